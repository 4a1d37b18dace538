"""Weights that a run starts from: read or drawn, and what is kept of them.

An update takes the memory of the state before it, so that the first one takes the memory of these weights. What is read
later on (the policy of the penalty, the draft that is not trained) is kept in arrays of its own, and no more than that.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from draftco_jax.checkpoint import fingerprint
from draftco_jax.config import RunConfig, resolve_checkpoint
from draftco_jax.drafts.base import DraftConfig
from draftco_jax.drafts.catalog import family_of
from draftco_jax.errors import UserError
from draftco_jax.models.compute import cast_params
from draftco_jax.models.functional import ModelGraph, Params, graph_of, initialise
from draftco_jax.models.hf_weights import load_policy
from draftco_jax.pretrain_config import AnyConfig
from draftco_jax.training.train_layout import TrainLayout, whole_compute

# Purposes of the run's root key; `run.py` has the others.
_POLICY_KEY, _DRAFT_KEY = 2**31, 2**31 + 1


@dataclass(frozen=True)
class Models:
    """Structures and starting weights. A state made of them takes them over: let go of them once there is one."""

    policy_graph: ModelGraph
    policy: Params
    draft_graph: ModelGraph | None
    draft: Params | None

    @cached_property
    def fingerprints(self) -> dict[str, int]:
        """One number for each model's starting weights, and the draft's vocabulary map."""
        constants = {} if self.draft_graph is None else self.draft_graph.constants
        return {"policy": fingerprint(self.policy), "draft": fingerprint({"weights": self.draft, "map": constants})}


@dataclass(frozen=True)
class Kept:
    """What a run keeps of its starting weights; no array is one of `Models`."""

    policy_shapes: Params
    """The policy's tree, layers one by one or stacked as the config has them, without its arrays."""
    fingerprints: dict[str, int]
    """Of both models (`Models.fingerprints`)."""
    reference: Params | None
    """The policy that the KL penalty pulls towards; None where there is no penalty."""
    draft: Params | None
    """The draft before the first step, whole on every device: what a frozen draft stays, and the twin of a co-trained
    one. None with speculation off."""


def keep(models: Models, layout: TrainLayout, *, reference: bool) -> Kept:
    """Copies on the devices of an update; `reference` says whether a penalty reads the starting policy."""
    return Kept(
        policy_shapes=jax.eval_shape(lambda policy: policy, models.policy),
        fingerprints=models.fingerprints,
        # Placing an array may leave one of its pieces where it is.
        reference=_copies(layout.place_reference(models.policy)) if reference else None,
        draft=None if models.draft is None else _copies(layout.everywhere(models.draft)),
    )


def _copies(params: Params) -> Params:
    return jax.tree.map(jnp.copy, params)


def load_models(cfg: RunConfig, key: Array) -> Models:
    """Read the checkpoints the config names, or draw weights."""
    graph, policy = load_target(replace(cfg, policy_compute=whole_compute(cfg.mesh, cfg.policy_compute)), key)
    if cfg.speculation == "off" or cfg.draft is None:
        return Models(graph, policy, None, None)
    family = family_of(cfg.draft)
    if cfg.draft_checkpoint is None or family.load is None:
        draft_graph, draft = initialise(cfg.draft.build, jax.random.fold_in(key, _DRAFT_KEY))
        draft = cast_params(family.from_policy(draft, policy), cfg.draft_compute.parameter_dtype)
        return Models(graph, policy, draft_graph, draft)
    draft_graph, draft = load_trained_draft(cfg.draft, cfg.draft_checkpoint)
    return Models(graph, policy, draft_graph, cast_params(draft, cfg.draft_compute.parameter_dtype))


def load_target(cfg: AnyConfig, key: Array) -> tuple[ModelGraph, Params]:
    """The policy of a config: read from its checkpoint, or drawn."""
    build = partial(cfg.policy.build, compute=cfg.policy_compute)
    if cfg.policy_checkpoint is None:
        return initialise(build, jax.random.fold_in(key, _POLICY_KEY))
    found, policy = load_policy(resolve_checkpoint(cfg.policy_checkpoint), compute=cfg.policy_compute)
    if found != cfg.policy:
        raise _other_sizes("policy", cfg.policy_checkpoint, found, cfg.policy)
    return graph_of(build), policy


def load_trained_draft(cfg: DraftConfig, checkpoint: str) -> tuple[ModelGraph, Params]:
    """Structure and weights of a draft's checkpoint, which must hold the draft of the config."""
    load = family_of(cfg).load
    assert load is not None, "families without weights have no checkpoint: the config was checked"
    found, graph, draft = load(resolve_checkpoint(checkpoint), cfg)
    if found != cfg:
        raise _other_sizes("draft", checkpoint, found, cfg)
    return graph, draft


def _other_sizes(part: str, checkpoint: str, found: Any, wanted: Any) -> UserError:
    names = [field.name for field in fields(wanted) if getattr(found, field.name) != getattr(wanted, field.name)]
    differences = ", ".join(
        f"{name}={getattr(found, name)} where {part}.{name}={getattr(wanted, name)}" for name in names
    )
    return UserError(
        f"{part}_checkpoint={checkpoint} must hold the {part} of the config, but has {differences}; "
        f"give the checkpoint of this {part}, or set {part} to what the checkpoint holds"
    )
