from __future__ import annotations

import functools
import json
from collections import Counter

import pytest

from draftco_jax.data.prompts import PromptBatches, digest_of
from draftco_jax.environments.arithmetic import ArithmeticConfig, ArithmeticTask
from draftco_jax.errors import UserError
from draftco_jax.types import Prompt


class Numbers:
    """A finite source whose problem is its index."""

    def __init__(self, size: int) -> None:
        self.num_problems: int | None = size

    def problem(self, index: int) -> Prompt:
        return Prompt(prompt_id=index, text=f"{index}", answer="", token_ids=(2,))


ARITHMETIC = ArithmeticTask(ArithmeticConfig(), seed=0)
SOURCES = [pytest.param(ARITHMETIC, id="endless"), pytest.param(Numbers(7), id="finite")]


def _ids(batches: PromptBatches, count: int) -> list[tuple[int, ...]]:
    return [tuple(prompt.prompt_id for prompt in next(batches)) for _ in range(count)]


def _through_json(state: dict) -> dict:
    return json.loads(json.dumps(state))


def test_an_endless_source_is_walked_in_order():
    batches = PromptBatches(ARITHMETIC, batch_size=4, seed=0)
    assert _ids(batches, 3) == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)]
    assert next(batches) == tuple(ARITHMETIC.problem(index) for index in range(12, 16))


def test_a_finite_source_is_shuffled_anew_in_each_epoch():
    batches = PromptBatches(Numbers(12), batch_size=4, seed=0)
    epochs = [sum(_ids(batches, 3), ()) for _ in range(6)]
    assert all(sorted(epoch) == list(range(12)) for epoch in epochs)
    assert len(set(epochs)) == 6
    assert list(range(12)) not in [list(epoch) for epoch in epochs]


def test_seeds_give_unrelated_orders():
    # grain's own seeds would make epoch 1 of seed 0 equal epoch 0 of seed 1.
    epochs = [epoch for seed in range(4) for epoch in _epochs(seed)]
    assert len(set(epochs)) == len(epochs)


def _epochs(seed: int) -> list[tuple[int, ...]]:
    batches = PromptBatches(Numbers(12), batch_size=12, seed=seed)
    return _ids(batches, 4)


@functools.cache
def _uninterrupted(source: Numbers | ArithmeticTask) -> list[tuple[int, ...]]:
    return _ids(PromptBatches(source, batch_size=2, seed=5), 24)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("stop", range(21))
def test_bug_cases_b100_b103_resume_at_every_index(source, stop: int):
    # 7 problems in pairs: every second epoch ends inside a batch.
    first = PromptBatches(source, batch_size=2, seed=5)
    before = _ids(first, stop)
    resumed = PromptBatches(source, batch_size=2, seed=5)
    resumed.set_state(_through_json(first.get_state()))
    assert before + _ids(resumed, 24 - stop) == _uninterrupted(source)


def test_bug_case_b101_resume_at_an_exact_epoch_end():
    first = PromptBatches(Numbers(6), batch_size=2, seed=0)
    epoch_one = _ids(first, 3)
    resumed = PromptBatches(Numbers(6), batch_size=2, seed=0)
    resumed.set_state(_through_json(first.get_state()))
    epoch_two = _ids(resumed, 3)
    assert sorted(sum(epoch_two, ())) == list(range(6))
    assert epoch_two != epoch_one


@pytest.mark.parametrize("source", SOURCES)
def test_bug_case_b104_resume_after_resume(source):
    whole = _ids(PromptBatches(source, batch_size=3, seed=1), 14)
    seen, state = [], PromptBatches(source, batch_size=3, seed=1).get_state()
    for _ in range(7):
        batches = PromptBatches(source, batch_size=3, seed=1)
        batches.set_state(_through_json(state))
        seen += _ids(batches, 2)
        state = batches.get_state()
    assert seen == whole


