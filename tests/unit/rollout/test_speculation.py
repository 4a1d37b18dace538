"""What a run keeps of the choice of draft lengths: to the last bit, and nothing that a clock would change."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.decoding.control import decide, open_ledger, settle
from draftco_jax.decoding.cost_table import CostTable
from draftco_jax.decoding.serving import Served
from draftco_jax.decoding.speculation_control import Bandit, CostModel
from draftco_jax.errors import UserError
from draftco_jax.rollout.speculation import SpeculationControl, costs_of_run

COSTS = CostTable({"device": "cpu"}, (2,), (0, 1, 3), ((0.1, 0.17, 0.31),))


def after_rounds(speculation: SpeculationControl, count: int) -> list[int]:
    """Lengths chosen in so many rounds of two requests."""
    control, ledger, chosen = speculation.control, open_ledger(speculation.rule), []
    live = jnp.ones(2, bool)
    for number in range(count):
        choice = decide(speculation.rule, control, jnp.int32(2))
        k = speculation.rule.lengths[int(choice)]
        accepted = jnp.asarray([number % (k + 1), k // 2])
        control, ledger = settle(
            speculation.rule, control, ledger, choice,
            active=jnp.int32(2), live=live, proposed=jnp.full(2, k), accepted=accepted, committed=accepted + 1,
        )  # fmt: skip
        chosen.append(k)
    speculation.after(Served(None, control, ledger))  # type: ignore[arg-type]
    return chosen


@pytest.mark.parametrize("rule", [Bandit(lengths=COSTS.lengths, epsilon=0.5), CostModel(lengths=COSTS.lengths)])
def test_a_state_that_went_through_a_file_chooses_as_the_one_that_did_not(rule):
    kept, fresh = (SpeculationControl(rule, jax.random.key(3), COSTS) for _ in range(2))
    after_rounds(kept, 7)
    fresh.set_state(json.loads(json.dumps(kept.get_state(), allow_nan=False)))
    for one, two in zip(jax.tree.leaves(kept.control), jax.tree.leaves(fresh.control), strict=True):
        assert one.dtype == two.dtype
        same = one == two
        assert (same if jax.dtypes.issubdtype(one.dtype, jax.dtypes.prng_key) else same | (one != one)).all()
    assert after_rounds(kept, 8) == after_rounds(fresh, 8)


def test_metrics_of_a_call_are_by_the_cost_table():
    speculation = SpeculationControl(CostModel(lengths=COSTS.lengths), jax.random.key(0), COSTS)
    control, ledger = speculation.control, open_ledger(speculation.rule)
    ledger = ledger._replace(rounds=jnp.asarray([2, 0, 6]), plain_rounds=jnp.float32(20.0))
    metrics = speculation.after(Served(None, control, ledger))  # type: ignore[arg-type]
    assert metrics == pytest.approx(
        {
            "rollout/draft_length_mean": 18 / 8,
            "rollout/plain_rounds_fraction": 0.25,
            "rollout/speculation_gain": 20 * 0.1 / (2 * 0.1 + 6 * 0.31),
        }
    )


def test_costs_are_measured_once_and_refused_for_another_setting(tmp_path):
    measured = []

    def measure(setting):
        measured.append(setting)
        return COSTS

    first, second = (costs_of_run(tmp_path, COSTS.setting, measure) for _ in range(2))
    assert measured == [COSTS.setting] and first == COSTS
    np.testing.assert_array_equal(second.array(), COSTS.array())
    with pytest.raises(UserError, match="must be measured for device='gpu', not for 'cpu'; delete it to measure anew"):
        costs_of_run(tmp_path, {"device": "gpu"}, measure)
