"""Slots over long runs: thousands of requests, draft lengths that change from round to round, every rule and policy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.decoding.engine import Engine, EngineShape, Request, no_context, request_keys
from draftco_jax.decoding.slots import SlotShape
from draftco_jax.drafts.ngram.config import NGramConfig
from draftco_jax.models.functional import initialise
from draftco_jax.models.gpt_oss import GptOssConfig
from draftco_jax.models.nemotron_h import NemotronHConfig
from draftco_jax.models.qwen3_5_moe import Qwen35MoeConfig
from draftco_jax.numerics.sampling import SamplingConfig
from draftco_jax.types import PolicyVersion
from draftco_jax.weight_sync import Publisher

pytestmark = pytest.mark.slow
GREEDY, SAMPLING, K = SamplingConfig(temperature=0.0), SamplingConfig(), 3


@dataclass(frozen=True)
class InTurn:
    """Every length after the other, whatever comes of it."""

    lengths: tuple[int, ...]
    needs_costs: ClassVar[bool] = False

    def init(self):
        return jnp.int32(0)

    def choose(self, state, situation):
        return state % len(self.lengths)

    def observe(self, state, outcome):
        return state + 1


TURNS = SlotShape(slots=3, draft_lengths=(0, 1, K), rule=InTurn((0, 1, K)), page=2, chunk=2, walk=4)


def numpy_of(rollouts):
    return jax.tree.map(np.asarray, rollouts)


def same_texts(found, wanted):
    for field in ("tokens", "lengths", "finished"):
        np.testing.assert_array_equal(getattr(found, field), getattr(wanted, field), err_msg=field)
    np.testing.assert_allclose(found.logprobs, wanted.logprobs, atol=1e-5)


def test_draft_lengths_that_change_from_round_to_round_change_no_greedy_text(toy, mixed_requests, greedy_shape):
    plain = toy.generate("deep", "good", mixed_requests, 0, greedy_shape, GREEDY)
    engine, weights = toy.engine(greedy_shape, GREEDY), toy.published("deep", "good")
    found = numpy_of(engine.generate(*weights, mixed_requests, K, TURNS))
    same_texts(found, plain)
    assert 0 < found.proposed.sum() < K * found.rounds.sum() and (found.accepted[:, -1].sum() > 0)


@pytest.mark.parametrize("changes", [{"verification": "block"}, {"verify_budget": 8 * K}], ids=["block", "budget"])
def test_rules_with_random_numbers_of_their_own_give_the_static_texts(toy, mixed_requests, sampled_shape, changes):
    shape = replace(sampled_shape, **changes)
    static = toy.generate("deep", "good", mixed_requests, K, shape, SAMPLING)
    slots = SlotShape(slots=3, draft_lengths=(K,), page=2, chunk=2, walk=4)
    engine, weights = toy.engine(shape, SAMPLING), toy.published("deep", "good")
    found = numpy_of(engine.generate(*weights, mixed_requests, K, slots))
    same_texts(found, static)
    np.testing.assert_array_equal(found.accepted, static.accepted)


def test_a_stream_shows_beginnings_of_what_comes_out_in_the_end(toy, mixed_requests, sampled_shape, responses):
    """Seven of eight rows are requests; what is over stays as it is, and the last look is all that `serve` gives."""
    engine, weights = toy.engine(sampled_shape, SAMPLING), toy.published("deep", "good")
    slots = SlotShape(slots=3, draft_lengths=(K,), page=2, chunk=2, walk=4)
    wanted = responses(numpy_of(engine.serve(*weights, mixed_requests, slots).rollouts))
    looks = list(engine.stream(*weights, mixed_requests, slots, known=7, turns=3))
    assert len(looks) > 3 and looks[-1].over.all()
    for look in looks:
        for row, text in enumerate(responses(look.rollouts)[:7]):
            assert text == (wanted[row] if look.over[row] else wanted[row][: len(text)])
    assert any(0 < look.over[:7].sum() < 7 for look in looks)
    assert responses(looks[-1].rollouts)[7] == []


POLICIES = {
    "qwen3_5_moe": replace(
        Qwen35MoeConfig.tiny(), num_hidden_layers=2, layer_types=("linear_attention", "full_attention")
    ),
    "nemotron_h": replace(NemotronHConfig.tiny(), num_hidden_layers=3, block_types=("mamba", "attention", "moe")),
    "gpt_oss": replace(GptOssConfig.tiny(), num_hidden_layers=2, layer_types=("sliding_attention", "full_attention")),
}


@pytest.mark.parametrize("family", POLICIES)
def test_bug_case_b39_recurrent_states_and_windows_in_slots(family):
    """Drafts of changing number, kept and rejected, in slots that are used again: the static plain text."""
    cfg = replace(POLICIES[family], vocab_size=8)  # so few tokens that copied drafts are often right
    graph, params = initialise(cfg.build, jax.random.key(1))
    params = jax.tree.map(lambda leaf: leaf * 6 if leaf.ndim >= 2 else leaf, params)
    draft_graph, draft = initialise(NGramConfig(min_match=1, max_match=2).build, jax.random.key(2))
    publisher = Publisher(graph, draft_graph)
    weights = publisher.publish(params, draft, PolicyVersion(0))
    shape = EngineShape(prompt_capacity=6, max_new_tokens=16, stop_ids=(1,), pad_id=0)
    engine = Engine(*publisher.rollout_graphs(params, draft), shape=shape, sampling=GREEDY)
    prompts = jnp.asarray(np.random.default_rng(3).integers(2, 8, (8, 6)), jnp.int32)
    lengths = jnp.asarray([6, 6, 1, 3, 3, 5, 2, 4], jnp.int32)
    prompts = prompts.at[1].set(prompts[0]).at[4].set(prompts[3])
    request = Request(prompts, lengths, request_keys(jax.random.key(5), 8), no_context(8))
    plain = numpy_of(engine.generate(weights.policy, None, request))
    found = numpy_of(engine.generate(weights.policy, weights.draft, request, K, replace(TURNS, poison=True)))
    same_texts(found, plain)
    assert 0 < found.accepted.sum() < found.proposed.sum()


def test_two_thousand_requests_through_sixteen_slots(toy):
    """Random lengths, limits and groups: every text is that of a plain run of the static batch."""
    count, rng = 2000, np.random.default_rng(0)
    shape = EngineShape(prompt_capacity=6, max_new_tokens=10, stop_ids=(3,), pad_id=0)
    group = np.cumsum(rng.random(count) < 0.4)  # neighbours of one group have one prompt
    prompts = rng.integers(0, 7, (group.max() + 1, 6))[group]
    lengths = rng.integers(1, 7, group.max() + 1)[group]
    limits = rng.integers(1, 11, count)
    request = Request(
        jnp.asarray(prompts, jnp.int32), jnp.asarray(lengths, jnp.int32), request_keys(jax.random.key(1), count),
        no_context(count),
    )  # fmt: skip
    plain = toy.generate("deep", "good", request, 0, shape, GREEDY)
    slots = replace(TURNS, slots=16, staging_rows=2, pages=70)
    engine, weights = toy.engine(shape, GREEDY), toy.published("deep", "good")
    found = numpy_of(engine.generate(*weights, request._replace(max_tokens=jnp.asarray(limits, jnp.int32)), K, slots))
    ends = np.minimum(plain.lengths, plain.prompt_lengths + limits)
    np.testing.assert_array_equal(found.lengths, ends)
    written = np.arange(plain.tokens.shape[1])[None] < ends[:, None]
    np.testing.assert_array_equal(np.where(written, found.tokens, 0), np.where(written, plain.tokens, 0))
    np.testing.assert_allclose(found.logprobs, np.where(written, plain.logprobs, 0.0), atol=1e-5)
