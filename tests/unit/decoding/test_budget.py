"""The verification budget: which drafts it takes, and that the output law stays the policy's, by enumeration."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.decoding.budget import chosen, limit, round_uniforms, scores
from draftco_jax.decoding.engine import EngineShape
from draftco_jax.drafts.base import Proposal
from draftco_jax.numerics.sampling import SamplingConfig, request_uniforms

V, K, B = 3, 2, 2
RNG = np.random.default_rng(4)


def law(*shape: int) -> np.ndarray:
    return RNG.dirichlet(np.ones(V), shape)


# Of each request: the law of its first token, and of its second after each first. Target's, then draft's.
P1, P2, Q1, Q2 = law(B), law(B, V), law(B), law(B, V)


def by_sorting(score: np.ndarray, live: np.ndarray, budget: int) -> np.ndarray:
    """The rule in words: highest score, then smaller i, then smaller request."""
    entries = [(-score[b, i], i, b) for b, i in np.ndindex(*score.shape) if live[b] and score[b, i] > 0]
    kept = np.zeros(score.shape, bool)
    for _, i, b in sorted(entries)[:budget]:
        kept[b, i] = True
    return kept


@pytest.mark.parametrize("budget", [1, 3, 5, 100])
def test_the_best_drafts_of_live_requests_are_taken(budget):
    take = jax.jit(lambda *a: chosen(*a, budget))
    for seed in range(20):
        rng = np.random.default_rng(seed)
        # Few different values, so that there are ties; zeros, where nothing is proposed.
        score = np.minimum.accumulate(rng.choice([0.0, 0.25, 0.5, 1.0], (4, 3)), axis=1).astype(np.float32)
        live = rng.random(4) < 0.7
        kept = np.asarray(take(jnp.asarray(score), jnp.asarray(live)))
        np.testing.assert_array_equal(kept, by_sorting(score, live, budget))
        assert (np.diff(kept.astype(int), axis=1) <= 0).all(), "a draft is verified only after those before it"


def test_scores_never_rise_whatever_rounding_does_and_stop_at_broken_laws():
    rows = np.zeros((3, 4, V), np.float32)
    rows[0, :, 0] = np.nextafter(np.float32(1), np.float32(2))  # a softmax may round to more than 1
    rows[1] = np.random.default_rng(0).dirichlet(np.ones(V), 4)
    rows[2, :, 1], rows[2, 1] = 0.5, np.nan
    found = np.asarray(scores(jnp.asarray(rows)))
    assert (np.diff(found, axis=1) <= 0).all() and (found[0] == 1).all()
    np.testing.assert_allclose(found[1], np.cumprod(rows[1].max(axis=-1)), rtol=1e-6)
    np.testing.assert_array_equal(found[2], [0.5, 0, 0, 0])


def round_law(p: np.ndarray, q: np.ndarray | None, token: int) -> tuple[float, np.ndarray]:
    """Of one position whose draft is `token` ~ q: chance that it is accepted, and the law emitted otherwise."""
    if q is None:  # a row of zeros
        return 0.0, p
    excess = np.maximum(p - q, 0)
    return min(1.0, p[token] / q[token]), excess / excess.sum()


def texts_of(request: int, drafts: tuple[int, ...], kept: np.ndarray) -> np.ndarray:
    """Law [V, V] of a request's first two tokens, given its drafts and which are verified; later rounds are exact."""
    found = np.zeros((V, V))
    first, second = drafts
    accept, residual = round_law(P1[request], Q1[request] if kept[0] else None, first)
    found += (1 - accept) * residual[:, None] * P2[request]
    accept2, residual2 = round_law(P2[request, first], Q2[request, first] if kept[1] else None, second)
    found[first, second] += accept * accept2
    found[first] += accept * (1 - accept2) * residual2
    return found


