"""Tests of what is proposed from an earlier text, and with which laws."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.drafts.base import Context, Features, Shared
from draftco_jax.drafts.previous import PREVIOUS
from draftco_jax.drafts.previous.config import PreviousConfig
from draftco_jax.models.functional import initialise
from draftco_jax.models.qwen3 import Qwen3Config
from draftco_jax.numerics.sampling import SamplingConfig, law

VOCAB, CAPACITY, HISTORY, K = 7, 12, 9, 3
POLICY = Qwen3Config(
    vocab_size=VOCAB,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    max_position_embeddings=64,
)
CFG = PreviousConfig(policy=POLICY, history_tokens=HISTORY)
SAMPLING = SamplingConfig(temperature=0.8)
# The live tables are not those of the old policy: reading them would show.
SHARED = Shared(jnp.full((VOCAB, 16), jnp.nan), jnp.full((16, VOCAB), jnp.nan))


class Drafting:
    """(texts, earlier texts) -> proposal. Behind each text stands rejected stuff."""

    def __init__(self, sampling=SAMPLING):
        self.sampling = sampling
        self.graph, params = initialise(CFG.build, jax.random.key(0))
        self.params = jax.tree.map(lambda a: a * 6 if a.ndim == 2 else a, params)  # laws that are far from uniform
        self.run = jax.jit(self._run)

    def _run(self, tokens, anchor, context):
        draft = self.graph.merge(self.params)
        batch = tokens.shape[0]
        following = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)))
        wide, start = jnp.zeros((*tokens.shape, 0)), jnp.zeros(batch, jnp.int32)
        state = draft.empty_state(batch, CAPACITY, context)
        state = draft.absorb(state, Features(tokens, following, wide, wide, start, anchor - 1), SHARED)
        newest = jnp.take_along_axis(tokens, anchor[:, None], axis=1)[:, 0]
        return draft.propose(state, newest, anchor, jnp.zeros((batch, K)), self.sampling, SHARED)[0]

    def __call__(self, texts, earlier, room=HISTORY):
        tokens = np.random.default_rng(9).integers(0, VOCAB, size=(len(texts), CAPACITY)).astype(np.int32)
        history = np.full((len(texts), room), -1, np.int32)
        for b, (text, old) in enumerate(zip(texts, earlier, strict=True)):
            tokens[b, : len(text)] = text
            history[b, : len(old[:room])] = old[:room]
        anchor = jnp.array([len(text) - 1 for text in texts], jnp.int32)
        none = jnp.zeros((len(texts), 0), jnp.int32)
        return self.run(jnp.asarray(tokens), anchor, Context(jnp.asarray(history), none))


def spoken(proposal, b):
    return np.asarray(proposal.tokens[b, : int(proposal.count[b])]).tolist()


@pytest.fixture(scope="module")
def drafting():
    return Drafting()


OLD = [1, 2, 3, 4, 5, 6, 0]


def test_the_earlier_text_is_proposed_while_the_text_is_its_beginning(drafting):
    texts = [OLD[:2], OLD[:4], OLD[:5], OLD[:6], OLD, [1, 2, 3, 0], [2, 2, 3, 4], [*OLD, 1, 1, 1]]
    proposal = drafting(texts, [OLD] * 8)
    expected = [[3, 4, 5], [5, 6, 0], [6, 0], [0], [], [], [], []]
    assert [spoken(proposal, b) for b in range(8)] == expected
    for b, tokens in enumerate(expected):
        assert (np.asarray(proposal.laws[b, len(tokens) :]) == 0).all()
        assert (np.asarray(proposal.tokens[b, len(tokens) :]) == 0).all()
        np.testing.assert_allclose(proposal.laws[b, : len(tokens)].sum(axis=-1), 1.0, atol=1e-6)


def test_laws_are_those_of_the_old_policy_step_by_step(drafting):
    """Against decoding with a cache, one token at a time."""
    policy = drafting.graph.merge(drafting.params).policy
    step = jax.jit(lambda token, at, cache: policy.step(token, at, cache, tap_layers=()))
    cache, laws = policy.empty_cache(1, CAPACITY), []
    for position, token in enumerate(OLD):
        hidden, _, cache, _ = step(jnp.array([[token]], jnp.int32), jnp.array([position], jnp.int32), cache)
        laws.append(np.asarray(law(policy.logits(hidden[:, 0]), SAMPLING)[0]))
    proposal = drafting([OLD[:2], OLD[:4], OLD[:5]] + [OLD] * 5, [OLD] * 8)
    for b, anchor in enumerate((1, 3, 4)):
        count = int(proposal.count[b])
        # Cached and whole-row attention round differently.
        np.testing.assert_allclose(proposal.laws[b, :count], laws[anchor : anchor + count], rtol=0, atol=1e-6)
    assert np.abs(laws[1] - laws[2]).max() > 1e-2


def test_a_longer_text_is_cut_at_the_room_for_it(drafting):
    old = [1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4]
    proposal = drafting([old[:7], old[:8], old[:9], old[:10]] * 2, [old] * 8)
    assert [spoken(proposal, b) for b in range(4)] == [[1, 2], [2], [], []]


def test_without_an_earlier_text_nothing_is_proposed(drafting):
    for room in (HISTORY, 0):
        proposal = drafting([OLD[:2]] * 8, [[]] * 8, room)
        assert (np.asarray(proposal.count) == 0).all() and (np.asarray(proposal.laws) == 0).all()


@pytest.mark.parametrize(
    "sampling", [SamplingConfig(top_k=2), SamplingConfig(temperature=0.0)], ids=["top-k", "greedy"]
)
def test_a_token_that_the_old_law_excludes_ends_the_proposal_before_it(sampling):
    drafting = Drafting(sampling)
    draft = drafting.graph.merge(drafting.params)
    rng, batch, counts = np.random.default_rng(0), 16, []
    olds = rng.integers(0, VOCAB, size=(batch, HISTORY)).astype(np.int32)
    positions = np.tile(np.arange(HISTORY, dtype=np.int32), (batch, 1))

    @jax.jit
    def laws(tokens, at):
        hidden = draft.policy(tokens, at, jnp.ones((batch, HISTORY), jnp.int32))[0]
        return law(draft.policy.logits(hidden), sampling)

    possible = np.asarray(laws(jnp.asarray(olds), jnp.asarray(positions))) > 0
    proposal = drafting([old[:2] for old in olds], olds)
    for b, old in enumerate(olds):
        says = [possible[b, 1 + i, old[2 + i]] for i in range(K)] + [False]
        counts.append(says.index(False))
        assert int(proposal.count[b]) == counts[-1]
        assert (np.asarray(proposal.laws[b, counts[-1] :]) == 0).all()
    assert len(set(counts)) > 1


def test_bug_case_b37_nothing_of_an_earlier_request_is_left(drafting):
    fresh = Drafting()([OLD[:2]] * 8, [[1, 2, 6]] * 8)
    drafting([OLD[:5]] * 8, [OLD] * 8)
    for one, other in zip(drafting([OLD[:2]] * 8, [[1, 2, 6]] * 8), fresh, strict=True):
        np.testing.assert_array_equal(one, other)
    assert spoken(fresh, 0) == [6]


def test_bug_case_b38_proposals_do_not_depend_on_the_batch(drafting):
    a, b = (OLD[:3], OLD), ([5, 5], [5, 5, 5, 5])
    mixed = drafting([x for x, _ in (a, b, a)], [x for _, x in (a, b, a)])
    alone = drafting([a[0]], [a[1]])
    for row in (0, 2):
        np.testing.assert_array_equal(mixed.tokens[row], alone.tokens[0])
        np.testing.assert_array_equal(mixed.count[row], alone.count[0])
        # Two batch sizes are two programs with other float32 rounding.
        np.testing.assert_allclose(mixed.laws[row], alone.laws[0], rtol=0, atol=1e-6)
    assert spoken(mixed, 1) == [5, 5] and spoken(alone, 0) == [4, 5, 6]


def test_it_is_an_older_version_of_the_policy_and_not_trained(drafting):
    policy_params = initialise(POLICY.build, jax.random.key(5))[1]
    started = PREVIOUS.from_policy(drafting.params, policy_params)
    assert jax.tree.structure(started) == jax.tree.structure(drafting.params)
    assert started["policy"] is policy_params and not PREVIOUS.trained and PREVIOUS.config is PreviousConfig
    CFG.check_target(POLICY)
    with pytest.raises(ValueError, match="must equal the run's policy"):
        CFG.check_target(Qwen3Config.tiny())


def test_a_run_that_trains_the_policy_cannot_use_it():
    for from_checkpoint in (True, False):
        with pytest.raises(ValueError, match="draft=PreviousConfig"):
            CFG.check_run(from_checkpoint=from_checkpoint)


@pytest.mark.parametrize("tokens", [0, 65])
def test_a_history_that_the_policy_cannot_read_is_refused(tokens):
    with pytest.raises(ValueError, match=f"history_tokens={tokens}"):
        PreviousConfig(policy=POLICY, history_tokens=tokens)
