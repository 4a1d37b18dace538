"""Policy losses token by token, their aggregation and their corrections, against tables in fractions and in float64."""

from __future__ import annotations

from fractions import Fraction as F

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.losses.aggregation import scale_tokens
from draftco_jax.losses.correction import (
    icepop_weights,
    sequence_error_weights,
    sequence_mask_weights,
    truncated_weights,
)
from draftco_jax.losses.documents import document_means
from draftco_jax.losses.kl import kl_k1, kl_k2, kl_k3, kl_tokens, penalised_advantages
from draftco_jax.losses.policy import cispo_tokens, clip_tokens, gspo_tokens

RATIOS = (F(7, 4), F(1, 2), F(1, 2), F(5, 4), F(1), F(7, 2))
ADVANTAGES = (F(1), F(-1), F(1), F(-1), F(2), F(-2))
CLIP = {"clip_low": 0.25, "clip_high": 0.5}


@pytest.fixture(autouse=True, scope="module")
def float64():
    with jax.enable_x64(True):
        yield


def f64(values):
    return values if isinstance(values, jax.Array) else jnp.asarray(np.array(values, np.float64))


def logs(ratios):
    return f64([np.log(r.numerator) - np.log(r.denominator) for r in ratios])


def floats(fractions):
    return [float(x) for x in fractions]


def close(actual, expected, rtol=1e-13):
    np.testing.assert_allclose(actual, np.array(expected, np.float64), rtol=rtol, atol=1e-14)


def clipped(ratio, advantage, low, high):
    return min(ratio * advantage, min(max(ratio, low), high) * advantage)


def derivative(function, at, step=1e-6):
    """Central differences of a scalar function in float64."""
    found = np.zeros(at.shape)
    for index in np.ndindex(*at.shape):
        move = np.zeros(at.shape)
        move[index] = step
        found[index] = (float(function(at + move)) - float(function(at - move))) / (2 * step)
    return found


def test_clip_higher_and_dual_clip_equal_a_table_in_fractions():
    low, high = F(3, 4), F(3, 2)
    table = [clipped(r, a, low, high) for r, a in zip(RATIOS, ADVANTAGES, strict=True)]
    assert table == [F(3, 2), F(-3, 4), F(1, 2), F(-5, 4), F(2), F(-7)]
    arguments = logs(RATIOS), f64([0.0] * 6), f64(floats(ADVANTAGES)), f64([1.0] * 6)
    plain, dual = clip_tokens(*arguments, **CLIP), clip_tokens(*arguments, **CLIP, dual_clip=3.0)
    close(plain.objective, floats(table))
    close(dual.objective, floats([max(t, 3 * a) if a < 0 else t for t, a in zip(table, ADVANTAGES, strict=True)]))
    assert dual.objective[-1] == -6.0
    assert plain.too_low.tolist() == [False, True, False, False, False, False]
    assert plain.too_high.tolist() == [True] + [False] * 5 and not plain.too_far.any()
    assert dual.too_far.tolist() == [False] * 5 + [True]


def test_cispo_clips_the_weight_and_keeps_every_gradient():
    low, high = F(3, 4), F(3, 2)
    weights = [min(max(r, low), high) for r in RATIOS]
    old, mask = f64(np.linspace(-2, -1, 6)), f64([1.0] * 6)
    logprobs, advantages = old + logs(RATIOS), f64(floats(ADVANTAGES))
    tokens = cispo_tokens(logprobs, old, advantages, mask, **CLIP)
    slope = floats([w * a for w, a in zip(weights, ADVANTAGES, strict=True)])
    close(tokens.objective, slope * np.asarray(logprobs))
    close(jax.grad(lambda x: cispo_tokens(x, old, advantages, mask, **CLIP).objective.sum())(logprobs), slope)
    assert tokens.too_low.tolist() == [False, True, True, False, False, False]
    assert tokens.too_high.tolist() == [True] + [False] * 4 + [True]


# Two rows of packed documents with prompts and padding between: 1 of row 0 has labels 1..3, 2 has 6, row 1 has 1..4.
DOCUMENTS = np.array([[1, 1, 1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 1, 1, 2, 2]])
MASK = np.array([[0, 1, 1, 1, 0, 0, 1, 0], [0, 1, 1, 1, 1, 0, 0, 0]], np.float64)
ADVANTAGE_OF = {(0, 1): 1.5, (0, 2): -1.0, (1, 1): -0.5, (1, 2): 9.0}
DOCS = [(0, 1), (0, 2), (1, 1)]  # those with labels


