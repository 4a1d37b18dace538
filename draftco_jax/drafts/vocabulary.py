"""Reduced draft vocabularies: which target ids a draft knows, as offsets in files and as ids in the module.

d2t, int64 [W], holds OFFSETS: target id = draft id + d2t[draft id]. t2d, bool [V], marks the target ids that are kept.
(EAGLE, SpecForge, vLLM.) In memory a draft holds the target ids themselves, i32 [W].
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import numpy as np
from flax import nnx

from draftco_jax.errors import UserError
from draftco_jax.models.functional import ModelGraph, split

CONSTANT = "draft_to_target"
"""Name of the module's variable."""


@runtime_checkable
class Vocabularies(Protocol):
    """The two sizes of a draft's config."""

    @property
    def vocab_size(self) -> int: ...  # noqa: D102

    @property
    def draft_vocab_size(self) -> int: ...  # noqa: D102


def vocabulary_map(cfg: Vocabularies, d2t: np.ndarray | None, t2d: np.ndarray | None, source: str) -> np.ndarray | None:
    """Target id of each draft id from offsets, checked; None for a full vocabulary."""
    for name, given, kind in (("d2t", d2t, np.integer), ("t2d", t2d, np.bool_)):
        if given is not None and not (given.ndim == 1 and np.issubdtype(given.dtype, kind)):
            raise UserError(
                f"{source}: {name} is {given.dtype} of shape {given.shape} but must be one row of "
                f"{'offsets' if name == 'd2t' else 'true and false'}; take it from the checkpoint as it was published"
            )
    if cfg.draft_vocab_size == cfg.vocab_size:
        if d2t is not None and np.any(d2t):
            raise UserError(
                f"{source}: d2t moves ids although draft_vocab_size={cfg.draft_vocab_size} is vocab_size, where draft "
                "and target ids are the same; set draft_vocab_size to the rows of lm_head"
            )
        if t2d is not None and not (t2d.size == cfg.vocab_size and t2d.all()):
            raise _disagree(source)
        return None
    if d2t is None:
        raise UserError(
            f"{source}: draft_vocab_size={cfg.draft_vocab_size} is below vocab_size={cfg.vocab_size} but there is no "
            "map from draft ids to target ids; give a checkpoint with d2t, or set draft_vocab_size to vocab_size"
        )
    ids = np.arange(d2t.size) + d2t.astype(np.int64)
    fits = ids.size == cfg.draft_vocab_size and ids.min() >= 0 and ids.max() < cfg.vocab_size
    if not fits or np.unique(ids).size != ids.size:
        raise UserError(
            f"{source}: d2t must map {cfg.draft_vocab_size} draft ids to different target ids below "
            f"{cfg.vocab_size}; it holds offsets, target id = draft id + d2t[draft id]"
        )
    if t2d is None and ids.size > 1 and np.all(np.diff(d2t) > 0):
        # Ids always rise from one draft id to the next; offsets do so only where no two neighbouring ids are kept.
        raise UserError(
            f"{source}: d2t rises at every entry, so it may be target ids, but it holds offsets by definition, "
            "target id = draft id + d2t[draft id]; give t2d too, which tells the two apart"
        )
    if t2d is not None and not (t2d.size == cfg.vocab_size and np.array_equal(np.flatnonzero(t2d), np.sort(ids))):
        raise _disagree(source)
    return ids.astype(np.int32)


def _disagree(source: str) -> UserError:
    return UserError(f"{source}: d2t and t2d name different target ids; take both from one checkpoint")


def map_tensors(cfg: Vocabularies, ids: np.ndarray | None) -> dict[str, np.ndarray]:
    """d2t and t2d of these target ids; None stands for the full vocabulary, whose offsets are zero."""
    ids = np.arange(cfg.vocab_size) if ids is None else np.asarray(ids).astype(np.int64)
    return {"d2t": ids - np.arange(ids.size), "t2d": np.isin(np.arange(cfg.vocab_size), ids)}


def graph_with_map(cfg: Any, ids: np.ndarray | None) -> ModelGraph:
    """Structure of a draft with its vocabulary map."""
    graph, _ = split(nnx.eval_shape(lambda: cfg.build(nnx.Rngs(0))))
    return ModelGraph(graph.graphdef, {} if ids is None else {CONSTANT: ids})


def kept_ids(counts: np.ndarray, size: int) -> np.ndarray:
    """The `size` most frequent target ids in rising order, so that the draft id is the rank among them: i32 [size].

    Args:
        counts: [V] how often the policy's own rollouts hold each token, supervised positions only.
        size: draft vocabulary. Of ids counted equally often the smaller ones are kept.
    """
    if counts.ndim != 1 or not 0 < size <= counts.size:
        raise ValueError(
            f"size={size} must be in 1..{counts.size}, the vocabulary that {counts.shape} counts are given for; "
            "count every target id once"
        )
    most = np.argsort(-np.asarray(counts, np.float64), kind="stable")[:size]
    return np.sort(most).astype(np.int32)
