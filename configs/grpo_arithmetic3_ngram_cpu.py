"""GRPO on 3-digit addition with prompt lookup as the draft: copies from a request's own text, nothing is trained.

    draftco train --config configs/grpo_arithmetic3_ngram_cpu.py --run-dir runs/demo-ngram

These texts repeat little of themselves: the accepted length stays at 1.22 (k = 4).
"""

from dataclasses import replace

from grpo_arithmetic3_eagle3_cpu import get_config as eagle3_config

from draftco_jax.config import RunConfig
from draftco_jax.drafts.ngram.config import NGramConfig


def get_config() -> RunConfig:
    return replace(eagle3_config(), speculation="frozen", draft=NGramConfig(min_match=1), draft_checkpoint=None)
