"""Holds EAGLE-3 training to SpecForge: the loss of every training-time-test pass and every gradient."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.drafts.base import Target, TrainingContext
from draftco_jax.drafts.eagle3.checkpoint import graph_with_map, vocabulary_map
from draftco_jax.drafts.eagle3.config import Eagle3Config
from draftco_jax.drafts.eagle3.training import denominator, passes_loss
from draftco_jax.losses.draft import DraftLossConfig
from draftco_jax.models.functional import abstract_params
from draftco_jax.models.hf_weights import from_tensors, to_tensors
from draftco_jax.numerics.sampling import SamplingConfig
from draftco_jax.types import PackedBatch

CFG = Eagle3Config(
    tap_layers=(0, 1, 2),
    vocab_size=128,
    draft_vocab_size=96,
    hidden_size=64,
    intermediate_size=128,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    rope_theta=1e4,
    passes=4,
    label_mask="official",
    loss=DraftLossConfig(soft_cross_entropy=1.0, normaliser="all_positions"),
)
# A tile that does not divide the vocabulary and a chunk that does not divide the tokens.
CONTEXT = TrainingContext(SamplingConfig(), chunk_tokens=32, draft_length=4, tile=40)
KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def values(golden):
    with np.load(golden / "eagle3.npz") as file:
        return dict(file)


@pytest.fixture(scope="module")
def batch(values):
    """What the official code was given: ids and teacher of index t are those of t + 1, so one token stands before."""
    rows, tokens = values["ids"].shape
    before = lambda x: np.concatenate([np.zeros_like(x[:, :1]), x], axis=1)  # noqa: E731
    after = lambda x: np.concatenate([x, np.zeros_like(x[:, :1])], axis=1)  # noqa: E731
    mask = jnp.asarray(after(values["lm"][..., 0]), jnp.float32)
    positions = jnp.broadcast_to(jnp.arange(tokens + 1, dtype=jnp.int32)[None], mask.shape)
    ids, ones = jnp.asarray(before(values["ids"]), jnp.int32), jnp.ones(mask.shape, jnp.int32)
    packed = PackedBatch(ids, positions, ones, mask, jnp.zeros_like(mask), mask, mask, ones)
    # The teacher's logits are given: states of that width and a head that is the identity.
    target = (jnp.asarray(after(values["hs"])), jnp.asarray(before(values["tgt"])), jnp.eye(CFG.vocab_size))
    return packed, target


def test_pass_losses_and_every_gradient(values, batch):
    tensors = {name[2:]: tensor for name, tensor in values.items() if name.startswith("w.")}
    embedding = jnp.asarray(tensors.pop("embed_tokens.weight"))
    params = from_tensors(abstract_params(CFG.build), tensors, "golden", prefix="")
    graph = graph_with_map(CFG, vocabulary_map(CFG, values["d2t"], values["t2d"], "golden"))
    np.testing.assert_array_equal(graph.merge(params).draft_to_target[...], np.flatnonzero(values["t2d"]))
    packed, (taps, hidden, head) = batch
    positions = float(values["ids"].size)  # the official mean is over the tokens it was given

    def loss(params):
        target = Target(taps, hidden, head, embedding)
        return passes_loss(
            graph.merge(params), target, packed, denominator=jnp.float32(positions), key=KEY, context=CONTEXT
        )

    (total, report), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    # The report's mean is over live labels.
    live = np.array([values["lm"][:, k:, 0].sum() for k in range(CFG.passes)])
    np.testing.assert_allclose(report.losses * live / positions, values["plosses"], rtol=1e-6)
    np.testing.assert_allclose(total, sum(0.8**k * loss for k, loss in enumerate(values["plosses"])), rtol=1e-6)
    assert denominator(packed, CFG, KEY) == positions + values["ids"].shape[0]
    found = to_tensors(gradients, prefix="")
    expected = {name[2:]: tensor for name, tensor in values.items() if name.startswith("g.")}
    # The official table of embeddings is trained with the draft; here it is the policy's, which gets no gradient.
    del expected["embed_tokens.weight"]
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        np.testing.assert_allclose(gradient, expected[name], rtol=0, atol=1e-6, err_msg=name)
        assert np.abs(expected[name]).max() > 1e-4, f"{name}: the tolerance must be small beside the values"
