"""A run's update on its mesh: what lies where, and the ways there and back.

    checkpoint, publish          layers one by one, on one device
    place_policy / gathered      <-> stages (`pipeline.layout`), spread over the mesh
    place_state                  a fresh state; drafts are whole on every device
    place_batch                  packed rows, padded to what mesh and micro-batches need

Without a mesh (all sizes 1) everything here hands on what it is given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from jaxtyping import Array

from draftco_jax.context_parallel import PackedRows
from draftco_jax.data.packing import pad_rows
from draftco_jax.distributed.axes import make_mesh
from draftco_jax.distributed.sharding import shardings
from draftco_jax.drafts.base import DraftConfig
from draftco_jax.errors import UserError
from draftco_jax.models.compute import ComputeConfig
from draftco_jax.models.functional import ModelGraph, Params, abstract_params, graph_of
from draftco_jax.models.transformer import DecoderConfig
from draftco_jax.pipeline.layout import from_stages, to_stages
from draftco_jax.pipeline.spec import PipelineSpec
from draftco_jax.pipeline.staged import StagedDecoder
from draftco_jax.training.mesh_config import MeshConfig
from draftco_jax.training.objective import ObjectiveSpec, reference_logprobs
from draftco_jax.training.update import (
    Optimizers,
    TrainState,
    UpdateFn,
    batch_spec,
    check_rows,
    init_state,
    make_update,
    place_batch,
    place_policy,
    place_state,
    policy_specs,
    state_layout,
)
from draftco_jax.types import PackedBatch


@dataclass(frozen=True, kw_only=True)
class TrainLayout:
    """Made by `make_layout`."""

    cfg: MeshConfig
    packed: PackedRows
    pipeline: PipelineSpec | None
    mesh: Mesh | None
    graph: ModelGraph
    """Of the policy as the update holds it."""
    whole_graph: ModelGraph
    """Of the policy before `stacked` and after `gathered`."""

    # ---- models ----

    def stacked(self, policy: Params) -> Params:
        """The tree that the update holds, wherever the arrays are."""
        return policy if self.pipeline is None else to_stages(policy, self.pipeline.layout)

    def shapes(self, policy: Params) -> Params:
        """That tree without its arrays."""
        return jax.eval_shape(self.stacked, policy)

    def place_policy(self, policy: Params) -> Params:
        """A policy on its devices."""
        if self.mesh is None:
            return policy
        return place_policy(self.stacked(policy), self.graph, self.packed, self.mesh, self.pipeline)

    def place_reference(self, policy: Params) -> Params:
        """The policy of the penalty; all its layers are on every stage."""
        if self.mesh is None:
            return policy
        specs = policy_specs(self.whole_graph, policy, self.packed, self.mesh)
        return jax.device_put(policy, shardings(specs, self.mesh))

    def everywhere(self, tree: Any) -> Any:
        """Whole on every device."""
        return tree if self.mesh is None else jax.device_put(tree, NamedSharding(self.mesh, PartitionSpec()))

    def gathered(self, policy: Params) -> Params:
        """A policy of the update, layers one by one, on one device."""
        policy = self.on_one_device(policy)
        return policy if self.pipeline is None else from_stages(policy, self.pipeline.layout)

    def on_one_device(self, tree: Any) -> Any:
        """The same arrays, bound to no device, so that programs of one device are those of a run without a mesh."""
        return tree if self.mesh is None else jax.tree.map(jnp.asarray, jax.device_get(tree))

    def start(self, policy: Params, draft: Params | None, optimizers: Optimizers, spec: ObjectiveSpec) -> TrainState:
        """The state of step 0; pass draft None unless it is trained.

        Its arrays may be the ones given, or share memory with them, so that an update takes these too.
        """
        state = init_state(self.place_policy(policy), self.everywhere(draft), optimizers)
        return state if self.mesh is None else place_state(state, spec, self.mesh)

    def start_shapes(
        self, policy: Params, draft: Params | None, optimizers: Optimizers, spec: ObjectiveSpec
    ) -> TrainState:
        """That state without its arrays: a `jax.ShapeDtypeStruct` for each, with where it lies."""
        state = jax.eval_shape(partial(init_state, optimizers=optimizers), self.shapes(policy), draft)
        if self.mesh is None:
            here = SingleDeviceSharding(jax.devices()[0])
            places = jax.tree.map(lambda _: here, state)
        else:
            places = state_layout(state, spec, self.mesh)
        struct = lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)  # noqa: E731
        return jax.tree.map(struct, state, places)

    # ---- batches ----

    def place_batch(self, batch: PackedBatch, draft_cfg: DraftConfig | None) -> PackedBatch:
        """Whole rows from the host, checked, padded and spread.

        Rows are dealt out to devices and micro-batches in turn: packing fills the first rows and leaves the last empty.
        """
        if self.mesh is None:
            check_rows(batch, self.packed, draft_cfg)
            return batch
        groups, (rows, tokens) = self.cfg.row_groups, batch.tokens.shape
        reach = 1 if draft_cfg is None else draft_cfg.label_reach
        padded = pad_rows(batch, -(-rows // groups) * groups, self.cfg.row_tokens(tokens, reach))
        dealt = np.arange(padded.tokens.shape[0]).reshape(-1, groups).T.reshape(-1)
        padded = jax.tree.map(lambda x: np.asarray(x)[dealt], padded)
        return place_batch(padded, self.packed, self.mesh, draft_cfg=draft_cfg, pipeline=self.pipeline)

    # ---- the update ----

    def make_update(self, spec: ObjectiveSpec, optimizers: Optimizers) -> UpdateFn:
        """`training.update.make_update` on the mesh; `reference` is a policy of `place_reference` in every case.

        The new state takes the memory of the old one, which cannot be read any more: with bfloat16 parameters a state
        has 14 bytes for each (2, and 4 each of copy and moments), and is there once.
        """
        update = make_update(spec, optimizers, self.mesh, donate=True)
        if self.pipeline is None:
            return update
        logprobs = self._reference_logprobs(spec)

        def run(
            state: TrainState,
            batch: PackedBatch,
            draft_loss_weight: Array,
            reference: Params | None = None,
            frozen_draft: Params | None = None,
        ) -> tuple[TrainState, dict[str, Array]]:
            of_labels = None if reference is None else logprobs(reference, batch)
            return update(state, batch, draft_loss_weight, of_labels, frozen_draft)

        return run

    def make_rest(self, spec: ObjectiveSpec, optimizers: Optimizers) -> UpdateFn:
        """An update of the policy alone, which is compiled when it is first called; takes what `make_update` takes."""
        alone = replace(spec, draft_graph=None, draft_cfg=None)
        update = self.make_update(alone, Optimizers(optimizers.policy, None))

        def run(
            state: TrainState,
            batch: PackedBatch,
            draft_loss_weight: Array,
            reference: Params | None = None,
            frozen_draft: Params | None = None,
        ) -> tuple[TrainState, dict[str, Array]]:
            without = state._replace(draft=None, draft_optimizer=None)
            after, metrics = update(without, batch, draft_loss_weight, reference, None)
            return after._replace(draft=state.draft, draft_optimizer=state.draft_optimizer), metrics

        return run

    def _reference_logprobs(self, spec: ObjectiveSpec) -> Callable[[Params, PackedBatch], Array]:
        """Log-probs of the labels [R, T] by a policy with all layers on every stage, spread as the batch is."""
        mesh, packed = self.mesh, self.packed
        assert mesh is not None
        whole = replace(spec, policy_graph=self.whole_graph, pipeline=None)

        def of_device(reference: Params, batch: PackedBatch) -> Array:
            return reference_logprobs(packed.varying(reference), batch, whole)

        def run(reference: Params, batch: PackedBatch) -> Array:
            specs = policy_specs(self.whole_graph, reference, packed, mesh)
            return jax.shard_map(
                of_device,
                mesh=mesh,
                in_specs=(specs, batch_spec(packed)),
                out_specs=batch_spec(packed),
                axis_names=set(mesh.axis_names),
                check_vma=True,
            )(reference, batch)

        return jax.jit(run)


def make_layout(
    cfg: MeshConfig, policy: DecoderConfig, compute: ComputeConfig, *, on_devices: bool = True
) -> TrainLayout:
    """The layout of a policy's updates.

    Args:
        cfg: the mesh.
        policy: config of the policy.
        compute: how it is gone through; `whole_compute` says what its whole tree is made with.
        on_devices: False leaves the mesh out, to read a checkpoint where there are fewer devices.

    Raises:
        UserError: too few devices, or a dim of the policy that the mesh does not divide.
    """
    whole_graph = graph_of(partial(policy.build, compute=whole_compute(cfg, compute)))
    graph, pipeline, build = whole_graph, cfg.pipeline(policy), None
    if pipeline is not None:
        stages = pipeline.layout
        build = lambda rngs: StagedDecoder(policy, stages, compute, rngs=rngs)  # noqa: E731
        graph = graph_of(build)
    packed, mesh = cfg.packed(), None
    if on_devices and cfg.sizes:
        mesh = _make_mesh(cfg)
        abstract = abstract_params(build or partial(policy.build, compute=whole_compute(cfg, compute)))
        try:
            shardings(policy_specs(graph, abstract, packed, mesh, pipeline), mesh)
        except ValueError as error:
            raise UserError(f"mesh: {error}") from error
    return TrainLayout(cfg=cfg, packed=packed, pipeline=pipeline, mesh=mesh, graph=graph, whole_graph=whole_graph)


def whole_compute(cfg: MeshConfig, compute: ComputeConfig) -> ComputeConfig:
    """How a policy is read and published: stages stack layers in their own way, so that it comes with these apart."""
    return replace(compute, scan_layers=False) if cfg.staged else compute


def _make_mesh(cfg: MeshConfig) -> Mesh:
    devices = jax.devices()
    if cfg.devices > len(devices):
        sizes = " x ".join(f"{axis}={size}" for axis, size in cfg.sizes.items())
        there = f"there {'is' if len(devices) == 1 else 'are'} {len(devices)}"
        raise UserError(
            f"mesh: {sizes} takes {cfg.devices} devices, but {there} ({devices[0].platform}); use smaller sizes, or on "
            f"a CPU start with JAX_NUM_CPU_DEVICES={cfg.devices}"
        )
    return make_mesh(cfg.sizes, devices)
