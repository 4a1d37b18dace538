"""Layers shared by all policies and drafts.

Letters: B batch, T tokens, S cache slots, D model width, N query heads, K key-value heads, H head width, F hidden
width of the MLP, V vocabulary.

Every array is stated once, in the constructor of its module: shape, logical axes, initializer. Abstract trees,
shardings and checkpoints derive from that statement (`nnx.eval_shape`, the `logical_axes` and `units` metadata).

Over a tensor axis (`PackedRows.tensor_axis`) a module holds its rank's part of each array and reads how much that is
off the arrays. Projections into heads or hidden widths are split by columns, which needs nothing; those back into the
residual stream are split by rows, so that each rank has a part of a sum (`Linear`, `reduce`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from draftco_jax.context_parallel import WHOLE_ROWS, PackedRows
from pallas_kernels.manual_axes import cast, checks_types, varying_axes
from pallas_kernels.skinny_matmul import PackedWeight, pack, skinny_matmul, unpack

Initializer = Callable[..., Array]


def parameter(
    rngs: nnx.Rngs,
    shape: Sequence[int],
    axes: Sequence[str],
    init: Initializer,
    dtype: jnp.dtype = jnp.float32,
    *,
    units: Mapping[str, int] | None = None,
) -> nnx.Param:
    """State one array: shape, logical axes (one name per dim), initializer, dtype.

    `units`: of how many equal parts, none of which may be cut, a named dim consists (heads). Left out: of its entries.
    """
    if len(shape) != len(axes):
        raise ValueError(f"{axes=} must name each dim of {shape=}")
    stated = tuple(sorted((units or {}).items()))
    return nnx.Param(init(rngs.params(), tuple(shape), dtype), logical_axes=tuple(axes), units=stated)


def summed(y: Array, axis: str | None) -> Array:
    """The sum over a tensor axis of what its ranks have a part of each; None: y is whole."""
    if axis is None:
        return y
    if checks_types(axis) and axis not in varying_axes(y):
        raise ValueError(
            f"axis={axis!r} must be one that the weights behind {y.shape} are split over; give them the shardings of "
            "distributed.sharding"
        )
    return jax.lax.psum(y, axis)


NormRule = Literal["cast_first", "cast_last", "offset"]
"""Where a norm casts from float32 to the dtype of its input, and what it multiplies by.

cast_first   weight * cast(x_hat)              Llama, Qwen3, GPT-OSS
cast_last    cast(float32(weight) * x_hat)     Nemotron-H
offset       cast((1 + weight) * x_hat)        Qwen3.5: the weight is stored around 0
"""


class RMSNorm(nnx.Module):
    """y = weight * x_hat, x_hat = x / sqrt(mean(x^2) + eps) in float32, result in the dtype of x (`NormRule`)."""

    def __init__(
        self, width: int, *, eps: float, rngs: nnx.Rngs, axis: str = "embed", rule: NormRule = "cast_first"
    ) -> None:
        self.eps, self.rule = eps, rule
        init = nnx.initializers.zeros if rule == "offset" else nnx.initializers.ones
        self.weight = parameter(rngs, (width,), (axis,), init)

    def __call__(self, x: Float[Array, "*b D"]) -> Float[Array, "*b D"]:
        """Normalise the last dim."""
        x32 = x.astype(jnp.float32)
        normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        weight = jnp.expand_dims(self.weight[...], range(x.ndim - 1))
        if self.rule == "cast_first":
            return weight.astype(x.dtype) * normed.astype(x.dtype)
        weight = weight.astype(jnp.float32)
        return ((1.0 + weight if self.rule == "offset" else weight) * normed).astype(x.dtype)


def packed(kernel: Float[Array, "I O"]) -> nnx.Param:
    """A kernel in panels, for `project`: made once for a rollout layout, on one device."""
    return nnx.Param(pack(kernel).panels, logical_axes=("panels", "inputs", "panel"), units=())


def project(x: Float[Array, "*b I"], kernel: Float[Array, "..."], columns: int | None) -> Float[Array, "*b O"]:
    """x @ kernel in the dtype of x; `columns`: O of a kernel that is `packed`, None of one that is not."""
    if columns is None:
        return x @ kernel.astype(x.dtype)
    return skinny_matmul(x, PackedWeight(kernel, columns), implementation="native")


class Linear(nnx.Module):
    """y = x @ kernel (+ bias), kernel [in, out].

    `reduce`: the axis that the kernel's rows, and the last dim of x, are split over: the products are summed over it,
    and then the bias is added, once.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        axes: tuple[str, str],
        *,
        rngs: nnx.Rngs,
        init: Initializer | None = None,
        bias: bool = False,
        units: Mapping[str, int] | None = None,
    ) -> None:
        self.kernel = parameter(rngs, shape, axes, init or nnx.initializers.normal(0.02), units=units)
        self.biased, self.columns = bias, None
        if bias:
            self.bias = parameter(rngs, shape[1:], axes[1:], nnx.initializers.zeros, units=units)

    def __call__(self, x: Float[Array, "*b I"], reduce: str | None = None) -> Float[Array, "*b O"]:
        """Project the last dim in the dtype of x."""
        y = summed(project(x, self.kernel[...], self.columns), reduce)
        return y + jnp.expand_dims(self.bias[...].astype(x.dtype), range(x.ndim - 1)) if self.biased else y

    @property
    def inputs(self) -> int:
        """I, of this rank's rows."""
        return self.kernel.shape[0 if self.columns is None else 1]

    def pack(self) -> None:
        """Replace the kernel by its panels."""
        self.columns, self.kernel = self.kernel[...].shape[1], packed(self.kernel[...])

    def matrix(self) -> Float[Array, "I O"]:
        """The kernel, packed or not."""
        kernel = self.kernel[...]
        return kernel if self.columns is None else unpack(PackedWeight(kernel, self.columns))


