"""One optimizer group: AdamW with its own schedule and its own gradient clip; its state may be split over `data`.

Devices of the data axis hold the same parameters. Each may keep the optimizer state of a part of every array alone:
gradients are summed so that each device gets its part (reduce-scatter), steps are taken on parts, and the new
parameters are gathered. A part is a stretch of the first dim that is whole in the layout of the parameters and can be
divided; arrays without such a dim, a few norms at most, keep their state whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from draftco_jax.distributed.axes import MeshAxis
from draftco_jax.distributed.sharding import shardings
from pallas_kernels.manual_axes import cast, varying_axes


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW and its schedule; policy and draft each have one."""

    learning_rate: float
    schedule: Literal["constant", "cosine"] = "constant"
    """Shape after the warm-up; cosine ends at a tenth of learning_rate."""
    warmup_steps: int = 0
    """Updates of linear warm-up."""
    beta1: float = 0.9
    beta2: float = 0.98
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    """Global gradient norm of this group is clipped to this value."""

    def __post_init__(self) -> None:
        """Refuse values no run can use."""
        if self.learning_rate < 0:
            raise ValueError(f"learning_rate={self.learning_rate} must be >= 0; 0 freezes the group")
        for name in ("beta1", "beta2"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name}={getattr(self, name)} must be in [0, 1); 0.9 and 0.98 are usual")
        if self.epsilon <= 0.0 or self.weight_decay < 0.0:
            raise ValueError(
                f"epsilon={self.epsilon} must be > 0 and weight_decay={self.weight_decay} >= 0; use 1e-8 and 0"
            )
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps={self.warmup_steps} must be >= 0; 0 starts at full learning rate")
        if self.clip_norm <= 0:
            raise ValueError(f"clip_norm={self.clip_norm} must be > 0; give a large value to switch clipping off")


def learning_rate_schedule(cfg: OptimizerConfig, total_steps: int) -> optax.Schedule:
    """Learning rate by the number of updates already made.

    The first of n warm-up updates uses 1/n of the rate, the n-th all of it: none is spent on a rate of 0.
    """
    if cfg.schedule == "cosine":
        decay = max(total_steps, cfg.warmup_steps + 1)
        start = 0.0 if cfg.warmup_steps else cfg.learning_rate
        schedule = optax.warmup_cosine_decay_schedule(
            start, cfg.learning_rate, cfg.warmup_steps, decay, 0.1 * cfg.learning_rate
        )
        return (lambda count: schedule(count + 1)) if cfg.warmup_steps else schedule
    if cfg.warmup_steps:
        schedule = optax.warmup_constant_schedule(0.0, cfg.learning_rate, cfg.warmup_steps)
        return lambda count: schedule(count + 1)
    return optax.constant_schedule(cfg.learning_rate)


class MasterState(NamedTuple):
    """State of a group whose parameters are not all float32: steps are taken on a float32 copy."""

    inner: optax.OptState
    master: Any  # f32, the tree of the parameters; each parameter is its rounding


_UNDECAYED = ("weight", "bias", "A_log", "D", "sinks")
"""Norm weights and what else is no matrix, as is all that ends in bias: decay would pull them to 0, which for them is
no smaller model. Router corrections (`e_score_correction_bias`) and time steps (`dt_bias`) are among them."""


def decays(params: Any) -> Any:
    """Which parameters weight decay applies to: matrices, whatever dims stacking or experts add."""

    def one(path: tuple[Any, ...], leaf: Any) -> bool:
        del leaf
        name = str(getattr(path[-1], "key", path[-1]))
        return not (name in _UNDECAYED or name.endswith("bias"))

    return jax.tree_util.tree_map_with_path(one, params)


def make_optimizer(cfg: OptimizerConfig, total_steps: int) -> optax.GradientTransformation:
    """Clip by the group's own global norm, then AdamW; moments and arithmetic in float32 whatever comes in.

    Updates are float32 too. Where a parameter is not, `apply_gradients` adds them to its float32 copy, since a step is
    often smaller than the spacing of bfloat16 numbers.
    """
    chain = optax.chain(
        optax.clip_by_global_norm(cfg.clip_norm),
        optax.adamw(
            learning_rate_schedule(cfg, total_steps),
            b1=cfg.beta1,
            b2=cfg.beta2,
            eps=cfg.epsilon,
            weight_decay=cfg.weight_decay,
            mask=decays,
        ),
    )

    def init(params: optax.Params) -> optax.OptState:
        if all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params)):
            return chain.init(params)
        # astype returns a float32 array itself; an array that is in a state twice could not be given up to the next.
        copy = jax.tree.map(lambda leaf: jnp.copy(leaf) if leaf.dtype == jnp.float32 else _float32(leaf), params)
        return MasterState(chain.init(copy), copy)

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        # optax raises a Python float to an integer count, which strict promotion refuses.
        with jax.numpy_dtype_promotion("standard"):
            return chain.update(_float32(updates), state, _float32(params))

    return optax.GradientTransformation(init, update)


