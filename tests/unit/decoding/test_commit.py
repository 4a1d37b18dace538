"""What a verified round adds to the output, on scripted rounds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.decoding.engine import EngineShape, Request, _commit, no_context
from draftco_jax.decoding.records import Response, Stats, Verified, assemble
from draftco_jax.decoding.stats import speculation_stats
from draftco_jax.numerics.sampling import SamplingConfig

SHAPE = EngineShape(prompt_capacity=3, max_new_tokens=8, stop_ids=(8, 9), pad_id=0)
K = 3
KEY = jax.random.key(0)
COMMIT = jax.jit(_commit, static_argnums=3)


def start(first_tokens: list[int]) -> tuple[Response, Stats]:
    """Output after the prefill: one token, whatever it is."""
    rows = len(first_tokens)
    tokens = jnp.zeros((rows, SHAPE.max_new_tokens + K + 1), jnp.int32).at[:, 0].set(jnp.asarray(first_tokens))
    stopped = jnp.asarray([token in SHAPE.stop_ids for token in first_tokens])
    out = Response(tokens, jnp.zeros(tokens.shape, jnp.float32), jnp.ones(rows, jnp.int32), stopped)
    return out, Stats(*[jnp.zeros(rows, jnp.int32)] * 3, jnp.zeros((rows, K), jnp.int32))


def commit(
    out: Response, stats: Stats, tokens: list[list[int]], accepted: list[int], proposed=None, shape: EngineShape = SHAPE
):
    block = jnp.asarray(tokens, jnp.int32)
    counts = [jnp.asarray(n, jnp.int32) for n in (accepted, proposed or [K] * len(accepted))]
    unread = jnp.zeros((*block.shape, 0))  # features, which are not committed
    verified = Verified(block, -block.astype(jnp.float32), *counts, block, unread, unread)
    return COMMIT(out, stats, verified, shape)


def texts(out: Response) -> list[list[int]]:
    return [list(map(int, row[:count])) for row, count in zip(np.asarray(out.tokens), out.count, strict=True)]


@pytest.mark.parametrize(
    "block, accepted, text, stopped",
    [
        ([8, 2, 3, 4], 3, [1, 8], True),  # first draft stops
        ([2, 8, 3, 4], 3, [1, 2, 8], True),  # second draft
        ([2, 3, 4, 9], 3, [1, 2, 3, 4, 9], True),  # bonus token, the other stop id
        ([2, 9, 7, 7], 1, [1, 2, 9], True),  # residual token
        ([2, 3, 8, 7], 1, [1, 2, 3], False),  # a rejected draft would have stopped
        ([2, 9, 8, 4], 3, [1, 2, 9], True),  # two stops: the first counts
        ([0, 0, 0, 0], 3, [1, 0, 0, 0, 0], False),  # the padding id is a token like any other
    ],
)
def test_a_round_is_committed_up_to_its_first_stop(block, accepted, text, stopped):
    out, stats, count = commit(*start([1]), [block], [accepted])
    assert texts(out) == [text]
    assert bool(out.stopped[0]) is stopped
    assert int(count[0]) == int(stats.committed[0]) == len(text) - 1
    np.testing.assert_array_equal(out.logprobs[0, 1 : len(text)], -np.array(text[1:], np.float32))


def test_bug_case_b109_counters_of_scripted_draft_rounds():
    out, stats = start([1])
    for accepted, proposed in ((2, 3), (0, 1)):
        out, stats, _ = commit(out, stats, [[2, 3, 4, 5]], [accepted], [proposed])
    out, stats, _ = commit(out, stats, [[2, 3, 4, 5]], [3])
    np.testing.assert_array_equal(stats.accepted, [[2, 2, 1]])
    assert int(stats.proposed[0]) == 3 + 1 + 3
    # 3 + 1 + 4 tokens, the last one past max_new_tokens = 8 = 1 + 7.
    assert (int(stats.rounds[0]), int(stats.committed[0])) == (3, 7)
    assert texts(out) == [[1, 2, 3, 4, 2, 2, 3, 4]]
    pooled = speculation_stats(_assembled(out, stats))
    assert pooled.accepted_length == 7 / 3
    assert pooled.accepted_length_papers == pytest.approx(8 / 3)


def test_a_finished_row_changes_no_more():
    out, stats = start([1, 8, 1])
    for _ in range(4):  # row 0 stops in round 2, row 1 stopped at the prefill, row 2 fills up in rounds of 4
        out, stats, _ = commit(
            out, stats, [[2, 2, 2, 2] if out.count[0] == 1 else [9] * 4, [3] * 4, [4] * 4], [3, 3, 3]
        )
    assert texts(out) == [[1, 2, 2, 2, 2, 9], [8], [1] + [4] * 7]
    np.testing.assert_array_equal(out.stopped, [True, True, False])
    np.testing.assert_array_equal(stats.rounds, [2, 0, 2])
    np.testing.assert_array_equal(stats.committed, [5, 0, 7])
    np.testing.assert_array_equal(stats.proposed, [6, 0, 6])
    np.testing.assert_array_equal(stats.accepted, [[2] * 3, [0] * 3, [2] * 3])


def _assembled(out: Response, stats: Stats, prompts=((5, 6, 7),), lengths=(3,), shape: EngineShape = SHAPE):
    rows = len(lengths)
    keys = jax.random.split(KEY, rows)
    request = Request(jnp.asarray(prompts, jnp.int32), jnp.asarray(lengths, jnp.int32), keys, no_context(rows))
    return jax.tree.map(np.asarray, assemble(request, out, stats, None, shape))


def test_bug_case_b70_a_real_token_equal_to_the_padding_id_survives():
    # The public report: mask id 0, prompt [11, 12, 13], answer [101, 102, 0, 103, 104]; here with small ids.
    out, stats = start([4])
    out, stats, _ = commit(out, stats, [[5, 0, 6, 7]], [3])
    rollouts = _assembled(out, stats, [(1, 0, 3)])
    np.testing.assert_array_equal(rollouts.tokens[0], [1, 0, 3, 4, 5, 0, 6, 7, 0, 0, 0])
    assert rollouts.lengths[0] == 8
    assert rollouts.logprobs[0, 5] == 0 and rollouts.logprobs[0, 6] == -6
    # A last block that runs past the capacity is cut, not shifted.
    for _ in range(2):
        out, stats, _ = commit(out, stats, [[0, 5, 0, 6]], [3])
    rollouts = _assembled(out, stats, [(1, 0, 3)])
    np.testing.assert_array_equal(rollouts.tokens[0], [1, 0, 3, 4, 5, 0, 6, 7, 0, 5, 0])


def test_bug_case_b71_unwritten_cells_are_no_stop_tokens():
    shape = EngineShape(prompt_capacity=3, max_new_tokens=8, stop_ids=(0,), pad_id=0)
    out, stats = start([4])
    # Rejected at once: 6, 7, 0 are not part of the text.
    out, stats, _ = commit(out, stats, [[5, 6, 7, 0]], [0], shape=shape)
    rollouts = _assembled(out, stats, shape=shape)
    assert texts(out) == [[4, 5]] and not rollouts.finished[0] and rollouts.lengths[0] == 5


def test_bug_case_b72_any_stop_id_ends_the_text_and_is_part_of_it():
    out, stats = start([4, 4, 9])
    out, stats, _ = commit(out, stats, [[5, 8, 1, 1], [5, 9, 1, 1], [1, 1, 1, 1]], [3, 3, 3])
    rollouts = _assembled(out, stats, [(1, 2, 0)] * 3, (2, 2, 2))
    np.testing.assert_array_equal(rollouts.tokens[:, :6], [[1, 2, 4, 5, 8, 0], [1, 2, 4, 5, 9, 0], [1, 2, 9, 0, 0, 0]])
    np.testing.assert_array_equal(rollouts.lengths, [5, 5, 3])
    assert rollouts.finished.all()  # not counted as cut


def test_bug_case_b43_one_row_per_emitted_token_on_every_path(toy, mixed_requests, sampled_shape, responses):
    for draft, k in (("good", 0), ("good", 3), ("random", 3)):
        rollouts = toy.generate("deep", draft, mixed_requests, k, sampled_shape, SamplingConfig())
        emitted = rollouts.lengths - rollouts.prompt_lengths
        np.testing.assert_array_equal((rollouts.logprobs != 0).sum(axis=1), emitted)
        if k:  # all but the token of the prefill
            np.testing.assert_array_equal(rollouts.committed, emitted - 1)
            assert (rollouts.accepted[:, :-1] >= rollouts.accepted[:, 1:]).all()
            assert (rollouts.committed <= rollouts.rounds + rollouts.accepted.sum(axis=1)).all()
        for text, finished in zip(responses(rollouts), rollouts.finished, strict=True):
            stops = [token in sampled_shape.stop_ids for token in text]
            assert not any(stops[:-1]) and stops[-1] == finished
            assert finished or len(text) == sampled_shape.max_new_tokens
