"""GRPO on 3-digit addition with the policy's own int8 copy as the draft, made anew at each publish; nothing is trained.

    draftco train --config configs/grpo_arithmetic3_self_int8_cpu.py --run-dir runs/demo-self_int8

A baseline: nearly everything is accepted, and a drafted token costs as much as a plain one on a CPU.
"""

from dataclasses import replace

from grpo_arithmetic3_eagle3_cpu import get_config as eagle3_config

from draftco_jax.config import RunConfig
from draftco_jax.drafts.self_int8.config import SelfInt8Config


def get_config() -> RunConfig:
    return replace(eagle3_config(), speculation="frozen", draft=SelfInt8Config(), draft_checkpoint=None)
