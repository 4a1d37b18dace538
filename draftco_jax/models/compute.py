"""How a model is held and computed: dtypes, layers in a loop or one by one, what is kept for the backward.

None of this is part of what the model is: a checkpoint loads under any of it, and results differ by rounding alone.

What stays float32 whatever the dtypes are: statistics of norms and softmax, routing, recurrent states and decays,
logits, log-probs, losses, gradient sums and optimizer state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from draftco_jax.context_parallel import save_ring_policy

Params = dict[str, Any]
FloatName = Literal["float32", "bfloat16"]
Remat = Literal["none", "attention", "block"]

_ALWAYS_FLOAT32 = ("A_log", "dt_bias", "D", "sinks", "e_score_correction_bias")
"""Arrays of a few numbers a head or an expert that decide much: decays, steps, router corrections."""


@dataclass(frozen=True, kw_only=True)
class DtypeConfig:
    """Of one model of a run: policy and draft each have one."""

    dtype: FloatName = "float32"
    """Of activations, of what matmuls read, of key-value caches and of published weights; matmuls accumulate in
    float32."""
    parameter_dtype: FloatName = "float32"
    """Of the weights. With bfloat16 the optimizer keeps a float32 copy of each, and steps are taken on that."""

    def __post_init__(self) -> None:
        """Refuse a pair of dtypes that would throw digits away at every step."""
        if self.dtype == "float32" and self.parameter_dtype == "bfloat16":
            raise ValueError(
                "parameter_dtype=bfloat16 must go with dtype=bfloat16: float32 activations of rounded weights cost "
                "twice and gain nothing; change one of them"
            )

    def cast_parameters(self, module: nnx.Module) -> None:
        """Give a fresh module's parameters their dtype."""
        for path, variable in nnx.iter_graph(module):
            if isinstance(variable, nnx.Param):
                dtype = parameter_dtype(path, self.parameter_dtype)
                variable.set_value(variable.get_value().astype(dtype))


@dataclass(frozen=True, kw_only=True)
class ComputeConfig(DtypeConfig):
    """The same, and how the layers of a policy are gone through."""

    scan_layers: bool = False
    """Layers of one kind are one stacked array and one loop: what is compiled does not grow with the depth. Small
    models run faster one by one."""
    remat: Remat = "none"
    """What the backward makes again. none: nothing. attention: each block, but for the results of attention, so that no
    ring is sent twice. block: all of each block."""
    step_matmul: Literal["xla", "skinny"] = "xla"
    """What multiplies in rollouts. skinny: a compiled kernel for few rows on CPUs (`pallas_kernels.skinny_matmul`),
    whose weights are packed at publish. Training has no part in it."""

    def __post_init__(self) -> None:
        """Refuse what the kernel has no product for."""
        super().__post_init__()
        if self.step_matmul == "skinny" and self.dtype != "float32":
            raise ValueError(f"step_matmul='skinny' must go with dtype=float32, not {self.dtype}; change one of them")

    def kept(self, block: Callable[..., Any], *, in_scan: bool) -> Callable[..., Any]:
        """`block` as it is to be differentiated."""
        if self.remat == "none":
            return block
        policy = save_ring_policy() if self.remat == "attention" else None
        # Inside a loop nothing can be merged with the forward anyway, and the barriers would cost.
        return jax.checkpoint(block, policy=policy, prevent_cse=not in_scan)


FLOAT32 = ComputeConfig()
"""Everything float32, layers one by one."""


def cast_params(params: Params, wanted: Any) -> Params:
    """The tree with its parameters in `wanted`, but for those that are float32 in any case."""
    cast = lambda path, leaf: leaf.astype(parameter_dtype(path, wanted))  # noqa: E731
    return jax.tree_util.tree_map_with_path(cast, params)


def parameter_dtype(path: tuple[Any, ...], wanted: Any) -> Any:
    """Dtype of the parameter at a tree path: `wanted`, or float32 for routers and the few that are always so."""
    names = [str(getattr(key, "key", key)) for key in path]
    is_router = len(names) > 1 and names[-2] == "gate"
    return jnp.dtype(jnp.float32) if is_router or names[-1] in _ALWAYS_FLOAT32 else jnp.dtype(wanted)