class LinearGroup(nnx.Module):
    """Several projections of one input: y_i = x @ kernel_i (+ bias_i).

    The kernels are trained and stored apart, under their own names. `fuse` lays them side by side, so that decoding,
    where a matmul is a pass over the weights, makes one pass instead of several.
    """

    def __init__(
        self,
        width: int,
        widths: dict[str, int],
        axes: dict[str, str],
        *,
        rngs: nnx.Rngs,
        in_axis: str = "embed",
        bias: bool = False,
        units: Mapping[str, int] | None = None,
    ) -> None:
        self.widths = tuple(widths.values())
        self.names = tuple(widths)
        self.fused, self.biased, self.columns = False, bias, None
        for name, out in widths.items():
            setattr(self, name, Linear((width, out), (in_axis, axes[name]), rngs=rngs, bias=bias, units=units))

    def fuse(self) -> None:
        """Replace the kernels by their concatenation along the output dim."""
        parts = [getattr(self, name) for name in self.names]
        for name in self.names:
            delattr(self, name)
        kernels = jnp.concatenate([part.kernel[...] for part in parts], axis=-1)
        self.kernel = nnx.Param(kernels, logical_axes=(*parts[0].kernel.logical_axes[:-1], "fused"), units=())
        if self.biased:
            biases = jnp.concatenate([part.bias[...] for part in parts], axis=-1)
            self.bias = nnx.Param(biases, logical_axes=(*parts[0].bias.logical_axes[:-1], "fused"), units=())
        self.fused = True

    def pack(self) -> None:
        """Replace the fused kernel by its panels."""
        self.columns, self.kernel = sum(self.widths), packed(self.kernel[...])

    def matrix(self) -> Float[Array, "I O"]:
        """The fused kernel, packed or not."""
        kernel = self.kernel[...]
        return kernel if self.columns is None else unpack(PackedWeight(kernel, self.columns))

    def __call__(self, x: Float[Array, "*b I"]) -> tuple[Array, ...]:
        """All projections, in the order of their names."""
        if not self.fused:
            parts = [getattr(self, name) for name in self.names]
            # Cast once: the gradients of x by all parts are then added before they are summed over a tensor axis.
            x = cast(x, varying_axes(x, *(part.kernel[...] for part in parts)))
            return tuple(part(x) for part in parts)
        y = project(x, self.kernel[...], self.columns)
        if self.biased:
            y = y + jnp.expand_dims(self.bias[...].astype(x.dtype), range(x.ndim - 1))
        ends = [sum(self.widths[: i + 1]) for i in range(len(self.widths) - 1)]
        return tuple(jnp.split(y, ends, axis=-1))


class GatedMLP(nnx.Module):
    """SwiGLU: down(silu(gate x) * up x)."""

    def __init__(self, width: int, hidden: int, *, rngs: nnx.Rngs, down_init: Initializer | None = None) -> None:
        self.gate_up = LinearGroup(
            width, {"gate_proj": hidden, "up_proj": hidden}, {"gate_proj": "mlp", "up_proj": "mlp"}, rngs=rngs
        )
        self.down_proj = Linear((hidden, width), ("mlp", "embed"), rngs=rngs, init=down_init)

    def __call__(self, x: Float[Array, "*b D"], packed: PackedRows = WHOLE_ROWS) -> Float[Array, "*b D"]:
        """Two projections up, one down."""
        return self.down_proj(self.hidden(x), packed.tensor_axis)

    def hidden(self, x: Float[Array, "*b D"]) -> Float[Array, "*b F"]:
        """What is projected down; of this rank's part of the hidden width."""
        gate, up = self.gate_up(x)
        return jax.nn.silu(gate) * up


def rotary_angles(
    positions: Int[Array, "B T"], width: int, theta: float
) -> tuple[Float[Array, "B T 1 h"], Float[Array, "B T 1 h"]]:
    """cos and sin of position * theta^(-2i/width), i < width/2, in float32, for rotation of half-split pairs."""
    exponents = jnp.arange(0, width, 2, dtype=jnp.float32) / width
    angles = positions[..., None, None].astype(jnp.float32) * (theta**-exponents)[None, None, None, :]
    return jnp.cos(angles), jnp.sin(angles)


def rotate(
    x: Float[Array, "B T n H"], angles: tuple[Float[Array, "B T 1 h"], Float[Array, "B T 1 h"]]
) -> Float[Array, "B T n H"]:
    """Rotary position embedding on half-split pairs (x_i, x_{i + h}) of the first 2h of H dims, done in float32.

    Dims after the first 2h are left as they are (partial rotary).
    """
    cos, sin = angles
    turning, rest = jnp.split(x, [2 * cos.shape[-1]], axis=-1)
    first, second = jnp.split(turning.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
    return jnp.concatenate([turned, rest], axis=-1) if rest.shape[-1] else turned
