import numpy as np
import pytest

from draftco_jax.decoding.stats import accepted_length_by_length, length_edges, speculation_stats
from draftco_jax.types import Rollouts


def rollouts(rounds, committed, accepted, proposed=None) -> Rollouts:
    """Rollouts of which only the counters matter; by default each round proposes all its drafts."""
    empty = np.zeros((len(rounds), 0), np.int32)
    return Rollouts(
        tokens=empty,
        prompt_lengths=np.zeros(len(rounds), np.int32),
        lengths=np.zeros(len(rounds), np.int32),
        logprobs=empty.astype(np.float32),
        finished=np.zeros(len(rounds), bool),
        rounds=np.array(rounds, np.int32),
        committed=np.array(committed, np.int32),
        accepted=np.array(accepted, np.int32),
        proposed=np.array(rounds if proposed is None else proposed, np.int32)
        * (np.shape(accepted)[1] if proposed is None else 1),
    )


def test_bug_case_b109_rate_and_length_of_three_draft_rounds():
    # k = 3, accepted 2, 0, 3: positions 1, 2, 3 were accepted 2, 2, 1 times; each round adds one more token.
    stats = speculation_stats(rollouts([3], [8], [[2, 2, 1]]))
    assert sum(stats.acceptance_rate_by_position) / 3 == pytest.approx(5 / 9)
    assert stats.acceptance_rate == 5 / 9
    assert stats.accepted_length == pytest.approx(stats.accepted_length_papers) == 8 / 3


def test_drafts_that_were_not_proposed_are_not_refused():
    # Three rounds of k = 3 in which 3, 0 and 1 drafts are proposed and 2, 0 and 1 accepted.
    stats = speculation_stats(rollouts([3], [6], [[2, 1, 0]], proposed=[4]))
    assert stats.acceptance_rate == 3 / 4
    assert stats.acceptance_rate_by_position == pytest.approx((2 / 3, 1 / 3, 0))


def test_ratios_are_pooled_over_requests_not_averaged():
    # 10 rounds that commit 4 tokens each, and one round of another request that commits 1.
    stats = speculation_stats(rollouts([10, 1], [40, 1], [[10, 10, 10], [0, 0, 0]]))
    assert stats.accepted_length == 41 / 11
    assert stats.accepted_length_papers == pytest.approx(1 + 30 / 11)
    assert stats.acceptance_rate_by_position == pytest.approx((10 / 11,) * 3)


def test_tokens_cut_by_a_stop_count_in_the_published_form_only():
    # Two rounds of k = 3 accept all drafts; the second ends at a stop in its second token.
    stats = speculation_stats(rollouts([2], [4 + 2], [[2, 2, 2]]))
    assert stats.accepted_length == 3
    assert stats.accepted_length_papers == 4


def test_without_rounds_there_are_no_ratios():
    stats = speculation_stats(rollouts([0, 0], [0, 0], np.zeros((2, 0))))
    assert stats.accepted_length is None
    assert stats.accepted_length_papers is None
    assert stats.acceptance_rate is None
    assert stats.acceptance_rate_by_position == ()


def test_accepted_length_by_length_of_the_response_is_pooled_in_each_bin():
    made = rollouts([10, 1, 4, 0], [40, 1, 10, 0], [[10, 10, 10], [0, 0, 0], [2, 2, 2], [0, 0, 0]])
    made = made._replace(prompt_lengths=np.array([3, 3, 3, 3]), lengths=np.array([44, 5, 18, 4]))
    assert accepted_length_by_length(made, (16, 40)) == {"0-15": (1 + 10) / (1 + 4), "40-": 4.0}
    assert accepted_length_by_length(made, ()) == {"0-": 51 / 15}


def test_bins_are_quarters_of_the_longest_response():
    assert length_edges(64) == (16, 32, 48)
    assert length_edges(2) == (1,) and length_edges(1) == ()
