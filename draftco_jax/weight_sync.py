"""Publish: from the train layout to the rollout layout, policy and draft as one version.

    update(step n) -> publish: one jitted program lays out BOTH trees -> Published(version n) -> next generate

With `ComputeConfig.step_matmul` "skinny" the policy's matrices are packed here, once, for the kernel that multiplies
with them in every step.

The published trees are new buffers: no array of the rollout side aliases one of the train side, nor the draft one of
the policy. Each model keeps the version it was stamped with, and a `Published`, which is what generate takes, refuses
two that differ. A draft that is made of the policy (`drafts.base.MadeOfPolicy`) is made in the same program, of the
policy as it is published, so that it is of its version by construction.

On a mesh the train layout may be any of an update (stages, context, tensor, data); in that of rollouts (`ROLLOUT`) what
is split over the tensor axis stays so, and all else is whole on every device, projections laid side by side too. Where
rollouts go over the mesh themselves (`over_mesh`), these stay apart and split: side by side they could not be cut head
by head. Of a policy in stages one layer's array
of every virtual stage is gathered at a time, so that beside what comes in and what goes out a device holds little.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx, traverse_util
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from draftco_jax.context_parallel import WHOLE_ROWS, PackedRows
from draftco_jax.distributed.sharding import partition_specs, rollout_rules, shardings
from draftco_jax.drafts.base import MadeOfPolicy
from draftco_jax.models.compute import FloatName, cast_params
from draftco_jax.models.functional import ModelGraph, Params, graph_of
from draftco_jax.models.layer_runs import Run, unstack_layers
from draftco_jax.models.tensor_decoder import TensorDecoder, rollout_rows
from draftco_jax.models.transformer import Decoder, to_rollout_layout
from draftco_jax.pipeline.layout import StageLayout, from_stages
from draftco_jax.pipeline.staged import StagedDecoder
from draftco_jax.types import PolicyVersion

_LITTLE_MEMORY = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
"""The usual schedule on a CPU gathers all arrays at once."""


@dataclass(frozen=True, slots=True)
class Stamped:
    """One model in the rollout layout, with the version that it was published under."""

    params: Params
    version: PolicyVersion


@dataclass(frozen=True, slots=True)
class Published:
    """Weights that a generate call may use: a policy and its draft, of one version."""

    stamped_policy: Stamped
    stamped_draft: Stamped | None

    def __post_init__(self) -> None:
        """Refuse a mixed pair."""
        if self.stamped_draft is not None and self.stamped_draft.version != self.version:
            raise ValueError(
                f"draft version={self.stamped_draft.version.step} must be {self.version.step}, that of the policy; "
                "publish both in one call"
            )

    @property
    def policy(self) -> Params:
        """Of the policy."""
        return self.stamped_policy.params

    @property
    def draft(self) -> Params | None:
        """Of the draft, where there is one."""
        return None if self.stamped_draft is None else self.stamped_draft.params

    @property
    def version(self) -> PolicyVersion:
        """Of both."""
        return self.stamped_policy.version


class Publisher:
    """Knows both layouts of the models of a run.

    Args:
        policy_graph: of the train layout; layers one by one, stacked, or in stages.
        draft_graph: None without a draft.
        draft_dtype: of the published draft.
        mesh: that of the update; None on one device.
        packed: axes that weights are split over, as in the update.
        over_mesh: rollouts go over the mesh (`decoding.sharded`); False: on one of its devices.
    """

    def __init__(
        self,
        policy_graph: ModelGraph,
        draft_graph: ModelGraph | None,
        draft_dtype: FloatName = "float32",
        *,
        mesh: Mesh | None = None,
        packed: PackedRows = WHOLE_ROWS,
        over_mesh: bool = False,
    ) -> None:
        self._train_graphs = (policy_graph, draft_graph)
        self._draft_dtype: FloatName = draft_dtype
        self._mesh, self._packed = mesh, packed
        self._apart = over_mesh and packed.tensor_axis is not None
        self._relayout = jax.jit(self._to_rollout, compiler_options=None if mesh is None else _LITTLE_MEMORY)

    def rollout_graphs(self, policy: Params, draft: Params | None) -> tuple[ModelGraph, ModelGraph | None]:
        """Structures of the published models; the trees give shapes only."""
        policy_graph, draft_graph = self._train_graphs
        fused_draft = None if draft_graph is None or draft is None else _fused_graph(draft_graph, draft)
        module = self._policy_module(policy)
        layers = jax.eval_shape(partial(_one_by_one, module=module), policy)
        if self._apart:
            over = rollout_rows(self._packed)
            fused = graph_of(lambda rngs: TensorDecoder(module.cfg, over, module.compute, rngs=rngs))
        else:
            one_by_one = _graph_one_by_one(policy_graph, policy, module)
            fused = _fused_graph(one_by_one, layers)
            layers = jax.eval_shape(partial(_fused_params, one_by_one), layers)
        maker = self._draft_of_policy(draft)
        return fused, fused_draft if maker is None else _made_graph(maker, fused, layers)

    def publish(self, policy: Params, draft: Params | None, version: PolicyVersion) -> Published:
        """Lay both trees out for rollouts and stamp them."""
        policy, draft = jax.block_until_ready(self._relayout(policy, draft))
        return Published(Stamped(policy, version), None if draft is None else Stamped(draft, version))

    def lower(self, policy: Params, draft: Params | None) -> jax.stages.Lowered:
        """The program of a publish, to read off what it takes; shapes with shardings will do for the trees."""
        return self._relayout.lower(policy, draft)

    def _to_rollout(self, policy: Params, draft: Params | None) -> tuple[Params, Params | None]:
        laid_out, fused_draft = self._both_to_rollout(policy, draft)
        maker = self._draft_of_policy(draft)
        if maker is None:
            return laid_out, fused_draft
        module = self.rollout_graphs(policy, None)[0].merge(laid_out)
        made = _copies(nnx.to_pure_dict(nnx.state(maker.made_of(module), nnx.Param)))
        return laid_out, self._laid_out(made, jax.tree.map(lambda _: PartitionSpec(), made))

    def _both_to_rollout(self, policy: Params, draft: Params | None) -> tuple[Params, Params | None]:
        policy_graph, draft_graph = self._train_graphs
        fused_draft = None
        if draft is not None and draft_graph is not None:
            fused_draft = _copies(_fused_params(draft_graph, cast_params(draft, self._draft_dtype)))
            fused_draft = self._laid_out(fused_draft, jax.tree.map(lambda _: PartitionSpec(), fused_draft))
        module = self._policy_module(policy)
        policy = cast_params(policy, module.compute.dtype)  # first, so that less is moved
        graph = _graph_one_by_one(policy_graph, policy, module)
        if self._mesh is None:
            return _copies(_fused_params(graph, _one_by_one(policy, module))), fused_draft
        layers = jax.eval_shape(partial(_one_by_one, module=module), policy)
        laid_out = graph.merge(layers)
        if not self._apart:
            laid_out = _fused_graph(graph, layers).merge(jax.eval_shape(partial(_fused_params, graph), layers))
        rules = rollout_rules(self._packed.tensor_axis, self._packed.expert_axes)
        specs = partition_specs(laid_out, rules, self._mesh.shape)
        before = _before_fusing(layers, specs)
        if isinstance(module, StagedDecoder):
            policy = policy | {"stages": self._gathered(policy["stages"], before["layers"], module.layout)}
        policy = self._laid_out(_one_by_one(policy, module), before)
        policy = policy if self._apart else _fused_params(graph, policy)
        return self._laid_out(_copies(policy), specs), fused_draft

    def _draft_of_policy(self, draft: Params | None) -> MadeOfPolicy | None:
        """The draft of the train layout where its weights are made of the policy's."""
        draft_graph = self._train_graphs[1]
        if draft_graph is None or draft is None:
            return None
        module = draft_graph.merge(draft)
        return module if isinstance(module, MadeOfPolicy) else None

    def _policy_module(self, policy: Params) -> Decoder:
        module = _module(self._train_graphs[0], policy)
        if self._mesh is not None and module.compute.step_matmul == "skinny":
            raise ValueError("step_matmul='skinny' must have one device, not a mesh; set step_matmul=xla")
        return module

    def _gathered(self, stages: Any, specs: Any, layout: StageLayout) -> dict[int, Any]:
        """Arrays [K, repeats, ...] of the stages that give each layer's as one that all stages have."""
        assert self._mesh is not None
        mesh = self._mesh

        def gathered(leaf: jax.Array, spec: PartitionSpec) -> _Gathered:
            return _Gathered(leaf, NamedSharding(mesh, PartitionSpec(None, *spec)))

        def of_run(number: int, run: Run) -> dict[int, Any]:
            layers = [layout.example(run.layer(0, place)) for place in range(run.period)]
            return {p: jax.tree.map(gathered, stages[number][p], specs[layer]) for p, layer in enumerate(layers)}

        return {number: of_run(number, run) for number, run in enumerate(layout.runs)}

    def _laid_out(self, params: Any, specs: Any) -> Any:
        if self._mesh is None:
            return params
        return jax.lax.with_sharding_constraint(params, shardings(specs, self._mesh))


