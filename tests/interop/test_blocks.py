"""DFlash and DSpark exports in SpecForge's and DeepSpec's own classes: strict loading, and the logits of a block.

Bound of the logits: both sides compute in float32 and add in different orders. Measured: 1e-5 at most on logits of size
up to 11 (two layers, sums of up to 64 terms); the bound is twice that.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.drafts.base import Context, Features
from draftco_jax.drafts.blocks.body import head_logits
from draftco_jax.drafts.dflash.checkpoint import save_dflash
from draftco_jax.drafts.dflash.config import DFlashConfig
from draftco_jax.drafts.dspark.checkpoint import save_dspark
from draftco_jax.drafts.dspark.config import DSparkConfig
from draftco_jax.models.functional import graph_of
from draftco_jax.numerics.sampling import SamplingConfig

pytest.importorskip("torch")

SIZES = {
    "vocab_size": 37,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e3,
    "max_position_embeddings": 64,
    "tap_layers": (1, 5),  # as published for two layers on a policy of eight
    "mask_token_id": 36,
}
ROWS, ANCHOR, TOLERANCE = 2, 7, 2e-5


@pytest.fixture(scope="module")
def context():
    """Taps of the indices before the anchor, and the tokens up to it."""
    rng = np.random.default_rng(3)
    taps = rng.normal(size=(ROWS, ANCHOR, 64)).astype(np.float32)
    return taps, rng.integers(0, 36, (ROWS, ANCHOR + 1)).astype(np.int32)


def absorbed(module, taps, ids, shared):
    """Our draft's state when the anchor is at ANCHOR."""
    empty = module.empty_state(ROWS, 24, Context(*(jnp.zeros((ROWS, 0), jnp.int32) for _ in range(2))))
    features = Features(
        jnp.asarray(ids[:, :-1]),
        jnp.asarray(ids[:, 1:]),
        jnp.asarray(taps),
        jnp.zeros((ROWS, ANCHOR, 32)),
        jnp.zeros(ROWS, jnp.int32),
        jnp.full(ROWS, ANCHOR - 1, jnp.int32),
    )
    return module.absorb(empty, features, shared), jnp.asarray(ids[:, -1]), jnp.full(ROWS, ANCHOR, jnp.int32)


def their_block(torch, embedding, ids, rows):
    """Embeddings of the block, and positions of context and block."""
    block = np.full((ROWS, rows), 36)
    block[:, 0] = ids[:, -1]
    positions = torch.arange(ANCHOR + rows)[None].expand(ROWS, -1)
    return torch.tensor(np.array(embedding)[block]), positions


def official_mask(torch, found_class, window):
    """SpecForge's own mask of one block whose context ends before its anchor."""
    anchors, keep = torch.full((ROWS, 1), ANCHOR), torch.ones((ROWS, 1), dtype=torch.bool)
    make = found_class("specforge.algorithms.common.dflash_family_model", "create_dflash_sdpa_mask")
    return make(anchors, keep, ANCHOR, 6, torch.device("cpu"), window)


@pytest.mark.parametrize("kinds", [("full_attention",) * 2, ("sliding_attention", "full_attention")])
def test_specforge_fills_the_same_dflash_block(kinds, context, shared, lively, load_strictly, found_class, tmp_path):
    """A sliding layer is causal in the block, and its later rows see nothing of the context any more."""
    import torch

    window = 4 if "sliding_attention" in kinds else None
    cfg = DFlashConfig(**SIZES, block_size=6, layer_types=kinds, sliding_window=window)
    graph, params = graph_of(cfg.build), lively(cfg)
    save_dflash(tmp_path, cfg, graph, params)
    model = load_strictly("specforge.modeling.draft.dflash", "DFlashDraftModel", tmp_path)
    assert (model.block_size, model.mask_token_id, tuple(model.target_layer_ids)) == (6, 36, (1, 5))
    taps, ids = context
    embeds, positions = their_block(torch, shared.embedding, ids, 6)
    masks = {
        kind: official_mask(torch, found_class, window if kind == "sliding_attention" else None) for kind in set(kinds)
    }
    with torch.no_grad():
        states = model(
            position_ids=positions,
            noise_embedding=embeds,
            target_hidden=torch.from_numpy(taps),
            attention_mask=masks,
        )
        theirs = (states @ torch.tensor(np.array(shared.head))).numpy()[:, 1:]  # row 0 is not a draft
    module = graph.merge(params)
    ours = head_logits(module.block(*absorbed(module, taps, ids, shared), shared), shared.head)
    assert np.abs(theirs).max() > 1
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_deepspec_drafts_the_same_dspark_block(kind, context, shared, lively, load_strictly, tmp_path):
    """Greedy, so the token before each slot is the same on both sides where the logits are."""
    import torch

    cfg = DSparkConfig(**SIZES, block_size=5, markov_rank=8, markov_head_type=kind)
    graph, params = graph_of(cfg.build), lively(cfg)
    save_dspark(tmp_path, cfg, graph, params, shared)
    model = load_strictly("deepspec.modeling.dspark.qwen3.modeling", "Qwen3DSparkModel", tmp_path)
    taps, ids = context
    embeds, positions = their_block(torch, shared.embedding, ids, 5)
    first = torch.from_numpy(ids[:, -1]).long()
    with torch.no_grad():
        states = model._forward_backbone(
            position_ids=positions, noise_embedding=embeds, target_hidden_states=torch.from_numpy(taps)
        )
        tokens, logits = model.sample_draft_tokens(
            model.compute_logits(states), first_prev_token_ids=first, hidden_states=states
        )
        previous = torch.cat([first[:, None], tokens[:, :-1]], dim=1)
        confidence = model.predict_confidence_step(states, previous).numpy()

    module = graph.merge(params)
    state, newest, anchor = absorbed(module, taps, ids, shared)
    greedy, _ = module.propose(state, newest, anchor, jnp.full((ROWS, 5), 0.5), SamplingConfig(temperature=0.0), shared)
    np.testing.assert_array_equal(greedy.tokens, tokens.numpy())
    hidden = module.block(state, newest, anchor, shared)[:, None]
    features, kernel = module.label_features(hidden, jnp.asarray(previous.numpy(), jnp.int32)[:, None], shared.head)
    np.testing.assert_allclose(head_logits(features, kernel)[:, 0], logits.numpy(), rtol=0, atol=TOLERANCE)
    assert np.abs(logits.numpy()).max() > 1
    ours = module.confidence(hidden, jnp.asarray(previous.numpy(), jnp.int32)[:, None])[:, 0]
    np.testing.assert_allclose(ours, confidence, rtol=0, atol=TOLERANCE)