class StateLayout(NamedTuple):
    """How one group lies on a mesh; trees of the parameters with a `PartitionSpec` for each."""

    mesh: Mesh
    params: Any  # as the forward reads them
    state: Any  # moments, float32 copies and summed gradients


def optimizer_specs(specs: Any, params: Any, mesh: Mesh) -> Any:
    """A `PartitionSpec` for the optimizer state of each parameter: its own, with `data` on the first dim that is whole
    and a multiple of the devices of that axis. A parameter that `data` splits already keeps its own."""
    devices = mesh.shape.get(MeshAxis.DATA, 1)

    def one(spec: PartitionSpec, param: Any) -> PartitionSpec:
        dims = [*spec, *(None for _ in range(len(param.shape) - len(spec)))]
        names = [name for dim in dims for name in (dim if isinstance(dim, tuple) else (dim,))]
        free = [i for i, dim in enumerate(dims) if dim is None and param.shape[i] and param.shape[i] % devices == 0]
        if devices == 1 or not free or MeshAxis.DATA in names:
            return spec
        return PartitionSpec(*dims[: free[0]], str(MeshAxis.DATA), *tuple(spec)[free[0] + 1 :])

    return jax.tree.map(one, specs, params, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))


def sum_gradient(
    gradient: Float[Array, "..."], param: Float[Array, "..."], spec: PartitionSpec, axes: frozenset[str]
) -> Array:
    """Of each device of a shard_map, summed over those of `axes` that its parameter is the same on.

    `spec`: of the optimizer state. What that splits over `data` and the parameter is not comes out as this device's
    part. In the dtype of the parameter.
    """
    shared = axes - varying_axes(param)
    gradient = cast(gradient, shared)
    if MeshAxis.DATA in shared and MeshAxis.DATA in tuple(spec):
        dim = tuple(spec).index(MeshAxis.DATA)
        gradient = lax.psum_scatter(gradient, MeshAxis.DATA, scatter_dimension=dim, tiled=True)
        shared -= {MeshAxis.DATA}
    # Axis by axis: two numbers have one sum, so where axes have two devices no transport's order is in the result.
    for axis in sorted(shared, reverse=True):
        gradient = lax.psum(gradient, axis)
    return gradient.astype(param.dtype)


def state_shardings(state: optax.OptState, params: Any, layout: StateLayout) -> Any:
    """The tree of an optimizer state with a `NamedSharding` for each array: counters are whole."""
    structure, shapes = jax.tree.structure(params), [leaf.shape for leaf in jax.tree.leaves(params)]
    of_params, whole = shardings(layout.state, layout.mesh), NamedSharding(layout.mesh, PartitionSpec())

    def like_params(tree: Any) -> bool:
        return jax.tree.structure(tree) == structure and [leaf.shape for leaf in jax.tree.leaves(tree)] == shapes

    return jax.tree.map(lambda tree: of_params if like_params(tree) else whole, state, is_leaf=like_params)


def apply_gradients(
    optimizer: optax.GradientTransformation,
    gradients: Any,
    state: optax.OptState,
    params: Any,
    layout: StateLayout | None = None,
) -> tuple[Any, optax.OptState]:
    """Parameters and optimizer state after one step; with a layout they lie so, and gradients as the state does."""
    if layout is None:
        return _step(optimizer, gradients, state, params)
    parts, constrain = shardings(layout.state, layout.mesh), lax.with_sharding_constraint
    gradients, params = constrain((gradients, params), (parts, parts))
    new, state = _step(optimizer, gradients, state, params)
    state = constrain(state, state_shardings(state, params, layout))
    # First in parts: else rounding, and with it the gathering of float32, might be done in whole.
    return constrain(constrain(new, parts), shardings(layout.params, layout.mesh)), state


def _step(
    optimizer: optax.GradientTransformation, gradients: Any, state: optax.OptState, params: Any
) -> tuple[Any, optax.OptState]:
    if isinstance(state, MasterState):
        updates, inner = optimizer.update(gradients, state.inner, state.master)
        master = optax.apply_updates(state.master, updates)
        rounded = jax.tree.map(lambda exact, param: exact.astype(param.dtype), master, params)
        return rounded, MasterState(inner, master)
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state


def _float32(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)
