"""The joint update: one forward and backward for policy and draft, then each group's own optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from draftco_jax.context_parallel import PackedRows, check_documents
from draftco_jax.distributed.axes import MeshAxis
from draftco_jax.distributed.compiler_options import update_options
from draftco_jax.distributed.sharding import TRAIN, Axes, partition_specs, shardings, with_axes
from draftco_jax.drafts.base import DraftConfig
from draftco_jax.drafts.catalog import family_of
from draftco_jax.models.functional import ModelGraph
from draftco_jax.pipeline.spec import PipelineSpec
from draftco_jax.training.objective import ObjectiveSpec, across, global_counts, objective
from draftco_jax.training.optimizer import StateLayout, apply_gradients, optimizer_specs, state_shardings, sum_gradient
from draftco_jax.training.pipelined import pipelined_gradients
from draftco_jax.types import PackedBatch

Params = Any


class TrainState(NamedTuple):
    """All that an update changes. Draft fields are None where no draft is trained."""

    step: jax.Array  # i32[] optimizer steps taken
    policy: Params
    draft: Params | None
    policy_optimizer: optax.OptState
    draft_optimizer: optax.OptState | None


class Optimizers(NamedTuple):
    """One group each, with its own clip: a joint norm would make the policy depend on the draft."""

    policy: optax.GradientTransformation
    draft: optax.GradientTransformation | None


def init_state(policy: Params, draft: Params | None, optimizers: Optimizers) -> TrainState:
    """Step 0. Pass draft None unless it is trained."""
    policy_optimizer = optimizers.policy.init(policy)
    if draft is None or optimizers.draft is None:
        return TrainState(jnp.int32(0), policy, None, policy_optimizer, None)
    return TrainState(jnp.int32(0), policy, draft, policy_optimizer, optimizers.draft.init(draft))


def draft_updates(state: TrainState) -> int | None:
    """How many updates have trained the draft; None where none is trained."""
    if state.draft_optimizer is None:
        return None
    counts = optax.tree.get_all_with_path(state.draft_optimizer, "count")
    return int(counts[0][1])


UpdateFn = Callable[..., tuple[TrainState, dict[str, Array]]]


def make_update(
    spec: ObjectiveSpec, optimizers: Optimizers, mesh: Mesh | None = None, *, donate: bool = False
) -> UpdateFn:
    """Compile ``update(state, batch, draft_loss_weight, reference, frozen_draft) -> (state, metrics)``.

    With a mesh the batch is spread over it as `spec.packed` says, tokens in the order of its layout (`place_batch`),
    and so are the policy's parameters (`place_policy`). A draft is whole on every device. Optimizer states are split
    over `data` besides, unless `spec.shard_optimizer_state` is off (`place_state`). With `donate` the new state
    takes the memory of the old one, which cannot be read any more.
    """
    axes = spec.everywhere.mesh_axes
    if mesh is None and axes:
        raise ValueError(f"mesh=None must be the mesh with axes {axes} of spec; pass it")
    if mesh is not None:
        check_mesh(spec.everywhere, mesh)
    options = update_options(mesh, pipeline=spec.pipeline is not None)
    step = partial(update, spec=spec, optimizers=optimizers, mesh=mesh)
    return jax.jit(step, donate_argnums=(0,) if donate else (), compiler_options=options)


def check_mesh(packed: PackedRows, mesh: Mesh) -> None:
    """Refuse a mesh that lacks an axis, or whose context axis has another size than the layout's ranks."""
    missing = [axis for axis in packed.mesh_axes if axis not in mesh.shape]
    if missing or not packed.mesh_axes:
        raise ValueError(
            f"axes={packed.mesh_axes} of packed must name at least one axis of the mesh {dict(mesh.shape)}, and no "
            "other; set row_axes and context_axis, or pass mesh=None for one device"
        )
    if packed.context_axis is not None and (size := mesh.shape[packed.context_axis]) != packed.ranks:
        raise ValueError(f"ranks={packed.ranks} must be {size}, the size of axis {packed.context_axis!r}; set it so")


def check_rows(batch: PackedBatch, packed: PackedRows, draft_cfg: DraftConfig | None) -> None:
    """Refuse, on the host, whole rows that an update over `packed` would not compute as one device does.

    Documents must be stretches with positions 0, 1, 2, ...; a piece of a rank must hold what labels reach ahead; and
    every anchor must find a place.
    """
    check_documents(np.asarray(batch.segment_ids), np.asarray(batch.positions))
    layout = packed.row_layout(batch.tokens.shape[1])
    if draft_cfg is None:
        return
    if packed.ranks > 1 and draft_cfg.label_reach > layout.piece:
        raise ValueError(
            f"label_reach={draft_cfg.label_reach} of {type(draft_cfg).__name__} must be <= {layout.piece}, the tokens "
            f"of a piece of a row of {layout.tokens} over ranks={packed.ranks}; use longer rows, fewer ranks, or a "
            "longer stripe"
        )
    family_of(draft_cfg).check_batch(batch, draft_cfg, packed)


