"""Tests with hand-made drafts that are exact by construction: which row a draft is read off, and what counts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.drafts.base import Context, Features, Shared, Target, TrainingContext
from draftco_jax.drafts.dflash import training as dflash_training
from draftco_jax.drafts.dflash.config import DFlashConfig
from draftco_jax.drafts.dspark import training as dspark_training
from draftco_jax.drafts.dspark.config import DSparkConfig
from draftco_jax.losses.draft import DraftLossConfig
from draftco_jax.models.functional import abstract_params, graph_of
from draftco_jax.numerics.sampling import SamplingConfig
from draftco_jax.types import PackedBatch

V, MASK = 6, 5  # the policy counts 0, 1, 2, 3, 4, 0, ...; id 5 is the mask
BIG = 40.0
CONTEXT = TrainingContext(SamplingConfig(), chunk_tokens=64, draft_length=16)


def sizes(width):
    return {
        "tap_layers": (0,),
        "vocab_size": V,
        "hidden_size": width,
        "intermediate_size": V,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": V,
        "mask_token_id": MASK,
        "loss": DraftLossConfig(hard_cross_entropy=1.0),
    }


def spark(width, **changes):
    return DSparkConfig(**sizes(width) | {"markov_rank": 0, "enable_confidence_head": False} | changes)


def successor():
    """[V, V]: 1 where the column is the token after the row; nothing comes after the mask."""
    matrix = np.zeros((V, V), np.float32)
    matrix[np.arange(MASK), (np.arange(MASK) + 1) % MASK] = 1.0
    return matrix


def zeros(cfg):
    """All projections 0, all norms 1: every row keeps its embedding."""
    return jax.tree.map(lambda leaf: np.full(leaf.shape, leaf.ndim == 1, np.float32), abstract_params(cfg.build))


@pytest.fixture(scope="module")
def anchor_first():
    """Width V, embedding e_x: the anchor's own row says what follows it, a mask row says nothing."""
    params = zeros(spark(V))
    embedding = np.eye(V, dtype=np.float32)
    return params, embedding, BIG * successor(), lambda following: embedding[(following - 1) % MASK]


@pytest.fixture(scope="module")
def fill_in():
    """Width 3 V: a mask row copies the anchor by attention, and an MLP that is open in mask rows only moves it on.

    Dims 0..V-1 hold the embedding, V..2V-1 what attention brought, 2V..3V-1 what the head reads.
    """
    params = zeros(spark(3 * V))
    layer, eye = params["layers"][0], np.eye(V, dtype=np.float32)
    attention, mlp = layer["self_attn"], layer["mlp"]
    attention["q_norm"]["weight"] *= 0.0  # every key weighs the same
    attention["qkv"]["v_proj"]["kernel"][:V] = eye
    attention["o_proj"]["kernel"][:, V : 2 * V] = eye
    gate = np.where(np.arange(V) == MASK, 1.0, -1.0)
    mlp["gate_up"]["gate_proj"]["kernel"][:V] = BIG * gate[:, None]
    mlp["gate_up"]["up_proj"]["kernel"][V : 2 * V] = eye
    mlp["down_proj"]["kernel"][:, 2 * V :] = successor()
    embedding, head = np.zeros((V, 3 * V), np.float32), np.zeros((3 * V, V), np.float32)
    embedding[:, :V], head[2 * V :] = eye, BIG * eye
    return params, embedding, head, lambda following: np.eye(3 * V, dtype=np.float32)[2 * V + following]


def counting_rows(embedding, head, hidden_of):
    """Two rows of the policy's texts, and its states, which are sure of the next token."""
    tokens = (np.arange(8)[None] + np.array([[0], [3]])).astype(np.int32) % MASK
    rows = np.ones_like(tokens)
    positions = np.broadcast_to(np.arange(8, dtype=np.int32), tokens.shape)
    flat = np.zeros(tokens.shape, np.float32)
    arrays = tokens, positions, rows, np.ones_like(flat), flat, flat, flat, rows
    batch = PackedBatch(*(jnp.asarray(a) for a in arrays))
    taps = np.zeros((*tokens.shape, embedding.shape[1]), np.float32)
    return batch, Target(*(jnp.asarray(a) for a in (taps, hidden_of((tokens + 1) % MASK), head, embedding)))


