"""Mamba-2: a token mixer whose memory is one matrix a head that decays by a scalar (the linear layers of Nemotron-H).

One layer, x [.., D] -> [.., D]:

    z | xbc | d = x in_proj                      widths I = H P, I + 2 G N, H
    u | b | c   = silu(conv1d(xbc))              depthwise, causal, with bias; u [.., H, P], b and c [.., G, N]
    dt          = clip(softplus(d + dt_bias), *time_step_limit)
    S_t         = exp(-exp(A_log) dt_t) S_{t-1} + dt_t u_t b_t^T             S [H, P, N]
    y_t         = S_t c_t + D u_t                head h reads b and c of group h // (H / G)
    out         = out_proj(norm(y * silu(z)))    gate first, then RMSNorm over each of G groups of I / G channels

In chunks of Q tokens the sum over earlier tokens is a masked product of matrices, and only S passes between chunks:

    y_t = sum_{s <= t} exp(l_{s+1} + .. + l_t) (c_t . b_s) dt_s u_s + exp(l_1 + .. + l_t) S_0 c_t,   l = -exp(A_log) dt

Every sum of l is taken over its own tokens: as a difference of two running sums it would lose, at -1000, three digits.

A document's first token sees neither state nor inputs before it. Padding has dt = 0: it changes nothing, and reads 0.

The clamp of dt is one field, used alike by packed rows, prompts and steps. (transformers 5.24 clamps whole sequences at
`time_step_min` and single tokens not at all, so that its two paths disagree.)

From silu to the norm everything is float32, and so is S. Formulas: Dao and Gu 2024, "Transformers are SSMs";
names and order of the projections as published with Nemotron-H, where in_proj (z | u | b | c | d) and conv1d are one
tensor each. Here their parts (z, x, B, C, dt) are stated apart, so that each can be split: over a tensor axis a rank
has some of the groups, and their heads.

Letters: R rows or B requests of T tokens, D model width, H heads of P channels, I = H P, G groups, N state width,
W convolution width, C = I + 2 G N its channels, Q tokens of a chunk, K = lookahead + 1 tokens of a call.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Float32, Int

from draftco_jax.context_parallel import PackedRows
from draftco_jax.models.calls import CachedCall, PackedCall
from draftco_jax.models.layers import Initializer, Linear, LinearGroup, parameter
from draftco_jax.models.recurrent import Documents, ShortConvolution, documents, filled, window_after
from pallas_kernels.manual_axes import cast, varying_axes

STEP_RANGE = (1e-3, 0.1)  # of dt at the start of training, as published

# ---- the recurrence ----


class Tokens(NamedTuple):
    """What the recurrence reads. Entries of padding may hold anything."""

    u: jax.Array  # f32[R, T, H, P] input
    dt: jax.Array  # f32[R, T, H] step, >= 0
    b: jax.Array  # f32[R, T, G, N] where it is written
    c: jax.Array  # f32[R, T, G, N] where it is read
    live: jax.Array  # bool[R, T] False: padding
    first: jax.Array  # bool[R, T] first of its document


class _Steps(NamedTuple):
    """The same with padding blanked: S <- exp(rate) S + v b^T."""

    v: jax.Array  # f32[R, T, H, P] dt u
    rate: jax.Array  # f32[R, T, H] l, the logarithm of the decay, <= 0
    b: jax.Array  # f32[R, T, G, N]
    c: jax.Array  # f32[R, T, G, N]
    first: jax.Array  # bool[R, T]


def _steps(tokens: Tokens, a: Array) -> _Steps:
    wide = tokens.live[:, :, None, None]
    dt = jnp.where(tokens.live[:, :, None], tokens.dt, 0.0)
    u, b, c = (jnp.where(wide, x, 0.0) for x in (tokens.u, tokens.b, tokens.c))
    return _Steps(dt[..., None] * u, dt * a[None, None, :], b, c, tokens.first & tokens.live)


def ssd_sequential(
    tokens: Tokens, a: Float32[Array, " H"], state: Float32[Array, "R H P N"]
) -> tuple[Float32[Array, "R T H P"], Float32[Array, "R H P N"]]:
    """S c of each token, and S after the last; one token at a time: the reference.

    Args:
        tokens: float32, see `Tokens`.
        a: rate of decay, < 0.
        state: S before the first token; read by tokens that no start of a document stands before.
    """
    steps = _steps(tokens, a)
    repeats = a.shape[0] // tokens.b.shape[2]

    def one(s: Array, step: _Steps) -> tuple[Array, Array]:
        b, c = (jnp.repeat(x, repeats, axis=1) for x in (step.b, step.c))
        s = jnp.where(step.first[:, None, None, None], 0.0, s)
        s = jnp.exp(step.rate)[..., None, None] * s + step.v[..., None] * b[:, :, None, :]
        return s, _product("rhpn,rhn->rhp", s, c)

    start = cast(state, varying_axes(*steps))
    last, y = lax.scan(one, start, jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), steps))
    return jnp.swapaxes(y, 0, 1), last


def ssd_chunked(
    tokens: Tokens, a: Float32[Array, " H"], state: Float32[Array, "R H P N"], *, chunk: int = 128
) -> tuple[Float32[Array, "R T H P"], Float32[Array, "R H P N"]]:
    """What `ssd_sequential` gives, in products of matrices over `chunk` tokens; the last chunk is filled up.

    The backward pass makes the Q x Q weights of a chunk again: kept are S at the borders of chunks and the inputs.
    """
    rows, length = tokens.dt.shape[:2]
    chunk = min(chunk, length)
    count = -(-length // chunk)
    steps = _steps(tokens, a)
    start = cast(state, varying_axes(*steps))
    if count == 1:
        last, y = jax.checkpoint(_chunk)(start, steps)
        return y, last

    def cut(x: Array) -> Array:
        filled = jnp.pad(x, ((0, 0), (0, count * chunk - length)) + ((0, 0),) * (x.ndim - 2))
        return jnp.moveaxis(filled.reshape(rows, count, chunk, *x.shape[2:]), 1, 0)

    last, y = lax.scan(jax.checkpoint(_chunk, prevent_cse=False), start, jax.tree.map(cut, steps))
    return jnp.moveaxis(y, 0, 1).reshape(rows, count * chunk, *y.shape[3:])[:, :length], last


def _chunk(state: Array, steps: _Steps) -> tuple[Array, Array]:
    """S after one chunk, and S c of its tokens."""
    rows, length, groups, _ = steps.b.shape
    grouped = lambda x: x.reshape(rows, length, groups, -1, *x.shape[3:])  # noqa: E731
    decay = _decays(steps).reshape(rows, groups, -1, length, length)
    reach, v = grouped(_reach(steps)), grouped(steps.v)
    s = state.reshape(rows, groups, -1, *state.shape[2:])
    scores = _product("rtgn,rsgn->rgts", steps.c, steps.b)
    y = _product("rgkts,rsgkp->rtgkp", scores[:, :, None] * decay, v)
    y = y + reach[..., None] * _product("rtgn,rgkpn->rtgkp", steps.c, s)
    tail = jnp.moveaxis(decay[:, :, :, -1], 3, 1)  # how much of each token is left at the end
    after = reach[:, -1, :, :, None, None] * s + _product("rsgkp,rsgn->rgkpn", tail[..., None] * v, steps.b)
    return after.reshape(state.shape), y.reshape(steps.v.shape)


def _decays(steps: _Steps) -> Float32[Array, "R H Q Q"]:
    """exp(l_{s+1} + .. + l_t) at [t, s]; 0 where s > t or another document began in between."""
    length = steps.rate.shape[1]
    place = jnp.arange(length, dtype=jnp.int32)
    rate = jnp.swapaxes(steps.rate, 1, 2)[..., None]
    later = (place[:, None] > place[None, :])[None, None]
    sums = jnp.cumsum(jnp.where(later, rate, 0.0), axis=2)
    number = _document(steps)
    seen = (number[:, :, None] == number[:, None, :]) & (place[:, None] >= place[None, :])[None]
    # The upper triangle of `sums` is 0, so that the exponent is never above 0, seen or not.
    return jnp.where(seen[:, None], jnp.exp(sums), 0.0)


def _reach(steps: _Steps) -> Float32[Array, "R Q H"]:
    """What is left at each token of the state before the first; 0 once a document has begun."""
    return jnp.where(_document(steps)[..., None] == 0, jnp.exp(jnp.cumsum(steps.rate, axis=1)), 0.0)


def _document(steps: _Steps) -> Int[Array, "R Q"]:
    """How many documents have begun up to each token."""
    return jnp.cumsum(steps.first.astype(jnp.int32), axis=1)


def _product(rule: str, *xs: Array) -> Array:
    """HIGHEST: a GPU would round float32 inputs to TF32, and chunks would then disagree with single tokens."""
    return jnp.einsum(rule, *xs, precision=lax.Precision.HIGHEST)


# ---- rows spread over devices ----


def ssd_packed(
    tokens: Tokens, a: Float32[Array, " H"], packed: PackedRows, *, chunk: int = 128
) -> Float32[Array, "R T H P"]:
    """S c of each token of packed rows, wherever their pieces are.

    A piece turns the state S before it into r S + E: r a scalar a head (0 where a document begins inside), E its end
    state from zero. All r and E are gathered, R p (H P N + H) float32 numbers from each rank, and combined in the order
    of the row. What the state before a piece adds to its tokens is then added to what they gave from zero.
    """
    rows, length, heads, width = tokens.u.shape
    zero = jnp.zeros((rows, heads, width, tokens.b.shape[3]), jnp.float32)
    if packed.ranks == 1:
        return ssd_chunked(tokens, a, zero, chunk=chunk)[0]
    layout = packed.layout(length)

    def cut(x: Array) -> Array:
        return jnp.moveaxis(x.reshape(rows, layout.pieces, layout.piece, *x.shape[2:]), 1, 0)

    pieces = Tokens(*map(cut, tokens))
    # One piece after another, so that the weights of a chunk take no more room than on one device.
    y, end = lax.map(lambda piece: ssd_chunked(piece, a, zero, chunk=chunk), pieces)
    steps = jax.vmap(_steps, in_axes=(0, None))(pieces, a)
    reach = jax.vmap(_reach)(steps)
    before = _states_before(reach[:, :, -1], end, packed, length)
    c = jnp.repeat(steps.c, heads // steps.c.shape[3], axis=3)
    y = y + reach[..., None] * _product("zrthn,zrhpn->zrthp", c, before)
    return jnp.moveaxis(y, 0, 1).reshape(tokens.u.shape)


def _states_before(
    reach: Float32[Array, "p R H"], end: Float32[Array, "p R H P N"], packed: PackedRows, length: int
) -> Float32[Array, "p R H P N"]:
    """The state that each piece of this device starts from.

    The j-th pieces of all ranks are neighbours in the row, in an order that depends on the layout, and all j-th pieces
    lie before all (j + 1)-th. So one round at a time is gathered, and no more than C states of a row are held.
    """
    layout = packed.layout(length)
    number = layout.order().reshape(packed.ranks, layout.pieces, layout.piece)[:, :, 0] // layout.piece
    turns = jnp.asarray(np.argsort(number, axis=0).T)  # [p, C] ranks in the order of their pieces
    places = packed.index(length)[:: layout.piece] // layout.piece % packed.ranks  # of this rank in each round

    def piece(s: Array, turned: tuple[Array, Array]) -> tuple[Array, Array]:
        return turned[0][..., None, None] * s + turned[1], s

    def one_round(s: Array, own: tuple[Array, Array, Array, Array]) -> tuple[Array, Array]:
        reach, end, turn, place = own
        s, before = lax.scan(piece, s, tuple(lax.all_gather(x, packed.context_axis)[turn] for x in (reach, end)))
        return s, before[place]

    start = cast(jnp.zeros_like(end[0]), varying_axes(reach, end))
    # Gathered again in the backward pass, which then keeps one state a piece instead of C.
    return lax.scan(jax.checkpoint(one_round, prevent_cse=False), start, (reach, end, turns, places))[1]


# ---- the layer ----


@dataclass(frozen=True, kw_only=True)
class Mamba2Sizes:
    """Sizes and constants of a layer."""

    hidden_size: int
    heads: int
    head_dim: int
    state: int
    groups: int
    conv_width: int = 4
    eps: float = 1e-5
    time_step_limit: tuple[float, float] = (0.0, math.inf)
    """Smallest and largest dt, wherever it is computed."""
    chunk: int = 128

    def __post_init__(self) -> None:
        """Refuse sizes that do not fit together."""
        for name in ("hidden_size", "heads", "head_dim", "state", "groups", "conv_width", "chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be >= 1; set it to the model's size")
        if self.heads % self.groups:
            raise ValueError(
                f"heads={self.heads} must be a multiple of groups={self.groups}, which heads share; change one of them"
            )
        if not self.eps > 0:
            raise ValueError(f"eps={self.eps} must be > 0; 1e-5 is usual")
        low, high = self.time_step_limit
        if not 0 <= low < high:
            raise ValueError(
                f"time_step_limit={self.time_step_limit} must be 0 <= low < high; (0, inf) leaves dt alone"
            )

    @property
    def inner(self) -> int:
        """Channels of all heads, I."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution, C."""
        return self.inner + 2 * self.groups * self.state


