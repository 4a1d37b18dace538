"""What a round costs: seconds by rows in flight and draft length, measured at the start and kept with the run.

Nothing that decides tokens may read a clock while they are decoded: two runs, or a run and its resumption, would part.
So the cost is measured apart, written down, and read from there; a new measurement enters at a publish at the earliest.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float32

from draftco_jax.errors import UserError

Setting = Mapping[str, str | int]
"""What the seconds were measured for: device, shapes, model; whatever changes them. Compared as a whole."""


@dataclass(frozen=True)
class CostTable:
    """Seconds of a round."""

    setting: Setting
    rows: tuple[int, ...]
    """Rows in flight, rising. A round of a number between two of them costs what the larger one does."""
    lengths: tuple[int, ...]
    """Draft lengths, rising; 0 is a round of plain decoding."""
    seconds: tuple[tuple[float, ...], ...]
    """[rows, lengths]"""

    def __post_init__(self) -> None:
        """Refuse tables that are no table."""
        for name, least in (("rows", 1), ("lengths", 0)):
            values = getattr(self, name)
            if not values or values[0] < least or list(values) != sorted(set(values)):
                raise UserError(f"{name}={list(values)} must rise from {least} or more; correct the cost table")
        shape = (len(self.rows), len(self.lengths))
        if np.shape(self.seconds) != shape or not (np.isfinite(self.seconds).all() and np.min(self.seconds) > 0):
            raise UserError(f"seconds must be {shape[0]} rows of {shape[1]} numbers > 0; measure the cost table anew")

    def array(self) -> Float32[np.ndarray, "R n"]:
        """The seconds, as controllers take them."""
        return np.asarray(self.seconds, np.float32)

    def save(self, path: str | Path) -> None:
        """Write as JSON. Numbers are written so that they are read back to the last bit."""
        fields = {name: getattr(self, name) for name in ("rows", "lengths", "seconds")}
        text = json.dumps({"setting": dict(self.setting), **fields}, indent=2, sort_keys=True)
        half = Path(path).with_suffix(".part")  # a table that is there is a whole one
        half.write_text(text + "\n", encoding="utf-8")
        half.replace(path)

    @classmethod
    def load(cls, path: str | Path, setting: Setting) -> CostTable:
        """Read a table that was measured for this setting; `UserError` if it was measured for another."""
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
            rows, lengths = tuple(found["rows"]), tuple(found["lengths"])
            table = cls(dict(found["setting"]), rows, lengths, tuple(tuple(row) for row in found["seconds"]))
            names = sorted(set(table.setting) | set(setting))
        except (ValueError, KeyError, TypeError) as error:  # not text, not JSON, or of another shape
            raise UserError(
                f"cost_table={path} must be one that was saved by a run; delete it to measure anew, which may change "
                "what is chosen"
            ) from error
        differing = [name for name in names if table.setting.get(name) != setting.get(name)]
        if differing:
            name = differing[0]
            raise UserError(
                f"cost_table={path} must be measured for {name}={setting.get(name)!r}, not for "
                f"{table.setting.get(name)!r}; delete it to measure anew"
            )
        return table


def measure(
    setting: Setting,
    rows: tuple[int, ...],
    lengths: tuple[int, ...],
    round_of: Callable[[int, int], Callable[[], object]],
    *,
    repeats: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> CostTable:
    """Time a round of each kind: the median of some repetitions after one that is not counted.

    Args:
        setting: what the seconds will hold for.
        rows: rows in flight to be measured.
        lengths: draft lengths to be measured.
        round_of: (rows, length) -> a function that runs such a round to its end, results on the device waited for.
        repeats: rounds of each kind.
        clock: seconds.
    """
    if repeats < 1:
        raise UserError(f"repeats={repeats} must be >= 1; time a round at least once")

    def seconds(count: int, length: int) -> float:
        run, times = round_of(count, length), list[float]()
        run()  # compiles
        for _ in range(repeats):
            start = clock()
            run()
            times.append(clock() - start)
        return statistics.median(times)

    return CostTable(setting, rows, lengths, tuple(tuple(seconds(r, k) for k in lengths) for r in rows))
