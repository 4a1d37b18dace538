"""GRPO on 3-digit addition with a co-trained DFlash draft, which fills a block of tokens in one pass.

    draftco train --config configs/grpo_arithmetic3_dflash_cpu.py --run-dir runs/demo-dflash

The shipped draft starts at an accepted length of 4.39 (k = 4); left frozen it ends at 4.15.
"""

from dataclasses import replace

from grpo_arithmetic3_eagle3_cpu import get_config as eagle3_config
from pretrain_arithmetic3_dflash_cpu import get_config as pretrained

from draftco_jax.config import RunConfig


def get_config() -> RunConfig:
    return replace(
        eagle3_config(),
        # Rows of a step hold one or several answers, those of pre-training one. A row of 39 tokens has room for two
        # answers of 8 anchors, since each has a prompt of 9 tokens before it.
        draft=replace(pretrained().draft, num_anchors=8, row_anchors=16),
        draft_checkpoint="shipped:arithmetic3/dflash",
    )
