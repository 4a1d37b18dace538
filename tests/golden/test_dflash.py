"""Holds DFlash to SpecForge: loss, accuracy and every gradient, with the published decay and with D-PACE."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.drafts.base import Target, TrainingContext
from draftco_jax.drafts.blocks.training import block_labels, look_ahead, weighed
from draftco_jax.drafts.dflash.config import DFlashConfig
from draftco_jax.drafts.dflash.training import loss_at
from draftco_jax.losses.draft import DraftLossConfig
from draftco_jax.models.functional import abstract_params, graph_of
from draftco_jax.models.hf_weights import from_tensors, to_tensors
from draftco_jax.numerics.sampling import SamplingConfig
from draftco_jax.types import PackedBatch

# D-PACE of the official code divides by the number of sequences.
LOSSES = {
    "dflash": DraftLossConfig(hard_cross_entropy=1.0),
    "dflash_d_pace": DraftLossConfig(hard_cross_entropy=1.0, label_weights="d_pace", normaliser="sequences"),
}


def config(loss):
    return DFlashConfig(
        tap_layers=(0, 1, 2),
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        block_size=6,
        mask_token_id=127,
        loss_decay_gamma=4.0,
        loss=loss,
    )


def packed(values):
    """Each sequence is a row."""
    ids = np.asarray(values["ids"], np.int32)
    positions = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape)
    zeros, ones = np.zeros(ids.shape, np.float32), np.ones(ids.shape, np.int32)
    arrays = ids, positions, ones, values["lm"], zeros, zeros, zeros, ones
    return PackedBatch(*(jnp.asarray(a) for a in arrays))


@pytest.mark.parametrize("name", LOSSES)
def test_loss_accuracy_and_every_gradient(golden, name):
    with np.load(golden / f"{name}.npz") as file:
        values = dict(file)
    cfg = config(LOSSES[name])
    tensors = {key[2:]: tensor for key, tensor in values.items() if key.startswith("w.")}
    params = from_tensors(abstract_params(cfg.build), tensors, "golden", prefix="")
    batch, graph = packed(values), graph_of(cfg.build)
    target = Target(
        *(jnp.asarray(a) for a in (values["hs"],)), None, jnp.asarray(values["head"].T), jnp.asarray(values["emb"])
    )
    anchors, keep = jnp.asarray(values["anchors"], jnp.int32), jnp.asarray(values["keep"])
    context = TrainingContext(SamplingConfig(), chunk_tokens=1024, draft_length=5)

    def loss(params):
        ahead = look_ahead(batch, cfg)
        denominator = weighed(ahead, block_labels(ahead, anchors, keep, cfg), cfg).denominator
        return loss_at(graph.merge(params), target, batch, anchors, keep, denominator=denominator, context=context)

    (found, report), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    np.testing.assert_allclose(found, values["loss"], rtol=1e-6)
    np.testing.assert_allclose(report.extra["accuracy"], values["acc"], rtol=1e-6)
    expected = {key[2:]: tensor for key, tensor in values.items() if key.startswith("g.")}
    found = to_tensors(gradients, prefix="")
    assert found.keys() == expected.keys()
    for key, gradient in found.items():
        # Rounding of sums of float32 numbers is relative to the largest of a tensor, not to each.
        bound = 1e-5 * np.abs(expected[key]).max()
        assert bound > 0, f"{key}: nothing to compare with"
        np.testing.assert_allclose(gradient, expected[key], rtol=0, atol=bound, err_msg=key)
