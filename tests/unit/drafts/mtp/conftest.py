"""Tiny multi-token prediction heads of every style, and ragged documents packed into rows with what the policy says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.drafts.base import Target
from draftco_jax.drafts.mtp.config import MtpConfig
from draftco_jax.losses.draft import DraftLossConfig
from draftco_jax.models.functional import ModelGraph, abstract_params, graph_of
from draftco_jax.models.gpt_oss import GptOssConfig
from draftco_jax.models.nemotron_h import NemotronHConfig
from draftco_jax.models.qwen3_5_moe import Qwen35MoeConfig
from draftco_jax.models.transformer import DecoderConfig
from draftco_jax.types import PackedBatch

VOCAB, WIDTH, ROWS, TOKENS = 13, 16, 5, 14
UNSEEN = range(9, 13)  # ids that no text holds
MIXED = DraftLossConfig(hard_cross_entropy=0.25, soft_cross_entropy=0.5, l1=0.5)
CASES: dict[str, dict[str, Any]] = {
    "qwen3_5": {"style": "qwen3_5", "attention_output_gate": True, "rotary_fraction": 0.5},
    "deepseek": {"style": "deepseek", "loss": MIXED},
    "mimo-step": {"style": "mimo", "attention_pattern": "step", "step_decay": 1.0},
    "deepseek-step": {"style": "deepseek", "attention_pattern": "step", "loss": MIXED},
}
BODIES: dict[str, DecoderConfig] = {
    "experts": Qwen35MoeConfig.tiny(),  # a gate, partial rotation, a shared expert, norms that add 1
    "sinks": GptOssConfig.tiny(),  # sinks, biases, scaled rotation
    "two-blocks": NemotronHConfig.tiny(),  # no rotation; attention and experts in blocks of their own
}
"""Policies whose blocks a head may be made of."""


def slow_but(names, *fast):
    """The names; those that are not fast run in `make test-all`."""
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in names]


class Head(NamedTuple):
    """Config, structure, parameters."""

    cfg: MtpConfig
    graph: ModelGraph
    params: dict[str, Any]

    def merge(self, params=None):
        return self.graph.merge(self.params if params is None else params)


def config(**changes) -> MtpConfig:
    sizes = {"vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 24, "rope_theta": 1e4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    return MtpConfig(**(sizes | heads | changes))


def head_like(body: str, **changes) -> MtpConfig:
    """A head of the blocks of a policy, in the sizes of the documents."""
    return MtpConfig.for_target(replace(BODIES[body], vocab_size=VOCAB), like_policy=True, **changes)


def make_head(cfg: MtpConfig | None = None, **changes) -> Head:
    """Weights of such a size that attention is not flat, and norms that are not 1: a mistake in either shows."""
    cfg, rng = config(**changes) if cfg is None else cfg, np.random.default_rng(1)
    centre = 0.0 if cfg.norm_rule == "offset" else 1.0

    def draw(leaf):
        noise = rng.normal(size=leaf.shape)
        return jnp.asarray(centre + 0.3 * noise if leaf.ndim == 1 else noise * leaf.shape[-2] ** -0.5, leaf.dtype)

    return Head(cfg, graph_of(cfg.build), jax.tree.map(draw, abstract_params(cfg.build)))


@pytest.fixture(scope="session", params=slow_but(CASES, "qwen3_5", "deepseek", "mimo-step"))
def head(request) -> Head:
    """Every style; the pattern of drafting and FastMTP's."""
    return make_head(**CASES[request.param])


@pytest.fixture(scope="session", params=slow_but(BODIES, "experts", "two-blocks"))
def block_head(request) -> Head:
    """Every kind of body that is not the dense layer."""
    return make_head(head_like(request.param))


# What the others join is here one by one: styles, the pattern of steps, experts, sinks.
@pytest.fixture(
    scope="session",
    params=slow_but([*CASES, *BODIES], "qwen3_5", "deepseek", "mimo-step", "experts", "sinks"),
)
def any_head(request) -> Head:
    """All of them."""
    return make_head(head_like(request.param)) if request.param in BODIES else make_head(**CASES[request.param])


@pytest.fixture(scope="session")
def make():
    """Keyword changes of the config -> a head."""
    return make_head


class Document(NamedTuple):
    """A text, where its labels are, and the policy's final states."""

    tokens: np.ndarray
    labels: np.ndarray
    hidden: np.ndarray


@pytest.fixture(scope="session")
def documents() -> list[Document]:
    """Lengths 6, 5, 2 (too short for any label), 9, 3; one token amid the longest answer is not supervised."""
    rng, made = np.random.default_rng(2), []
    for length, prompt in ((6, 2), (5, 1), (2, 1), (9, 3), (3, 1)):
        tokens = rng.integers(1, UNSEEN.start, length).astype(np.int32)
        labels = np.float32(np.arange(length) >= prompt)
        made.append(Document(tokens, labels, rng.normal(size=(length, WIDTH)).astype(np.float32)))
    made[3].labels[6] = 0.0
    return made


PLACES = {
    "packed": ((0, 0), (0, 6), (1, 0), (1, 2), (1, 11)),  # (row, start); three cells of row 0 and rows 2 to 4 are empty
    "alone": ((0, 0), (1, 0), (2, 0), (3, 0), (4, 0)),
}


def batch_of(tokens, positions, segments, labels) -> PackedBatch:
    zeros = np.zeros(np.shape(tokens), np.float32)
    ids = np.zeros(np.shape(tokens), np.int32)
    values = {
        "tokens": np.int32(tokens),
        "positions": np.int32(positions),
        "segment_ids": np.int32(segments),
        "label_mask": np.float32(labels),
        "label_logprobs": zeros,
        "label_advantages": zeros,
        "label_rewards": zeros,
        "sample_ids": ids,
    }
    return PackedBatch(**{name: jnp.asarray(value) for name, value in values.items()})


@pytest.fixture(scope="session")
def lay_out(documents):
    """ "packed" or "alone" -> the documents in rows, and the same target in both."""
    rng = np.random.default_rng(3)
    head, embedding = (jnp.asarray(rng.normal(size=s) * 0.5, jnp.float32) for s in ((WIDTH, VOCAB), (VOCAB, WIDTH)))

    def lay(layout: str) -> tuple[PackedBatch, Target]:
        tokens, positions, segments, labels = np.zeros((4, ROWS, TOKENS))
        hidden = np.zeros((ROWS, TOKENS, WIDTH), np.float32)
        for document, (row, start) in zip(documents, PLACES[layout], strict=True):
            cells = slice(start, start + len(document.tokens))
            tokens[row, cells], labels[row, cells], hidden[row, cells] = document
            positions[row, cells] = np.arange(len(document.tokens))
            segments[row, cells] = segments[row].max() + 1
        batch = batch_of(tokens, positions, segments, labels)
        return batch, Target(jnp.zeros((ROWS, TOKENS, 0)), jnp.asarray(hidden), head, embedding)

    return lay
