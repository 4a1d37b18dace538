"""Pre-training of a DFlash draft (blocks of 6, 5 drafts) of the 2-digit policy, on two CPU cores in a few minutes.

draftco pretrain-draft --config configs/pretrain_arithmetic2_dflash_cpu.py --run-dir runs/draft-dflash
"""

from dataclasses import replace

from pretrain_arithmetic2_eagle3_cpu import get_config as eagle3_config

from draftco_jax.drafts.dflash.config import DFlashConfig
from draftco_jax.pretrain_config import OwnRolloutsConfig, PretrainConfig
from draftco_jax.training.optimizer import OptimizerConfig


def get_config() -> PretrainConfig:
    base = eagle3_config()
    return replace(
        base,
        draft=DFlashConfig.for_target(
            base.policy,
            mask_token_id=31,  # an id that no text uses
            block_size=6,
            num_hidden_layers=2,
            intermediate_size=128,
            num_anchors=12,
            row_anchors=12,
        ),
        # A block is filled at once, which is harder to learn than a chain: more texts, more steps, fewer rows each.
        rollout=OwnRolloutsConfig(sequences=16384),
        batch_rows=32,
        steps=3000,
        optimizer=OptimizerConfig(learning_rate=8e-3, schedule="cosine", warmup_steps=50),
    )
