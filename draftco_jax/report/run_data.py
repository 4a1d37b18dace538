"""The numbers of one run as the report reads them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from draftco_jax.errors import UserError
from draftco_jax.metrics import read_metrics, read_summary

CONFIG_FILE = "config.json"


class Series(NamedTuple):
    """The finite values of one metric, in step order."""

    steps: list[int]
    values: list[float]


@dataclass(frozen=True)
class RunData:
    """Everything a run directory says about a run."""

    run_dir: Path
    config: dict[str, Any]
    metrics: list[dict[str, float]]
    summary: dict[str, Any]  # empty until the run has ended

    @property
    def name(self) -> str:
        """The run's name; that of its directory until the summary says another."""
        return str(self.summary.get("name") or self.run_dir.resolve().name)

    @property
    def speculation(self) -> str:
        """The arm: "off", "frozen" or "cotrained", as the summary says or else as the metrics show."""
        if self.summary.get("speculation"):
            return str(self.summary["speculation"])
        if self.has("draft/tau_prob"):
            return "cotrained"
        return "frozen" if self.has("frozen_draft/tau_prob") or self.has("rollout/accepted_length") else "off"

    @property
    def draft_length(self) -> int:
        """K, the tokens drafted per verify round; 0 without speculation."""
        return int(self.summary.get("draft_length") or self.count("rollout/acceptance_rate_position"))

    @property
    def last_step(self) -> int:
        """The last finished step."""
        return int(self.metrics[-1]["step"])

    def series(self, name: str) -> Series:
        """The values of ``name`` at the steps that have a finite one."""
        found = [(int(row["step"]), row[name]) for row in self.metrics if name in row and math.isfinite(row[name])]
        return Series([step for step, _ in found], [value for _, value in found])

    def has(self, name: str) -> bool:
        """Whether any step has a finite value of ``name``."""
        return bool(self.series(name).steps)

    def count(self, prefix: str) -> int:
        """n such that ``prefix_1`` to ``prefix_n`` all have values."""
        n = 0
        while self.has(f"{prefix}_{n + 1}"):
            n += 1
        return n

    def not_finite(self) -> dict[str, list[int]]:
        """Steps at which a metric was NaN or infinite, by metric name."""
        found: dict[str, list[int]] = {}
        for row in self.metrics:
            for name, value in row.items():
                if not math.isfinite(value):
                    found.setdefault(name, []).append(int(row["step"]))
        return found

    def headline(self, name: str) -> float | None:
        """A number of the summary; None where it is absent, null or not finite."""
        value = self.summary.get(name)
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def speedup(row: Mapping[str, Any], plain: float) -> float:
    """A row's speed relative to plain: the median over the turns where the run kept it, else the ratio of medians."""
    measured = row.get("speedup")
    return float(measured) if measured is not None else float(row["tokens_per_second"]) / plain


def load_run(run_dir: Path) -> RunData:
    """Read a run directory; the summary may be missing, the metrics and the config may not.

    Raises:
        UserError: one line that names the file.
    """
    metrics = read_metrics(run_dir)
    path = run_dir / CONFIG_FILE
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"run_dir={run_dir}: no {CONFIG_FILE} in it; a run writes it before its first step") from error
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: not JSON ({error}); restore the file that the run wrote") from error
    return RunData(run_dir, config, metrics, read_summary(run_dir))
