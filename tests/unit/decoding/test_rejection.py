"""The rule of rejection sampling is exact: every outcome is enumerated, nothing is drawn.

An outcome is (drafted tokens, number accepted, final token). Its weight is the product of the laws the drafts come
from, of the acceptance probabilities, read off `accepts` by bisection, and of the final law, read off `residual`, all
in float64; that `verify` and the engine's commit lead to this outcome is checked, in the engine's own float32, by
uniforms that force it. The emitted prefix is then continued by the target to k + 1 tokens, and the law of the whole is
compared with the target's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from draftco_jax.decoding.records import committed_tokens
from draftco_jax.decoding.rejection import accepts, residual, verify
from draftco_jax.drafts.eagle3.config import Eagle3Config
from draftco_jax.numerics.sampling import SamplingConfig, law

SIZES = [(2, 1), (3, 2), (4, 3)]
BELOW_ONE = 1 - 2**-24  # the largest float32 uniform
VERIFY, COMMITTED = jax.jit(verify), jax.jit(committed_tokens)
Table = Callable[[tuple[int, ...]], np.ndarray]  # law of the next token after a prefix


def table(laws: np.ndarray, vocab: int, depth: int) -> Table:
    """One row of `laws` for every prefix of up to `depth` tokens."""
    prefixes = [prefix for n in range(depth + 1) for prefix in itertools.product(range(vocab), repeat=n)]
    return dict(zip(prefixes, laws[: len(prefixes)], strict=True)).__getitem__


def acceptance_probability(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Measure of the uniforms that `accepts` lets through: the threshold, bisected to 2^-60."""
    low, high = np.zeros_like(p), np.ones_like(p)
    with jax.enable_x64(True):
        for _ in range(60):
            middle = (low + high) / 2
            passed = np.asarray(accepts(jnp.asarray(p), jnp.asarray(q), jnp.asarray(middle)))
            low, high = np.where(passed, middle, low), np.where(passed, high, middle)
    return np.where(high == 1, 1.0, low)


