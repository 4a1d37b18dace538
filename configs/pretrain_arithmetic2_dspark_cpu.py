"""Pre-training of a DSpark draft (blocks of 5 drafts) of the 2-digit policy, on two CPU cores in a few minutes.

draftco pretrain-draft --config configs/pretrain_arithmetic2_dspark_cpu.py --run-dir runs/draft-dspark
"""

from dataclasses import replace

from pretrain_arithmetic2_eagle3_cpu import get_config as eagle3_config

from draftco_jax.drafts.dspark.config import DSparkConfig
from draftco_jax.losses.draft import DraftLossConfig
from draftco_jax.pretrain_config import AdaptationConfig, OwnRolloutsConfig, PretrainConfig
from draftco_jax.training.optimizer import OptimizerConfig


def get_config() -> PretrainConfig:
    base = eagle3_config()
    return replace(
        base,
        draft=DSparkConfig.for_target(
            base.policy,
            mask_token_id=31,  # an id that no text uses
            block_size=5,
            num_hidden_layers=2,
            intermediate_size=128,
            markov_rank=32,
            loss=DraftLossConfig(hard_cross_entropy=1.0),
            num_anchors=12,
            row_anchors=12,
        ),
        # As for DFlash; then on total variation, which decides how many of the drafts are accepted.
        rollout=OwnRolloutsConfig(sequences=16384),
        batch_rows=32,
        steps=2000,
        optimizer=OptimizerConfig(learning_rate=8e-3, schedule="cosine", warmup_steps=50),
        adaptation=AdaptationConfig(
            steps=1000,
            optimizer=OptimizerConfig(learning_rate=3e-3, schedule="cosine", warmup_steps=10),
            loss=DraftLossConfig(end_to_end_tv=1.0),
        ),
    )
