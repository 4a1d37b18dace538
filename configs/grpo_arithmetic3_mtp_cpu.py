"""GRPO on 3-digit addition with a co-trained multi-token prediction head.

    draftco train --config configs/grpo_arithmetic3_mtp_cpu.py --run-dir runs/demo-mtp
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
