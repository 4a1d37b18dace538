"""GRPO on 3-digit addition with a suffix draft: copies from earlier rollouts and from the group, nothing is trained.

    draftco train --config configs/grpo_arithmetic3_suffix_cpu.py --run-dir runs/demo-suffix

It starts with nothing to copy from, at an accepted length of 1.17 (k = 4), and ends at 2.2.
"""

from dataclasses import replace

from grpo_arithmetic3_eagle3_cpu import get_config as eagle3_config

from draftco_jax.config import RunConfig
from draftco_jax.drafts.suffix.config import SuffixConfig


def get_config() -> RunConfig:
    return replace(
        eagle3_config(),
        speculation="frozen",
        draft=SuffixConfig(history_tokens=4096, max_match=8),
        draft_checkpoint=None,
    )