def test_bug_case_b102_a_state_taken_before_a_batch_gives_it_again():
    # What was drawn but not yet trained on is drawn again after a crash, if the state saved is the one before it.
    trained: list[int] = []
    state = PromptBatches(Numbers(8), batch_size=2, seed=0).get_state()
    while len(trained) < 8:
        batches = PromptBatches(Numbers(8), batch_size=2, seed=0)
        batches.set_state(_through_json(state))
        done = next(batches)
        state = batches.get_state()
        next(batches)  # drawn ahead, lost in the crash
        trained += [prompt.prompt_id for prompt in done]
    assert sorted(trained) == list(range(8))


@pytest.mark.parametrize(("size", "batch_size"), [(10, 3), (7, 4), (5, 5), (3, 7), (1, 2)])
def test_bug_case_b105_nothing_is_dropped(size: int, batch_size: int):
    batches = PromptBatches(Numbers(size), batch_size=batch_size, seed=0)
    counts = Counter(sum(_ids(batches, 3 * size), ()))  # 3 * batch_size epochs in whole batches
    assert counts == {index: 3 * batch_size for index in range(size)}


def test_the_state_is_a_position_and_does_not_move_with_the_iterator():
    batches = PromptBatches(ARITHMETIC, batch_size=2, seed=0)
    state = batches.get_state()
    copy = _through_json(state)
    _ids(batches, 3)
    assert state == copy
    batches.set_state(state)
    assert _ids(batches, 1) == [(0, 1)]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"batch_size": 3}, "batch_size=3 must be 2 as in the saved run"),
        ({"seed": 1}, "seed=1 must be 0 as in the saved run"),
        ({"source": Numbers(8)}, "num_problems=8 must be 7 as in the saved run"),
    ],
)
def test_a_state_of_another_pipeline_is_refused(changed: dict, message: str):
    settings = {"source": Numbers(7), "batch_size": 2, "seed": 0}
    state = PromptBatches(**settings).get_state()
    with pytest.raises(UserError, match=message):
        PromptBatches(**(settings | changed)).set_state(state)


class Digested(Numbers):
    """Numbers with answers."""

    def __init__(self, answers: str) -> None:
        super().__init__(len(answers))
        self.problems_digest = digest_of((str(i), answer) for i, answer in enumerate(answers))


def test_an_edited_file_of_as_many_problems_is_not_resumed_but_old_states_are():
    state = PromptBatches(Digested("1234"), batch_size=2, seed=0).get_state()
    PromptBatches(Digested("1234"), batch_size=2, seed=0).set_state(_through_json(state))
    with pytest.raises(UserError, match="problems_digest=.* must be .* as in the saved run"):
        PromptBatches(Digested("1243"), batch_size=2, seed=0).set_state(state)
    old = PromptBatches(Numbers(4), batch_size=2, seed=0).get_state()
    PromptBatches(Digested("1243"), batch_size=2, seed=0).set_state(old)
    assert digest_of([("a", "bc")]) != digest_of([("ab", "c")]) != digest_of([("ab", "c"), ("", "")])


def test_bad_batch_size_is_refused():
    with pytest.raises(UserError, match="batch_size=0 must be 1 or more"):
        PromptBatches(ARITHMETIC, batch_size=0, seed=0)


@pytest.mark.parametrize("shards", [2, 3])
def test_processes_share_each_batch_of_one_process_and_its_positions(shards: int):
    whole = _ids(PromptBatches(Numbers(7), batch_size=6, seed=5), 5)
    parts = [PromptBatches(Numbers(7), batch_size=6, seed=5, shard=i, shards=shards) for i in range(shards)]
    together = [sum(one, ()) for one in zip(*(_ids(part, 3) for part in parts), strict=True)]
    assert together == whole[:3]
    resumed = PromptBatches(Numbers(7), batch_size=6, seed=5)
    resumed.set_state(_through_json(parts[1].get_state()))
    assert _ids(resumed, 2) == whole[3:], "by another number of processes"


@pytest.mark.parametrize(("shard", "shards", "batch_size"), [(2, 2, 4), (-1, 2, 4), (0, 3, 4), (0, 0, 4)])
def test_shares_that_do_not_come_out_are_refused(shard: int, shards: int, batch_size: int):
    with pytest.raises(UserError, match=f"batch_size={batch_size} must be a multiple of shards={shards}"):
        PromptBatches(Numbers(7), batch_size=batch_size, seed=0, shard=shard, shards=shards)
