"""`draftco bench slots`: what it counts, what it refuses, and a small real run."""

from __future__ import annotations

import json

import numpy as np
import pytest

from draftco_jax import bench_slots as bench
from draftco_jax import cli
from draftco_jax.types import Rollouts


def rollouts(prompt_lengths, lengths) -> Rollouts:
    fields = dict.fromkeys(Rollouts._fields)
    fields |= {"prompt_lengths": np.asarray(prompt_lengths), "lengths": np.asarray(lengths)}
    return Rollouts(**fields)


def test_tokens_beyond_a_limit_are_not_counted():
    both = [rollouts([2, 3], [6, 13]), rollouts([1], [9])]
    assert bench.asked_tokens(both, None) == 4 + 10 + 8
    assert bench.asked_tokens(both, np.array([5, 6, 1])) == 4 + 6 + 1


def test_uneven_limits_are_mostly_short_and_the_same_each_time():
    limits = bench.uneven_limits(4000, 3)
    np.testing.assert_array_equal(limits, bench.uneven_limits(4000, 3))
    assert limits.min() == 1 and limits.max() == 96 and 14 < limits.mean() < 18 and np.median(limits) < 13


def test_a_static_batch_is_made_for_its_own_longest_response():
    assert bench.longest_of_batches(np.array([3, 9, 2, 5, 1, 1]), 3) == [9, 5, 1]
    assert max(bench.longest_of_batches(bench.uneven_limits(128, 0), 4)) == 96


def test_settings_that_measure_nothing_are_refused():
    with pytest.raises(ValueError, match="policies=.* must name some of"):
        bench.BenchSlotsConfig(policies=("1T",))
    with pytest.raises(ValueError, match="slots=0 must be >= 1"):
        bench.BenchSlotsConfig(slots=0)
    for lengths in ((), (0, 4), (4, 480)):
        with pytest.raises(ValueError, match="must be numbers >= 1, each with room for steps=32 tokens"):
            bench.BenchSlotsConfig(lengths=lengths)
    with pytest.raises(ValueError, match=r"draft_lengths=\(-1,\) must be numbers >= 0"):
        bench.BenchSlotsConfig(draft_lengths=(-1,))


@pytest.mark.slow
def test_a_small_run_writes_its_figures(tmp_path, capsys):
    to = tmp_path / "slots.json"
    assert cli.main(["bench", "slots", "--fast", "--json", str(to)]) == 0
    found = json.loads(to.read_text())
    assert {(c["kind"], c["draft_length"]) for c in found["cells"]} == {("even", 3), ("uneven", 3)}
    for cell in found["cells"]:
        counted = cell["tokens"]["slots"], cell["tokens"]["static"]
        assert counted[0] == counted[1] > 0 and cell["slots_over_static"] > 0
    assert [row["length"] for row in found["step_by_length"]] == [4, 20]
    assert "Slots over static batches: at best" in capsys.readouterr().out