class _Gathered:
    """An array [K, repeats, ...] over stages that is gathered a repetition at a time, as `from_stages` reads it."""

    def __init__(self, leaf: jax.Array, sharding: NamedSharding) -> None:
        self._leaf, self._sharding = leaf, sharding
        self._found: dict[int, jax.Array] = {}

    def __getitem__(self, at: tuple[int, int]) -> jax.Array:
        entry, repeat = at
        if repeat not in self._found:
            self._found[repeat] = jax.lax.with_sharding_constraint(self._leaf[:, repeat], self._sharding)
        return self._found[repeat][entry]


def _module(graph: ModelGraph, params: Params) -> Decoder:
    """The model with shapes for arrays."""
    return graph.merge(jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params))


def _one_by_one(params: Params, module: Decoder) -> Params:
    """Layers one by one, which decoding is faster with; for training they may be stacked or in stages."""
    if "runs" in params:
        return unstack_layers(params, module.cfg.runs)
    return from_stages(params, module.layout) if isinstance(module, StagedDecoder) else params


def _graph_one_by_one(graph: ModelGraph, params: Params, module: Decoder) -> ModelGraph:
    """Of the policy whose parameters `_one_by_one` gives."""
    if "layers" in params:
        return graph
    return graph_of(partial(module.cfg.build, compute=replace(module.compute, scan_layers=False)))


