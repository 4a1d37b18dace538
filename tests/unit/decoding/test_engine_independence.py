"""A request's rollout depends on its own key, prompt and weights, not on the batch it is in."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.decoding.engine import EngineShape, request_keys
from draftco_jax.numerics.sampling import SamplingConfig

SAMPLING = SamplingConfig()
K = 3


@pytest.fixture(scope="module")
def roll_out(toy, sampled_shape):
    def run(request, k=K, shape=sampled_shape):
        return toy.generate("deep", "good", request, k, shape, SAMPLING)

    return run


def rows(rollouts, places):
    return jax.tree.map(lambda field: field[np.asarray(places)], rollouts)


def assert_identical(one, other):
    for name, left, right in zip(one._fields, one, other, strict=True):
        np.testing.assert_array_equal(left, right, err_msg=name)


@pytest.mark.parametrize("k", [0, K])
def test_permuted_requests_give_permuted_rollouts_bit_for_bit(roll_out, mixed_requests, select, k):
    order = [3, 7, 0, 5, 1, 6, 2, 4]
    assert_identical(roll_out(select(mixed_requests, order), k), rows(roll_out(mixed_requests, k), order))


def test_permuted_requests_give_permuted_rollouts_with_block_verification(
    roll_out, mixed_requests, select, sampled_shape
):
    order, shape = [3, 7, 0, 5, 1, 6, 2, 4], replace(sampled_shape, verification="block")
    permuted, whole = (roll_out(request, shape=shape) for request in (select(mixed_requests, order), mixed_requests))
    assert_identical(permuted, rows(whole, order))


@pytest.mark.parametrize("k", [0, K])
def test_bug_case_b27_a_request_does_not_depend_on_its_neighbours_bit_for_bit(roll_out, mixed_requests, select, k):
    together = roll_out(mixed_requests, k)
    for place in range(8):
        others = [other for other in range(8) if other != place]
        batch = [others[0], place, *others[1:3], *others[:4]]
        assert_identical(rows(roll_out(select(mixed_requests, batch), k), [1]), rows(together, [place]))


def test_bug_case_b27_a_batch_equals_single_runs(roll_out, mixed_requests, select):
    together = roll_out(mixed_requests)
    for place in range(8):
        alone = roll_out(select(mixed_requests, [place]))
        for name in ("tokens", "lengths", "finished", "rounds", "accepted"):
            np.testing.assert_array_equal(getattr(alone, name)[0], getattr(together, name)[place], err_msg=name)
        # Programs of two batch sizes may order sums differently: a few ulp of logits below 8.
        np.testing.assert_allclose(alone.logprobs[0], together.logprobs[place], atol=1e-5)


def test_bug_case_b38_equal_requests_in_one_batch_are_rolled_out_alike(roll_out, mixed_requests, select):
    repeated = roll_out(select(mixed_requests, [1, 4, 1, 1, 0, 1, 4, 1]))
    for place in (2, 3, 5, 7):
        assert_identical(rows(repeated, [0]), rows(repeated, [place]))
    assert_identical(rows(repeated, [1]), rows(repeated, [6]))


def test_bug_case_b37_a_second_request_after_a_longer_one_starts_afresh(roll_out, mixed_requests, select):
    long, short = select(mixed_requests, [1]), select(mixed_requests, [0])
    fresh = roll_out(short)
    assert roll_out(long).lengths[0] > fresh.lengths[0]
    assert_identical(roll_out(short), fresh)


def test_rollouts_do_not_depend_on_capacities_or_on_what_pads_the_prompt(roll_out, mixed_requests, sampled_shape):
    wider = EngineShape(prompt_capacity=7, max_new_tokens=14, stop_ids=sampled_shape.stop_ids, pad_id=4)
    padded = jnp.pad(mixed_requests.prompts, ((0, 0), (0, 2)), constant_values=3)
    inside = jnp.arange(7)[None, :] < mixed_requests.prompt_lengths[:, None]
    request = mixed_requests._replace(prompts=jnp.where(inside, padded, 3))
    narrow, wide = roll_out(mixed_requests), roll_out(request, K, wider)
    for row in range(8):
        end = narrow.lengths[row]
        np.testing.assert_array_equal(wide.tokens[row, :end], narrow.tokens[row, :end])
        np.testing.assert_allclose(wide.logprobs[row, :end], narrow.logprobs[row, :end], atol=1e-5)
        assert narrow.finished[row] == (wide.finished[row] and wide.lengths[row] == end)


def test_another_key_gives_another_text(roll_out, mixed_requests):
    other = mixed_requests._replace(keys=request_keys(jax.random.key(12), 8))
    assert (roll_out(mixed_requests).tokens != roll_out(other).tokens).any(axis=1).sum() >= 6


def test_request_keys_do_not_depend_on_the_number_of_requests():
    key = jax.random.key(3)
    few, many = (jax.random.key_data(request_keys(key, count)) for count in (3, 8))
    np.testing.assert_array_equal(few, many[:3])
    assert len({tuple(data) for data in np.asarray(many).tolist()}) == 8


def test_requests_are_what_the_engine_was_compiled_for(toy, mixed_requests, sampled_shape):
    engine = toy.engine(sampled_shape, SAMPLING)
    narrow = mixed_requests._replace(prompts=mixed_requests.prompts[:, :4])
    with pytest.raises(ValueError, match="prompt_capacity=5"):
        engine.generate(*toy.published("deep", "good"), narrow, K)
    with pytest.raises(ValueError, match="draft_length=-1"):
        engine.generate(*toy.published("deep", "good"), mixed_requests, -1)
    with pytest.raises(ValueError, match="needs a draft"):
        engine.generate(*toy.published("deep", None), mixed_requests, K)
