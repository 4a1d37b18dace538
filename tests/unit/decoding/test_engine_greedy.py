"""At temperature 0 speculation changes nothing but the number of target forwards."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.decoding.engine import Request, no_context, request_keys
from draftco_jax.numerics.sampling import SamplingConfig

GREEDY = SamplingConfig(temperature=0.0)
ALL = list(range(8))


@pytest.fixture(scope="module")
def roll_out(toy, mixed_requests, greedy_shape, select):
    """Greedy rollouts of the mixed requests at these places; k = 0 decodes plainly."""

    def run(policy, draft, places, k):
        return toy.generate(policy, draft, select(mixed_requests, places), k, greedy_shape, GREEDY)

    return run


def same_text(speculative, plain):
    for field in ("tokens", "prompt_lengths", "lengths", "finished"):
        np.testing.assert_array_equal(getattr(speculative, field), getattr(plain, field), err_msg=field)


@pytest.mark.parametrize(
    ("k", "places"),
    [
        pytest.param(1, [1], id="1-batch1"),
        pytest.param(1, ALL, id="1-batch8", marks=pytest.mark.slow),
        pytest.param(4, [1], id="4-batch1", marks=pytest.mark.slow),
        pytest.param(4, ALL, id="4-batch8"),
    ],
)
@pytest.mark.parametrize("draft", ["good", "random", "wrong"])
@pytest.mark.parametrize("policy", ["bigram", "deep"])
def test_speculative_greedy_equals_plain_greedy(roll_out, policy, draft, k, places):
    same_text(roll_out(policy, draft, places, k), roll_out(policy, draft, places, 0))


@pytest.mark.parametrize("draft", ["good", "random", "wrong"])
def test_greedy_texts_and_counts_with_block_verification_are_those_of_the_token_rule(
    toy, roll_out, mixed_requests, greedy_shape, draft
):
    shape = replace(greedy_shape, verification="block")
    block, token = toy.generate("deep", draft, mixed_requests, 4, shape, GREEDY), roll_out("deep", draft, ALL, 4)
    same_text(block, token)
    np.testing.assert_array_equal(block.accepted, token.accepted)


def test_the_drafts_are_what_their_names_say(roll_out):
    perfect, random, wrong = (roll_out("bigram", name, ALL, 4) for name in ("good", "random", "wrong"))
    assert (perfect.accepted == perfect.rounds[:, None]).all()
    assert 0 < random.accepted.sum() < random.rounds.sum() * 4
    assert wrong.accepted.sum() == 0
    close = roll_out("deep", "good", ALL, 4)
    assert 0.2 < close.accepted[:, 0].sum() / close.rounds.sum() < 1


@pytest.mark.parametrize("k", [1, 4])
def test_stop_token_at_every_offset_of_a_round(toy, greedy_shape, k):
    # x + 1 follows x and 3 stops: [2] is answered by 3, [1] by 2 3, ..., [4] by 5 6 0 1 2 3, [3] by 4 5 6 0 1 2 3.
    starts = np.array([0, 1, 2, 3, 4, 5, 6, 6], np.int32)
    prompts = jnp.asarray(np.repeat(starts[:, None], 5, axis=1))
    request = Request(prompts, jnp.ones(8, jnp.int32), request_keys(jax.random.key(0), 8), no_context(8))
    rollouts = toy.generate("cycle", "cycle", request, k, greedy_shape, GREEDY)
    same_text(rollouts, toy.generate("cycle", "cycle", request, 0, greedy_shape, GREEDY))
    answers = (2 - starts) % 7 + 1
    np.testing.assert_array_equal(rollouts.lengths - 1, answers)
    assert rollouts.finished.all()
    # The first token comes from the prefill; a perfect draft makes rounds of k + 1, the last one cut by the stop.
    np.testing.assert_array_equal(rollouts.committed, answers - 1)
    np.testing.assert_array_equal(rollouts.rounds, -(-(answers - 1) // (k + 1)))


def test_max_new_tokens_reached_in_the_middle_of_a_round(roll_out):
    # 12 tokens = 1 from the prefill + 5 + 5 + the first 1 of a third round of 5.
    rollouts = roll_out("loop", "loop", ALL, 4)
    assert not rollouts.finished.any()
    np.testing.assert_array_equal(rollouts.lengths - rollouts.prompt_lengths, 12)
    np.testing.assert_array_equal(rollouts.rounds, 3)
    np.testing.assert_array_equal(rollouts.committed, 11)
    np.testing.assert_array_equal(rollouts.accepted, 3)
    same_text(rollouts, roll_out("loop", "loop", ALL, 0))


@pytest.mark.parametrize("draft", ["wrong", "random"])
def test_bug_case_b35_rejection_cuts_the_cache_back_and_leaves_earlier_entries(roll_out, draft):
    # The deep policy reads its whole cache, so a stale or a lost entry would change the text.
    rollouts = roll_out("deep", draft, ALL, 4)
    assert 4 * rollouts.rounds.sum() - rollouts.accepted.sum() > 100
    same_text(rollouts, roll_out("deep", draft, ALL, 0))


def test_bug_case_b71_fill_value_equal_to_the_stop_id_does_not_end_generation(roll_out, greedy_shape):
    assert greedy_shape.pad_id in greedy_shape.stop_ids
    for k in (1, 4):
        rollouts = roll_out("loop", "loop", ALL, k)
        np.testing.assert_array_equal(rollouts.lengths - rollouts.prompt_lengths, 12)
