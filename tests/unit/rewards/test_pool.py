"""Scoring in other processes: hanging, dying and raising cost one answer each, and time is bounded."""

from __future__ import annotations

import math
import os
import resource
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from draftco_jax.errors import UserError
from draftco_jax.rewards.catalog import build_scorer, require_scorer
from draftco_jax.rewards.pool import PoolConfig, PoolScorer
from draftco_jax.rewards.scores import Score

FUNCTIONS = """
import os, time

def judge(response, answer):
    if response == "hang":
        while True:
            pass
    if response == "die":
        os._exit(3)
    if response == "exit":
        raise SystemExit(0)
    if response == "memory":
        bytearray(10**11)
    if response == "print":
        print('{"total": 1.0}')
    if response == "nan":
        return float("nan")
    return float(int(response) == int(answer))

def parts(response, answer):
    return {"correct": response == answer, "short": len(response) < 3, "answer": response.upper()}

def weighed(response, answer):
    return {"total": 0.5, "correct": 1}

def measure(response, answer):
    return float(len(response))

def huge(response, answer):
    return 1e39 if response == "1e39" else 1.0

def slow(response, answer):
    time.sleep(0.05)
    return 1.0

def nameless(response, answer):
    return {"right": 1.0}

NUMBER = 3
"""


@pytest.fixture(scope="module")
def functions(tmp_path_factory):
    """A module that both this process and others can import."""
    folder = tmp_path_factory.mktemp("functions")
    (folder / "scoring_functions.py").write_text(FUNCTIONS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield "scoring_functions"


def test_what_hangs_dies_or_raises_costs_its_own_answer_only(functions):
    responses = ["7", "hang", "8", "die", "word", "memory", "exit", "nan", "7"]
    pool = PoolScorer(f"{functions}:judge", PoolConfig(timeout_seconds=3.0))
    started = time.monotonic()
    scores = pool.score(responses, ["7"] * len(responses))
    assert time.monotonic() - started < 30.0
    assert [score.total for score in scores] == [1.0, 0, 0, 0, 0, 0, 0, 0, 1.0]
    faults = ["", "timeout", "", "died", "ValueError", "MemoryError", "SystemExit", "ValueError: total=nan", ""]
    for score, said in zip(scores, faults, strict=True):
        assert (score.fault or "").startswith(said) and bool(score.fault) == bool(said), (score, said)
    # What is printed is no reply, and the pool goes on.
    assert [score.fault for score in pool.score(["print", "7"], ["7", "7"])][1] is None
    pool.close()


def test_a_process_that_died_between_two_batches_costs_no_answer(functions):
    pool = PoolScorer(f"{functions}:judge", PoolConfig(workers=1))
    for _ in range(2):
        assert pool.score(["7"], ["7"])[0].total == 1.0
        process = pool._workers[0]._process
        assert process is not None
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    process = pool._workers[0]._process
    assert process is not None
    # As if it died after it was looked at: the write fails, and the answer is asked once more.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "poll", lambda: None)
        assert pool.score(["7"], ["7"])[0].total == 1.0
    pool.close()


def test_a_process_that_does_not_read_is_given_up_in_time_and_long_texts_arrive_whole(functions):
    pool = PoolScorer(f"{functions}:measure", PoolConfig(workers=1, timeout_seconds=2.0))
    assert pool.score(["x" * 3_000_000, "x"], ["", ""])[0].total == 3_000_000
    process = pool._workers[0]._process
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)
    scores: list[Score] = []
    asking = threading.Thread(target=lambda: scores.extend(pool.score(["x" * 3_000_000], [""])), daemon=True)
    asking.start()
    asking.join(20.0)
    process.kill()  # does nothing where it is gone
    assert [score.fault for score in scores] == ["timeout"]
    pool.close()


