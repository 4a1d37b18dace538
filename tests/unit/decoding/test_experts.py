"""What a generate call records of the routing, against one forward over the finished texts."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.decoding.engine import Engine, EngineShape, Request, no_context, request_keys
from draftco_jax.decoding.slots import SlotShape
from draftco_jax.decoding.stats import speculation_stats
from draftco_jax.drafts.ngram.config import NGramConfig
from draftco_jax.models.functional import initialise
from draftco_jax.models.nemotron_h import NemotronHConfig
from draftco_jax.models.qwen3_5_moe import Qwen35MoeConfig
from draftco_jax.numerics.sampling import SamplingConfig
from draftco_jax.types import PolicyVersion, Rollouts
from draftco_jax.weight_sync import Publisher

VOCAB = 8  # so few that copied drafts are often right
POLICIES = {
    "qwen3_5_moe": replace(
        Qwen35MoeConfig.tiny(),
        vocab_size=VOCAB,
        num_hidden_layers=2,
        layer_types=("linear_attention", "full_attention"),
        num_experts=8,
    ),
    "nemotron_h": replace(
        NemotronHConfig.tiny(),
        vocab_size=VOCAB,
        num_hidden_layers=4,
        block_types=("mamba", "moe", "attention", "moe"),
        n_routed_experts=8,
    ),
}
LENGTHS = np.array([4, 2, 1], np.int32)
NEW, STOP = 20, 1


class Recorded:
    """A family's rollouts, plain and speculative with and without a budget, and its routing of any text."""

    def __init__(self, family: str) -> None:
        self.cfg = POLICIES[family]
        graph, params = initialise(self.cfg.build, jax.random.key(1))
        # Weights of 0.02 say nearly the same everywhere; these have a mind of their own, and repeat themselves.
        params = jax.tree.map(lambda leaf: leaf * 6 if leaf.ndim >= 2 else leaf, params)
        draft_graph, draft = initialise(NGramConfig(min_match=1, max_match=2).build, jax.random.key(2))
        publisher = Publisher(graph, draft_graph)
        self._graphs = publisher.rollout_graphs(params, draft)
        self._weights = publisher.publish(params, draft, PolicyVersion(0))
        prompts = np.random.default_rng(3).integers(2, VOCAB, (3, 4)).astype(np.int32)
        keys = request_keys(jax.random.key(5), 3)
        self._request = Request(jnp.asarray(prompts), jnp.asarray(LENGTHS), keys, no_context(3))
        forward = lambda tokens, positions, ones: graph.merge(params)(tokens, positions, ones).routing.ids  # noqa: E731
        self._forward = jax.jit(forward)
        self._found: dict[tuple, Rollouts] = {}

    def roll_out(self, k: int, budget: int | None = None, slots: SlotShape | None = None) -> Rollouts:
        if (k, budget, slots) not in self._found:
            self._found[k, budget, slots] = self._roll_out(k, budget, slots)
        return self._found[k, budget, slots]

    def _roll_out(self, k: int, budget: int | None, slots: SlotShape | None) -> Rollouts:
        shape = EngineShape(
            prompt_capacity=4, max_new_tokens=NEW, stop_ids=(STOP,), pad_id=0, record_experts=True, verify_budget=budget
        )
        engine = Engine(*self._graphs, shape=shape, sampling=SamplingConfig(temperature=0.7))
        rollouts = engine.generate(self._weights.policy, self._weights.draft if k else None, self._request, k, slots)
        return jax.tree.map(np.asarray, rollouts)

    def routing(self, rollouts: Rollouts) -> np.ndarray:
        tokens = jnp.asarray(rollouts.tokens)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
        return np.asarray(self._forward(tokens, positions, jnp.ones_like(tokens)))


recorded_of = cache(Recorded)


@pytest.fixture(scope="module", params=POLICIES)
def recorded(request) -> Recorded:
    return recorded_of(request.param)


# Mamba-2 beside experts in layers of their own shows in one of the three.
@pytest.mark.parametrize(
    "recorded, k, budget",
    [
        pytest.param(
            *(family, k, budget),
            marks=pytest.mark.slow if (family, name) in {("nemotron_h", "plain"), ("nemotron_h", "budget")} else (),
            id=f"{family}-{name}",
        )
        for family in POLICIES
        for k, budget, name in ((0, None, "plain"), (2, None, "speculative"), (2, 2, "budget"))
    ],
    indirect=["recorded"],
)
def test_recorded_experts_are_those_of_one_forward_over_the_text(recorded, k, budget):
    rollouts = recorded.roll_out(k, budget)
    if k:
        assert 0 < rollouts.accepted.sum() < rollouts.proposed.sum(), "kept and rejected drafts must be there"
    assert len(set(rollouts.lengths.tolist())) > 1, "rows of one length would show little"
    experts, wanted = rollouts.experts, recorded.routing(rollouts)
    assert experts.dtype == np.int16 and experts.shape == wanted.shape
    assert len(np.unique(wanted.reshape(-1, wanted.shape[-1]), axis=0)) > 2, "one choice for all would show nothing"
    for row, length in enumerate(rollouts.lengths):
        # Order is by score, and scores of two experts may be equal to rounding: sets.
        np.testing.assert_array_equal(
            np.sort(experts[row, : length - 1], axis=-1), np.sort(wanted[row, : length - 1], axis=-1), err_msg=str(row)
        )
        assert (experts[row, length - 1 :] == -1).all()


@pytest.mark.slow
@pytest.mark.parametrize("k", [0, 2])
def test_in_slots_the_same_experts_are_recorded(recorded, k):
    slots = SlotShape(slots=2, draft_lengths=(k,), page=2, chunk=2, walk=4, poison=True)
    found, wanted = recorded.roll_out(k, slots=slots), recorded.roll_out(k)
    np.testing.assert_array_equal(found.tokens, wanted.tokens)
    np.testing.assert_array_equal(np.sort(found.experts, axis=-1), np.sort(wanted.experts, axis=-1))
    assert found.experts_touched[0] > 0


@pytest.mark.parametrize("recorded", ["qwen3_5_moe"], indirect=True)
def test_touched_experts_are_counted_over_running_requests_alone(recorded):
    rollouts = recorded.roll_out(0)
    steps = []  # plain decoding: step j reads response token j of every request that is still running
    for step in range(rollouts.lengths.max()):
        at = LENGTHS + step
        rows = [rollouts.experts[b, at[b]] for b in range(3) if at[b] < rollouts.lengths[b] - 1]
        if rows:
            steps.append(np.mean([len(np.unique([row[m] for row in rows])) for m in range(rows[0].shape[0])]))
    np.testing.assert_allclose(rollouts.experts_touched, np.mean(steps), rtol=1e-6)
    assert speculation_stats(rollouts).experts_touched == pytest.approx(np.mean(steps), rel=1e-6)


@pytest.mark.parametrize("recorded", ["qwen3_5_moe"], indirect=True)
def test_a_budget_touches_fewer_experts_a_forward(recorded):
    everything, few = recorded.roll_out(2), recorded.roll_out(2, 2)
    assert few.proposed.sum() <= 2 * few.rounds.max()
    assert few.experts_touched[0] < everything.experts_touched[0]


def test_recording_needs_a_policy_with_experts(toy, mixed_requests):
    shape = EngineShape(prompt_capacity=5, max_new_tokens=2, stop_ids=(3,), pad_id=3, record_experts=True)
    with pytest.raises(ValueError, match="record_experts=True"):
        toy.generate("deep", "good", mixed_requests, 0, shape, SamplingConfig())
