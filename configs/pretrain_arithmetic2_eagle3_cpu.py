"""Pre-training of the EAGLE-3 draft of the 2-digit policy on its own rollouts, on two CPU cores in a few minutes.

draftco pretrain-draft --config configs/pretrain_arithmetic2_eagle3_cpu.py --run-dir runs/draft
"""

from dataclasses import replace

from pretrain_arithmetic3_eagle3_cpu import get_config as three_digits

from draftco_jax.drafts.eagle3.config import Eagle3Config
from draftco_jax.environments.arithmetic import ArithmeticConfig
from draftco_jax.models.qwen3 import Qwen3Config
from draftco_jax.pretrain_config import PretrainConfig

POLICY = Qwen3Config.tiny(hidden_size=96, intermediate_size=256)


def get_config() -> PretrainConfig:
    return replace(
        three_digits(),
        task=ArithmeticConfig(digits=2),
        policy=POLICY,
        policy_checkpoint="shipped:arithmetic2/policy",
        draft=Eagle3Config.for_target(
            POLICY, intermediate_size=128, num_attention_heads=2, num_key_value_heads=1, passes=4
        ),
    )
