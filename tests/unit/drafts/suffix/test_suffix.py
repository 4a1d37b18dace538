"""Tests of the suffix draft against a suffix tree with counts that is really built, token by token."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.drafts.base import Context, Features, Shared
from draftco_jax.drafts.suffix import SUFFIX
from draftco_jax.drafts.suffix.config import SuffixConfig
from draftco_jax.models.functional import initialise
from draftco_jax.numerics.sampling import SamplingConfig

VOCAB, CAPACITY, HISTORY, K = 3, 14, 20, 5
SHARED = Shared(jnp.zeros((VOCAB, 2)), jnp.zeros((2, VOCAB)))


# ---- the reference: a tree of counts ----


def tree_of(texts, depth):
    """Nested {token: [count, children]} of all runs of up to `depth` tokens in the texts."""
    root = {}
    for text in texts:
        for start in range(len(text)):
            children = root
            for token in text[start : start + depth]:
                node = children.setdefault(token, [0, {}])
                node[0] += 1
                children = node[1]
    return root


def reference(text, texts, k, cfg):
    """Greedy walk from the deepest node that spells an end of `text` and has children."""
    tree = tree_of(texts, cfg.max_match + k)
    for length in range(min(cfg.max_match, len(text)), cfg.min_match - 1, -1):
        children = tree
        for token in text[len(text) - length :]:
            children = children[token][1] if token in children else {}
        if children:
            break
    else:
        return []
    walked, probability = [], np.float32(1.0)
    while children and len(walked) < min(k, cfg.budget(length)):
        token = max(children, key=lambda t: (children[t][0], -t))
        total = sum(count for count, _ in children.values())
        probability = probability * (np.float32(children[token][0]) / np.float32(total))
        if probability < cfg.min_probability:
            break
        walked.append(token)
        children = children[token][1]
    return walked


# ---- the draft under test ----


def rows(texts, width):
    """Texts in rows, -1 behind them."""
    out = np.full((len(texts), width), -1, np.int32)
    for row, text in zip(out, texts, strict=True):
        row[: len(text)] = text
    return out


class Drafting:
    """The draft of one config: (texts, history, siblings) -> proposal. Behind each text stands rejected stuff."""

    def __init__(self, **changes):
        values = {"min_match": 1, "max_match": 4, "min_probability": 0.3, "history_tokens": HISTORY}
        self.cfg = SuffixConfig(**(values | changes))
        self.graph, self.params = initialise(self.cfg.build, jax.random.key(0))
        self.run = jax.jit(self._run)

    def _run(self, tokens, anchor, context):
        draft = self.graph.merge(self.params)
        batch = tokens.shape[0]
        wide, start = jnp.zeros((batch, CAPACITY, 0)), jnp.zeros(batch, jnp.int32)
        state = draft.empty_state(batch, CAPACITY, context)
        state = draft.absorb(state, Features(tokens[:, :-1], tokens[:, 1:], wide, wide, start, anchor - 1), SHARED)
        newest = jnp.take_along_axis(tokens, anchor[:, None], axis=1)[:, 0]
        return draft.propose(state, newest, anchor, jnp.zeros((batch, K)), SamplingConfig(), SHARED)[0]

    def __call__(self, texts, history, siblings):
        tokens = rows(texts, CAPACITY + 1)  # the newest token stands behind the last index
        junk = np.random.default_rng(9).integers(0, VOCAB, size=tokens.shape).astype(np.int32)
        anchor = jnp.array([len(text) - 1 for text in texts], jnp.int32)
        context = Context(jnp.asarray(history), jnp.asarray(siblings, jnp.int32))
        return self.run(jnp.asarray(np.where(tokens < 0, junk, tokens)), anchor, context)


def spoken(proposal, b):
    return np.asarray(proposal.tokens[b, : int(proposal.count[b])]).tolist()


def random_history(rng):
    """Texts of random lengths with a -1 between them, and -1 as padding, as lists and as the row."""
    texts = [rng.integers(0, VOCAB, size=rng.integers(0, 8)).tolist() for _ in range(2)]
    row = [*texts[0], -1, *texts[1]]
    return texts, row + [-1] * (HISTORY - len(row))


def in_groups(batch):
    """Siblings of groups of two, each row among its own siblings as the caller may well give it, then padding."""
    return [[b - b % 2, b - b % 2 + 1, -1] for b in range(batch)]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"budget_per_match": 0.5, "min_match": 2},
        {"use_siblings": False, "min_probability": 0.0, "budget_per_match": 4.0},
        {"max_match": 12, "min_probability": 0.6},
    ],
    ids=["usual", "small budget", "no siblings, no limit", "long matches"],
)
def test_proposals_equal_the_walk_in_a_suffix_tree(changes):
    rng, lengths, batch = np.random.default_rng(0), [], 8
    drafting = Drafting(**changes)
    for _ in range(25):
        texts = [rng.integers(0, VOCAB, size=rng.integers(2, CAPACITY + 2)).tolist() for _ in range(batch)]
        histories = [random_history(rng) for _ in range(batch)]
        proposal = drafting(texts, np.array([row for _, row in histories], np.int32), in_groups(batch))
        for b, text in enumerate(texts):
            searched = [*histories[b][0], text, *([texts[b ^ 1]] if drafting.cfg.use_siblings else [])]
            expected = reference(text, searched, K, drafting.cfg)
            assert spoken(proposal, b) == expected, (text, searched)
            law = np.zeros((K, VOCAB), np.float32)
            law[np.arange(len(expected)), expected] = 1.0
            np.testing.assert_array_equal(proposal.laws[b], law)
            lengths.append(len(expected))
    assert len(set(lengths)) >= 3  # proposals of several lengths are met


NO_HISTORY, ALONE = np.full((2, HISTORY), -1, np.int32), [[-1], [-1]]


@pytest.fixture(scope="module")
def drafting():
    """Matches of up to four tokens, siblings on."""
    return Drafting()


def test_the_most_frequent_successor_is_followed_and_ties_go_to_the_smaller_id(drafting):
    frequent = rows([[0, 2, 2, -1, 0, 1, -1, 0, 2, 1], []], HISTORY)
    assert spoken(drafting([[1, 0], [1, 1]], frequent, ALONE), 0)[:1] == [2]
    tied = rows([[0, 2, -1, 0, 1], []], HISTORY)
    assert spoken(drafting([[1, 0], [1, 1]], tied, ALONE), 0)[:1] == [1]


def test_a_sibling_is_read_up_to_its_own_anchor_and_only_by_its_siblings(drafting):
    texts = [[2, 0], [0, 1, 1]]
    assert spoken(drafting(texts, NO_HISTORY, [[1], [0]]), 0) == [1]
    assert spoken(drafting(texts, NO_HISTORY, ALONE), 0) == []
    # The sibling ends where something might follow: that is no match, what stands behind its anchor was rejected.
    assert spoken(drafting([[2, 0], [1, 0]], NO_HISTORY, [[1], [0]]), 0) == []


def test_a_match_does_not_span_two_texts(drafting):
    history = rows([[1, 0, 2, -1, 0, 1], []], HISTORY)
    # "2 | 0" is no occurrence of "2 0"; the one of "0" alone goes on with 2 in one text and with 1 in the other.
    assert spoken(drafting([[2, 0], [1, 1]], history, ALONE), 0) == [1]


def test_the_budget_grows_with_the_match():
    cfg = SuffixConfig(budget_per_match=1.5, max_match=8)
    assert [cfg.budget(length) for length in (0, 1, 2, 3, 8)] == [0, 1, 3, 4, 12]


def test_bug_case_b37_nothing_of_an_earlier_request_is_left(drafting):
    long = [[0, 1, 2, 0, 1, 2, 0, 1, 2, 0], [0, 1, 2, 0, 1, 2, 0, 1, 2, 0]]
    assert (np.asarray(drafting(long, NO_HISTORY, ALONE).count) > 0).all()
    assert (np.asarray(drafting([[0, 1], [2, 0]], NO_HISTORY, ALONE).count) == 0).all()


def test_bug_case_b38_without_siblings_proposals_do_not_depend_on_the_batch():
    drafting = Drafting(use_siblings=False)
    a, b = [0, 1, 2, 0, 1], [1, 1, 1, 1]
    history = rows([[1, 2, 2], [1, 0, 0], [1, 2, 2]], HISTORY)
    mixed = drafting([a, b, a], history, [[1, 2], [0, 2], [0, 1]])
    alone = drafting([a], history[:1], [[-1, -1]])
    for row in (0, 2):
        for one, other in zip(mixed, alone, strict=True):
            np.testing.assert_array_equal(one[row], other[0])
    assert spoken(alone, 0)[:1] == [2]


def test_it_is_a_family_without_training_or_weights(drafting):
    assert SUFFIX.config is SuffixConfig and not SUFFIX.trained and drafting.params == {}


@pytest.mark.parametrize(
    "changes",
    [
        {"min_match": 0},
        {"max_match": 0},
        {"budget_per_match": 0.01},
        {"budget_per_match": float("inf")},
        {"min_probability": 1.5},
        {"history_tokens": -1},
    ],
)
def test_fields_that_allow_no_proposal_are_refused(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        SuffixConfig(**changes)
