"""Scoring in processes of their own: what hangs, dies or eats memory there costs one answer, not the run."""

from __future__ import annotations

import json
import os
import queue
import select
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from draftco_jax.errors import UserError
from draftco_jax.rewards.scores import Score, fault

_START_SECONDS = 120.0
_STARTS = 3
_PIPE_BYTES = 65536
TIMEOUT, DIED, GIVEN_UP = "timeout", "died", "given up"


@dataclass(frozen=True, kw_only=True)
class PoolConfig:
    """Limits of the processes that score."""

    workers: int = 2
    timeout_seconds: float = 10.0
    """Of one answer. What takes longer is a fault, and the process that hangs is replaced."""
    max_restarts: int = 32
    """Processes replaced while one batch is scored. Beyond that its other answers are faults ("given up"), which bounds
    the time that a policy can waste."""
    memory_mebibytes: int = 4096
    """Address space of a process."""

    def __post_init__(self) -> None:
        """Refuse limits under which nothing is scored."""
        for name, least in (("workers", 1), ("max_restarts", 0), ("memory_mebibytes", 256)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be >= {least}; leave it out for the default")
        if not 0 < self.timeout_seconds <= 3600:
            raise ValueError(f"timeout_seconds={self.timeout_seconds} must be in 0..3600; 10 is usual")


_DEFAULT = PoolConfig()


class _Ended(Exception):
    """The process gave no reply; its argument says why."""


class _Worker:
    """One process, started when it is first needed."""

    def __init__(self, function: str, config: PoolConfig, modules: Sequence[str]) -> None:
        self._function, self._config, self._modules = function, config, modules
        self._process: subprocess.Popen[bytes] | None = None
        self._unread = b""

    def ask(self, response: str, answer: str) -> dict[str, Any]:
        """The reply; `_Ended` where none came in time, after which the process is gone.

        A process that has ended before it could read the answer says nothing of it: another one is asked.
        """
        line = json.dumps([response, answer]).encode() + b"\n"
        try:
            try:
                process, deadline = self._write(line)
            except OSError:
                self.stop()
                process, deadline = self._write(line)
            return self._read(process, deadline)
        except OSError as error:
            self.stop()
            raise _Ended(DIED) from error
        except _Ended:
            self.stop()
            raise

    def stop(self) -> None:
        """Ends the process, if there is one, whatever it is doing."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    try:
                        pipe.close()
                    except OSError:  # bytes that a dead process will never read
                        pass

    def _write(self, line: bytes) -> tuple[subprocess.Popen[bytes], float]:
        """Hands a line to a process that runs; (that process, the time by which it must have replied)."""
        if self._process is not None and self._process.poll() is not None:
            self.stop()
        process = self._process or self._start()
        assert process.stdin is not None
        descriptor, deadline = process.stdin.fileno(), time.monotonic() + self._config.timeout_seconds
        os.set_blocking(descriptor, False)  # a process that does not read would hold a long line up for ever
        while line:
            _wait(descriptor, select.POLLOUT, deadline)
            line = line[os.write(descriptor, line[:_PIPE_BYTES]) :]
        return process, deadline

    def _start(self) -> subprocess.Popen[bytes]:
        config, said = self._config, "it ended before it was ready"
        command = [sys.executable, "-m", "draftco_jax.rewards.worker", self._function]
        # Modules are found there as they are here.
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        for _ in range(_STARTS):
            self._unread = b""
            self._process = subprocess.Popen(
                [*command, str(config.timeout_seconds), str(config.memory_mebibytes), *self._modules],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
            )
            try:
                reply = self._read(self._process, time.monotonic() + _START_SECONDS)
            except _Ended:
                self.stop()
                continue
            if "ready" in reply:
                return self._process
            self.stop()
            said = reply["failed"]
            break
        raise UserError(f"reward={self._function} must load in a process of its own, but {said}; correct the function")

    def _read(self, process: subprocess.Popen[bytes], deadline: float) -> dict[str, Any]:
        assert process.stdout is not None
        descriptor = process.stdout.fileno()
        while b"\n" not in self._unread:
            _wait(descriptor, select.POLLIN, deadline)
            more = os.read(descriptor, _PIPE_BYTES)
            if not more:
                raise _Ended(DIED)
            self._unread += more
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)


def _wait(descriptor: int, event: int, deadline: float) -> None:
    """Until a pipe can be read or written, or its other end is closed; `_Ended` at the deadline.

    By poll, since select knows the descriptors under 1024 only.
    """
    poller = select.poll()
    poller.register(descriptor, event)
    left = deadline - time.monotonic()
    if left <= 0 or not poller.poll(1000.0 * left):
        raise _Ended(TIMEOUT)


class PoolScorer:
    """A scoring function ``package.module:function`` in a pool of processes.

    The function takes a response and the gold answer, and returns a number, or a mapping of numbers with "total" or
    "correct" among them (`worker.as_reply`). `modules` are loaded with it, before the time of an answer runs. Can be
    called from any thread; calls wait for one another.
    """

    def __init__(self, function: str, config: PoolConfig = _DEFAULT, modules: Sequence[str] = ()) -> None:
        self.function, self._config = function, config
        self._workers = [_Worker(function, config, modules) for _ in range(config.workers)]
        self._lock = threading.Lock()
        self._ever_scored = False
        self._stopper = weakref.finalize(self, _stop, self._workers)

    def score(self, responses: Sequence[str], answers: Sequence[str]) -> list[Score]:
        """One score a response, in order.

        Raises `UserError` if the function cannot be loaded, or has raised for every response that it was ever given.
        """
        jobs: queue.SimpleQueue[int] = queue.SimpleQueue()
        for index in range(len(responses)):
            jobs.put(index)
        found: list[Score | None] = [None] * len(responses)
        pairs = list(zip(responses, answers, strict=True))
        with self._lock:
            restarts = _Restarts(self._config.max_restarts)
            with ThreadPoolExecutor(len(self._workers)) as threads:
                list(threads.map(lambda worker: _work(worker, jobs, pairs, found, restarts), self._workers))
            scores = [fault(GIVEN_UP) if score is None else score for score in found]
            self._require_sound(scores)
        return scores

    def close(self) -> None:
        """Ends the processes; they start again when they are needed."""
        _stop(self._workers)

    def _require_sound(self, scores: Sequence[Score]) -> None:
        self._ever_scored = self._ever_scored or any(score.fault is None for score in scores)
        raised = [score.fault for score in scores if score.fault and score.fault not in (TIMEOUT, DIED, GIVEN_UP)]
        if scores and not self._ever_scored and len(raised) == len(scores):
            raise UserError(
                f"reward={self.function} must score a response, but raised for all of the first {len(scores)} "
                f"({raised[0]}); return 0 for what cannot be read"
            )


class _Restarts:
    """A count of the processes that may still be replaced, shared by threads."""

    def __init__(self, left: int) -> None:
        self._left, self._lock = left, threading.Lock()

    def take(self) -> bool:
        with self._lock:
            self._left -= 1
            return self._left >= 0


def _work(
    worker: _Worker,
    jobs: queue.SimpleQueue[int],
    pairs: Sequence[tuple[str, str]],
    found: list[Score | None],
    restarts: _Restarts,
) -> None:
    """Scores one response after another, each once, until none is left or no process may be replaced any more."""
    while True:
        try:
            index = jobs.get_nowait()
        except queue.Empty:
            return
        try:
            reply = worker.ask(*pairs[index])
        except _Ended as end:
            found[index] = fault(str(end))
            if not restarts.take():
                return
            continue
        reason = reply["fault"]
        if reason is None:
            found[index] = Score(reply["total"], reply["components"], reply["answer"])
        else:
            found[index] = fault(reason)


def _stop(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        worker.stop()