class Pending(NamedTuple):
    """Inputs of the last call, of which the next call's `start` says how many were kept."""

    xbc: jax.Array  # [B, K, C] before the convolution
    dt: jax.Array  # f32[B, K, H]


class Mamba2State(NamedTuple):
    """What a request's past is to the layer."""

    window: jax.Array  # [B, W - 1, C] the last inputs of the convolution before `position`
    s: jax.Array  # f32[B, H, P, N] after the tokens before `position`
    position: jax.Array  # i32[B]
    pending: Pending


class GatedNorm(nnx.Module):
    """weight * g / sqrt(mean(g^2) + eps), g = y silu(z), the mean over each group of channels; float32, cast as z."""

    def __init__(self, width: int, groups: int, *, eps: float, rngs: nnx.Rngs) -> None:
        self.group_width, self.eps = width // groups, eps
        self.weight = parameter(rngs, (width,), ("mixer",), nnx.initializers.ones, units={"mixer": groups})

    def __call__(self, y: Float32[Array, "B T I"], z: Float[Array, "B T I"]) -> Float[Array, "B T I"]:
        """Gate, then normalise."""
        gated = (y * jax.nn.silu(z.astype(jnp.float32))).reshape(*y.shape[:2], -1, self.group_width)
        scale = lax.rsqrt(jnp.mean(gated * gated, axis=-1, keepdims=True) + self.eps)
        return self.weight[...].astype(z.dtype)[None, None, :] * (gated * scale).reshape(y.shape).astype(z.dtype)


