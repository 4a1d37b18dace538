"""Pre-training of an MTP head (4 recursive steps) of the 3-digit policy, on two CPU cores in a few minutes.

draftco pretrain-draft --config configs/pretrain_arithmetic3_mtp_cpu.py --run-dir runs/draft-mtp
"""

from dataclasses import replace

from pretrain_arithmetic3_eagle3_cpu import get_config as eagle3_config

from draftco_jax.drafts.mtp.config import MtpConfig
from draftco_jax.pretrain_config import PretrainConfig
from draftco_jax.training.optimizer import OptimizerConfig


def get_config() -> PretrainConfig:
    base = eagle3_config()
    return replace(
        base,
        draft=MtpConfig.for_target(
            base.policy, intermediate_size=128, num_attention_heads=2, num_key_value_heads=1, steps=4, step_decay=0.8
        ),
        steps=1000,
        optimizer=OptimizerConfig(learning_rate=4e-3, schedule="cosine", warmup_steps=10),
    )