def place_batch(
    batch: PackedBatch,
    packed: PackedRows,
    mesh: Mesh,
    *,
    draft_cfg: DraftConfig | None,
    pipeline: PipelineSpec | None = None,
) -> PackedBatch:
    """Whole rows from the host, checked (`check_rows`), put in the order of the ranks and spread over the mesh."""
    check_mesh(across(packed, pipeline), mesh)
    check_rows(batch, packed, draft_cfg)
    rows, shards = batch.tokens.shape[0], math.prod(mesh.shape[axis] for axis in packed.row_axes)
    if rows % shards:
        raise ValueError(f"rows={rows} must be a multiple of {shards}, the devices of {packed.row_axes}; pad the batch")
    if pipeline is not None and rows // shards % pipeline.microbatches:
        raise ValueError(
            f"rows={rows // shards} of a device must be a multiple of microbatches={pipeline.microbatches}; pad them"
        )
    order = packed.row_layout(batch.tokens.shape[1]).order()
    sharding = NamedSharding(mesh, batch_spec(packed))
    return jax.tree.map(lambda x: jax.device_put(np.asarray(x)[:, order], sharding), batch)


def policy_specs(
    graph: ModelGraph, policy: Params, packed: PackedRows, mesh: Mesh, pipeline: PipelineSpec | None = None
) -> Params:
    """A `PartitionSpec` for each parameter of the policy: the train table, with the axes that `packed` names, and that
    of the stages where the policy is cut into some."""
    changed: dict[str, Axes] = {
        MeshAxis.TENSOR: packed.tensor_axis,
        MeshAxis.EXPERT: packed.expert_axes or None,
        MeshAxis.STAGE: None if pipeline is None else pipeline.stage_axis,
    }
    return partition_specs(graph.merge(policy), with_axes(TRAIN, changed), mesh.shape)


def place_policy(
    policy: Params, graph: ModelGraph, packed: PackedRows, mesh: Mesh, pipeline: PipelineSpec | None = None
) -> Params:
    """The policy's parameters, or a reference's, spread over the mesh."""
    check_mesh(across(packed, pipeline), mesh)
    return jax.device_put(policy, shardings(policy_specs(graph, policy, packed, mesh, pipeline), mesh))


def layout_of(spec: ObjectiveSpec, params: dict[str, Params], mesh: Mesh) -> dict[str, StateLayout]:
    """Of the models of an update, by name."""
    sharded = spec.shard_optimizer_state and MeshAxis.DATA in spec.packed.row_axes
    whole = jax.tree.map(lambda _: PartitionSpec(), params)

    def one(name: str) -> StateLayout:
        specs = whole[name]
        if name == "policy":
            specs = policy_specs(spec.policy_graph, params[name], spec.packed, mesh, spec.pipeline)
        return StateLayout(mesh, specs, optimizer_specs(specs, params[name], mesh) if sharded else specs)

    return {name: one(name) for name in params}


def state_layout(state: TrainState, spec: ObjectiveSpec, mesh: Mesh) -> TrainState:
    """The tree of a state with a `NamedSharding` for each array. Shapes will do for arrays, so that a state can be
    made where it is to lie: ``jax.jit(init, out_shardings=state_layout(jax.eval_shape(init, ...), spec, mesh))``."""
    layouts, whole = layout_of(spec, _models(state), mesh), NamedSharding(mesh, PartitionSpec())

    def group(name: str, params: Params | None, optimizer: optax.OptState | None) -> tuple[Any, Any]:
        if params is None or optimizer is None:
            return None, None
        return shardings(layouts[name].params, mesh), state_shardings(optimizer, params, layouts[name])

    policy, policy_optimizer = group("policy", state.policy, state.policy_optimizer)
    draft, draft_optimizer = group("draft", state.draft, state.draft_optimizer)
    return state._replace(
        step=whole, policy=policy, draft=draft, policy_optimizer=policy_optimizer, draft_optimizer=draft_optimizer
    )


def place_state(state: TrainState, spec: ObjectiveSpec, mesh: Mesh) -> TrainState:
    """A state spread over the mesh as an update keeps it; arrays may come from the host."""
    check_mesh(spec.everywhere, mesh)
    return jax.device_put(state, state_layout(state, spec, mesh))


def batch_spec(packed: PackedRows) -> PartitionSpec:
    """Rows over the row axes, tokens over the context axis."""
    return PartitionSpec(packed.row_axes or None, packed.context_axis)


