"""What token mixers with a recurrence share: where documents begin, tokens before a piece, the short convolution.

A mixer must not carry anything from one packed document into the next. `documents` says which tokens are real and which
begin a document; the convolution counts a tap of another document as 0. Under context parallelism the tokens before a
piece lie on another rank: `preceded` fetches the last few, once for all taps, and `states_before_pieces` the state.

The convolution is depthwise, causal and `width` taps wide, with the newest token under the last tap:

    y[t, c] = bias[c] + sum_{i < W} weight[c, i] * x[t - (W - 1 - i), c]        (accumulated in float32)

Letters: R packed rows of T tokens, of which a device holds p pieces of w; B requests; C channels; W taps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int32, Shaped

from draftco_jax.context_parallel import PackedRows, Zigzag, from_ranks
from draftco_jax.models.layers import Initializer, parameter
from draftco_jax.numerics.rows import slice_rows

Tree = TypeVar("Tree")
State = TypeVar("State")


class Documents(NamedTuple):
    """What a recurrence has to know of packed rows."""

    real: jax.Array  # bool[R, T] tokens that take part
    starts: jax.Array  # bool[R, T] real tokens before which the state is empty


def documents(segment_ids: Int32[Array, "R T"], packed: PackedRows) -> Documents:
    """Read off segment ids (0 = padding), wherever a document's first token and the token before it may lie."""
    real = segment_ids > 0
    return Documents(real, real & (segment_ids != behind(segment_ids, 1, packed)))


# ---- tokens before a piece ----


def behind(x: Shaped[Array, "R T *rest"], steps: int, packed: PackedRows) -> Shaped[Array, "R T *rest"]:
    """y[t] = x[t - steps] in the order of the row, whatever the document; zeros before the row's start."""
    return shifted_back(preceded(x, steps, packed), steps, x.shape[1])


def preceded(tree: Tree, reach: int, packed: PackedRows) -> Tree:
    """Each piece of every array [R, T, ...] after the `reach` tokens before it in the row: [R, p, reach + w, ...].

    Zeros before the row's start. Only these `reach` tokens of each piece are sent, by two permutes for a zigzag and one
    for stripes. `reach` is at most w where there are several ranks: a piece may not look beyond its neighbour.
    """

    def one(x: Array) -> Array:
        if packed.ranks == 1:
            return jnp.pad(x[:, None], ((0, 0), (0, 0), (reach, 0)) + ((0, 0),) * (x.ndim - 2))
        layout = packed.layout(x.shape[1])
        if reach > layout.piece:
            raise ValueError(f"reach={reach} must be <= {layout.piece}, the tokens of a piece; use longer pieces")
        pieces = x.reshape(x.shape[0], layout.pieces, layout.piece, *x.shape[2:])
        tails = pieces[:, :, layout.piece - reach :]
        before = _tails_before_zigzag if isinstance(layout, Zigzag) else _tails_before_stripes
        return jnp.concatenate([before(tails, packed), pieces], axis=2)

    return jax.tree.map(one, tree)


def shifted_back(extended: Shaped[Array, "R p e *rest"], steps: int, tokens: int) -> Shaped[Array, "R T *rest"]:
    """y[t] = x[t - steps] of what `preceded` gave for `tokens` tokens of this device, steps <= its reach."""
    width = tokens // extended.shape[1]
    reach = extended.shape[2] - width
    if not 0 <= steps <= reach:
        raise ValueError(f"steps={steps} must be in 0..{reach}, the reach; fetch more tokens with preceded")
    back = extended[:, :, reach - steps : reach - steps + width]
    return back.reshape(back.shape[0], tokens, *back.shape[3:])


def _tails_before_zigzag(tails: Array, packed: PackedRows) -> Array:
    """Before an early chunk lies that of the rank before (on the first one nothing), before a late chunk that of the
    next rank (on the last one its own early chunk)."""
    assert packed.context_axis is not None
    early, late = tails[:, :1], tails[:, 1:]
    rank, last = lax.axis_index(packed.context_axis), packed.ranks - 1
    before_early = lax.ppermute(early, packed.context_axis, _ring(packed.ranks, 1))
    before_late = lax.ppermute(late, packed.context_axis, _ring(packed.ranks, -1))
    return jnp.concatenate(
        [
            jnp.where(rank == 0, jnp.zeros_like(early), before_early),
            jnp.where(rank == last, early, before_late),
        ],
        axis=1,
    )


