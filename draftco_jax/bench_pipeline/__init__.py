"""`draftco bench pipeline`: what features and the draft cost a pipelined update, beside arXiv 2609.07108.

Every key of the result is one of four kinds, which `kinds` names: counted on the host, read from compiled programs,
counted in a run on virtual devices, or computed with an assumed rate.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from draftco_jax.bench_pipeline.counts import counted
from draftco_jax.bench_pipeline.programs import device_facts

_KINDS = {
    "paper": "printed in the paper",
    "targets": "aims of this project",
    "host_staged_bytes": "counted in a run on virtual devices",
    "tap_wait_share": "counted, with an assumed rate (teraflops) and bandwidths",
    "tap_wait_bandwidths": "assumed",
    "tap_bytes_over_eq5_formula": "counted",
    "feature_bytes": "counted",
}


@dataclass(frozen=True, kw_only=True)
class BenchPipelineConfig:
    """What is compiled and counted."""

    stages: int = 4
    """Of what is compiled, of the critical path and of waiting for taps; overheads are for the paper's 2."""
    microbatches: int = 8
    memory_microbatches: tuple[int, ...] = (8, 16, 32)
    """M at which memory is compiled."""
    tokens: int = 20_480
    """Of a micro-batch where FLOPs are counted: one document."""
    teraflops: float = 400.0
    """Assumed rate of one device, only for waiting for taps."""

    def __post_init__(self) -> None:
        """Refuse shapes without a pipeline."""
        if not 2 <= self.stages <= 8:
            raise ValueError(f"stages={self.stages} must be 2 to 8; use 4")
        counts = (self.microbatches, *self.memory_microbatches)
        if not self.memory_microbatches or min(counts) < 1 or any(count % self.stages for count in counts):
            raise ValueError(
                f"microbatches={self.microbatches} and memory_microbatches={self.memory_microbatches} must be "
                f"multiples of stages={self.stages}; use 8 and 8,16,32"
            )
        if self.tokens < 1 or not self.teraflops > 0:
            raise ValueError(f"tokens={self.tokens} and teraflops={self.teraflops} must be > 0; use 20480 and 400")


def bench_pipeline(cfg: BenchPipelineConfig, stage: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """All figures; a dict of plain values."""
    settings = {
        "stages": cfg.stages,
        "microbatches": cfg.microbatches,
        "tokens": cfg.tokens,
        "teraflops": cfg.teraflops,
        "jax": jax.__version__,
    }
    stage("counting FLOPs and playing schedules")
    of_host = counted(cfg.stages, cfg.microbatches, cfg.tokens, cfg.teraflops)
    stage(f"compiling updates of {cfg.stages} virtual devices, some minutes")
    of_programs = _device_facts(cfg)
    kinds = dict.fromkeys(of_host, "counted")
    kinds |= dict.fromkeys(of_programs, "read from programs compiled for virtual devices")
    kinds |= _KINDS
    return settings | of_host | of_programs | {"kinds": kinds}


def _device_facts(cfg: BenchPipelineConfig) -> dict[str, Any]:
    """In this process if it has the devices, whose number was fixed when JAX started; otherwise in another one."""
    question = (cfg.stages, cfg.microbatches, *cfg.memory_microbatches)
    if len(jax.devices("cpu")) >= cfg.stages:
        return device_facts(cfg.stages, cfg.microbatches, cfg.memory_microbatches)
    command = [sys.executable, "-m", "draftco_jax.bench_pipeline.child", *map(str, question)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[1:])} stopped with code {done.returncode}:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])
