"""Holds the EAGLE-3 layer to SpecForge: the loss of every training-time-test pass and every gradient."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.drafts.eagle3.checkpoint import graph_with_map, vocabulary_map
from draftco_jax.drafts.eagle3.config import Eagle3Config
from draftco_jax.losses.draft import soft_cross_entropy
from draftco_jax.models.functional import abstract_params
from draftco_jax.models.hf_weights import from_tensors, to_tensors
from draftco_jax.numerics.sampling import SamplingConfig, log_law

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
)


@pytest.fixture(scope="module")
def values(golden):
    with np.load(golden / "eagle3.npz") as file:
        return dict(file)


def shifted(x, steps):
    """x[:, t + steps], zeros past the end: what the official code does on each pass."""
    return jnp.concatenate([x[:, steps:], jnp.zeros_like(x[:, :steps])], axis=1)


def official_loss(params, embedding, graph, values):
    """The official mask (that of the token the pass reads, not of its label) and mean (over all positions)."""
    draft = graph.merge(params)
    ids, teacher = jnp.asarray(values["ids"], jnp.int32), values["tgt"]
    kept_ids, full_law = np.flatnonzero(values["t2d"]), SamplingConfig()
    mask = jnp.asarray(values["lm"][..., 0] * values["t2d"][teacher.argmax(-1)])
    rows, tokens = ids.shape
    positions = jnp.broadcast_to(jnp.arange(tokens)[None], ids.shape)
    causal = jnp.broadcast_to(jnp.tril(jnp.ones((tokens, tokens), bool))[None], (rows, tokens, tokens))
    embeds = [embedding[shifted(ids, k)] for k in range(CFG.passes)]
    losses = []
    for k, state in enumerate(draft.passes(embeds, jnp.asarray(values["hs"]), positions, causal)):
        label_law = log_law(shifted(jnp.asarray(teacher), k)[..., kept_ids], full_law)
        cross_entropy = soft_cross_entropy(label_law, log_law(draft.logits(state), full_law))
        losses.append(jnp.mean(shifted(mask, k) * cross_entropy))
    return sum(CFG.pass_decay**k * loss for k, loss in enumerate(losses)), jnp.stack(losses)


def test_pass_losses_and_every_gradient(values):
    tensors = {name[2:]: tensor for name, tensor in values.items() if name.startswith("w.")}
    embedding = jnp.asarray(tensors.pop("embed_tokens.weight"))
    params = from_tensors(abstract_params(CFG.build), tensors, "golden", prefix="")
    graph = graph_with_map(CFG, vocabulary_map(CFG, values["d2t"], values["t2d"], "golden"))
    np.testing.assert_array_equal(graph.merge(params).draft_to_target[...], np.flatnonzero(values["t2d"]))

    loss = jax.jit(jax.value_and_grad(lambda p, e: official_loss(p, e, graph, values), argnums=(0, 1), has_aux=True))
    (_, losses), (gradients, embedding_gradient) = loss(params, embedding)
    np.testing.assert_allclose(losses, values["plosses"], rtol=1e-6)
    found = to_tensors(gradients, prefix="") | {"embed_tokens.weight": np.asarray(embedding_gradient)}
    expected = {name[2:]: tensor for name, tensor in values.items() if name.startswith("g.")}
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        np.testing.assert_allclose(gradient, expected[name], rtol=0, atol=1e-6, err_msg=name)
        assert np.abs(expected[name]).max() > 1e-4, f"{name}: the tolerance must be small beside the values"