def joint_law(budget: int) -> np.ndarray:
    """Law [V, V, V, V] of the texts of both requests, summed over all drafts that could have been drawn."""
    total = np.zeros((V,) * 4)
    draws = list(itertools.product(range(V), repeat=B * K))
    drafts = np.array(draws, np.int32).reshape(-1, B, K)
    request = np.arange(B)[None]
    laws = np.stack([np.broadcast_to(Q1, (len(draws), B, V)), Q2[request, drafts[:, :, 0]]], axis=2)
    take = jax.vmap(lambda tokens, laws: limit(Proposal(tokens, laws, jnp.full(B, K)), jnp.ones(B, bool), budget).laws)
    left = np.asarray(take(jnp.asarray(drafts), jnp.asarray(laws, jnp.float32)))
    for tokens, q, kept in zip(drafts, laws, left.any(axis=-1), strict=True):
        chance = np.prod(np.take_along_axis(q, tokens[..., None], axis=-1))
        texts = [texts_of(b, tuple(tokens[b]), kept[b]) for b in range(B)]
        total += chance * texts[0][:, :, None, None] * texts[1][None, None]
    return total


TARGET = (P1[:, :, None] * P2)[0][:, :, None, None] * (P1[:, :, None] * P2)[1][None, None]


@pytest.mark.parametrize("budget", [1, 2, 3, 4])
def test_the_texts_of_a_batch_follow_independent_policy_laws(budget):
    np.testing.assert_allclose(joint_law(budget), TARGET, rtol=0, atol=1e-12)


@pytest.mark.parametrize("budget", [1, 2, 3])
def test_looking_at_the_drafted_token_itself_is_caught(budget, monkeypatch):
    """The same enumeration of a rule that scores a draft by the probability of the token that was drawn."""

    def cheat(proposal: Proposal, live, budget: int) -> Proposal:
        drawn = jnp.take_along_axis(proposal.laws, proposal.tokens[..., None], axis=-1)[..., 0]
        kept = chosen(jnp.cumprod(drawn, axis=1), live, budget)
        return proposal._replace(laws=jnp.where(kept[..., None], proposal.laws, 0.0))

    monkeypatch.setitem(globals(), "limit", cheat)
    assert np.abs(joint_law(budget) - TARGET).max() > 1e-3


def test_random_numbers_are_never_met_twice():
    keys = jax.random.split(jax.random.key(0), 2)
    tables = [np.asarray(round_uniforms(keys, jnp.full(2, n, jnp.int32), 4)) for n in range(3)]
    table = np.asarray(request_uniforms(keys, 8))  # what the first token is drawn with
    found = np.concatenate([part.ravel() for part in (*tables, table)])
    assert len(np.unique(found)) == len(found)


def test_random_numbers_of_a_round_do_not_depend_on_the_batch():
    keys, rounds = jax.random.split(jax.random.key(0), 3), jnp.asarray([4, 0, 2], jnp.int32)
    together = round_uniforms(keys, rounds, 4)
    np.testing.assert_array_equal(round_uniforms(keys[2:], rounds[2:], 4)[0], together[2])


GREEDY = SamplingConfig(temperature=0.0)
BUDGET = 5


def test_greedy_text_is_that_of_plain_decoding_and_no_more_drafts_are_counted(toy, mixed_requests):
    shape = EngineShape(prompt_capacity=5, max_new_tokens=12, stop_ids=(3,), pad_id=3, verify_budget=BUDGET)
    plain = toy.generate("deep", "good", mixed_requests, 0, shape, GREEDY)
    found = toy.generate("deep", "good", mixed_requests, 3, shape, GREEDY)
    np.testing.assert_array_equal(found.tokens, plain.tokens)
    # While all eight run, three requests get no draft at all.
    assert found.proposed.sum() <= BUDGET * found.rounds.max() < 3 * found.rounds.sum()
    assert 0 < found.accepted.sum() <= found.proposed.sum()


def test_sampled_texts_follow_the_law_of_the_policy(small_toy, law_batch, law_shape, p_value):
    """The compiled engine, with a budget for half of the drafts; a right one is refused with probability 1e-6."""
    shape = EngineShape(
        prompt_capacity=law_shape.prompt_capacity,
        max_new_tokens=law_shape.max_new_tokens,
        stop_ids=law_shape.stop_ids,
        pad_id=law_shape.pad_id,
        verify_budget=law_batch.prompts.shape[0],
    )
    sampling = SamplingConfig()
    rollouts = small_toy.generate("deep", "good", law_batch, 2, shape, sampling)
    assert rollouts.proposed.sum() < 2 * rollouts.rounds.sum()
    p = p_value(small_toy, "deep", rollouts, sampling)
    print(f"p-value {p:.2g}")
    assert p > 1e-6
