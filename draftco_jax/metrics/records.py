"""Records of a run: one line of numbers a step, kept so that a killed and resumed run leaves each step once.

Files in the run directory:

- ``metrics.jsonl``: one JSON object a step, keys ``step`` then ``group/name``. A step is on disk before ``write``
  returns.
- ``tensorboard/``: the same scalars as TensorBoard events.
- ``summary.json``: the headline numbers at the end of the run.

JSON has no word for numbers that are not finite. They are written as the strings "nan", "inf" and "-inf", which every
JSON reader accepts, and ``read_metrics`` and ``read_summary`` turn them back into floats.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO, cast

from tensorboardX import SummaryWriter

from draftco_jax.errors import UserError
from draftco_jax.types import StepReport

METRICS_FILE = "metrics.jsonl"
SUMMARY_FILE = "summary.json"
TENSORBOARD_FOLDER = "tensorboard"

NOT_FINITE = ("nan", "inf", "-inf")


class MetricsWriter:
    """Appends step reports to a run directory; a context manager.

    ``resume_step=None`` starts a run and refuses a directory that already holds metrics. A number continues one: lines
    after that step, which the killed run wrote past its last checkpoint, are cut off first.
    """

    def __init__(self, run_dir: Path, resume_step: int | None) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        path = run_dir / METRICS_FILE
        if resume_step is not None:
            _cut_after(path, resume_step)
        elif path.exists() and path.stat().st_size > 0:
            raise UserError(
                f"run_dir={run_dir}: it already holds {METRICS_FILE} and nothing is overwritten; "
                "resume that run or choose another run directory"
            )
        self._lines: TextIO = path.open("a", encoding="utf-8")
        # TensorBoard hides what older event files say from the purged step on, as the cut does for the lines.
        self._events = SummaryWriter(
            logdir=str(run_dir / TENSORBOARD_FOLDER), purge_step=None if resume_step is None else resume_step + 1
        )

    def write(self, report: StepReport) -> None:
        """Append one step; on return its line is on disk."""
        self._lines.write(json.dumps({"step": report.step} | _to_json(report.metrics), allow_nan=False) + "\n")
        self._lines.flush()
        os.fsync(self._lines.fileno())
        for name, value in report.metrics.items():
            self._events.add_scalar(name, value, report.step)
        self._events.flush()

    def close(self) -> None:
        """Close both files."""
        self._lines.close()
        self._events.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(run_dir: Path) -> list[dict[str, float]]:
    """Return the finished steps in order. A last line torn by a kill is left out.

    Raises:
        UserError: no metrics file, no finished step in it, or an unreadable line that is not the last.
    """
    path = run_dir / METRICS_FILE
    if not path.is_file():
        raise UserError(f"run_dir={run_dir}: no {METRICS_FILE} in it; name the directory that a training run wrote")
    steps = _finished_steps(path)
    if not steps:
        raise UserError(f"run_dir={run_dir}: {METRICS_FILE} holds no finished step; let the run finish its first step")
    return steps


def write_summary(run_dir: Path, summary: Mapping[str, Any]) -> Path:
    """Write ``summary.json`` whole or not at all. Values may be nested dicts, lists, numbers, strings or None."""
    path = run_dir / SUMMARY_FILE
    write_text_whole(path, json.dumps(_to_json(summary), indent=2, allow_nan=False) + "\n")
    return path


def read_summary(run_dir: Path) -> dict[str, Any]:
    """Return ``summary.json``; an empty dict where the run has not written one yet."""
    path = run_dir / SUMMARY_FILE
    if not path.is_file():
        return {}
    try:
        return cast(dict[str, Any], _from_json(json.loads(path.read_text(encoding="utf-8"))))
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: not JSON ({error}); remove the file and write the summary again") from error


def write_text_whole(path: Path, text: str) -> None:
    """Replace a file so that a reader, or a restart after a kill, sees the old text or the new and nothing between."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    with unfinished.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name is part of the folder, and only this puts it on disk
    finally:
        os.close(folder)


def _cut_after(path: Path, last_step: int) -> None:
    if path.is_file():
        kept = [step for step in _finished_steps(path) if step["step"] <= last_step]
        write_text_whole(path, "".join(json.dumps(_to_json(step), allow_nan=False) + "\n" for step in kept))


def _finished_steps(path: Path) -> list[dict[str, float]]:
    lines = path.read_bytes().splitlines()
    steps: list[dict[str, float]] = []
    for number, line in enumerate(lines, start=1):
        try:
            steps.append(_step_line(json.loads(line)))
        except ValueError as error:  # not JSON, or cut inside a character
            if number == len(lines):
                break
            raise UserError(f"{path}:{number}: not a JSON object ({error}); repair or remove that line") from error
    return steps


def _step_line(line: Any) -> dict[str, float]:
    if not isinstance(line, dict) or "step" not in line:
        raise ValueError("a line must be an object with a step")
    return _from_json(cast(dict[str, Any], line))


def _to_json(value: Any) -> Any:
    """Containers copied, array scalars made plain, numbers that are not finite spelled out."""
    if isinstance(value, Mapping):
        return {str(key): _to_json(item) for key, item in cast(Mapping[Any, Any], value).items()}
    if isinstance(value, list | tuple):
        return [_to_json(item) for item in cast(list[Any], value)]
    if value is None or isinstance(value, str | bool | int):
        return value
    number = value.item() if hasattr(value, "item") else value
    return str(float(number)) if isinstance(number, float) and not math.isfinite(number) else number


def _from_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _from_json(item) for key, item in cast(dict[str, Any], value).items()}
    if isinstance(value, list):
        return [_from_json(item) for item in cast(list[Any], value)]
    return float(value) if value in NOT_FINITE else value
