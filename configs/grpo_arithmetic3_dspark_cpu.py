"""GRPO on 3-digit addition with a co-trained DSpark draft, a block whose tokens are drawn in order.

    draftco train --config configs/grpo_arithmetic3_dspark_cpu.py --run-dir runs/demo-dspark

The shipped draft starts at an accepted length of 4.43 (k = 4); left frozen it ends at 4.02.
"""

from dataclasses import replace

from grpo_arithmetic3_eagle3_cpu import get_config as eagle3_config
from pretrain_arithmetic3_dspark_cpu import get_config as pretrained

from draftco_jax.config import RunConfig
from draftco_jax.losses.draft import DraftLossConfig


def get_config() -> RunConfig:
    return replace(
        eagle3_config(),
        # Rows of a step hold one or several answers, those of pre-training one. A row of 39 tokens has room for two
        # answers of 8 anchors, since each has a prompt of 9 tokens before it.
        # The loss is the published one, which pre-training prepares for.
        draft=replace(
            pretrained().draft,
            num_anchors=8,
            row_anchors=16,
            loss=DraftLossConfig(hard_cross_entropy=0.1, l1=0.9),
        ),
        draft_checkpoint="shipped:arithmetic3/dspark",
    )
