"""Publish: from the train layout to the rollout layout, policy and draft as one version.

    update(step n) -> publish: one jitted program lays out BOTH trees -> Published(version n) -> next generate

The published trees are new buffers: no array of the rollout side aliases one of the train side, nor the draft one of
the policy. A pair of different versions cannot be made, since only `Publisher.publish` makes a `Published`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from draftco_jax.models.compute import FloatName, cast_params
from draftco_jax.models.functional import ModelGraph, Params, graph_of
from draftco_jax.models.layer_runs import unstack_layers
from draftco_jax.models.transformer import Decoder, fuse_projections
from draftco_jax.types import PolicyVersion


@dataclass(frozen=True, slots=True)
class Published:
    """Weights that a generate call may use."""

    policy: Params
    draft: Params | None
    version: PolicyVersion


class Publisher:
    """Knows both layouts of the models of a run."""

    def __init__(
        self, policy_graph: ModelGraph, draft_graph: ModelGraph | None, draft_dtype: FloatName = "float32"
    ) -> None:
        self._train_graphs = (policy_graph, draft_graph)
        self._draft_dtype: FloatName = draft_dtype
        self._relayout = jax.jit(self._to_rollout)

    def rollout_graphs(self, policy: Params, draft: Params | None) -> tuple[ModelGraph, ModelGraph | None]:
        """Structures of the published models; the trees give shapes only."""
        policy_graph, draft_graph = self._train_graphs
        fused_draft = None if draft_graph is None or draft is None else _fused_graph(draft_graph, draft)
        return _fused_graph(*_one_by_one(policy_graph, policy)), fused_draft

    def publish(self, policy: Params, draft: Params | None, version: PolicyVersion) -> Published:
        """Lay both trees out for rollouts and stamp them."""
        policy, draft = jax.block_until_ready(self._relayout(policy, draft))
        return Published(policy, draft, version)

    def _to_rollout(self, policy: Params, draft: Params | None) -> tuple[Params, Params | None]:
        policy_graph, draft_graph = self._train_graphs
        fused_draft = None
        if draft is not None and draft_graph is not None:
            fused_draft = _fused_params(draft_graph, cast_params(draft, self._draft_dtype))
        graph, policy = _one_by_one(policy_graph, policy)
        module: Decoder = graph.merge(policy)
        return _fused_params(graph, cast_params(policy, module.compute.dtype)), fused_draft


def _one_by_one(graph: ModelGraph, params: Params) -> tuple[ModelGraph, Params]:
    """A policy with its layers one by one, which decoding is faster with; they may be stacked for training."""
    if "runs" not in params:
        return graph, params
    module = graph.merge(jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params))
    compute = replace(module.compute, scan_layers=False)
    return graph_of(partial(module.cfg.build, compute=compute)), unstack_layers(params, module.cfg.runs)


def _fused_params(graph: ModelGraph, params: Params) -> Params:
    module = graph.merge(params)
    fuse_projections(module)
    fused = nnx.to_pure_dict(nnx.state(module, nnx.Param))
    return jax.tree.map(jnp.copy, fused)


def _fused_graph(graph: ModelGraph, params: Params) -> ModelGraph:
    def build() -> nnx.Module:
        module = graph.merge(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), params))
        fuse_projections(module)
        return module

    graphdef, _, _ = nnx.split(nnx.eval_shape(build), nnx.Param, ...)
    return ModelGraph(graphdef, graph.constants)
