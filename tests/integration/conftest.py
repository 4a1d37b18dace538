"""Small runs that many tests look at, and the command in processes of its own."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import draftco_jax as dc
from draftco_jax import loop
from draftco_jax.config_io import to_json
from draftco_jax.metrics import read_metrics
from draftco_jax.types import Rollouts

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "grpo_arithmetic2_eagle3_cpu.py"

# The shipped policy and draft with little to do: compiling is what these tests wait for. 16 held-out prompts are as
# many as the sequences of a step, so that both use one program.
SMALL = (
    "steps=6",
    "rollout.prompts_per_step=4",
    "rollout.samples_per_prompt=4",
    "evaluation.prompts=16",
    "evaluation.every_steps=3",
    "checkpoint.every_steps=2",
    "draft.passes=2",
    "draft_length=2",
    "speed.repetitions=0",
)


class Interrupted(Exception):
    """Stands for whatever stops a run in the middle of a step."""


@dataclasses.dataclass
class Trace:
    """What a run did that its metrics do not tell."""

    rollouts: dict[int, Rollouts] = dataclasses.field(default_factory=dict)
    prompt_ids: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    published_drafts: list[Any] = dataclasses.field(default_factory=list)


class FinishedRun(NamedTuple):
    config: dc.RunConfig
    run_dir: Path
    trace: Trace


class Done(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture(scope="session")
def config_file() -> Path:
    """The config all small runs are made of."""
    return CONFIG


@pytest.fixture(scope="session")
def small() -> Callable[..., dc.RunConfig]:
    """The small config with further overrides."""
    return lambda *overrides: dc.load_config(CONFIG, [*SMALL, *overrides])


@pytest.fixture(scope="session")
def small_options() -> Callable[..., list[str]]:
    """The same for the command line."""

    def options(*overrides: str) -> list[str]:
        return ["--config", str(CONFIG), *(word for one in (*SMALL, *overrides) for word in ("--set", one))]

    return options


@pytest.fixture(scope="session")
def set_up() -> Callable[[dc.RunConfig], Any]:
    """`run.set_up`, except that two runs of one config share their compiled programs.

    Rollouts are the same programs whether their draft is trained or not, and whether speed is measured.
    """
    original, programs = loop.set_up, {}

    def cached(cfg: dc.RunConfig) -> Any:
        (run, models), values = original(cfg), to_json(cfg)
        of_update = json.dumps(values)
        of_rollouts = json.dumps(values | {"speed": None, "speculation": cfg.speculation == "off"})
        programs.setdefault(of_update, {"update": run.update})
        programs.setdefault(of_rollouts, {"engine": run.engine, "publisher": run.publisher})
        return dataclasses.replace(run, **programs[of_update], **programs[of_rollouts]), models

    return cached


@pytest.fixture(scope="session")
def train(set_up) -> Callable[..., Trace]:
    """`draftco_jax.train` in this process, traced.

    `stop_in_step=n` raises Interrupted when step n is done but not yet recorded. Without `to_the_report` the run ends
    after its last step: no closing measurements, no report.
    """

    def run(
        cfg: dc.RunConfig, run_dir: Path, *, resume: bool = False, stop_in_step: int = 0, to_the_report: bool = False
    ) -> Trace:
        trace, originals = Trace(), (loop.generate, loop.publish, loop.train_step)

        def generate(run, weights, prompts, step):
            trace.prompt_ids[step] = [prompt.prompt_id for prompt in prompts]
            generated = originals[0](run, weights, prompts, step)
            trace.rollouts[step] = generated[0]
            return generated

        def publish(run, state):
            weights = originals[1](run, state)
            trace.published_drafts.append(weights.draft)
            return weights

        def train_step(run, state, weights, step):
            done = originals[2](run, state, weights, step)
            if step == stop_in_step:
                raise Interrupted
            return done

        with pytest.MonkeyPatch.context() as patch:
            for replacement in (set_up, generate, publish, train_step):
                name = "set_up" if replacement is set_up else replacement.__name__
                patch.setattr(loop, name, replacement)
            if not to_the_report:
                patch.setattr(loop, "summarise_run", lambda *_: {})
                patch.setattr(loop, "write_report", lambda _: None)
            dc.train(cfg, run_dir, resume=resume)
        return trace

    def stopping(cfg: dc.RunConfig, run_dir: Path, **options: Any) -> Trace:
        if not options.get("stop_in_step"):
            return run(cfg, run_dir, **options)
        with pytest.raises(Interrupted):
            run(cfg, run_dir, **options)
        return Trace()

    return stopping


@pytest.fixture(scope="session")
def finished(small, train, tmp_path_factory) -> Callable[[str], FinishedRun]:
    """A finished run of an arm, made once. Tests only read it; `unfinished_copy` is theirs to change."""
    runs: dict[str, FinishedRun] = {}

    def of(arm: str) -> FinishedRun:
        if arm not in runs:
            # One arm also measures speed, as few settings as make all keys of the summary.
            speed = ("speed.repetitions=1", "speed.draft_lengths=1") if arm == "cotrained" else ()
            config = small(f"speculation={arm}", *speed)
            run_dir = tmp_path_factory.mktemp("runs") / arm
            runs[arm] = FinishedRun(config, run_dir, train(config, run_dir, to_the_report=True))
        return runs[arm]

    return of


@pytest.fixture
def unfinished_copy(finished, tmp_path) -> Callable[[str], Path]:
    """A copy of a finished run as if it had been stopped after its last checkpoint."""

    def copy(arm: str) -> Path:
        run_dir = tmp_path / "unfinished"
        shutil.copytree(finished(arm).run_dir, run_dir)
        for name in ("summary.json", "report.html"):
            (run_dir / name).unlink()
        return run_dir

    return copy


@pytest.fixture(scope="session")
def lines() -> Callable[[Path], list[dict[str, float]]]:
    """The metrics of a run without those that a clock has a say in."""

    def timed(name: str) -> bool:
        return name.startswith("time_seconds/") or name == "rollout/tokens_per_second"

    def read(run_dir: Path) -> list[dict[str, float]]:
        return [{name: line[name] for name in line if not timed(name)} for line in read_metrics(run_dir)]

    return read


@pytest.fixture(scope="session")
def checkpoint() -> Callable[[Path, int], dict[str, Any]]:
    """What a checkpoint holds, to be compared: its record, and the bytes of every array."""

    def read(run_dir: Path, step: int) -> dict[str, Any]:
        folder = run_dir / "checkpoints" / str(step)
        arrays = ocp.StandardCheckpointer().restore(folder / "state")
        leaves = jax.tree_util.tree_flatten_with_path(arrays)[0]
        assert len(leaves) > 50
        named = {jax.tree_util.keystr(path): np.asarray(leaf).tobytes() for path, leaf in leaves}
        return json.loads((folder / "record" / "metadata").read_text()) | named

    return read


@pytest.fixture(scope="session")
def tree() -> Callable[[Path], dict[str, Any]]:
    """Every file and folder below a folder with its bytes and its time of change."""

    def read(folder: Path) -> dict[str, Any]:
        return {
            str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else None)
            for path in folder.rglob("*")
        }

    return read


@pytest.fixture(scope="session")
def environment(tmp_path_factory) -> dict[str, str]:
    """For processes that tests start: they share what they compile."""
    cache = tmp_path_factory.mktemp("compiled")
    return os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
    }


@pytest.fixture(scope="session")
def command(environment, tmp_path_factory) -> Iterator[Callable[..., Done]]:
    """Runs `draftco` with these arguments in a process of its own."""
    folder = tmp_path_factory.mktemp("streams")
    server = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("forked_commands.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert server.stdin and server.stdout
    requests, answers = server.stdin, server.stdout

    def run(*arguments: str | Path) -> Done:
        out, err = folder / "out", folder / "err"
        requests.write(json.dumps({"arguments": [*map(str, arguments)], "out": str(out), "err": str(err)}) + "\n")
        requests.flush()
        return Done(int(answers.readline()), out.read_text(), err.read_text())

    yield run
    requests.close()
    server.wait(timeout=60)
    answers.close()
