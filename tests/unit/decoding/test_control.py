"""The draft length chosen inside the program: causal, repeatable from what a call leaves, and off where it loses."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.decoding.control import Control, decide, gain, open_ledger, settle, start
from draftco_jax.decoding.engine import no_context
from draftco_jax.decoding.round_cost import ROUNDS_PER_CALL, _rounds
from draftco_jax.decoding.serving import work_of
from draftco_jax.decoding.slots import SlotShape
from draftco_jax.decoding.speculation_control import AcceptanceEstimate, Bandit, CostModel, FixedLength
from draftco_jax.numerics.sampling import SamplingConfig

GREEDY, K = SamplingConfig(temperature=0.0), 3
RULE = CostModel(lengths=(0, K), estimate=AcceptanceEstimate(prior=0.8, weight=4.0, keep=0.9))


@pytest.fixture(scope="module")
def serve(toy, mixed_requests, greedy_shape):
    """Serves the mixed requests in two slots under RULE; one program, whatever the costs and what is known."""
    slots = SlotShape(slots=2, draft_lengths=RULE.lengths, rule=RULE, page=2, chunk=4, walk=4)
    engine, weights = toy.engine(greedy_shape, GREEDY), toy.published("deep", "good")

    def serve(control):
        served = engine.serve(*weights, mixed_requests, slots, control)
        numpy = {name: jax.tree.map(np.asarray, getattr(served, name)) for name in ("rollouts", "ledger")}
        return served._replace(**numpy)

    return serve


def control_at(seconds) -> Control:
    return start(RULE, jax.random.key(0), jnp.asarray(seconds))


def test_costs_decide_whether_a_call_drafts_and_change_no_greedy_text(serve, toy, mixed_requests, greedy_shape):
    plain = toy.generate("deep", "good", mixed_requests, 0, greedy_shape, GREEDY)
    cheap, dear = serve(control_at([1.0, 1.1])), serve(control_at([1.0, 50.0]))
    for served in (cheap, dear):
        for field in ("tokens", "lengths", "finished"):
            np.testing.assert_array_equal(getattr(served.rollouts, field), getattr(plain, field), err_msg=field)
    np.testing.assert_array_equal(dear.ledger.rounds[1], 0)
    assert dear.rollouts.proposed.sum() == 0 and cheap.ledger.rounds[1] > 0
    assert cheap.ledger.rounds.sum() < dear.ledger.rounds.sum()
    for served in (cheap, dear):
        later = plain.lengths - plain.prompt_lengths - 1  # the first token of a response belongs to no round
        assert served.ledger.tokens.sum() == later.sum()


def test_the_gain_is_plain_seconds_for_the_same_tokens_over_seconds_spent(serve):
    costs = [1.0, 1.1]
    cheap, dear = serve(control_at(costs)), serve(control_at([1.0, 50.0]))
    np.testing.assert_allclose(gain(RULE, dear.control, dear.ledger), 1.0, rtol=1e-6)
    spent = float(np.dot(cheap.ledger.rounds, costs))
    np.testing.assert_allclose(gain(RULE, cheap.control, cheap.ledger), cheap.ledger.plain_rounds / spent, rtol=1e-6)
    # Full rounds of m requests commit m tokens at least, and plain decoding m exactly.
    assert cheap.ledger.rounds.sum() <= cheap.ledger.plain_rounds <= cheap.ledger.tokens.sum()


def test_a_call_goes_on_from_what_the_one_before_has_learnt(serve):
    """A draft that was never accepted is off from the first round on; the same `Control` gives the same call."""
    known = control_at([1.0, 1.2])
    hopeless = known._replace(rule=known.rule._replace(reached=jnp.full(K, 1e4), accepted=jnp.zeros(K)))
    assert serve(hopeless).ledger.rounds[1] == 0
    first = serve(known)
    again, other = serve(first.control), serve(first.control)
    assert first.control.rounds == first.ledger.rounds.sum()
    for one, two in zip(jax.tree.leaves(again), jax.tree.leaves(other), strict=True):
        assert (one == two).all()
    assert again.control.rule.reached[0] > 0


LENGTHS = (0, 1, K)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "verification"),
    [(CostModel(lengths=LENGTHS), "token"), (Bandit(lengths=LENGTHS, epsilon=0.3), "token"),
     (Bandit(lengths=LENGTHS, epsilon=0.3), "block")],
)  # fmt: skip
def test_texts_follow_the_law_whatever_lengths_are_chosen(small_toy, law_shape, law_batch, p_value, rule, verification):
    """At 1e-3, with a draft that is often refused, so that what rounds taught has a say in what is drafted next."""
    engine = small_toy.engine(replace(law_shape, verification=verification), SamplingConfig())
    slots = SlotShape(slots=64, draft_lengths=LENGTHS, rule=rule, page=4, chunk=4, walk=8)
    control = start(rule, jax.random.key(2), jnp.asarray([1.0, 1.2, 1.6]))
    served = engine.serve(*small_toy.published("deep", "wrong"), law_batch, slots, control)
    assert (np.asarray(served.ledger.rounds) > 0).sum() >= 2, "one length alone shows nothing of the choice"
    assert p_value(small_toy, "deep", jax.device_get(served.rollouts), SamplingConfig()) > 1e-3


def test_a_plain_round_is_measured_with_what_the_draft_reads(toy, greedy_shape):
    """NaN in the draft's weights comes out in its state: the work is there, whatever is asked of the result."""
    policy, draft = toy.published("deep", "good")
    slots = SlotShape(slots=2, draft_lengths=(0, K), page=2, chunk=4, walk=4)
    make = partial(work_of, toy.graphs, shape=greedy_shape, sampling=GREEDY, slots=slots)
    spoiled = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), draft)
    state = jax.jit(partial(_rounds, make, number=0))((policy, spoiled), no_context(2))
    floats = [x for x in jax.tree.leaves(state.slots.draft) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert any(bool(jnp.isnan(x).any()) for x in floats)
    assert bool(jnp.isfinite(state.out.logprobs).all()) and int(state.ledger.rounds[0]) == ROUNDS_PER_CALL


@dataclass(frozen=True)
class Log:
    """A rule that keeps what it is shown."""

    lengths: tuple[int, ...] = (0, 2)
    needs_costs: ClassVar[bool] = False

    def init(self):
        return ()

    def choose(self, state, situation):
        by_chance = jax.random.randint(situation.key, (), 0, 1000, jnp.int32)
        return 100 * by_chance + 10 * situation.active + jnp.argmax(situation.seconds).astype(jnp.int32)

    def observe(self, state, outcome):
        return (*state, outcome)


def test_a_round_is_told_to_the_rule_and_added_up():
    rule, seconds = Log(), jnp.asarray([1.0, 1.5])
    control, ledger = start(rule, jax.random.key(1), seconds), open_ledger(Log())
    live, committed = jnp.asarray([True, True, False, False]), jnp.asarray([3, 1, 1, 0])
    first = int(decide(rule, control, jnp.int32(3)))
    control, ledger = settle(
        rule, control, ledger, jnp.int32(1), active=jnp.int32(3), live=live, proposed=jnp.asarray([2, 2, 0, 0]),
        accepted=jnp.asarray([2, 0, 0, 0]), committed=committed,
    )  # fmt: skip
    (outcome,) = control.rule
    assert int(outcome.active) == 3
    assert first % 100 == 31 and float(outcome.seconds) == 1.5 and int(outcome.choice) == 1
    np.testing.assert_array_equal(outcome.live, live)
    assert int(decide(rule, control, jnp.int32(3))) // 100 != first // 100, "a key must not be used twice"
    np.testing.assert_array_equal(ledger.rounds, [0, 1])
    np.testing.assert_array_equal(ledger.tokens, [0, 5])
    np.testing.assert_allclose(ledger.plain_rounds, 5 / 3)
    np.testing.assert_allclose(gain(rule, control, ledger), 5 / 3 / 1.5)
    assert gain(FixedLength(lengths=(2,), length=2), control, ledger) is None


def test_rules_that_weigh_costs_want_a_table_of_their_lengths():
    for rule in (RULE, Bandit(lengths=(0, 2))):
        with pytest.raises(ValueError, match=f"rule={type(rule).__name__} must have a cost table"):
            start(rule, jax.random.key(0))
    with pytest.raises(ValueError, match=r"seconds of shape \(3,\) must be of lengths=\[0, 3\]"):
        start(RULE, jax.random.key(0), jnp.ones(3))
    with pytest.raises(ValueError, match=r"draft_lengths=\(0, 1\) must be those of the rule, \(0, 3\)"):
        SlotShape(slots=2, draft_lengths=(0, 1), rule=RULE)
