"""EAGLE-3 exports in SpecForge's and DeepSpec's own classes: strict loading, and the logits of every pass.

Bound of the logits: both sides compute in float32 and add in different orders. Measured: 3e-6 at most on logits of size
up to 4 (sums of up to 160 terms); the bound is three times that.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.drafts.eagle3.checkpoint import graph_with_map, save_draft
from draftco_jax.drafts.eagle3.config import Eagle3Config

pytest.importorskip("torch")

SIZES = {
    "vocab_size": 37,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e3,
    "max_position_embeddings": 64,
    "passes": 3,
}
KEPT = np.array([0, 1, 4, 5, 9, 11, 12, 20, 21, 22, 30, 36], np.int32)
ROWS, TOKENS, TOLERANCE = 2, 9, 1e-5


@pytest.fixture(scope="module")
def inputs(shared):
    """Embeddings of x_{t+1+k} for each pass k, and taps."""
    rng = np.random.default_rng(2)
    ids = rng.integers(0, 37, (ROWS, TOKENS + 3))
    embeds = [np.asarray(shared.embedding)[ids[:, 1 + k : 1 + k + TOKENS]] for k in range(3)]
    return embeds, ids, {count: rng.normal(size=(ROWS, TOKENS, count * 32)).astype(np.float32) for count in (3, 5)}


def our_logits(draft, embeds, taps):
    positions = jnp.broadcast_to(jnp.arange(TOKENS)[None], (ROWS, TOKENS))
    documents = jnp.ones((ROWS, TOKENS), jnp.int32)
    states = draft.passes([jnp.asarray(e) for e in embeds], jnp.asarray(taps), positions, documents)
    return [np.asarray(draft.logits(state)) for state in states]


def causal(torch):
    mask = torch.full((TOKENS, TOKENS), torch.finfo(torch.float32).min).triu(1)
    return mask.expand(ROWS, 1, TOKENS, TOKENS)


@pytest.mark.parametrize("kept", [KEPT, None], ids=["reduced", "full"])
@pytest.mark.parametrize("fc_norm", [False, True])
def test_specforge_computes_the_same_passes(kept, fc_norm, inputs, shared, lively, load_strictly, tmp_path):
    import torch

    size = 37 if kept is None else kept.size
    cfg = Eagle3Config(**SIZES, tap_layers=(1, 2, 4), draft_vocab_size=size, fc_norm=fc_norm)
    graph, params = graph_with_map(cfg, kept), lively(cfg)
    save_draft(tmp_path, cfg, graph, params, shared)
    model = load_strictly("specforge.modeling.draft.llama3_eagle", "LlamaForCausalLMEagle3", tmp_path)
    kept = np.arange(37) if kept is None else kept
    np.testing.assert_array_equal(np.arange(size) + model.d2t.numpy(), kept)
    np.testing.assert_array_equal(np.flatnonzero(model.t2d.numpy()), kept)

    embeds, _, taps = inputs
    positions = torch.arange(TOKENS)[None].expand(ROWS, TOKENS)
    with torch.no_grad():
        hidden, cache, theirs = model.project_hidden_states(torch.from_numpy(taps[3])), [[], []], []
        for embed in embeds:
            hidden = model.backbone(torch.from_numpy(embed), hidden, cache, causal(torch), positions)
            theirs.append(model.compute_logits(hidden).numpy())
    for ours, other in zip(our_logits(graph.merge(params), embeds, taps[3]), theirs, strict=True):
        assert np.abs(other).max() > 1
        np.testing.assert_allclose(ours, other, rtol=0, atol=TOLERANCE)


def test_deepspec_computes_the_same_first_pass(inputs, shared, lively, load_strictly, tmp_path):
    import torch

    cfg = Eagle3Config(**SIZES, tap_layers=(1, 3, 5, 7, 9), draft_vocab_size=37, qk_norm=True)
    graph, params = graph_with_map(cfg, None), lively(cfg)
    save_draft(tmp_path, cfg, graph, params, shared)
    model = load_strictly("deepspec.modeling.eagle3.qwen3.modeling", "Qwen3Eagle3Model", tmp_path)
    embeds, ids, taps = inputs
    np.testing.assert_array_equal(model.embed_tokens.weight.detach().numpy(), shared.embedding)
    with torch.no_grad():
        found = model(
            hidden_states=torch.from_numpy(taps[5]),
            input_ids=torch.from_numpy(ids[:, 1 : 1 + TOKENS]),
            attention_mask=torch.ones(ROWS, TOKENS),
            return_logits=True,
        )
    ours = our_logits(graph.merge(params), embeds, taps[5])[0]
    assert np.abs(ours).max() > 1
    np.testing.assert_allclose(ours, found.draft_logits.numpy(), rtol=0, atol=TOLERANCE)