def _tails_before_stripes(tails: Array, packed: PackedRows) -> Array:
    """Before a stripe lies that of the rank before; before the first rank's, the last rank's previous one."""
    assert packed.context_axis is not None
    arrived = lax.ppermute(tails, packed.context_axis, _ring(packed.ranks, 1))
    of_last_rank = jnp.concatenate([jnp.zeros_like(arrived[:, :1]), arrived[:, :-1]], axis=1)
    return jnp.where(lax.axis_index(packed.context_axis) == 0, of_last_rank, arrived)


def _ring(ranks: int, step: int) -> tuple[tuple[int, int], ...]:
    """Permutation of a ring, rank r to r + step: complete, so that no rank's input is undefined."""
    return tuple((r, (r + step) % ranks) for r in range(ranks))


# ---- states before a piece ----


def states_before_pieces(maps: Tree, empty: State, apply: Callable[[Tree, State], State], packed: PackedRows) -> State:
    """State [R, p, ...] before each piece of this device, where a row begins with `empty` [R, ...].

    `maps` [R, p, ...] say what each piece does to a state: apply(map of one piece, state before) = state after. The
    maps of all C p pieces are gathered, and every device applies all of them in the order of the row: exact, at the
    cost of C p applications and as many maps in memory, so with stripes keep C p small.
    """
    assert packed.context_axis is not None
    axis, own = packed.context_axis, jax.tree.leaves(maps)[0].shape[1]
    # Pieces are equally long, so they stand as tokens would where a piece is a token.
    layout = (packed if packed.stripe is None else replace(packed, stripe=1)).layout(own)
    gather = lambda y: jnp.moveaxis(from_ranks(lax.all_gather(y, axis, axis=1, tiled=True), layout), 1, 0)  # noqa: E731
    _, before = lax.scan(lambda s, one: (apply(one, s), s), empty, jax.tree.map(gather, maps))
    places = layout.index(lax.axis_index(axis))
    return jax.tree.map(lambda y: jnp.moveaxis(y[places], 0, 1), before)


# ---- the short convolution ----


class Taps(nnx.Module):
    """Parameters of some channels: weight [C, W] (the newest token under the last tap), bias [C] or None."""

    def __init__(
        self, channels: int, width: int, *, rngs: nnx.Rngs, bias: bool, axis: str, units: Mapping[str, int] | None
    ) -> None:
        self.weight = parameter(rngs, (channels, width), (axis, "taps"), _uniform(width**-0.5), units=units)
        self.bias = parameter(rngs, (channels,), (axis,), nnx.initializers.zeros, units=units) if bias else None


class ShortConvolution(nnx.Module):
    """A depthwise causal convolution over parts of channels (queries, keys, values), which lie one after the other.

    The parts are stated apart, under their own names: over a tensor axis a rank has some channels of each.
    """

    def __init__(
        self,
        parts: Mapping[str, int],
        width: int,
        *,
        rngs: nnx.Rngs,
        bias: bool,
        axis: str,
        units: Mapping[str, int] | None = None,
    ) -> None:
        if width < 1:
            raise ValueError(f"width={width} must be >= 1; 1 looks at no earlier token")
        self.width, self.names = width, tuple(parts)
        for name, channels in parts.items():
            setattr(self, name, Taps(channels, width, rngs=rngs, bias=bias, axis=axis, units=units))

    @property
    def channels(self) -> int:
        """Channels of all parts held here."""
        return sum(getattr(self, name).weight.shape[0] for name in self.names)

    def split(self, x: Float[Array, "*b C"]) -> list[Array]:
        """The channels of each part."""
        widths = [getattr(self, name).weight.shape[0] for name in self.names]
        return jnp.split(x, [sum(widths[: i + 1]) for i in range(len(widths) - 1)], axis=-1)

    def __call__(
        self, x: Float[Array, "R T C"], segment_ids: Int32[Array, "R T"], packed: PackedRows
    ) -> Float[Array, "R T C"]:
        """Packed rows: taps of another document count 0, and so do all taps of padding."""
        return convolve_packed(x, *self._whole(), segment_ids, packed)

    def step(
        self, x: Float[Array, "B T C"], window: Float[Array, "B P C"]
    ) -> tuple[Float[Array, "B T C"], Float[Array, "B S C"]]:
        """T tokens after the P = W - 1 inputs before them; also all S = P + T inputs, for `window_after`."""
        return convolve_after(x, window, *self._whole())

    def _whole(self) -> tuple[Array, Array | None]:
        """Weight and bias of all parts."""
        parts = [getattr(self, name) for name in self.names]
        biases = [part.bias[...] for part in parts if part.bias is not None]
        return jnp.concatenate([part.weight[...] for part in parts]), jnp.concatenate(biases) if biases else None


