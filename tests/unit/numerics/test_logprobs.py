import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

from draftco_jax.numerics.logprobs import entropy, token_logprobs
from draftco_jax.numerics.sampling import SamplingConfig, law, support

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(0, 2, (3, 40, 9)).astype(np.float32)
TOKENS = RNG.integers(0, 9, (3, 40)).astype(np.int32)


def test_token_logprobs_are_the_log_softmax_at_the_token():
    for temperature in (1.0, 0.7, 2.0):
        laws = log_softmax(np.float64(LOGITS) / temperature, axis=-1)
        expected = np.take_along_axis(laws, TOKENS[..., None], axis=-1)[..., 0]
        result = token_logprobs(jnp.asarray(LOGITS), jnp.asarray(TOKENS), SamplingConfig(temperature=temperature))
        np.testing.assert_allclose(result, expected, atol=3e-6)


def test_filtered_logprobs_are_those_of_the_law_for_tokens_inside_it():
    sampling = SamplingConfig(temperature=0.8, top_k=4, top_p=0.9)
    logits, tokens = jnp.asarray(LOGITS), jnp.asarray(TOKENS)
    result = np.asarray(token_logprobs(logits, tokens, sampling))
    probabilities = np.take_along_axis(np.asarray(law(logits, sampling)), TOKENS[..., None], axis=-1)[..., 0]
    inside = probabilities > 0
    assert 10 < inside.sum() < inside.size - 10
    np.testing.assert_allclose(np.exp(result[inside]), probabilities[inside], atol=1e-6)


def test_a_token_that_rounding_pushed_out_of_the_law_keeps_a_finite_logprob():
    # As if drawn before: it is put back, and shares the mass with what the filters left.
    sampling = SamplingConfig(top_k=2)
    logits = jnp.log(jnp.asarray([[0.4, 0.3, 0.2, 0.1]]))
    outside = jnp.asarray([2], jnp.int32)
    assert not support(logits, sampling)[0, 2]
    np.testing.assert_allclose(token_logprobs(logits, outside, sampling), np.log([0.2 / 0.9]), rtol=1e-5)


def test_greedy_logprobs_are_zero_at_the_argmax_and_minus_infinity_elsewhere():
    logits = jnp.asarray([[1.0, 2.0], [1.0, 2.0]])
    result = token_logprobs(logits, jnp.asarray([1, 0], jnp.int32), SamplingConfig(temperature=0.0))
    np.testing.assert_array_equal(result, [0, -np.inf])


def test_logprobs_are_float32_for_bfloat16_logits():
    result = token_logprobs(jnp.asarray(LOGITS, jnp.bfloat16), jnp.asarray(TOKENS), SamplingConfig())
    assert result.dtype == jnp.float32
    rounded = np.asarray(jnp.asarray(LOGITS, jnp.bfloat16).astype(jnp.float32))
    expected = np.take_along_axis(log_softmax(np.float64(rounded), axis=-1), TOKENS[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(result, expected, atol=3e-6)


@pytest.mark.parametrize("sampling", [SamplingConfig(), SamplingConfig(temperature=0.5, top_p=0.8)], ids=str)
def test_entropy_is_that_of_the_law(sampling):
    laws = np.float64(law(jnp.asarray(LOGITS), sampling))
    expected = -np.sum(np.where(laws > 0, laws * np.log(np.where(laws > 0, laws, 1)), 0), axis=-1)
    np.testing.assert_allclose(entropy(jnp.asarray(LOGITS), sampling), expected, atol=1e-5)


def test_entropy_of_known_laws():
    assert entropy(jnp.zeros((1, 8)), SamplingConfig())[0] == pytest.approx(np.log(8), rel=1e-6)
    assert entropy(jnp.zeros((1, 8)), SamplingConfig(top_k=2))[0] == pytest.approx(np.log(2), rel=1e-6)
    assert entropy(jnp.asarray([[3.0, 1.0]]), SamplingConfig(temperature=0.0))[0] == 0