def update(
    state: TrainState,
    batch: PackedBatch,
    draft_loss_weight: Array,
    reference: Params | None = None,
    frozen_draft: Params | None = None,
    *,
    spec: ObjectiveSpec,
    optimizers: Optimizers,
    mesh: Mesh | None = None,
) -> tuple[TrainState, dict[str, Array]]:
    """One optimizer step of every trained group; metrics are float32 scalars."""
    params = _models(state)
    layouts = {} if mesh is None else layout_of(spec, params, mesh)
    key = spec.draft_key(state.step)
    gradients, metrics = joint_gradients(spec, mesh)(params, batch, draft_loss_weight, reference, frozen_draft, key)
    policy, policy_optimizer = apply_gradients(
        optimizers.policy, gradients["policy"], state.policy_optimizer, state.policy, layouts.get("policy")
    )
    metrics["policy/gradient_norm"] = optax.tree.norm(gradients["policy"])
    draft, draft_optimizer = state.draft, state.draft_optimizer
    if draft is not None and draft_optimizer is not None and optimizers.draft is not None:
        draft, draft_optimizer = apply_gradients(
            optimizers.draft, gradients["draft"], draft_optimizer, draft, layouts.get("draft")
        )
        metrics["draft/gradient_norm"] = optax.tree.norm(gradients["draft"])
    return TrainState(state.step + 1, policy, draft, policy_optimizer, draft_optimizer), metrics


def joint_gradients(spec: ObjectiveSpec, mesh: Mesh | None) -> Callable[..., tuple[Params, dict[str, Array]]]:
    """``(params, batch, draft_loss_weight, reference, frozen_draft, key)`` -> gradients, metrics.

    Under a pipeline the gradients are made inside the shard_map, a micro-batch at a time. So they are where optimizer
    states are split over `data`: each device then gets the sum of its part alone. Else the shard_map is differentiated.
    """
    split = mesh is not None and spec.shard_optimizer_state and MeshAxis.DATA in spec.packed.row_axes
    if spec.pipeline is None and not split:
        return jax.grad(joint_loss(spec, mesh), has_aux=True)
    assert mesh is not None, "make_update refuses a pipeline without a mesh"
    axes, devices = frozenset(spec.everywhere.axes), mesh

    def spread(params: Params, batch: PackedBatch, weight: Array, *rest: Any) -> tuple[Params, dict[str, Array]]:
        layouts = layout_of(spec, params, devices)
        models, states = ({name: lay[i] for name, lay in layouts.items()} for i in (1, 2))

        def gradients(params: Params, batch: PackedBatch, weight: Array, *rest: Any) -> tuple[Params, dict[str, Array]]:
            reference, frozen_draft, key = rest
            counts = global_counts(batch, spec.draft_cfg, key, spec.packed, spec.algorithm)
            if spec.pipeline is not None:
                return pipelined_gradients(params, batch, counts, weight, reference, frozen_draft, spec, key, states)
            own = spec.packed.varying(params)
            found = jax.grad(objective, has_aux=True)
            gradients, metrics = found(own, batch, counts, weight, reference, frozen_draft, spec, key)
            one = lambda p, g, s: sum_gradient(g, p, s, axes)  # noqa: E731
            return jax.tree.map(one, params, gradients, states), metrics

        whole = PartitionSpec()
        if spec.pipeline is None:
            reference = whole if rest[0] is None else models["policy"]
        else:
            reference = batch_spec(spec.packed)
        run = jax.shard_map(
            gradients,
            mesh=devices,
            in_specs=(models, batch_spec(spec.packed), whole, reference, whole, whole),
            out_specs=(states, whole),
            axis_names=set(spec.everywhere.mesh_axes),
            check_vma=True,
        )
        return run(params, batch, weight, *rest)

    return spread


def _models(state: TrainState) -> dict[str, Params]:
    return {"policy": state.policy} | ({} if state.draft is None else {"draft": state.draft})


def joint_loss(spec: ObjectiveSpec, mesh: Mesh | None) -> Callable[..., tuple[Array, dict[str, Array]]]:
    """The objective with its own counts, ``(params, batch, draft_loss_weight, reference, frozen_draft, key)``.

    On a mesh it is one shard_map over the axes that batch and parameters are spread over. Each device gets its piece of
    the policy, and the whole draft. Inside they are typed as varying over the axes of the batch (`objective`), so that
    their gradients are summed over these once, at the end; gradients come out spread as the parameters are.
    """

    def loss(params: Params, batch: PackedBatch, weight: Array, *rest: Any) -> tuple[Array, dict[str, Array]]:
        reference, frozen_draft, key = rest
        counts = global_counts(batch, spec.draft_cfg, key, spec.packed, spec.algorithm)
        return objective(params, batch, counts, weight, reference, frozen_draft, spec, key)

    if mesh is None:
        return loss

    def spread(params: Params, batch: PackedBatch, weight: Array, *rest: Any) -> tuple[Array, dict[str, Array]]:
        whole = PartitionSpec()
        models = {name: layout.params for name, layout in layout_of(spec, params, mesh).items()}
        reference = whole if rest[0] is None else models["policy"]
        run = jax.shard_map(
            loss,
            mesh=mesh,
            in_specs=(models, batch_spec(spec.packed), whole, reference, whole, whole),
            out_specs=whole,
            axis_names=set(spec.packed.mesh_axes),
            check_vma=True,
        )
        return run(params, batch, weight, *rest)

    return spread