def final_laws(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Law of the token emitted after n accepted drafts, [N, k + 1, V]."""
    with_bonus = np.concatenate([q, np.zeros_like(q[:, :1])], axis=1)
    with jax.enable_x64(True):
        weights = np.asarray(residual(jnp.asarray(p), jnp.asarray(with_bonus)))
    return weights / weights.sum(axis=-1, keepdims=True)


class Outcomes:
    """All outcomes of one round with positive weight, and the share of drafts accepted at each position."""

    def __init__(self, target: Table, verified: Table, drawn: Table, vocab: int, k: int) -> None:
        texts = list(itertools.product(range(vocab), repeat=k))
        self.p = np.array([[target(d[:i]) for i in range(k + 1)] for d in texts])
        self.q = np.array([[verified(d[:i]) for i in range(k)] for d in texts])
        self.drafts = np.array(texts)
        drawn_weight = np.array([np.prod([drawn(d[:i])[d[i]] for i in range(k)]) for d in texts])
        at = self.drafts[..., None]
        p_drafted = np.take_along_axis(self.p[:, :k], at, axis=-1)[..., 0]
        q_drafted = np.take_along_axis(self.q, at, axis=-1)[..., 0]
        self.accept = acceptance_probability(p_drafted, q_drafted)
        reached = np.cumprod(np.concatenate([np.ones((len(texts), 1)), self.accept], axis=1), axis=1)
        rejected = np.concatenate([1 - self.accept, np.ones((len(texts), 1))], axis=1)
        self.final = final_laws(self.p, self.q)
        self.weights = (drawn_weight[:, None] * reached * rejected)[..., None] * self.final  # [N, k + 1, V]
        self.acceptance = (drawn_weight[:, None] * reached[:, 1:]).sum(axis=0)

    def emissions(self) -> Iterator[tuple[float, tuple[int, ...]]]:
        """Weight and tokens of each possible outcome, the tokens as `verify` and the engine's commit emit them."""
        text, n, x = np.indices(self.weights.shape).reshape(3, -1)
        k = self.drafts.shape[1]
        slot = np.arange(k)[None, :]
        accept_uniforms = np.where(slot < n[:, None], 0.0, np.where(slot == n[:, None], BELOW_ONE, 0.5))
        ends = np.cumsum(self.final[text, n], axis=-1)
        end = np.take_along_axis(ends, x[:, None], axis=-1)[:, 0]
        middle = end - self.final[text, n, x] / 2
        elsewhere = 1 - middle  # entries that must not be read
        commit_uniforms = np.where(np.arange(k + 1)[None, :] == n[:, None], middle[:, None], elsewhere[:, None])
        drafts = jnp.asarray(self.drafts[text], jnp.int32)
        p, q, accept_uniforms, commit_uniforms = (
            jnp.asarray(values, jnp.float32)
            for values in (self.p[text], self.q[text], accept_uniforms, commit_uniforms)
        )
        accepted, final = VERIFY(p, q, drafts, accept_uniforms, commit_uniforms)
        weights = self.weights.reshape(-1)
        possible = weights > 0
        np.testing.assert_array_equal(np.asarray(accepted)[possible], n[possible])
        np.testing.assert_array_equal(np.asarray(final)[possible], x[possible])
        tokens = np.asarray(COMMITTED(drafts, accepted, final))
        for weight, row, count in zip(weights[possible], tokens[possible], n[possible], strict=True):
            yield weight, tuple(map(int, row[: count + 1]))


def text_law(outcomes: Outcomes, target: Table, vocab: int, length: int) -> np.ndarray:
    """Law of `length` tokens: the emitted prefix continued by the target, [V, ..., V]."""
    total = np.zeros((vocab,) * length)
    for weight, emitted in outcomes.emissions():
        total[emitted] += weight * continuation(target, emitted, vocab, length)
    return total


def continuation(target: Table, prefix: tuple[int, ...], vocab: int, length: int) -> np.ndarray:
    """Law of the tokens after `prefix` up to `length`, drawn from the target."""
    if len(prefix) == length:
        return np.ones(())
    here = target(prefix)
    return np.stack([here[x] * continuation(target, (*prefix, x), vocab, length) for x in range(vocab)])


def one_hot(values: np.ndarray) -> np.ndarray:
    return np.eye(values.shape[-1])[np.argmax(values, axis=-1)]


def softmax_laws(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return rng.dirichlet(np.ones(shape[1]), size=shape[0])


def laws_with_zeros(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Laws with at least one zero each."""
    values = softmax_laws(rng, shape)
    for row in values:
        row[rng.choice(shape[1], size=rng.integers(1, shape[1]), replace=False)] = 0
    return values / values.sum(axis=-1, keepdims=True)


def argmax_laws(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return one_hot(rng.normal(size=shape))


def filtered_laws(rng: np.random.Generator, shape: tuple[int, int], **sampling) -> np.ndarray:
    """The library's laws of random logits, renormalised in float64."""
    sampling = sampling or {"temperature": 0.7, "top_k": max(1, shape[1] - 1), "top_p": 0.8}
    logits = jnp.asarray(rng.normal(0, 2, shape), jnp.float32)
    values = np.asarray(law(logits, SamplingConfig(**sampling)), np.float64)
    return values / values.sum(axis=-1, keepdims=True)


def laws_of_reduced_draft(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Laws over all tokens but token 1, scattered to the target's vocabulary by the draft module."""
    vocab = shape[1]
    kept = (0, *range(2, vocab))
    cfg = Eagle3Config(
        tap_layers=(0,),
        vocab_size=vocab,
        draft_vocab_size=len(kept),
        hidden_size=2,
        intermediate_size=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=2,
    )
    graphdef, params, _ = nnx.split(nnx.eval_shape(lambda: cfg.build(nnx.Rngs(0))), nnx.Param, ...)
    draft = nnx.merge(graphdef, params, {"draft_to_target": jnp.asarray(kept, jnp.int32)})
    with jax.enable_x64(True):
        return np.asarray(draft.to_target_vocabulary(jnp.asarray(softmax_laws(rng, (shape[0], len(kept))))))


MAKERS = {
    "random": (softmax_laws, softmax_laws),
    "zeros in q": (softmax_laws, laws_with_zeros),
    "zeros in p": (laws_with_zeros, softmax_laws),
    "zeros in both": (laws_with_zeros, laws_with_zeros),
    "reduced vocabulary": (softmax_laws, laws_of_reduced_draft),
    "one-hot q": (softmax_laws, argmax_laws),
    "greedy": (argmax_laws, argmax_laws),
    "filtered": (filtered_laws, filtered_laws),
    "filtered target": (filtered_laws, softmax_laws),
}
KINDS = ["p equals q", *MAKERS]


def tables(kind: str, vocab: int, k: int) -> tuple[Table, Table]:
    """Target and draft laws of one kind for every prefix."""
    rng = np.random.default_rng([vocab, k])
    shape = (sum(vocab**n for n in range(k + 1)), vocab)
    if kind == "p equals q":
        return (table(softmax_laws(rng, shape), vocab, k),) * 2
    target, draft = (table(make(rng, shape), vocab, k) for make in MAKERS[kind])
    return target, draft


@pytest.mark.parametrize("vocab, k", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_emitted_text_follows_the_target_law(kind, vocab, k):
    target, draft = tables(kind, vocab, k)
    outcomes = Outcomes(target, draft, draft, vocab, k)
    difference = np.abs(text_law(outcomes, target, vocab, k + 1) - continuation(target, (), vocab, k + 1)).max()
    assert difference < 1e-12
    assert abs(outcomes.weights.sum() - 1) < 1e-12


def test_acceptance_is_the_overlap_of_the_laws():
    target, draft = tables("random", 4, 1)
    outcomes = Outcomes(target, draft, draft, 4, 1)
    np.testing.assert_allclose(outcomes.acceptance[0], np.minimum(target(()), draft(())).sum(), atol=1e-12)


def test_a_draft_that_equals_the_target_is_always_accepted():
    target, draft = tables("p equals q", 4, 3)
    np.testing.assert_array_equal(Outcomes(target, draft, draft, 4, 3).acceptance.round(12), [1, 1, 1])


# p and q of three public reports.
P, Q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.5, 0.3])


def constant(values: np.ndarray) -> Table:
    return lambda prefix: values


@pytest.mark.parametrize("k", [1, 2, 3])
def test_bug_case_b23_argmax_draft_with_softmax_q(k):
    softmax, argmax = constant(Q), constant(one_hot(Q))
    first = lambda verified: text_law(Outcomes(constant(P), verified, argmax, 3, k), constant(P), 3, k + 1)  # noqa: E731
    law_of_first = lambda joint: joint.reshape(3, -1).sum(axis=1)  # noqa: E731
    # The fault: drawn by argmax, verified as if drawn from the softmax.
    np.testing.assert_allclose(law_of_first(first(softmax)), [0.40, 0.60, 0.0], atol=1e-12)
    # Right for an argmax draft: its law is one-hot.
    np.testing.assert_allclose(law_of_first(first(argmax)), P, atol=1e-12)


def test_bug_case_b25_draft_probabilities_are_not_dropped():
    softmax = constant(Q)
    kept = Outcomes(constant(P), softmax, softmax, 3, 1)
    np.testing.assert_allclose(text_law(kept, constant(P), 3, 2).sum(axis=1), P, atol=1e-12)
    np.testing.assert_allclose(kept.acceptance, [0.70], atol=1e-12)
    # Dropped: each drafted token is judged as if its own law were one-hot. Lossless too, but acceptance is sum q p.
    texts = np.arange(3)
    hot = np.eye(3)
    accept = acceptance_probability(P[texts], hot[texts, texts])
    final = final_laws(np.tile(P, (3, 2, 1)), hot[:, None])[:, 0]
    np.testing.assert_allclose((Q * accept) + (Q * (1 - accept)) @ final, P, atol=1e-12)
    np.testing.assert_allclose((Q * accept).sum(), 0.31, atol=1e-12)


def test_bug_case_b26_top_k_of_one_emits_the_greedy_text_for_any_draft():
    rng = np.random.default_rng(3)
    target = table(filtered_laws(rng, (85, 4), top_k=1), 4, 3)
    draft = table(softmax_laws(rng, (85, 4)), 4, 3)
    joint = text_law(Outcomes(target, draft, draft, 4, 3), target, 4, 4)
    greedy: tuple[int, ...] = ()
    for _ in range(4):
        greedy += (int(np.argmax(target(greedy))),)
    np.testing.assert_allclose(joint[greedy], 1, atol=1e-12)


def test_bug_case_b26_a_token_outside_the_nucleus_is_never_emitted():
    rng = np.random.default_rng(4)
    laws = filtered_laws(rng, (85, 4), temperature=1.5, top_p=0.6)
    assert (laws == 0).sum() > 85
    target, draft = table(laws, 4, 3), table(softmax_laws(rng, (85, 4)), 4, 3)
    for _, emitted in Outcomes(target, draft, draft, 4, 3).emissions():
        assert all(target(emitted[:i])[token] > 0 for i, token in enumerate(emitted))


def test_a_drafted_token_of_target_probability_zero_is_rejected_even_at_uniform_zero():
    assert not accepts(jnp.zeros(1), jnp.ones(1), jnp.zeros(1))[0]
    assert accepts(jnp.full(1, 1e-30), jnp.ones(1), jnp.zeros(1))[0]


def test_residual_without_mass_is_the_target_law():
    p = jnp.asarray([[0.25, 0.75, 0.0]])
    np.testing.assert_array_equal(residual(p, p), p)
    np.testing.assert_array_equal(residual(p, jnp.asarray([[0.5, 0.5, 0.0]])), [[0, 0.25, 0]])


@pytest.mark.parametrize("kind", ["random", "zeros in both", "one-hot q"])
def test_float32_uniforms_leave_the_law_within_their_resolution(kind):
    # The engine's uniforms are multiples of 2^-23 and its laws float32. Bisect the threshold on that grid.
    target, draft = tables(kind, 4, 1)
    p, q = (np.asarray(values(()), np.float32) for values in (target, draft))
    grid = np.arange(2**23, dtype=np.float32) * np.float32(2**-23)
    accept = np.array([np.asarray(accepts(*(jnp.full(2**23, x) for x in (p[i], q[i])), jnp.asarray(grid))).mean()
                       for i in range(4)])  # fmt: skip
    final = final_laws(np.float64([[p, p]]), np.float64([[q]]))[0, 0]
    emitted = q * accept + np.sum(q * (1 - accept)) * final
    assert np.abs(emitted - p).max() < 3 * 2**-23


def test_a_draft_whose_law_is_broken_is_never_accepted():
    # The token of a law of NaNs over a reduced vocabulary is id 0, where q is 0: it was drawn from nothing.
    p = jnp.asarray([[[0.1, 0.2, 0.3, 0.4]] * 2])
    q = jnp.asarray([[[0.0, np.nan, np.nan, np.nan]]])
    accepted, _ = verify(p, q, jnp.zeros((1, 1), jnp.int32), jnp.zeros((1, 1)), jnp.full((1, 2), 0.5))
    assert accepted[0] == 0