def _before_fusing(params: Params, specs: Params) -> Params:
    """A `PartitionSpec` for each array of the tree that is fused: what will be laid side by side is whole before."""
    fused, whole = traverse_util.flatten_dict(specs), PartitionSpec()
    return traverse_util.unflatten_dict({path: fused.get(path, whole) for path in traverse_util.flatten_dict(params)})


def _fused_params(graph: ModelGraph, params: Params) -> Params:
    module = graph.merge(params)
    to_rollout_layout(module)
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def _copies(params: Params) -> Params:
    """Arrays of their own: what a jitted function returns as it came is no new buffer."""
    return jax.tree.map(jnp.copy, params)


def _made_graph(maker: MadeOfPolicy, graph: ModelGraph, params: Params) -> ModelGraph:
    """Of the draft that is made of a policy of this structure."""
    zeros = lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), params)  # noqa: E731
    return graph_of(lambda rngs: maker.made_of(graph.merge(zeros())))


def _fused_graph(graph: ModelGraph, params: Params) -> ModelGraph:
    def build() -> nnx.Module:
        module = graph.merge(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), params))
        to_rollout_layout(module)
        return module

    graphdef, _, _ = nnx.split(nnx.eval_shape(build), nnx.Param, ...)
    return ModelGraph(graphdef, graph.constants)