def convolve_packed(
    x: Float[Array, "R T C"],
    weight: Float[Array, "C W"],
    bias: Float[Array, " C"] | None,
    segment_ids: Int32[Array, "R T"],
    packed: PackedRows,
) -> Float[Array, "R T C"]:
    """The convolution of each document by itself, in the dtype of x."""
    tokens, reach = x.shape[1], weight.shape[1] - 1
    inputs, ids = preceded((x, segment_ids), reach, packed)
    real = segment_ids > 0
    taps = []
    for steps in range(reach, -1, -1):
        same = real & (shifted_back(ids, steps, tokens) == segment_ids)
        taps.append(jnp.where(same[:, :, None], shifted_back(inputs, steps, tokens), jnp.zeros((), x.dtype)))
    return _weighted(taps, weight, bias)


def convolve_after(
    x: Float[Array, "B T C"],
    window: Float[Array, "B P C"],
    weight: Float[Array, "C W"],
    bias: Float[Array, " C"] | None,
) -> tuple[Float[Array, "B T C"], Float[Array, "B S C"]]:
    """The convolution of T tokens after a window of P = W - 1 inputs (zeros before a document), and all S inputs."""
    if window.shape[1] != weight.shape[1] - 1:
        raise ValueError(
            f"window={window.shape} must hold {weight.shape[1] - 1} inputs, all taps but one; make it with empty_state"
        )
    inputs = jnp.concatenate([window.astype(x.dtype), x], axis=1)
    taps = [inputs[:, i : i + x.shape[1]] for i in range(weight.shape[1])]
    return _weighted(taps, weight, bias), inputs


def window_after(inputs: Float[Array, "B S C"], kept: Int32[Array, " B"], width: int) -> Float[Array, "B P C"]:
    """The window once `kept` of the tokens are read, of what `convolve_after` gave; `width` taps, P = width - 1."""
    return slice_rows(inputs, kept, width - 1)


def filled(tree: Tree, missing: int) -> Tree:
    """Every array [B, T, ...] with zeros after its tokens: the room of a call with fewer tokens than there may be."""
    pad = lambda x: jnp.pad(x, ((0, 0), (0, missing)) + ((0, 0),) * (x.ndim - 2))  # noqa: E731
    return jax.tree.map(pad, tree) if missing else tree


def _weighted(taps: list[Array], weight: Array, bias: Array | None) -> Array:
    """sum_i weight[:, i] * taps[i], oldest tap first, summed in float32; the dtype of the taps."""
    weight32 = weight.astype(jnp.float32)
    total = sum(tap.astype(jnp.float32) * weight32[None, None, :, i] for i, tap in enumerate(taps))
    assert isinstance(total, jax.Array)  # a convolution has at least one tap
    if bias is not None:
        total = total + bias.astype(jnp.float32)[None, None]
    return total.astype(taps[0].dtype)


def _uniform(bound: float) -> Initializer:
    """Uniform on [-bound, bound)."""
    draw = nnx.initializers.uniform(2 * bound)
    return lambda *args: draw(*args) - jnp.asarray(bound, args[2])