def cells(document):
    row, segment = document
    return [(row, t) for t in range(8) if DOCUMENTS[row, t] == segment and MASK[row, t] > 0]


def packed_case(seed=0):
    rng = np.random.default_rng(seed)
    old = rng.normal(-2, 0.4, MASK.shape)
    logprobs = old + rng.choice([-0.4, -0.1, 0.1, 0.5], MASK.shape)
    advantages = np.array([[ADVANTAGE_OF.get((r, s), 0.0) for s in row] for r, row in enumerate(DOCUMENTS)])
    return logprobs, old, advantages


def gspo(logprobs, old, advantages, mask=MASK):
    mask, documents = f64(mask), jnp.asarray(DOCUMENTS)
    mean = document_means(logprobs - f64(old), mask, documents)
    tokens = gspo_tokens(logprobs, mean, f64(advantages), mask, clip_low=0.1, clip_high=0.12)
    weights, sequences = scale_tokens(mask, documents, aggregation="sequence")
    return -jnp.sum(weights * jnp.where(mask > 0, tokens.objective, 0.0)) / sequences, tokens


def gspo_by_sequences(logprobs, old, advantages):
    total = 0.0
    for document in DOCS:
        at = cells(document)
        s = np.exp(np.mean([logprobs[c] - old[c] for c in at]))
        a = advantages[at[0]]
        total -= min(s * a, np.clip(s, 0.9, 1.12) * a)
    return total / len(DOCS)


@pytest.mark.parametrize("seed", range(4))
def test_gspo_of_tokens_has_the_value_and_the_gradient_of_the_sequence_form(seed):
    logprobs, old, advantages = packed_case(seed)
    close(gspo(f64(logprobs), old, advantages)[0], gspo_by_sequences(logprobs, old, advantages), rtol=1e-12)
    gradient = jax.grad(lambda x: gspo(x, old, advantages)[0])(f64(logprobs))
    expected = derivative(lambda x: gspo_by_sequences(x, old, advantages), logprobs)
    np.testing.assert_allclose(gradient, expected, atol=1e-9)


def test_gspo_equals_a_table_in_fractions():
    # Ratios 4, 1/2, 1/2 have geometric mean 1; 2 of one token; 8, 8, 1/8, 1/8 have 1: clipped is only the second.
    ratios = np.ones(MASK.shape)
    for document, values in zip(DOCS, ((F(4), F(1, 2), F(1, 2)), (F(2),), (F(8), F(8), F(1, 8), F(1, 8))), strict=True):
        for cell, value in zip(cells(document), values, strict=True):
            ratios[cell] = float(value)
    _, old, advantages = packed_case()
    loss, tokens = gspo(f64(old + np.log(ratios)), old, -advantages)
    table = [
        clipped(r, F(-ADVANTAGE_OF[d]), F(9, 10), F(28, 25)) for r, d in zip((F(1), F(2), F(1)), DOCS, strict=True)
    ]
    assert table == [F(-3, 2), F(28, 25), F(1, 2)]
    close(loss, float(-sum(table) / 3))
    assert np.asarray(tokens.too_high)[0, 6] and np.asarray(tokens.too_high).sum() == 1


@pytest.mark.parametrize("dual_clip", [None, 1.3])
def test_the_clipped_surrogates_gradient_equals_finite_differences(dual_clip):
    logprobs, old, advantages = packed_case()

    def loss(x):
        tokens = clip_tokens(
            f64(x), f64(old), f64(advantages), f64(MASK), clip_low=0.2, clip_high=0.28, dual_clip=dual_clip
        )
        return jnp.sum(MASK * tokens.objective)

    np.testing.assert_allclose(jax.grad(loss)(f64(logprobs)), derivative(loss, logprobs), atol=1e-9)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_gradients_equal_finite_differences(estimator):
    logprobs, reference, _ = packed_case()
    loss = lambda x: jnp.sum(kl_tokens(f64(x), f64(reference), estimator))  # noqa: E731
    np.testing.assert_allclose(jax.grad(loss)(f64(logprobs)), derivative(loss, logprobs), atol=1e-8)


