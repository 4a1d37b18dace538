"""`draftco bench attention`: Fig. 5 and Fig. 6 of arXiv 2609.07108 as counts, compiled memory and CPU times.

Every key of the result is one of three kinds, which `kinds` names: counted on the host, read from a compiled program,
or measured here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from draftco_jax.bench_attention.counts import counted
from draftco_jax.bench_attention.devices import device_facts
from draftco_jax.bench_attention.timing import timed
from pallas_kernels import deviceless

FAST_REASON = "--fast leaves out what is compiled for H100"
_PRINTED = {"paper": "printed in the paper", "peak_bytes_per_rank_reason": "why there is none"}


@dataclass(frozen=True, kw_only=True)
class BenchAttentionConfig:
    """What is counted, compiled and timed."""

    ranks: int = 8
    """Ranks of what is compiled; counts are for 1, 2, 4 and 8."""
    fast: bool = False
    """Leave out what is compiled for H100."""
    documents: tuple[int, ...] = (64, 256)
    """Documents of a mix; the first gives the headline ratios."""
    tokens: tuple[int, ...] = (2048, 4096, 8192)
    """Lengths at which kernels are timed."""
    repetitions: int = 5
    """Timed turns; medians are quoted."""
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse settings that count nothing."""
        if self.ranks not in (2, 4, 8):
            raise ValueError(f"ranks={self.ranks} must be 2, 4 or 8; 8 is what the paper has")
        if not self.documents or min(self.documents) < 8:
            raise ValueError(f"documents={self.documents} must be >= 8 each; use 64,256")
        if not self.tokens or min(self.tokens) < 1 or self.repetitions < 1:
            raise ValueError(
                f"tokens={self.tokens} and repetitions={self.repetitions} must be >= 1; use 2048,4096,8192 and 5"
            )


def bench_attention(cfg: BenchAttentionConfig, stage: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """All figures; a dict of plain values, with the same keys whatever is left out."""
    kinds: dict[str, str] = dict(_PRINTED)
    found: dict[str, Any] = {"ranks": cfg.ranks, "seed": cfg.seed, "fast": cfg.fast, "jax": jax.__version__}

    def take(kind: str, values: dict[str, Any]) -> None:
        found.update(values)
        kinds.update({name: kind for name in values if name not in _PRINTED})

    stage("counting work of ranks")
    take("counted", counted(cfg.documents, cfg.seed))
    stage(f"compiling rings of {cfg.ranks} virtual devices")
    facts = _device_facts(cfg)
    anchors = {name: value for name, value in facts.items() if name.startswith("anchors")}
    take("counted in a run on virtual devices", anchors)
    take("read from programs compiled for virtual devices", {k: v for k, v in facts.items() if k not in anchors})
    take("planned by the compiler for H100", _memory(cfg, stage))
    stage("timing kernels in turn")
    take("measured on this machine's CPU", timed(cfg.tokens, cfg.repetitions))
    return found | {"kinds": kinds}


def _device_facts(cfg: BenchAttentionConfig) -> dict[str, Any]:
    """In this process if it has the devices, whose number was fixed when JAX started; otherwise in another one."""
    if len(jax.devices("cpu")) >= cfg.ranks:
        return device_facts(cfg.ranks, cfg.seed)
    return _ask("devices", str(cfg.ranks), str(cfg.seed))


def _memory(cfg: BenchAttentionConfig, stage: Callable[[str], None]) -> dict[str, Any]:
    reason = None
    if cfg.fast:
        reason = FAST_REASON
    elif not deviceless.available():
        reason = "the compiler for GPUs is not installed: run `make setup`"
    if reason is None:
        stage("compiling for H100, a minute or two")
    rows = None if reason else _ask("h100", str(cfg.ranks))
    return {"peak_bytes_per_rank": rows, "peak_bytes_per_rank_reason": reason}


def _ask(*question: str) -> Any:
    """The answer of `child`, a process of its own."""
    command = [sys.executable, "-m", "draftco_jax.bench_attention.child", *question]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[1:])} stopped with code {done.returncode}:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])
