"""Tests that training is the chain of drafting steps, that nothing leaks, and of names and fields."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.drafts.base import Context, Features, Shared
from draftco_jax.drafts.mtp import MTP
from draftco_jax.drafts.mtp.config import MtpConfig
from draftco_jax.models.functional import split
from draftco_jax.models.hf_weights import to_tensors
from draftco_jax.models.qwen3 import Qwen3Config
from draftco_jax.models.transformer import fuse_projections
from draftco_jax.numerics.sampling import SamplingConfig
from draftco_jax.numerics.shift import look_ahead

STEPS, K, BLOCK, CAPACITY = 3, 3, 4, 16
SAMPLING = SamplingConfig(temperature=0.8)


@pytest.fixture(scope="module")
def unroll(any_head, lay_out):
    """(tokens, hidden, positions, segments) -> outputs z [steps, R, T, D]."""
    embedding = lay_out("packed")[1].embedding

    @jax.jit
    def run(tokens, hidden, positions, segments):
        embeds = [embedding[look_ahead(tokens, k + 1)] for k in range(STEPS)]
        return jnp.stack(any_head.merge().unroll(embeds, hidden, positions, segments))

    return lambda *arrays: np.asarray(run(*arrays))


class Drafting:
    """The head in the rollout layout, driven as the engine drives it."""

    def __init__(self, head, target):
        module = head.merge()
        fuse_projections(module)
        self.graph, self.params = split(module)
        self.shared = Shared(target.embedding, target.head)
        self.absorb = jax.jit(lambda state, features: self._draft().absorb(state, features, self.shared))
        self.propose = jax.jit(self._propose)

    def _draft(self):
        return self.graph.merge(self.params)

    def _propose(self, state, newest, anchor, uniforms):
        return self._draft().propose(state, newest, anchor, uniforms, SAMPLING, self.shared)

    def read(self, documents):
        """The proposal after rounds that each verify one or two tokens amid a block, with drafts in between.

        Each text is read up to its last token, which has no hidden state yet. What is random of a request (rejected
        stuff, uniforms) depends on its length only.
        """
        batch = len(documents)
        none = jnp.zeros((batch, 0), jnp.int32)
        state = self._draft().empty_state(batch, CAPACITY, Context(none, none))
        ends = np.array([len(d.tokens) - 1 for d in documents], np.int32)
        done = np.zeros(batch, np.int32)
        while (done < ends).any():
            done = np.where(done == ends, done - 1, done)  # a finished request is given its last index again
            known = np.minimum(ends - done, 2).astype(np.int32)
            rngs = [np.random.default_rng(int(end)) for end in ends]
            tokens, following = np.stack([rng.integers(1, 9, size=(2, BLOCK)) for rng in rngs], axis=1).astype(np.int32)
            width = documents[0].hidden.shape[1]
            hidden = np.stack([rng.normal(size=(BLOCK, width)) for rng in rngs]).astype(np.float32)
            for b, document in enumerate(documents):
                cells = slice(done[b], done[b] + known[b])
                tokens[b, : known[b]], hidden[b, : known[b]] = document.tokens[cells], document.hidden[cells]
                following[b, : known[b]] = document.tokens[done[b] + 1 : done[b] + known[b] + 1]
            taps = np.zeros((batch, BLOCK, 0), np.float32)
            arrays = (tokens, following, taps, hidden, done, known - 1)
            state = self.absorb(state, Features(*map(jnp.asarray, arrays)))
            done = done + known
            newest = np.array([d.tokens[at] for d, at in zip(documents, done, strict=True)], np.int32)
            uniforms = np.stack([rng.uniform(size=K) for rng in rngs]).astype(np.float32)
            proposal, after = self.propose(state, *map(jnp.asarray, (newest, done, uniforms)))
            # What the chain left in the cache is nobody's: the next round goes on from it.
            state = after._replace(hidden=jnp.full_like(after.hidden, jnp.nan))
        return proposal, uniforms


@pytest.fixture(scope="module")
def drafting(any_head, lay_out):
    return Drafting(any_head, lay_out("packed")[1])


def test_drafting_equals_training(any_head, drafting, documents, unroll, lay_out):
    """The laws that tokens are drawn from are those of training at the same index of the text that goes on with them.

    Only with the pattern "chain": under "step" the first law is that of drafting, and the later ones are not.
    """
    target = lay_out("packed")[1]
    proposal, uniforms = drafting.read(documents)
    tokens = np.zeros((len(documents), CAPACITY), np.int32)
    hidden = np.zeros((len(documents), CAPACITY, target.head.shape[0]), np.float32)
    segments = np.zeros_like(tokens)
    for b, document in enumerate(documents):
        text = np.concatenate([document.tokens, proposal.tokens[b]])
        tokens[b, : len(text)], segments[b, : len(text)] = text, 1
        hidden[b, : len(document.tokens) - 1] = document.hidden[:-1]
    positions = np.tile(np.arange(CAPACITY, dtype=np.int32), (len(documents), 1))
    outputs = unroll(*map(jnp.asarray, (tokens, hidden, positions, segments)))
    differences = np.zeros((K, len(documents)))
    for b, document in enumerate(documents):
        logits = any_head.merge().norm(jnp.asarray(outputs[:, b, len(document.tokens) - 2])) @ target.head
        expected = np.asarray(jax.nn.softmax(logits / 0.8, axis=-1))
        differences[:, b] = np.abs(proposal.laws[b] - expected).max(axis=-1)
        for i in range(K):  # drawn by inversion from that very law
            cumulative = np.cumsum(proposal.laws[b, i])
            assert proposal.tokens[b, i] == np.argmax(cumulative > uniforms[b, i] * cumulative[-1])
    assert (np.asarray(proposal.count) == K).all()
    chain = any_head.cfg.attention_pattern == "chain"
    # Two orders of the same float32 sums; probabilities, so absolute. Measured 5e-7.
    assert differences[: K if chain else 1].max() < 2e-6
    assert chain or differences[1:].max(axis=1).min() > 1e-3


def test_bug_case_b38_proposals_do_not_depend_on_the_batch(drafting, documents):
    a, b = documents[3], documents[0]
    mixed, alone = drafting.read([a, b, a, b, a])[0], drafting.read([a])[0]  # five, as in the test before
    for row in (0, 2, 4):
        np.testing.assert_array_equal(mixed.tokens[row], alone.tokens[0])
        # Two batch sizes are two programs with other float32 rounding.
        np.testing.assert_allclose(mixed.laws[row], alone.laws[0], rtol=0, atol=1e-6)
    assert np.abs(mixed.laws[1, 0] - alone.laws[0, 0]).max() > 1e-2


def places(segments, position):
    """Which (step, index) of a row have their input token in their document, and whether it is that of `position`."""
    for k in range(STEPS):
        for t in range(len(segments) - 1 - k):
            if segments[t] > 0 and segments[t] == segments[t + 1 + k]:
                yield k, t, segments[t] == segments[position]


@pytest.mark.parametrize("changed", ["tokens", "hidden"])
def test_nothing_leaks_from_later_places_or_other_documents(any_head, unroll, lay_out, changed):
    """Bitwise. Read at (t, k): tokens up to x_{t+1+k}, hidden states up to t, of the document of t."""
    chain = any_head.cfg.attention_pattern == "chain"
    batch, target = lay_out("packed")
    arrays = {"tokens": batch.tokens, "hidden": target.hidden, "p": batch.positions, "s": batch.segment_ids}
    before, segments, compared = unroll(*arrays.values()), np.asarray(batch.segment_ids), 0
    for row in (0, 1):
        for position in np.flatnonzero(segments[row] > 0):
            other = {
                "tokens": batch.tokens.at[row, position].set((batch.tokens[row, position] + 1) % 9),
                "hidden": target.hidden.at[row, position].add(1.0),
            }
            after = unroll(*(arrays | {changed: other[changed]}).values())
            differs = (before != after).any(axis=-1)
            assert not np.delete(differs, row, axis=1).any()
            for k, t, same in places(segments[row], position):
                reach = t + 1 + k if changed == "tokens" else t
                if not same or position > reach:
                    assert not differs[k, row, t], (row, position, k, t)
                elif position == reach:
                    # DeepSeek's layer never sees the embedding that is read at position 0.
                    first = int(batch.positions[row, t]) + (k if chain else 0) == 0
                    unseen = any_head.cfg.zeroes_first_embedding and first and changed == "tokens"
                    assert differs[k, row, t] != unseen, (row, position, k, t)
                compared += 1
    assert compared > 300


def test_in_bfloat16_the_state_keeps_its_types_and_laws_are_float32(any_head, lay_out):
    target = lay_out("packed")[1]
    half = lambda tree: jax.tree.map(lambda a: a.astype(jnp.bfloat16), tree)  # noqa: E731

    def round_of(params, hidden, embedding, out):
        draft, shared, none = any_head.merge(params), Shared(embedding, out), jnp.zeros((5, 0), jnp.int32)
        at, tokens = jnp.zeros(5, jnp.int32), jnp.zeros((5, BLOCK), jnp.int32)
        state = draft.empty_state(5, CAPACITY, Context(none, none))
        read = draft.absorb(state, Features(tokens, tokens, hidden[:, :, :0], hidden, at, at), shared)
        proposal, after = draft.propose(read, at, at + 1, jnp.zeros((5, K)), SAMPLING, shared)
        return state, read, after, proposal.laws

    arrays = half((any_head.params, target.hidden[:, :BLOCK], target.embedding, target.head))
    *states, laws = jax.eval_shape(round_of, *arrays)
    types = [[(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(state)] for state in states]
    assert types[0] == types[1] == types[2]
    assert laws.dtype == jnp.float32 and states[0].hidden.dtype == jnp.bfloat16


def test_tensors_have_the_published_names(make):
    head = make(attention_output_gate=True)
    shapes = {name.removeprefix("mtp."): tensor.shape for name, tensor in to_tensors(head.params, "mtp.").items()}
    layer = "layers.0."
    assert shapes == {
        "pre_fc_norm_embedding.weight": (16,),
        "pre_fc_norm_hidden.weight": (16,),
        "fc.weight": (16, 32),
        "norm.weight": (16,),
        layer + "input_layernorm.weight": (16,),
        layer + "post_attention_layernorm.weight": (16,),
        layer + "self_attn.q_proj.weight": (64, 16),  # 4 heads of width 8, each with its gate
        layer + "self_attn.k_proj.weight": (16, 16),
        layer + "self_attn.v_proj.weight": (16, 16),
        layer + "self_attn.o_proj.weight": (16, 32),
        layer + "self_attn.q_norm.weight": (8,),
        layer + "self_attn.k_norm.weight": (8,),
        layer + "mlp.gate_proj.weight": (24, 16),
        layer + "mlp.up_proj.weight": (24, 16),
        layer + "mlp.down_proj.weight": (16, 24),
    }


def test_a_head_fits_the_policy_it_is_made_for():
    policy = Qwen3Config.tiny()
    cfg = MtpConfig.for_target(policy, steps=2)
    cfg.check_target(policy)
    assert cfg.steps == 2 and cfg.tap_layers == () and cfg.max_draft_length is None
    with pytest.raises(ValueError, match="vocab_size=32"):
        cfg.check_target(Qwen3Config.tiny(vocab_size=33))
    assert MTP.config is MtpConfig and MTP.trained


def test_a_checkpoint_may_be_trained_in_another_way(make):
    one, other = make().cfg, make(steps=1, attention_pattern="step", style="deepseek").cfg
    taken = one.with_training_of(other)
    assert (taken.steps, taken.attention_pattern, taken.style) == (1, "step", "qwen3_5")


@pytest.mark.parametrize(
    "changes",
    [
        {"steps": 0},
        {"step_decay": 0.0},
        {"rotary_fraction": 0.0},
        {"rotary_fraction": 0.4},  # 3 of 8
        {"rotary_fraction": 1.5},
        {"vocab_size": 0},
        {"num_key_value_heads": 3},
    ],
)
def test_sizes_that_do_not_fit_are_refused(make, changes):
    (name, value) = next(iter(changes.items()))
    with pytest.raises(ValueError, match=rf"{name}={value} must be|{name}={value}$|{name}={value};"):
        make(**changes)
