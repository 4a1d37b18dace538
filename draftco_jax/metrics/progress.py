"""The progress display of long work: a bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

SECONDS_BETWEEN_LINES = 10.0

# Steps of a minute are common, and the remaining time is estimated from the steps of this window.
SPEED_WINDOW_SECONDS = 900.0

COLUMNS = (
    ("reward/mean", "reward", "{:.2f}"),
    ("eval/pass_rate", "pass", "{:.2f}"),
    ("rollout/accepted_length", "accepted", "{:.2f}"),
    ("rollout/tokens_per_second", "tokens/s", "{:,.0f}"),
)


class Progress:
    """Shows how far a run is and its last reward, pass rate, accepted length and tokens/s; a context manager.

    On a terminal: a bar with the remaining time. Elsewhere (a file, a pipe): a plain line for each stage and, about
    every ten seconds, one for a step; the first finished step and the last one are always among them. A value stays in
    sight until a newer one comes, so the pass rate is that of the newest evaluation.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        done_steps: int = 0,
        title: str = "train",
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console or Console()
        self._clock = clock
        self._total = total_steps
        self._title = title
        self._shown: dict[str, str] = {}
        self._first: tuple[int, float] | None = None
        self._line_due = clock()
        self._bar = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[values]}"),
            console=self._console,
            disable=not self._console.is_terminal,
            expand=True,
            speed_estimate_period=SPEED_WINDOW_SECONDS,
        )
        self._task = self._bar.add_task(title, total=total_steps, completed=done_steps, values="")

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show that ``step`` steps are done, with the metrics of the last of them."""
        for name, label, style in COLUMNS:
            if name in metrics:
                self._shown[label] = style.format(float(metrics[name]))
        values = "  ".join(f"{label} {self._shown[label]}" for _, label, _ in COLUMNS if label in self._shown)
        self._bar.update(self._task, completed=step, values=values)
        always = self._first is None or step >= self._total
        self._first = self._first or (step, self._clock())
        if not self._console.is_terminal and (always or self._clock() >= self._line_due):
            self._line_due = self._clock() + SECONDS_BETWEEN_LINES
            self._plain(f"{self._title} {step}/{self._total}{self._remaining(step)}  {values}".rstrip())

    def stage(self, text: str) -> None:
        """Say what is going on where no step ends for a while: compiling, evaluating, timing."""
        self._bar.update(self._task, description=f"{self._title}: {text}")
        if not self._console.is_terminal:
            self._plain(f"{self._title}: {text}")

    def note(self, text: str) -> None:
        """A line that stays: something the reader should know."""
        self._plain(f"{self._title}: {text}")

    def _remaining(self, step: int) -> str:
        """Time left at the speed since the first finished step, which held the compilation and is left out."""
        if self._first is None or step <= self._first[0]:
            return ""
        seconds = (self._clock() - self._first[1]) / (step - self._first[0]) * (self._total - step)
        minutes, seconds = divmod(round(seconds), 60)
        return f"  {minutes}:{seconds:02d} left"

    def _plain(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
