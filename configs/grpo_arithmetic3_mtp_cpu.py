"""GRPO on 3-digit addition with a co-trained multi-token prediction head.

    draftco train --config configs/grpo_arithmetic3_mtp_cpu.py --run-dir runs/demo-mtp

The shipped head starts at an accepted length of 4.70 (k = 4); left frozen it ends at 4.54.
"""

from dataclasses import replace

from grpo_arithmetic3_eagle3_cpu import get_config as eagle3_config
from pretrain_arithmetic3_mtp_cpu import get_config as pretrained

from draftco_jax.config import RunConfig


def get_config() -> RunConfig:
    return replace(
        eagle3_config(),
        draft=pretrained().draft,
        draft_checkpoint="shipped:arithmetic3/mtp",
    )
