"""The memory rows of `draftco bench attention`, for programs of few tokens."""

from __future__ import annotations

from draftco_jax.bench_attention import h100

TOKENS, RANKS = 8192, 8


def test_rows_have_more_memory_than_arguments_and_results_and_send_what_they_should(monkeypatch):
    names = [("one_pass", h100.FORWARD, TOKENS, RANKS), ("three_passes", h100.BOTH, TOKENS, RANKS)]
    monkeypatch.setattr(h100, "programs", lambda ranks: names)
    one, three = h100.memory_rows(RANKS)
    local = TOKENS // RANKS * h100.WIDTH * 2  # bytes of one head of a rank
    queries, trunk = local * h100.HEADS, 2 * local * h100.KV_HEADS
    assert one["sent_over_formula"] == 1.0
    assert one["bytes"] > 2 * queries + (1 + 3) * trunk
    # All backward passes send the same own keys first, which XLA may do once: 2 hops of 3 (7 + 7 + 14).
    assert 1 - 2 / (3 * 28) <= three["sent_over_formula"] <= 1
    assert three["bytes"] > 2 * queries + 3 * queries + 2 * (1 + 2) * trunk


def test_all_lengths_are_compiled_for_all_ranks_and_the_longest_for_one():
    found = h100.programs(RANKS)
    assert len(set(found)) == len(found)
    assert {tokens for name, _, tokens, ranks in found if name == "three_passes" and ranks == RANKS} == set(
        h100.CONTEXTS
    )
    assert ("three_passes", h100.BOTH, h100.LONG_TOKENS, 1) in found
