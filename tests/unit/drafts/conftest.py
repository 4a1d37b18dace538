"""A tiny EAGLE-3 draft, what it learns from, and ragged documents packed into rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.drafts.base import Target
from draftco_jax.drafts.eagle3.checkpoint import graph_with_map
from draftco_jax.drafts.eagle3.config import Eagle3Config
from draftco_jax.models.functional import ModelGraph, abstract_params
from draftco_jax.types import PackedBatch

VOCAB, WIDTH, ROWS, TOKENS = 19, 16, 5, 14
KEPT = np.array([1, 2, 4, 5, 7, 8, 9, 11, 12, 15, 18], np.int32)  # ids of the reduced draft vocabulary


class Draft(NamedTuple):
    """Sizes, structure, parameters, and the target ids of the draft ids."""

    cfg: Eagle3Config
    graph: ModelGraph
    params: dict[str, Any]
    kept: np.ndarray


class Document(NamedTuple):
    """A text and where its labels are."""

    tokens: np.ndarray
    labels: np.ndarray


def lively(params, seed):
    """Weights of such a size that attention is not flat, and norms that are not 1: a mistake in either shows."""
    rng = np.random.default_rng(seed)

    def draw(leaf):
        noise = rng.normal(size=leaf.shape)
        return jnp.asarray(1 + 0.3 * noise if leaf.ndim == 1 else noise * leaf.shape[0] ** -0.5, leaf.dtype)

    return jax.tree.map(draw, params)


@pytest.fixture(scope="session")
def make_draft():
    """Keyword changes of the config -> a draft with lively weights."""

    def make(**changes) -> Draft:
        values: dict[str, Any] = {
            "tap_layers": (0, 1),
            "vocab_size": VOCAB,
            "draft_vocab_size": VOCAB,
            "hidden_size": WIDTH,
            "intermediate_size": 24,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "passes": 3,
        }
        cfg = Eagle3Config(**(values | changes))
        reduced = cfg.draft_vocab_size < cfg.vocab_size
        kept = KEPT if reduced else np.arange(cfg.vocab_size, dtype=np.int32)
        graph = graph_with_map(cfg, KEPT if reduced else None)
        return Draft(cfg, graph, lively(abstract_params(cfg.build), 1), kept)

    return make


@pytest.fixture(scope="session", params=["full", "reduced"])
def draft(request, make_draft) -> Draft:
    """With the whole vocabulary, then with eleven ids of it."""
    return make_draft(draft_vocab_size=VOCAB if request.param == "full" else KEPT.size)


@pytest.fixture(scope="session")
def full_draft(make_draft) -> Draft:
    return make_draft()


@pytest.fixture(scope="session")
def documents() -> list[Document]:
    """Lengths 6, 5, 2 (too short for any label), 9, 3; one token amid the longest answer is not supervised."""
    rng = np.random.default_rng(2)
    made = []
    for length, prompt in ((6, 2), (5, 1), (2, 1), (9, 3), (3, 1)):
        made.append(Document(rng.integers(1, VOCAB, length).astype(np.int32), np.float32(np.arange(length) >= prompt)))
    made[3].labels[6] = 0.0
    return made


PACKED = ((0, 0), (0, 6), (1, 0), (1, 2), (1, 11))  # (row, start); three cells of row 0 and rows 2 to 4 are padding
ALONE = ((0, 0), (1, 0), (2, 0), (3, 0), (4, 0))


def lay_out(documents, places, values):
    """A batch of the documents at these places, and values given per document in the same cells (zeros elsewhere)."""
    shape = (ROWS, TOKENS)
    tokens, positions, segments, ids = np.zeros((4, *shape), np.int32)
    labels = np.zeros(shape, np.float32)
    laid = [np.zeros((*shape, v[0].shape[-1]), np.float32) for v in values]
    for i, (document, (row, start)) in enumerate(zip(documents, places, strict=True)):
        cells = slice(start, start + len(document.tokens))
        tokens[row, cells], labels[row, cells] = document
        positions[row, cells] = np.arange(len(document.tokens))
        segments[row, cells] = segments[row].max() + 1
        ids[row, cells] = 70 + i
        for whole, part in zip(laid, values, strict=True):
            whole[row, cells] = part[i]
    zeros = np.zeros(shape, np.float32)
    batch = PackedBatch(*(jnp.asarray(a) for a in (tokens, positions, segments, labels, zeros, zeros, zeros, ids)))
    return batch, [jnp.asarray(whole) for whole in laid]


@pytest.fixture(scope="session")
def lay_out_target(documents):
    """ "packed" or "alone" -> the documents in rows, and the same target features and states in both."""
    rng = np.random.default_rng(3)
    taps, hidden = (
        [rng.normal(size=(len(d.tokens), w)).astype(np.float32) for d in documents] for w in (2 * WIDTH, WIDTH)
    )
    head, embedding = (jnp.asarray(rng.normal(size=s) * 0.5, jnp.float32) for s in ((WIDTH, VOCAB), (VOCAB, WIDTH)))

    def make(layout: str) -> tuple[PackedBatch, Target]:
        batch, laid = lay_out(documents, {"packed": PACKED, "alone": ALONE}[layout], (taps, hidden))
        return batch, Target(*laid, head, embedding)

    return make