def acceptance(cfg, toy):
    """Mean acceptance of the first draft in training, and the law's share of the right token in a rollout."""
    params, embedding, head, hidden_of = toy
    batch, target = counting_rows(embedding, head, hidden_of)
    anchors, keep = jnp.asarray([[1, 2, 4, 6]] * 2, jnp.int32), jnp.ones((2, 4), bool)

    def rollout(draft):
        shared, start = Shared(target.embedding, target.head), jnp.zeros(2, jnp.int32)
        state = draft.empty_state(2, 8, Context(*jnp.zeros((2, 2, 0), jnp.int32)))
        arrays = batch.tokens[:, :4], batch.tokens[:, 1:5], target.taps[:, :4], target.taps[:, :4]
        state = draft.absorb(state, Features(*arrays, start, start + 3), shared)
        uniforms = jnp.asarray([[0.3], [0.6]], jnp.float32)
        return draft.propose(state, batch.tokens[:, 4], start + 4, uniforms, SamplingConfig(), shared)[0]

    @jax.jit
    def run(params):
        draft = graph_of(cfg.build).merge(params)
        return trained(draft, target, batch, anchors, keep, CONTEXT), rollout(draft)

    report, proposal = run(params)
    right = np.take_along_axis(np.asarray(proposal.laws)[:, 0], np.asarray(batch.tokens)[:, 5:6], axis=1)
    return float(report.acceptances[0]), float(np.mean(right))


def trained(draft, target, batch, anchors, keep, context):
    """What training reports of these anchors."""
    training = dflash_training if isinstance(draft.cfg, DFlashConfig) else dspark_training
    one = jnp.float32(1.0)
    return training.loss_at(draft, target, batch, anchors, keep, denominator=one, context=context)[1]


def test_bug_case_b04_a_draft_is_exact_in_its_own_layout_only(anchor_first, fill_in):
    first, later = spark(V, block_size=1), spark(V, block_size=1, sample_from_anchor=False)
    np.testing.assert_allclose(acceptance(first, anchor_first), 1.0, rtol=1e-5)
    np.testing.assert_allclose(acceptance(later, anchor_first), 1 / V, rtol=1e-5)  # a mask row knows nothing
    first, later = spark(3 * V, block_size=1), spark(3 * V, block_size=1, sample_from_anchor=False)
    np.testing.assert_allclose(acceptance(later, fill_in), 1.0, rtol=1e-5)
    np.testing.assert_allclose(acceptance(first, fill_in), 1 / V, rtol=1e-2)  # the gate is shut to exp(-BIG) or so
    np.testing.assert_allclose(acceptance(DFlashConfig(**sizes(3 * V), block_size=2), fill_in), 1.0, rtol=1e-5)


def test_bug_case_b04_the_anchor_first_layout_runs_one_row_fewer_for_as_many_drafts():
    first, later = spark(V, block_size=4), spark(V, block_size=4, sample_from_anchor=False)
    assert (first.rows, first.first_row, first.max_draft_length) == (4, 0, 4)
    assert (later.rows, later.first_row, later.max_draft_length) == (5, 1, 4)
    flash = DFlashConfig(**sizes(V), block_size=4)
    assert (flash.rows, flash.first_row, flash.max_draft_length) == (4, 1, 3)


@pytest.mark.parametrize(
    ("cfg", "expected"),
    [
        (spark(V, block_size=4), 1 + 4),
        (spark(V, block_size=4, sample_from_anchor=False), 1 + 4),
        (DFlashConfig(**sizes(V), block_size=4, proposals="sample"), 1 + 3),
        (DFlashConfig(**sizes(V), block_size=4), 1 + 3),
    ],
    ids=["anchor_first", "five_rows", "fill_in", "fill_in_argmax"],
)
def test_bug_case_b05_the_first_row_counts_where_it_predicts(cfg, expected):
    """A perfect draft: all embeddings alike, so every row says what the policy says everywhere."""
    embedding, head = np.ones((V, V), np.float32), np.zeros((V, V), np.float32)
    head[:, 2] = BIG  # the policy always says 2
    batch, target = counting_rows(embedding, head, lambda following: np.ones((*following.shape, V), np.float32))
    anchors, keep = jnp.asarray([[0, 2]] * 2, jnp.int32), jnp.ones((2, 2), bool)

    @jax.jit
    def run(params):
        draft = graph_of(cfg.build).merge(params)
        shorter = CONTEXT._replace(draft_length=2)  # of the rollouts
        return [trained(draft, target, batch, anchors, keep, context) for context in (CONTEXT, shorter)]

    report, cut = run(zeros(cfg))
    np.testing.assert_allclose(report.acceptances, np.ones(cfg.max_draft_length), rtol=1e-6)
    np.testing.assert_allclose(report.tau_prob, expected, rtol=1e-6)
    np.testing.assert_allclose(cut.tau_prob, 3.0, rtol=1e-6)


def test_a_block_may_start_in_the_last_slot_of_its_context():
    """Angles of the rows after the capacity exist: the block is not written to the cache."""
    cfg = DFlashConfig(**sizes(V), block_size=4)
    draft = graph_of(cfg.build).merge(jax.tree.map(jnp.asarray, zeros(cfg)))
    state = draft.empty_state(1, 5, Context(*jnp.zeros((2, 1, 0), jnp.int32)))
    cos, _ = state.angles_at(jnp.asarray([4], jnp.int32), cfg.rows)
    angle = np.arange(4, 8)[:, None] * 1e6 ** (-np.arange(3) / 3)
    np.testing.assert_allclose(cos[0, :, 0], np.cos(angle), atol=1e-6)