def test_kl_estimates_of_a_law_have_its_divergence_as_their_mean():
    # p and q in fractions; k1 and k3 are unbiased as identities, k2 is half the mean square.
    p, q = (F(1, 2), F(1, 4), F(1, 4)), (F(1, 4), F(1, 4), F(1, 2))
    law, own, other = np.array(floats(p)), logs(p), logs(q)
    divergence = float(F(1, 2) - F(1, 4)) * np.log(2)
    close((law * kl_k1(own, other)).sum(), divergence)
    close((law * kl_k3(own, other)).sum(), divergence)
    close((law * kl_k2(own, other)).sum(), float(F(3, 4)) * np.log(2) ** 2 / 2)
    close(kl_k1(other, own), np.asarray(-kl_k1(own, other)))


def test_the_kl_in_the_reward_is_taken_off_each_token_and_has_no_gradient():
    own, reference = logs([F(1, 2), F(1, 4)]), logs([F(1, 4), F(1, 4)])
    arguments = f64([1.0, np.nan]), own, f64([reference[0], np.inf]), f64([1.0, 0.0])
    close(penalised_advantages(*arguments, coefficient=0.5, estimator="k1"), [1 - 0.5 * np.log(2), 0])
    slope = jax.grad(
        lambda x: penalised_advantages(f64([1, 1]), x, reference, f64([1, 1]), coefficient=1, estimator="k2").sum()
    )(own)
    assert (np.asarray(slope) == 0).all()


def test_aggregations_equal_tables_in_fractions():
    per_token = {(0, 1): (F(1), F(2), F(6)), (0, 2): (F(5),), (1, 1): (F(4), F(4), F(4), F(8))}
    values = np.full(MASK.shape, np.nan)
    for document, numbers in per_token.items():
        for cell, number in zip(cells(document), numbers, strict=True):
            values[cell] = float(number)
    expected = {"token": F(34, 8), "sequence": (F(3) + 5 + 5) / 3, "fixed_length": F(34, 3 * 10)}
    for aggregation, mean in expected.items():
        length = 10 if aggregation == "fixed_length" else None
        weights, count = scale_tokens(f64(MASK), jnp.asarray(DOCUMENTS), aggregation=aggregation, fixed_length=length)
        close(jnp.sum(jnp.where(weights > 0, weights * values, 0.0)) / count, float(mean))
    with pytest.raises(ValueError, match="fixed_length=None must be a number with aggregation=fixed_length"):
        scale_tokens(f64(MASK), jnp.asarray(DOCUMENTS), aggregation="fixed_length")


def alone(array):
    """The same documents, one to a row."""
    found = np.zeros((4, 8), np.asarray(array).dtype)
    for row, document in enumerate([(0, 1), (0, 2), (1, 1), (1, 2)]):
        at = [t for t in range(8) if DOCUMENTS[document[0], t] == document[1]]
        found[row, : len(at)] = np.asarray(array)[document[0], at]
    return found


def losses(logprobs, old, advantages, mask, documents, counts=None):
    """Every loss that looks at sequences, and its denominators."""
    logprobs, old, advantages, mask = (f64(x) for x in (logprobs, old, advantages, mask))
    documents = jnp.asarray(documents)
    mean = document_means(logprobs - old, mask, documents)
    by_sequence, sequences = scale_tokens(mask, documents, aggregation="sequence")
    by_token, tokens = scale_tokens(mask, documents, aggregation="token")
    s, t = (sequences, tokens) if counts is None else counts
    gspo = gspo_tokens(logprobs, mean, advantages, mask, clip_low=0.1, clip_high=0.12).objective
    plain = clip_tokens(logprobs, old, advantages, mask, clip_low=0.2, clip_high=0.28).objective
    masked = sequence_mask_weights(logprobs, old, mask, documents, low=0.95, high=1.1).weights
    filtered = sequence_error_weights(logprobs, old, mask, documents, limit=1.35).weights
    found = jnp.stack([
        jnp.sum(by_sequence * gspo) / s,
        jnp.sum(by_token * masked * plain) / t,
        jnp.sum(by_sequence * filtered * plain) / s,
    ])  # fmt: skip
    return found, (sequences, tokens)


