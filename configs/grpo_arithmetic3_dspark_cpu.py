"""GRPO on 3-digit addition with a co-trained DSpark draft, a block whose tokens are drawn in order.

    draftco train --config configs/grpo_arithmetic3_dspark_cpu.py --run-dir runs/demo-dspark
"""

from dataclasses import replace

from grpo_arithmetic3_eagle3_cpu import get_config as eagle3_config
from pretrain_arithmetic3_dspark_cpu import get_config as pretrained

from draftco_jax.config import RunConfig


def get_config() -> RunConfig:
    return replace(
        eagle3_config(),
        # Rows of a step hold one or several answers, those of pre-training one. The 39 tokens of a row have room for two
        # answers of 8 anchors, since each has a prompt of 9 tokens before it.
        draft=replace(pretrained().draft, num_anchors=8, row_anchors=16),
        draft_checkpoint="shipped:arithmetic3/dspark",
    )