class Mamba2(nnx.Module):
    """The layer, a `models.calls.Mixer`."""

    def __init__(self, sizes: Mamba2Sizes, *, rngs: nnx.Rngs, out_init: Initializer | None = None) -> None:
        self.sizes = sizes
        mixed = {"x": sizes.inner, "B": sizes.groups * sizes.state, "C": sizes.groups * sizes.state}
        projected = {"z": sizes.inner} | mixed | {"dt": sizes.heads}
        # A group and its heads stay together.
        units = {"mixer": sizes.groups, "mixer_heads": sizes.groups}
        axes = dict.fromkeys(projected, "mixer") | {"dt": "mixer_heads"}
        by_head = lambda init: parameter(rngs, (sizes.heads,), ("mixer_heads",), init, units=units)  # noqa: E731
        self.in_proj = LinearGroup(sizes.hidden_size, projected, axes, rngs=rngs, units=units)
        self.conv1d = ShortConvolution(mixed, sizes.conv_width, rngs=rngs, bias=True, axis="mixer", units=units)
        self.A_log = by_head(_log_rates)
        self.D = by_head(nnx.initializers.ones)
        self.dt_bias = by_head(_step_bias)
        self.norm = GatedNorm(sizes.inner, sizes.groups, eps=sizes.eps, rngs=rngs)
        self.out_proj = Linear(
            (sizes.inner, sizes.hidden_size), ("mixer", "embed"), rngs=rngs, init=out_init, units=units
        )

    def __call__(self, x: Float[Array, "R T D"], call: PackedCall) -> Float[Array, "R T D"]:
        """Packed rows, perhaps spread over devices."""
        z, xbc, dt = self._project(x)
        mixed = self.conv1d(xbc, call.segment_ids, call.packed)
        tokens = self._tokens(mixed, dt, documents(call.segment_ids, call.packed))
        y = ssd_packed(tokens, self._rates(), call.packed, chunk=self.sizes.chunk)
        return self._output(y, tokens, z, call.packed)

    def empty_state(self, batch: int, capacity: int, lookahead: int, dtype: Any) -> Mamba2State:
        """Nothing read. `capacity` takes no room here; `dtype` is that of the kept inputs, S is float32 in any case."""
        sizes, length = self.sizes, lookahead + 1
        channels, heads = self.conv1d.channels, self.A_log.shape[0]  # of this rank
        return Mamba2State(
            window=jnp.zeros((batch, sizes.conv_width - 1, channels), dtype),
            s=jnp.zeros((batch, heads, sizes.head_dim, sizes.state), jnp.float32),
            position=jnp.zeros((batch,), jnp.int32),
            pending=Pending(
                xbc=jnp.zeros((batch, length, channels), dtype),
                dt=jnp.zeros((batch, length, heads), jnp.float32),
            ),
        )

    def step(
        self, x: Float[Array, "B T D"], state: Mamba2State, call: CachedCall
    ) -> tuple[Float[Array, "B T D"], Mamba2State]:
        """New tokens, after the kept ones of the last call; 0 <= start - position <= K is the caller's promise."""
        length, room = x.shape[1], state.pending.dt.shape[1]
        if call.lengths is None and length > room:
            raise ValueError(f"T={length} must be <= lookahead + 1 = {room} in a call without lengths; state lengths")
        state = self._settle(state, call.start)
        z, xbc, dt = self._project(x)
        mixed, inputs = self.conv1d.step(xbc, state.window)
        tokens = self._tokens(mixed, dt, _one_document(x.shape[:2], call.lengths))
        y, last = ssd_chunked(tokens, self._rates(), state.s, chunk=self.sizes.chunk)
        if call.lengths is None:
            kept = filled(Pending(xbc.astype(state.pending.xbc.dtype), dt), room - length)
            return self._output(y, tokens, z, call.packed), state._replace(pending=kept)
        window = window_after(inputs, call.lengths, self.sizes.conv_width).astype(state.window.dtype)
        state = state._replace(window=window, s=last, position=call.start + call.lengths)
        return self._output(y, tokens, z, call.packed), state

    def _settle(self, state: Mamba2State, start: Int[Array, " B"]) -> Mamba2State:
        """The state at `start`: the first `start - position` pending tokens are read, the others forgotten."""
        kept, pending = start - state.position, state.pending
        mixed, inputs = self.conv1d.step(pending.xbc, state.window)
        tokens = self._tokens(mixed, pending.dt, _one_document(pending.dt.shape[:2], kept))
        s = ssd_chunked(tokens, self._rates(), state.s, chunk=self.sizes.chunk)[1]
        return Mamba2State(window_after(inputs, kept, self.sizes.conv_width), s, start, pending)

    def _project(self, x: Array) -> tuple[Array, Array, Float32[Array, "B T H"]]:
        """z [B, T, I], inputs of the convolution [B, T, C], dt."""
        z, *mixed, d = self.in_proj(x)
        bias = self.dt_bias[...].astype(jnp.float32)[None, None, :]
        low, high = self.sizes.time_step_limit
        return z, jnp.concatenate(mixed, axis=-1), jnp.clip(jax.nn.softplus(d.astype(jnp.float32) + bias), low, high)

    def _tokens(self, mixed: Float[Array, "B T C"], dt: Float32[Array, "B T H"], where: Documents) -> Tokens:
        """What the recurrence reads, of the convolution's output."""
        u, b, c = self.conv1d.split(jax.nn.silu(mixed.astype(jnp.float32)))
        split = lambda x, width: x.reshape(*x.shape[:2], -1, width)  # noqa: E731
        b, c = (split(x, self.sizes.state) for x in (b, c))
        return Tokens(split(u, self.sizes.head_dim), dt, b, c, where.real, where.starts)

    def _rates(self) -> Float32[Array, " H"]:
        return -jnp.exp(self.A_log[...].astype(jnp.float32))

    def _output(
        self, y: Float32[Array, "B T H P"], tokens: Tokens, z: Array, packed: PackedRows
    ) -> Float[Array, "B T D"]:
        y = y + self.D[...].astype(jnp.float32)[None, None, :, None] * tokens.u
        return self.out_proj(self.norm(y.reshape(z.shape), z), packed.tensor_axis)


def _one_document(shape: tuple[int, ...], lengths: Int[Array, " B"] | None) -> Documents:
    """B x T tokens that go on from the state; the first `lengths` of them are real."""
    none = jnp.zeros(shape, bool)
    if lengths is None:
        return Documents(~none, none)
    return Documents(jnp.arange(shape[1], dtype=lengths.dtype)[None, :] < lengths[:, None], none)


def _log_rates(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """Rates 1, 2, .. H, whatever the key."""
    del key
    return jnp.log(jnp.arange(1, shape[0] + 1, dtype=dtype))


def _step_bias(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """softplus of it is log-uniform over STEP_RANGE."""
    low, high = (math.log(x) for x in STEP_RANGE)
    step = jnp.exp(jax.random.uniform(key, shape, dtype, low, high))
    return step + jnp.log(-jnp.expm1(-step))  # the inverse of softplus
