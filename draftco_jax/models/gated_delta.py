"""The gated delta net, token mixer of the linear layers of Qwen3.5, with steps that can be rolled back.

    q | k | v = silu(conv(x W_qkv))        conv: depthwise, causal, 4 taps, inside the document
    beta = sigmoid(x W_b)                  g = -exp(A_log) softplus(x W_a + dt_bias)
    q = l2norm(q) dk^-1/2, k = l2norm(k)   l2norm(y) = y / sqrt(sum(y^2) + 1e-6)
    o = delta_rule(q, k, v, g, beta)       `delta_rule.py`
    y = (w rmsnorm(o) silu(x W_z)) W_out   norm over each value head

Projections are done in the dtype of x; from the convolution's result to the gate everything is float32. Names and
formulas as in transformers 5.24, `qwen3_5_moe`; there in_proj_qkv and conv1d are one tensor each, q | k | v, and
conv1d.weight has a dim of size 1 in its middle. Here q, k and v are stated apart, so that each can be split: over a
tensor axis a rank has some of the key heads, and the value heads that these serve.

State of a request: S [V, dk, dv] and the last 3 inputs of the convolution as of `position`, and what the last call's
tokens brought. The next call's `start` says how many of these were kept: they are read first, in one chunk. So a call
reads up to lookahead + 1 tokens a second time, and one S a request is enough.

Letters: D model width, K key heads, V value heads, dk and dv their widths, C = 2 K dk + V dv channels, B requests of T
new tokens, n = lookahead + 1.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from draftco_jax.context_parallel import PackedRows
from draftco_jax.models.calls import CachedCall, PackedCall
from draftco_jax.models.delta_rule import CHUNK, DeltaInputs, delta_rule_chunked, delta_rule_packed
from draftco_jax.models.layers import Initializer, Linear, LinearGroup, parameter
from draftco_jax.models.recurrent import Documents, ShortConvolution, documents, filled, window_after
from pallas_kernels.manual_axes import cast, varying_axes

# Added to the squared length of keys and queries; not a config field of the published model.
LENGTH_EPS = 1e-6


class Pending(NamedTuple):
    """What the tokens of the last call brought: `DeltaInputs` without the queries."""

    k: jax.Array  # f32[B, n, K, dk]
    v: jax.Array  # f32[B, n, V, dv]
    log_decay: jax.Array  # f32[B, n, V]
    beta: jax.Array  # f32[B, n, V]


class GatedDeltaState(NamedTuple):
    """What B requests have read up to `position`, and what the tokens of the last call brought from there on."""

    memory: jax.Array  # f32[B, V, dk, dv]
    position: jax.Array  # i32[B] tokens read
    inputs: jax.Array  # [B, 3 + n, C] of the convolution: the last 3 before `position`, then those of the last call
    pending: Pending


class GatedRMSNorm(nnx.Module):
    """y = weight * x / sqrt(mean(x^2) + eps) * silu(gate), all in float32."""

    def __init__(self, width: int, *, eps: float, rngs: nnx.Rngs) -> None:
        self.eps = eps
        self.weight = parameter(rngs, (width,), ("value_dim",), nnx.initializers.ones)

    def __call__(self, x: Float[Array, "*b H"], gate: Float[Array, "*b H"]) -> Float32[Array, "*b H"]:
        """Normalise the last dim, then gate."""
        x32 = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        weight = jnp.expand_dims(self.weight[...].astype(jnp.float32), range(x.ndim - 1))
        return weight * (x32 * scale) * jax.nn.silu(gate.astype(jnp.float32))


class GatedDeltaNet(nnx.Module):
    """A `models.calls.Mixer`."""

    def __init__(
        self,
        hidden_size: int,
        *,
        key_heads: int,
        value_heads: int,
        key_dim: int,
        value_dim: int,
        conv_width: int = 4,
        eps: float,
        rngs: nnx.Rngs,
        chunk: int = CHUNK,
        out_init: Initializer | None = None,
    ) -> None:
        if value_heads % key_heads:
            raise ValueError(
                f"value_heads={value_heads} must be a multiple of key_heads={key_heads}; each key head serves as many"
            )
        self.key_heads, self.value_heads = key_heads, value_heads
        self.key_dim, self.value_dim, self.chunk = key_dim, value_dim, chunk
        values = value_heads * value_dim
        parts = {"q": key_heads * key_dim, "k": key_heads * key_dim, "v": values}
        # A key head and the value heads that it serves stay together.
        units = {"mixer": key_heads, "mixer_heads": key_heads}
        linear = lambda out, axis: Linear((hidden_size, out), ("embed", axis), rngs=rngs, units=units)  # noqa: E731
        self.in_proj_qkv = LinearGroup(hidden_size, parts, dict.fromkeys(parts, "mixer"), rngs=rngs, units=units)
        self.in_proj_z = linear(values, "mixer")
        self.in_proj_b = linear(value_heads, "mixer_heads")
        self.in_proj_a = linear(value_heads, "mixer_heads")
        self.conv1d = ShortConvolution(parts, conv_width, rngs=rngs, bias=False, axis="mixer", units=units)
        self.A_log = parameter(rngs, (value_heads,), ("mixer_heads",), _log_uniform, units=units)
        self.dt_bias = parameter(rngs, (value_heads,), ("mixer_heads",), nnx.initializers.ones, units=units)
        self.norm = GatedRMSNorm(value_dim, eps=eps, rngs=rngs)
        self.out_proj = Linear((values, hidden_size), ("mixer", "embed"), rngs=rngs, init=out_init, units=units)

    def __call__(self, x: Float[Array, "R T D"], call: PackedCall) -> Float[Array, "R T D"]:
        """Packed rows; padding gives zeros and takes no part."""
        # Cast once: the gradients of x by all projections are then added before they are summed over a tensor axis.
        x = cast(x, varying_axes(x, self.A_log[...]))
        mixed = self.conv1d(self._qkv(x), call.segment_ids, call.packed)
        docs = documents(call.segment_ids, call.packed)
        answers = delta_rule_packed(self._brought(mixed, x), docs, call.packed, chunk=self.chunk)
        return self._finish(answers, x, call.packed)

    def empty_state(self, batch: int, capacity: int, lookahead: int, dtype: DTypeLike) -> GatedDeltaState:
        """State before anything was read; its size does not depend on `capacity`. The convolution's inputs in dtype."""
        del capacity
        tokens, value_heads = lookahead + 1, self.A_log.shape[0]  # of this rank
        heads = (batch, tokens, value_heads)
        zeros = lambda *shape: jnp.zeros(shape, jnp.float32)  # noqa: E731
        pending = Pending(
            k=zeros(batch, tokens, value_heads * self.key_heads // self.value_heads, self.key_dim),
            v=zeros(*heads, self.value_dim),
            log_decay=zeros(*heads),
            beta=zeros(*heads),
        )
        inputs = jnp.zeros((batch, self.conv1d.width - 1 + tokens, self.conv1d.channels), dtype)
        memory = zeros(batch, value_heads, self.key_dim, self.value_dim)
        return GatedDeltaState(memory, jnp.zeros(batch, jnp.int32), inputs, pending)

    def step(
        self, x: Float[Array, "B T D"], state: GatedDeltaState, call: CachedCall
    ) -> tuple[Float[Array, "B T D"], GatedDeltaState]:
        """New tokens at `call.start`, which is at least `state.position` and at most the end of the last call."""
        room = state.pending.beta.shape[1]
        if call.lengths is None and x.shape[1] > room:
            raise ValueError(
                f"x={x.shape} must hold <= {room} tokens a request (lookahead + 1); give `lengths` to read a prompt"
            )
        memory, window = self._rolled_back(state, call.start - state.position)
        mixed, inputs = self.conv1d.step(self._qkv(x), window)
        brought = self._brought(mixed, x)
        answers, after = delta_rule_chunked(brought, _first(call.lengths, brought), memory, chunk=self.chunk)
        y = self._finish(answers, x, call.packed)
        if call.lengths is None:
            pending = Pending(brought.k, brought.v, brought.log_decay, brought.beta)
            inputs, pending = filled((inputs, pending), room - x.shape[1])
            return y, GatedDeltaState(memory, call.start, inputs.astype(state.inputs.dtype), pending)
        window = window_after(inputs, call.lengths, self.conv1d.width).astype(state.inputs.dtype)
        unread = ((0, 0), (0, room), (0, 0))
        nothing = jax.tree.map(jnp.zeros_like, state.pending)
        return y, GatedDeltaState(after, call.start + call.lengths, jnp.pad(window, unread), nothing)

    def _rolled_back(self, state: GatedDeltaState, kept: Array) -> tuple[Array, Array]:
        """Memory and window once the first `kept` of the pending tokens are read."""
        brought = DeltaInputs(jnp.zeros_like(state.pending.k), *state.pending)  # nothing is asked again
        memory = delta_rule_chunked(brought, _first(kept, brought), state.memory, chunk=self.chunk)[1]
        return memory, window_after(state.inputs, kept, self.conv1d.width)

    def _qkv(self, x: Float[Array, "R T D"]) -> Float[Array, "R T C"]:
        return jnp.concatenate(self.in_proj_qkv(x), axis=-1)

    def _brought(self, mixed: Float[Array, "R T C"], x: Float[Array, "R T D"]) -> DeltaInputs:
        """What each token brings to the rule, of the convolution's result and the layer's input."""
        q, k, v = self.conv1d.split(jax.nn.silu(mixed.astype(jnp.float32)))
        heads = lambda y, width: y.reshape(*y.shape[:2], -1, width)  # noqa: E731
        rate = -jnp.exp(self.A_log[...].astype(jnp.float32))[None, None]
        delay = self.in_proj_a(x).astype(jnp.float32) + self.dt_bias[...].astype(jnp.float32)[None, None]
        return DeltaInputs(
            q=_unit(heads(q, self.key_dim)) * self.key_dim**-0.5,
            k=_unit(heads(k, self.key_dim)),
            v=heads(v, self.value_dim),
            log_decay=rate * jax.nn.softplus(delay),
            beta=jax.nn.sigmoid(self.in_proj_b(x).astype(jnp.float32)),
        )

    def _finish(
        self, answers: Float32[Array, "R T V dv"], x: Float[Array, "R T D"], packed: PackedRows
    ) -> Float[Array, "R T D"]:
        gated = self.norm(answers, self.in_proj_z(x).reshape(answers.shape))
        return self.out_proj(gated.reshape(*x.shape[:2], -1).astype(x.dtype), packed.tensor_axis)


def _first(count: Array | None, brought: DeltaInputs) -> Documents:
    """The first `count` tokens of each request are real (None: all), and none of them begins anew."""
    batch, tokens = brought.beta.shape[:2]
    last = tokens if count is None else count[:, None]
    real = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32)[None, :] < last, (batch, tokens))
    return Documents(real, jnp.zeros((batch, tokens), bool))


def _unit(y: Float32[Array, "*b H"]) -> Float32[Array, "*b H"]:
    return y * jax.lax.rsqrt(jnp.sum(y * y, axis=-1, keepdims=True) + LENGTH_EPS)


def _log_uniform(key: Array, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """log of decay rates between 0.01 and 16: the published start, away from log(0)."""
    return jnp.log(jax.random.uniform(key, shape, dtype, 0.01, 16.0))
