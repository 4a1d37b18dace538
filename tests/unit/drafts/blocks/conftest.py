"""Block drafts of every kind with lively weights, their compiled training forwards, and a slow float64 reference."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.drafts.base import TrainingContext
from draftco_jax.drafts.blocks.body import head_logits
from draftco_jax.drafts.blocks.training import (
    block_labels,
    block_states,
    denominator,
    look_ahead,
    previous_tokens,
)
from draftco_jax.drafts.dflash import training as dflash_training
from draftco_jax.drafts.dflash.config import DFlashConfig
from draftco_jax.drafts.dspark import training as dspark_training
from draftco_jax.drafts.dspark.config import DSparkConfig
from draftco_jax.models.functional import ModelGraph, abstract_params, graph_of
from draftco_jax.numerics.sampling import SamplingConfig

VOCAB, WIDTH = 19, 16  # those of the documents in tests/unit/drafts/conftest.py
TEMPERATURE = 0.7
SIZES: dict[str, Any] = {
    "tap_layers": (0, 1),
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,  # not width / heads
    "rope_theta": 100.0,
    "mask_token_id": 0,
    "num_anchors": 3,
}
WINDOWS: dict[str, Any] = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 3}
CONFIGS = {
    "dflash": DFlashConfig(**SIZES, block_size=4),
    "dflash_windows": DFlashConfig(**SIZES, **WINDOWS, block_size=8, proposals="sample"),
    "dspark": DSparkConfig(**SIZES, block_size=3, markov_rank=5),
    "dspark_gated_fill_in": DSparkConfig(
        **SIZES,
        **WINDOWS,
        sliding_causal=False,
        block_size=3,
        markov_rank=5,
        markov_head_type="gated",
        sample_from_anchor=False,
    ),
    "dspark_rnn": DSparkConfig(**SIZES, causal=True, block_size=8, markov_rank=5, markov_head_type="rnn"),
}


class Case(NamedTuple):
    """A draft and the training forward of its family."""

    cfg: Any
    graph: ModelGraph
    params: dict[str, Any]

    @property
    def training(self) -> Any:
        return dflash_training if isinstance(self.cfg, DFlashConfig) else dspark_training


@pytest.fixture(scope="session")
def make_case():
    """Config -> draft with weights of such a size that attention is not flat and norms are not 1."""

    def make(cfg) -> Case:
        rng = np.random.default_rng(1)

        def draw(leaf):
            noise = rng.normal(size=leaf.shape)
            return jnp.asarray(1 + 0.3 * noise if leaf.ndim == 1 else noise * leaf.shape[0] ** -0.5, leaf.dtype)

        return Case(cfg, graph_of(cfg.build), jax.tree.map(draw, abstract_params(cfg.build)))

    return make


# Windows are those of the gated draft too, and its plain head is held by tests/golden/test_dspark.py.
LONG = ("dflash_windows", "dspark")


@pytest.fixture(
    scope="session",
    params=[pytest.param(name, marks=pytest.mark.slow) if name in LONG else name for name in CONFIGS],
)
def case(request, make_case) -> Case:
    """Both families, every kind of head, both layouts, all masks."""
    return make_case(CONFIGS[request.param])


@pytest.fixture(scope="session")
def branches():
    """Compiled: (params, target, batch, anchors, keep) -> states and logits of every block."""

    @cache
    def compiled(cfg):
        graph = graph_of(cfg.build)

        @jax.jit
        def run(params, target, batch, anchors, keep):
            draft = graph.merge(params)
            states = block_states(draft, target, batch, anchors, keep)
            ahead = look_ahead(batch, cfg)
            previous = previous_tokens(ahead, block_labels(ahead, anchors, keep, cfg))
            return states, head_logits(*draft.label_features(states, previous, target.head))

        return run

    return compiled


@pytest.fixture(scope="session")
def context() -> TrainingContext:
    return TrainingContext(SamplingConfig(temperature=TEMPERATURE), chunk_tokens=50, draft_length=16)


@pytest.fixture(scope="session")
def losses(context):
    """Compiled: (params, target, batch, key, denominator) -> (loss, report), gradients of parameters and target."""

    @cache
    def compiled(cfg):
        graph, training = graph_of(cfg.build), Case(cfg, None, None).training  # pyright: ignore

        @jax.jit
        def run(params, target, batch, key, denominator):
            loss = lambda p, t: training.blocks_loss(  # noqa: E731
                graph.merge(p), t, batch, denominator=denominator, key=key, context=context
            )
            return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, target)

        return run

    return compiled


@pytest.fixture(scope="session")
def denominators():
    """Compiled: (batch, key) -> denominator."""
    return cache(lambda cfg: jax.jit(lambda batch, key: denominator(batch, cfg, key)))


# ---- the reference: one block at a time, float64, weights by their published names ----


def softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def normed(x, weight):
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6) * weight


def turned(x, position, theta):
    half = x.shape[-1] // 2
    angle = position * theta ** (-np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], axis=-1)


class Reference:
    """A block draft as its papers write it."""

    def __init__(self, cfg, tensors):
        self.cfg, self.w = cfg, {name: np.asarray(t, np.float64) for name, t in tensors.items()}

    def heads(self, layer, kind, x, position):
        """Heads of one vector: projected, normed, turned as its kind asks."""
        y = (self.w[f"layers.{layer}.self_attn.{kind}_proj.weight"] @ x).reshape(-1, self.cfg.head_dim)
        if kind == "v":
            return y
        return turned(normed(y, self.w[f"layers.{layer}.self_attn.{kind}_norm.weight"]), position, self.cfg.rope_theta)

    def visible(self, layer, anchor, j):
        """Indices of context, and rows of the block, that row j sees."""
        cfg, sliding = self.cfg, self.cfg.layer_types[layer] == "sliding_attention"
        lowest = max(0, anchor + j - (cfg.sliding_window - 1)) if sliding else 0
        causal = cfg.sliding_causal if sliding else cfg.causal
        return range(lowest, anchor), range(j + 1) if causal else range(cfg.rows)

    def states(self, tokens, taps, anchor, embedding):
        """Normed state of every row of the block."""
        w, cfg = self.w, self.cfg
        fused = [normed(w["fc.weight"] @ tap, w["hidden_norm.weight"]) for tap in taps[:anchor]]
        x = [embedding[tokens[anchor]]] + [embedding[cfg.mask_token_id]] * (cfg.rows - 1)
        for layer in range(cfg.num_hidden_layers):
            name = f"layers.{layer}."
            n = [normed(row, w[name + "input_layernorm.weight"]) for row in x]
            block = {kind: [self.heads(layer, kind, n[j], anchor + j) for j in range(cfg.rows)] for kind in "qkv"}
            trunk = {kind: [self.heads(layer, kind, c, s) for s, c in enumerate(fused)] for kind in "kv"}
            new = []
            for j in range(cfg.rows):
                before, within = self.visible(layer, anchor, j)
                keys = [trunk["k"][s] for s in before] + [block["k"][i] for i in within]
                values = [trunk["v"][s] for s in before] + [block["v"][i] for i in within]
                group, out = cfg.num_attention_heads // cfg.num_key_value_heads, []
                for head in range(cfg.num_attention_heads):
                    scores = np.array([k[head // group] @ block["q"][j][head] for k in keys]) / np.sqrt(cfg.head_dim)
                    out.append(softmax(scores) @ np.array([v[head // group] for v in values]))
                y = x[j] + w[name + "self_attn.o_proj.weight"] @ np.concatenate(out)
                m = normed(y, w[name + "post_attention_layernorm.weight"])
                gate, up = (w[f"{name}mlp.{part}_proj.weight"] @ m for part in ("gate", "up"))
                new.append(y + w[name + "mlp.down_proj.weight"] @ (gate * sigmoid(gate) * up))
            x = new
        return [normed(row, w["norm.weight"]) for row in x]

    def drafts(self, tokens, taps, anchor, embedding, head):
        """(logits, state, W1[token before it]) of every draft whose token before it is known."""
        w, cfg = self.w, self.cfg
        rank = getattr(cfg, "markov_rank", 0)
        first = 0 if getattr(cfg, "sample_from_anchor", False) else 1
        rows, memory, found = self.states(tokens, taps, anchor, embedding), np.zeros(rank), []
        for i in range(cfg.rows - first):
            if anchor + i >= len(tokens):
                break
            h = rows[first + i]
            logits, token = h @ head, None
            if rank:
                token = w["markov_head.markov_w1.weight"][tokens[anchor + i]]
                g = token
                if cfg.markov_head_type == "gated":
                    z = w["markov_head.gate_proj.weight"] @ np.concatenate([h, token])
                    g = sigmoid(z + w["markov_head.gate_proj.bias"]) * token
                elif cfg.markov_head_type == "rnn":
                    z = w["markov_head.joint_proj.weight"] @ np.concatenate([memory, token, h])
                    u, c, o = np.split(z + w["markov_head.joint_proj.bias"], 3)
                    g, memory = np.tanh(o), sigmoid(u) * memory + (1 - sigmoid(u)) * np.tanh(c)
                logits = logits + w["markov_head.markov_w2.weight"] @ g
            found.append((logits, h, token))
        return found

    def loss(self, documents, anchors, head, embedding, temperature, frozen=None):
        """Loss over the blocks, what each live draft said, and what counts as a constant in the gradient.

        `documents` are (tokens, labels, taps, hidden); `anchors` those of each document.
        """
        cfg, total, weights, found, constants = self.cfg, 0.0, 0.0, [], []
        for number, ((tokens, labels, taps, hidden), chosen) in enumerate(zip(documents, anchors, strict=True)):
            for anchor in chosen:
                for i, (logits, h, token) in enumerate(self.drafts(tokens, taps, anchor, embedding, head)):
                    at = anchor + 1 + i
                    if at >= len(tokens) or not labels[at]:
                        if cfg.cut_at_gap:
                            break
                        continue
                    q, p = softmax(logits / temperature), softmax(hidden[at - 1] @ head / temperature)
                    l1 = np.abs(q - p).sum()
                    value = cfg.loss.hard_cross_entropy * -np.log(q[tokens[at]]) + cfg.loss.l1 * l1
                    accepted = p[np.argmax(logits)] if getattr(cfg, "proposals", "") == "argmax" else 1 - l1 / 2
                    found.append((number, anchor, i, value, accepted, float(np.argmax(logits) == tokens[at])))
                    if getattr(cfg, "enable_confidence_head", False):
                        plain = 1 - np.abs(softmax(logits) - softmax(hidden[at - 1] @ head)).sum() / 2
                        constants.append((plain, np.concatenate([h, token])))
                        share, features = constants[-1] if frozen is None else frozen[len(constants) - 1]
                        c = sigmoid(
                            self.w["confidence_head.proj.weight"][0] @ features + self.w["confidence_head.proj.bias"][0]
                        )
                        value -= share * np.log(c) + (1 - share) * np.log(1 - c)
                    weight = np.exp(-i / cfg.loss_decay_gamma)
                    total, weights = total + weight * value, weights + weight
        return total / weights, weights, found, constants


@pytest.fixture(scope="session")
def reference():
    """(config, tensors) -> the draft in float64."""
    return Reference


@pytest.fixture(scope="session")
def split_documents():
    """(batch, target) -> per document: tokens, labels, taps, hidden; and its (row, start)."""

    def split(batch, target):
        documents, places = [], []
        segments = np.asarray(batch.segment_ids)
        for row in range(segments.shape[0]):
            for segment in range(1, segments[row].max() + 1):
                cells = np.flatnonzero(segments[row] == segment)
                arrays = (batch.tokens, batch.label_mask, target.taps, target.hidden)
                tokens, labels, taps, hidden = (np.asarray(a)[row, cells] for a in arrays)
                documents.append((tokens, labels > 0, taps.astype(np.float64), hidden.astype(np.float64)))
                places.append((row, int(cells[0])))
        return documents, places

    return split