def test_packed_rows_rows_of_one_document_and_three_micro_batches_have_one_loss_and_gradient():
    case = (*packed_case(), MASK, DOCUMENTS)
    pull = lambda x, rest, counts=None: jax.jacrev(lambda x: losses(x, *rest, counts)[0])(f64(x))  # noqa: E731
    whole, counts = losses(*case)
    assert 0 < np.count_nonzero(np.asarray(whole)) and [float(c) for c in counts] == [3, 8]
    apart = [alone(array) for array in case]
    close(losses(*apart)[0], np.asarray(whole), rtol=1e-12)
    gradient = np.asarray(pull(case[0], case[1:]))
    one_each = np.asarray(pull(apart[0], apart[1:]))
    close(one_each, np.stack([alone(g) for g in gradient]), rtol=1e-12)
    parts = [[array[rows] for array in apart] for rows in (slice(0, 1), slice(1, 3), slice(3, 4))]
    close(sum(np.array(losses(*part)[1]) for part in parts), [3, 8])
    close(sum(losses(*part, counts)[0] for part in parts), np.asarray(whole), rtol=1e-12)
    close(np.concatenate([pull(part[0], part[1:], counts) for part in parts], axis=1), one_each, rtol=1e-12)


def test_corrections_of_tokens_equal_tables_in_fractions():
    ratios = (F(1, 4), F(1, 2), F(1), F(2), F(5), F(8))
    arguments = logs(ratios), f64([0.0] * 6), f64([1, 1, 1, 1, 1, 0])
    truncated = truncated_weights(*arguments, high=2.5)
    close(truncated.weights, floats([*ratios[:4], F(5, 2), F(0)]))
    assert truncated.outside.tolist() == [False, False, False, False, True, False]
    floored = truncated_weights(*arguments, low=0.3, high=2.5)
    close(floored.weights[0], 0.3)
    icepop = icepop_weights(*arguments, low=0.4, high=2.5)
    close(icepop.weights, floats([F(0), F(1, 2), F(1), F(2), F(0), F(0)]))
    assert icepop.outside.tolist() == [True, False, False, False, True, False]


def test_corrections_of_sequences_equal_tables_in_fractions():
    # Geometric means 1, 2 and sqrt(2); means of exp|d| of 8/3, 2 and 3.
    ratios = np.ones(MASK.shape)
    values = ((F(4), F(1, 2), F(1, 2)), (F(2),), (F(4), F(4), F(1, 2), F(1, 2)))
    for document, numbers in zip(DOCS, values, strict=True):
        for cell, number in zip(cells(document), numbers, strict=True):
            ratios[cell] = float(number)
    arguments = f64(np.log(ratios)), f64(np.zeros(MASK.shape)), f64(MASK), jnp.asarray(DOCUMENTS)
    of = lambda found: [np.asarray(found)[cells(d)[0]] for d in DOCS]  # noqa: E731
    kept = sequence_mask_weights(*arguments, low=0.9, high=1.5)
    close(kept.weights, np.where(MASK * (DOCUMENTS == 1) > 0, ratios, 0))
    assert of(kept.outside) == [False, True, False]
    assert sum(max(x, 1 / x) for x in values[0]) / 3 == F(8, 3) and sum(max(x, 1 / x) for x in values[2]) / 4 == F(3)
    errors = sequence_error_weights(*arguments, limit=2.7)
    assert of(errors.weights) == [1, 1, 0] and of(errors.outside) == [False, False, True]


@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf, 1e4])
def test_garbage_under_the_mask_reaches_neither_loss_nor_gradient(garbage):
    logprobs, old, advantages = packed_case()
    dirty = [np.where(MASK > 0, x, garbage) for x in (logprobs, old, advantages)]

    def everything(logprobs, old, advantages):
        arguments, documents = (logprobs, f64(old), f64(advantages), f64(MASK)), jnp.asarray(DOCUMENTS)
        weights, count = scale_tokens(f64(MASK), documents, aggregation="sequence")
        trust = truncated_weights(logprobs, f64(old), f64(MASK), high=1.2).weights
        icepop = icepop_weights(logprobs, f64(old), f64(MASK), low=0.5, high=1.2).weights
        clip = clip_tokens(*arguments, **CLIP, dual_clip=3.0).objective
        cispo = cispo_tokens(*arguments, **CLIP).objective
        both = jnp.where(MASK > 0, (trust + icepop) * (clip + cispo), 0.0)
        return jnp.sum(weights * both) / count + jnp.sum(losses(logprobs, old, advantages, MASK, DOCUMENTS)[0])

    found, expected = (
        jax.value_and_grad(everything)(f64(x), old, advantages)
        for x, old, advantages in (dirty, (logprobs, old, advantages))
    )
    close(found[0], float(expected[0]))
    np.testing.assert_array_equal(found[1], expected[1])
    assert np.isfinite(found[1]).all()
