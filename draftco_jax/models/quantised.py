"""Weights as int8 with a float32 scale for each output channel, and the layers that multiply by them.

    s_o = max_i |w_io| / 127,   q_io = round(w_io / s_o),   |w_io - s_o q_io| <= s_o / 2   (a channel of zeros: s = 1)
    y_o = s_o * sum_i x_i q_io

The sum is taken in float32, of q in the dtype of x, which holds -127..127 exactly. Norms, biases, routers, taps of
convolutions, decays and projections onto one number stay as they are. For decoding alone: nothing is differentiated.

Letters: B rows, I inputs and O outputs of a kernel, E experts, M assignments of tokens to experts.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int8, Int32

from draftco_jax.models.grouped_matmul import grouped_matmul
from draftco_jax.models.layers import Linear, LinearGroup
from draftco_jax.models.moe import Experts, rows_of

LARGEST = 127
"""-128 is not used: the code is symmetric."""


class Quantised(NamedTuple):
    """An array w as s * q."""

    values: jax.Array  # i8, of the shape of w
    scales: jax.Array  # f32, without the dim that is summed over


def quantise(weights: Float[Array, "..."], summed: int) -> Quantised:
    """Codes and scales of an array; `summed` is the dim of the inputs, whose entries share a scale."""
    weights = weights.astype(jnp.float32)
    largest = jnp.max(jnp.abs(weights), axis=summed)
    scales = jnp.where(largest > 0, largest / LARGEST, 1.0)
    return Quantised(jnp.round(weights / jnp.expand_dims(scales, summed)).astype(jnp.int8), scales)


def dequantised(values: Int8[Array, "..."], scales: Float32[Array, "..."], summed: int) -> Float32[Array, "..."]:
    """s * q."""
    return values.astype(jnp.float32) * jnp.expand_dims(scales, summed)


def times(x: Float[Array, "*b I"], values: Int8[Array, "I O"], scales: Float32[Array, " O"]) -> Float32[Array, "*b O"]:
    """x @ (values * scales), the scales after the sum."""
    product = jnp.matmul(x, values.astype(x.dtype), preferred_element_type=jnp.float32)
    return product * jnp.expand_dims(scales, range(x.ndim - 1))


class QuantisedLinear(nnx.Module):
    """In the place of a `Linear`, or of a fused `LinearGroup` by way of `QuantisedGroup`."""

    def __init__(self, kernel: Float[Array, "I O"], bias: nnx.Param | None) -> None:
        values, scales = quantise(kernel, summed=0)
        self.values, self.scales, self.bias = nnx.Param(values), nnx.Param(scales), bias

    def __call__(self, x: Float[Array, "*b I"], reduce: str | None = None) -> Float[Array, "*b O"]:
        """Project the last dim, in the dtype of x."""
        assert reduce is None, "weights that are split are refused where they would be quantised"
        y = times(x, self.values[...], self.scales[...]).astype(x.dtype)
        return y if self.bias is None else y + jnp.expand_dims(self.bias[...].astype(x.dtype), range(x.ndim - 1))

    @property
    def inputs(self) -> int:
        """I."""
        return self.values.shape[0]


class QuantisedGroup(nnx.Module):
    """In the place of a `LinearGroup` in the rollout layout."""

    def __init__(self, group: LinearGroup) -> None:
        self.widths = group.widths
        self.side_by_side = QuantisedLinear(group.matrix(), group.bias if group.biased else None)

    def __call__(self, x: Float[Array, "*b I"]) -> tuple[Array, ...]:
        """All projections, in their order."""
        ends = [sum(self.widths[: i + 1]) for i in range(len(self.widths) - 1)]
        return tuple(jnp.split(self.side_by_side(x), ends, axis=-1))


class QuantisedExperts(Experts):
    """In the place of `Experts`: scales for each expert and output; biases stay."""

    def __init__(self, experts: Experts) -> None:
        self.cfg = experts.cfg
        for name in experts.kernels:
            values, scales = quantise(getattr(experts, name)[...], summed=1)
            setattr(self, name, nnx.Param(values))
            setattr(self, f"{name}_scales", nnx.Param(scales))
        if self.cfg.expert == "clamped_swiglu":
            self.gate_up_proj_bias, self.down_proj_bias = experts.gate_up_proj_bias, experts.down_proj_bias

    def product(
        self, name: str, rows: Float[Array, "M I"], sizes: Int32[Array, " E"], ids: Int32[Array, " M"]
    ) -> Float32[Array, "M O"]:
        """`Experts.product`; a row after the last group gets 0."""
        made = grouped_matmul(rows, getattr(self, name)[...], sizes, self.cfg.grouped_matmul)
        return made * rows_of(getattr(self, f"{name}_scales")[...], ids)


def quantise_layers(module: nnx.Module) -> None:
    """Replace every projection in a module in the rollout layout, itself and what it shares with others included."""
    for _, node in list(nnx.iter_graph(module)):
        if not isinstance(node, nnx.Module) or isinstance(node, Linear | LinearGroup | Experts):
            continue
        for name, part in list(vars(node).items()):
            if isinstance(part, LinearGroup):
                setattr(node, name, QuantisedGroup(part))
            elif isinstance(part, Linear) and part.matrix().shape[1] > 1:
                setattr(node, name, QuantisedLinear(part.matrix(), part.bias if part.biased else None))
            elif isinstance(part, Experts):
                setattr(node, name, QuantisedExperts(part))