def test_descriptors_past_the_first_1024_are_waited_for(functions):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1200:
        pytest.skip(f"at most {hard} open files here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (1200 if soft < 1200 else soft, hard))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1050)]
    try:
        pool = PoolScorer(f"{functions}:judge", PoolConfig(workers=1))
        assert pool.score(["7"], ["7"])[0].total == 1.0
        pool.close()
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_total_past_float32_is_a_fault_and_no_infinite_reward(functions):
    pool = PoolScorer(f"{functions}:huge", PoolConfig(workers=1))
    found = pool.score(["1e39", "1"], ["", ""])
    assert found[0].fault == "ValueError: total=1e+39 is not finite in float32" and found[1].total == 1.0
    pool.close()
    largest = float(np.finfo(np.float32).max)
    assert Score(-largest).total == -largest
    for total in (1e39, -math.inf, math.nan, largest * (1 + 1e-15)):
        with pytest.raises(ValueError, match="must be finite in float32"):
            Score(total)


def test_processes_are_replaced_so_many_times_and_no_more(functions):
    with_limit = PoolScorer(f"{functions}:judge", PoolConfig(workers=1, max_restarts=2))
    scores = with_limit.score(["7", "die", "die", "die", "7"], ["7"] * 5)
    assert [score.fault for score in scores] == [None, "died", "died", "died", "given up"]
    assert with_limit.score(["7"], ["7"])[0].total == 1.0, "the next batch starts anew"
    with_limit.close()


def test_bug_case_b80_any_thread_may_score_and_faults_are_told_from_wrong_answers(functions):
    pool = PoolScorer(f"{functions}:judge", PoolConfig(workers=1))
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: pool.score(["42", "41", "word"], ["42"] * 3), range(4)))
    assert threading.active_count() < 20
    for scores in found:
        assert scores[:2] == [Score(1.0, {"correct": 1.0}), Score(0.0, {"correct": 0.0})]
        assert scores[2].fault is not None and not scores[2].components
    pool.close()


def test_bug_case_b87_answers_are_scored_beside_one_another(functions):
    pool = PoolScorer(f"{functions}:slow", PoolConfig(workers=8))
    pool.score(["x"] * 16, ["x"] * 16)  # starts the processes
    started = time.monotonic()
    scores = pool.score(["x"] * 64, ["x"] * 64)
    assert sum(score.total for score in scores) == 64
    assert time.monotonic() - started < 2.5, "one after another takes 3.2 s"
    pool.close()


def test_a_mapping_names_the_parts_of_a_score(functions):
    pool = build_scorer(f"{functions}:parts", PoolConfig(workers=1))
    assert pool.score(["ab"], ["ab"]) == [Score(1.0, {"correct": 1.0, "short": 1.0}, "AB")]
    pool = build_scorer(f"{functions}:weighed", PoolConfig(workers=1))
    assert pool.score(["ab"], ["ab"]) == [Score(0.5, {"correct": 1.0})]


def test_a_function_that_raises_from_the_start_stops_the_run(functions):
    pool = PoolScorer(f"{functions}:nameless", PoolConfig(workers=1))
    with pytest.raises(UserError, match="must score a response, but raised for all of the first 2"):
        pool.score(["1", "2"], ["1", "2"])
    # Once it has scored something, texts that it cannot read are the policy's doing.
    pool = PoolScorer(f"{functions}:judge", PoolConfig(workers=1))
    pool.score(["7"], ["7"])
    assert pool.score(["word", "word"], ["7", "7"])[0].fault


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("best", "reward=best must be one of math_verify, dapo, dapo_strict, gsm8k, or package.module:function"),
        ("scoring_functions:absent", "has no attribute 'absent'"),
        ("scoring_functions:NUMBER", "is a int, not a function"),
        ("no_such_module:judge", "No module named 'no_such_module'"),
        ("a b:c", "reward=a b:c must be one of"),
    ],
)
def test_a_reward_that_is_not_there_is_refused_in_a_line(name: str, said: str, functions):
    with pytest.raises(UserError, match=said) as caught:
        require_scorer(name)
    assert "\n" not in str(caught.value)
    require_scorer(f"{functions}:judge")


def test_limits_that_score_nothing_are_refused():
    for name, value in (("workers", 0), ("timeout_seconds", 0.0), ("max_restarts", -1), ("memory_mebibytes", 1)):
        with pytest.raises(ValueError, match=f"{name}={value} must be"):
            PoolConfig(**{name: value})
