"""Holds the LK objectives to SpecForge: 'alpha' and 'lambda' of the first pass of EAGLE-3, on the arrays of eagle3.npz.

The pass is written out here in float64, so that nothing but the losses is under test.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.losses.draft import DraftLossConfig, per_label_loss, weighted_loss
from draftco_jax.losses.law_pair import Teacher, law_pair_terms
from draftco_jax.numerics.sampling import SamplingConfig

HEADS, KV_HEADS, HEAD_DIM, EPS, THETA = 4, 2, 16, 1e-6, 1e4
ALPHA, LAMBDA = 1.290347, 1.795602  # as SpecForge 0.2.0 prints them: six decimals


@pytest.fixture(scope="module")
def values(golden):
    with np.load(golden / "eagle3.npz") as file:
        return {name: file[name].astype(np.float64) for name in file.files}


def rms_norm(x, weight):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * weight


def rotate(x):
    """Rotary embedding of [B, S, heads, HEAD_DIM] at positions 0..S - 1."""
    angles = np.arange(x.shape[1])[:, None] * THETA ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    left, right = np.split(x, 2, axis=-1)
    return np.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)


def first_pass(values):
    """State after the final norm, [B, S, H]."""
    w = lambda name: values[f"w.{name}.weight"]  # noqa: E731
    layer = lambda name: w(f"midlayer.{name}")  # noqa: E731
    ids = values["ids"].astype(int)
    hidden = values["hs"] @ w("fc").T
    both = np.concatenate(
        [rms_norm(w("embed_tokens")[ids], layer("input_layernorm")), rms_norm(hidden, layer("hidden_norm"))], axis=-1
    )
    q, k, v = ((both @ layer(f"self_attn.{n}_proj").T).reshape(*ids.shape, -1, HEAD_DIM) for n in "qkv")
    k, v = (np.repeat(x, HEADS // KV_HEADS, axis=2) for x in (rotate(k), v))
    scores = np.einsum("bqhd,bkhd->bhqk", rotate(q), k) / np.sqrt(HEAD_DIM)
    scores = np.where(np.tril(np.ones(scores.shape[-2:])) > 0, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    heads = np.einsum("bhqk,bkhd->bqhd", weights, v).reshape(*ids.shape, -1)
    hidden = hidden + heads @ layer("self_attn.o_proj").T
    n = rms_norm(hidden, layer("post_attention_layernorm"))
    gate = n @ layer("mlp.gate_proj").T
    hidden = hidden + (gate / (1 + np.exp(-gate)) * (n @ layer("mlp.up_proj").T)) @ layer("mlp.down_proj").T
    return rms_norm(hidden, w("norm"))


@pytest.fixture(scope="module")
def labels(values):
    """Terms [1, B, S] of the pass, and the official mask: that of the token, where the policy's mode is a draft id."""
    rows, tokens = values["ids"].shape
    f32 = lambda x: jnp.asarray(x, jnp.float32)  # noqa: E731
    teacher = values["tgt"].reshape(rows * tokens, -1)
    terms = law_pair_terms(
        f32(first_pass(values).reshape(rows * tokens, -1)),
        f32(values["w.lm_head.weight"].T),
        Teacher(f32(teacher), jnp.eye(teacher.shape[1], dtype=jnp.float32), jnp.arange(rows * tokens, dtype=jnp.int32)),
        jnp.zeros(rows * tokens, jnp.int32),
        kept=jnp.asarray(np.flatnonzero(values["t2d"]), jnp.int32),
        sampling=SamplingConfig(),
        tile=40,
        chunk_tokens=rows * tokens,
    )
    laid_out = [x.reshape(1, rows, tokens) for x in terms[:-1]]
    terms = type(terms)(*laid_out)
    return terms, f32(values["lm"][None, ..., 0]) * terms.mode_kept


def test_the_pass_is_the_official_one(values, labels):
    terms, mask = labels
    cross_entropy = per_label_loss(terms, mask, DraftLossConfig(soft_cross_entropy=1.0))
    np.testing.assert_allclose(weighted_loss(cross_entropy, mask, float(mask.size)), values["plosses"][0], rtol=1e-6)


def test_alpha(labels):
    terms, mask = labels
    found = weighted_loss(per_label_loss(terms, mask, DraftLossConfig(lk_alpha=1.0)), mask, jnp.sum(mask))
    np.testing.assert_allclose(found, ALPHA, rtol=0, atol=1e-6)  # its last decimal


def test_lambda(labels):
    """The official mix divides the cross-entropy by all positions and 1 - a by the live ones."""
    terms, mask = labels
    cfg, count = DraftLossConfig(lk_lambda=1.0), jnp.sum(mask)
    mean = weighted_loss(terms.overlap, mask, count)[None]
    one, zero = jnp.ones_like(mask), jnp.zeros_like(mask)
    entropy = per_label_loss(terms._replace(overlap=one), mask, cfg, step_acceptance=mean)
    rejected = per_label_loss(terms._replace(soft_cross_entropy=zero), mask, cfg, step_acceptance=mean)
    found = weighted_loss(entropy, mask, float(mask.size)) + weighted_loss(rejected, mask, count)
    np.testing.assert_allclose(found, LAMBDA, rtol=0, atol=1e-6)
