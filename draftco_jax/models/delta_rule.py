"""The gated delta rule: token by token, in chunks, and over rows that several devices share.

Each value head h keeps a matrix S [dk, dv] and reads key head h // (V / K). A token forgets, corrects what its key
finds towards its value, and is answered from the result:

    S <- exp(g) S        S <- S + k (x) beta (v - S^T k)        o = S^T q          (g <= 0, 0 <= beta <= 1)

In a chunk of c tokens let D[t, s] = exp(sum of g over s < i <= t) for s <= t in one document, else 0, and a[t] the
same from the chunk's start, 0 once a document began. With the corrections u (rows of U) as unknowns, from S before:

    (I + strict_lower(beta D * K K^T)) U = beta (V - a K S)          solved for V and for a K at once: U = U0 - W S
    O  = (D * Q K^T) U + a Q S
    S' = a[c] S + (D[c] K)^T U

so that a chunk is the affine map S -> M S + N with M = a[c] I - (D[c] K)^T W. Sums of g are made for each pair apart: a
difference of running sums would lose the small ones behind a large one.

Several devices: each piece of a row finds its M and N from nothing, all are gathered ((dk + dv) dk floats a head and
piece), and each device runs its pieces again from the states it then knows. A document starting in a piece makes M 0.

All arrays are float32, and so are all sums. Letters: R rows, T tokens, K key heads, V value heads, G = V / K, dk and dv
their widths, N chunks of c tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32

from draftco_jax.context_parallel import PackedRows
from draftco_jax.models.recurrent import Documents, states_before_pieces
from pallas_kernels.manual_axes import cast, fresh, varying_axes

CHUNK = 64


class DeltaInputs(NamedTuple):
    """What each token brings."""

    q: jax.Array  # f32[R, T, K, dk] unit length times dk^-1/2
    k: jax.Array  # f32[R, T, K, dk] unit length
    v: jax.Array  # f32[R, T, V, dv]
    log_decay: jax.Array  # f32[R, T, V] g <= 0
    beta: jax.Array  # f32[R, T, V] in 0..1


class _Chunks(NamedTuple):
    """N chunks as maps of the state before them; a leading N, so that they can be scanned."""

    inside: jax.Array  # f32[N, R, K, G, c, dv] answers from the chunk alone
    reads: jax.Array  # f32[N, R, K, G, c, dk] O = inside + reads S
    new: jax.Array  # f32[N, R, K, G, c, dv] U0
    erased: jax.Array  # f32[N, R, K, G, c, dk] W
    writes: jax.Array  # f32[N, R, K, G, c, dk] D[c] K
    kept: jax.Array  # f32[N, R, K, G] a[c]


def delta_rule_sequential(
    x: DeltaInputs, documents: Documents, state: Float32[Array, "R V dk dv"] | None = None
) -> tuple[Float32[Array, "R T V dv"], Float32[Array, "R V dk dv"]]:
    """Answers and the last state, one token after the other: the reference. `state` None: empty."""
    group = x.v.shape[2] // x.k.shape[2]
    before = _empty(x) if state is None else state

    def read(s: Array, token: tuple[DeltaInputs, Array, Array]) -> tuple[Array, Array]:
        t, real, start = token
        q, k = (jnp.repeat(y, group, axis=1) for y in (t.q, t.k))
        s = jnp.where(start[:, None, None, None], 0.0, s)
        faded = jnp.exp(t.log_decay)[..., None, None] * s
        correction = t.beta[..., None] * (t.v - _dot("rhkv,rhk->rhv", faded, k))
        after = faded + k[..., :, None] * correction[..., None, :]
        s = jnp.where(real[:, None, None, None], after, s)
        return s, jnp.where(real[:, None, None], _dot("rhkv,rhk->rhv", s, q), 0.0)

    tokens = jax.tree.map(lambda y: jnp.moveaxis(y, 1, 0), (_blanked(x, documents), documents.real, documents.starts))
    last, out = lax.scan(read, before, tokens)
    return jnp.moveaxis(out, 0, 1), last


def delta_rule_chunked(
    x: DeltaInputs,
    documents: Documents,
    state: Float32[Array, "R V dk dv"] | None = None,
    *,
    chunk: int = CHUNK,
) -> tuple[Float32[Array, "R T V dv"], Float32[Array, "R V dk dv"]]:
    """The same as `delta_rule_sequential` with matmuls, `chunk` tokens at a time."""
    chunks = _chunks(x, documents, chunk)
    out, last = _run(chunks, _by_key_head(_empty(x) if state is None else state, x))
    return _rows(out, x), last.reshape(x.v.shape[0], x.v.shape[2], *last.shape[-2:])


def delta_rule_packed(
    x: DeltaInputs, documents: Documents, packed: PackedRows, *, chunk: int = CHUNK
) -> Float32[Array, "R T V dv"]:
    """Answers on packed rows that begin with nothing, also where the ranks share them."""
    if packed.ranks == 1:
        return delta_rule_chunked(x, documents, chunk=chunk)[0]
    rows, tokens = x.v.shape[:2]
    layout = packed.layout(tokens)
    # A piece as a row of its own: the one before it in memory is not the one before it in the row.
    x, documents = jax.tree.map(lambda y: y.reshape(rows * layout.pieces, layout.piece, *y.shape[2:]), (x, documents))
    chunks = _chunks(x, documents, chunk)
    maps = jax.tree.map(lambda y: y.reshape(rows, layout.pieces, *y.shape[1:]), _transition(chunks))
    before = states_before_pieces(
        maps,
        jnp.zeros_like(maps[1][:, 0]),
        lambda piece, s: _dot("rhgkl,rhglv->rhgkv", piece[0], s) + piece[1],
        packed,
    )
    out, _ = _run(chunks, before.reshape(rows * layout.pieces, *before.shape[2:]))
    return _rows(out, x).reshape(rows, tokens, *x.v.shape[2:])


def _chunks(x: DeltaInputs, documents: Documents, chunk: int) -> _Chunks:
    """Solve every chunk for itself; chunks are no longer than the rows, the last one is filled with padding."""
    if chunk < 1:
        raise ValueError(f"chunk={chunk} must be >= 1; {CHUNK} is usual")
    size = min(chunk, x.v.shape[1])
    q, k, v, log_decay, beta = _split(_blanked(x, documents), size)
    decay, from_start = _decays(log_decay, _tokens(documents.starts, size))
    strict = jnp.tril(jnp.ones((size, size), bool), -1)
    gram = _dot("nrhtk,nrhsk->nrhts", k, k)[:, :, :, None]
    system = jnp.where(strict[None, None, None, None], beta[..., None] * decay * gram, 0.0)
    keys = jnp.broadcast_to(k[:, :, :, None], (*beta.shape, k.shape[-1]))
    right = beta[..., None] * jnp.concatenate([v, from_start[..., None] * keys], axis=-1)
    solved = _dot("nrhgts,nrhgsw->nrhgtw", _unit_lower_inverse(system), right)
    new, erased = solved[..., : v.shape[-1]], solved[..., v.shape[-1] :]
    scores = decay * _dot("nrhtk,nrhsk->nrhts", q, k)[:, :, :, None]
    return _Chunks(
        inside=_dot("nrhgts,nrhgsv->nrhgtv", scores, new),
        reads=from_start[..., None] * q[:, :, :, None] - _dot("nrhgts,nrhgsk->nrhgtk", scores, erased),
        new=new,
        erased=erased,
        writes=decay[..., -1, :, None] * keys,
        kept=from_start[..., -1],
    )


def _decays(
    log_decay: Float32[Array, "N R K G c"], starts: Array
) -> tuple[Float32[Array, "N R K G c c"], Float32[Array, "N R K G c"]]:
    """D and a of the module's formula."""
    size = log_decay.shape[-1]
    number = jnp.cumsum(starts, axis=-1, dtype=jnp.int32)[:, :, None, None]  # 0: the document before the chunk
    causal = jnp.tril(jnp.ones((size, size), bool))[None, None, None, None]
    seen = causal & (number[..., :, None] == number[..., None, :])
    later = jnp.tril(jnp.ones((size, size), bool), -1)[None, None, None, None]
    between = jnp.cumsum(jnp.where(later, log_decay[..., :, None], 0.0), axis=-2)
    decay = jnp.where(seen, jnp.exp(jnp.where(seen, between, 0.0)), 0.0)
    return decay, jnp.where(number == 0, jnp.exp(jnp.cumsum(log_decay, axis=-1)), 0.0)


def _unit_lower_inverse(strict: Float32[Array, "*b c c"]) -> Float32[Array, "*b c c"]:
    """(I + strict)^-1 by blocks that double: the lower left one of two is -(inverse below) strict (inverse above).

    Only matmuls: a triangular solve of small systems runs row by row, and that of jaxlib for CPUs hung under load.
    was seen to hang on two CPU cores. The series of powers of `strict` would lose all digits where keys are alike.
    """
    size = strict.shape[-1]
    place = jnp.arange(size, dtype=jnp.int32)
    batch = (None,) * (strict.ndim - 2)
    inverse = jnp.broadcast_to(jnp.eye(size, dtype=jnp.float32), strict.shape)
    block = 1
    while block < size:
        number = place // block
        corner = (number[:, None] % 2 == 1) & (number[:, None] - 1 == number[None, :])
        between = jnp.where(corner[batch], strict, 0.0)
        inverse = inverse - _dot("...ts,...sw->...tw", _dot("...ts,...sw->...tw", inverse, between), inverse)
        block *= 2
    return inverse


def _run(chunks: _Chunks, state: Float32[Array, "R K G dk dv"]) -> tuple[Array, Array]:
    """Answers [N, R, K, G, c, dv] and the last state."""
    if chunks.kept.shape[0] == 1:  # no loop round a single chunk: a cached step is one
        only = jax.tree.map(lambda y: y[0], chunks)
        return _answers(only, state)[None], _after(only, state)
    last, out = lax.scan(lambda s, one: (_after(one, s), _answers(one, s)), state, chunks)
    return out, last


def _transition(chunks: _Chunks) -> tuple[Float32[Array, "R K G dk dk"], Float32[Array, "R K G dk dv"]]:
    """M and N of S -> M S + N over all chunks: the identity and nothing, side by side as one state."""
    width, value_width = chunks.erased.shape[-1], chunks.new.shape[-1]
    heads = chunks.kept.shape[1:]
    eye = jnp.broadcast_to(jnp.eye(width, dtype=jnp.float32), (*heads, width, width))
    nothing = jnp.zeros((*heads, width, value_width), jnp.float32)
    start = cast(jnp.concatenate([eye, nothing], axis=-1), varying_axes(*chunks))
    wide = chunks._replace(new=jnp.pad(chunks.new, ((0, 0),) * 5 + ((width, 0),)))
    both, _ = lax.scan(lambda s, one: (_after(one, s), None), start, wide)
    return both[..., :width], both[..., width:]


def _answers(one: _Chunks, state: Array) -> Array:
    return one.inside + _dot("rhgtk,rhgkv->rhgtv", one.reads, state)


def _after(one: _Chunks, state: Array) -> Array:
    corrections = one.new - _dot("rhgtk,rhgkv->rhgtv", one.erased, state)
    return one.kept[..., None, None] * state + _dot("rhgtk,rhgtv->rhgkv", one.writes, corrections)


# ---- shapes ----


def _blanked(x: DeltaInputs, documents: Documents) -> DeltaInputs:
    """Padding brings nothing: it neither forgets (g = 0) nor writes (beta = 0)."""
    mask = lambda y: jnp.where(documents.real.reshape(*y.shape[:2], *(1,) * (y.ndim - 2)), y, 0.0)  # noqa: E731
    return jax.tree.map(mask, x)


def _split(x: DeltaInputs, size: int) -> tuple[Array, Array, Array, Array, Array]:
    """Chunks first, tokens behind heads: q, k [N, R, K, c, dk], v [N, R, K, G, c, dv], g, beta [N, R, K, G, c]."""
    rows, tokens, key_heads = x.k.shape[:3]
    grouped = lambda y: y.reshape(rows, tokens, key_heads, -1, *y.shape[3:])  # noqa: E731
    q, k = (jnp.moveaxis(_tokens(y, size), 2, 3) for y in (x.q, x.k))
    v, log_decay, beta = (jnp.moveaxis(_tokens(grouped(y), size), 2, 4) for y in (x.v, x.log_decay, x.beta))
    return q, k, v, log_decay, beta


def _tokens(y: Array, size: int) -> Array:
    """[R, T, ...] -> [N, R, size, ...], filled with zeros."""
    filled = jnp.pad(y, ((0, 0), (0, -y.shape[1] % size)) + ((0, 0),) * (y.ndim - 2))
    return jnp.moveaxis(filled.reshape(y.shape[0], -1, size, *y.shape[2:]), 1, 0)


def _rows(out: Float32[Array, "N R K G c dv"], x: DeltaInputs) -> Float32[Array, "R T V dv"]:
    """The inverse, without what was filled in."""
    rows, tokens, heads, width = x.v.shape
    return out.transpose(1, 0, 4, 2, 3, 5).reshape(rows, -1, heads, width)[:, :tokens]


def _by_key_head(state: Float32[Array, "R V dk dv"], x: DeltaInputs) -> Float32[Array, "R K G dk dv"]:
    return state.reshape(state.shape[0], x.k.shape[2], -1, *state.shape[2:])


def _empty(x: DeltaInputs) -> Float32[Array, "R V dk dv"]:
    rows, _, heads, width = x.v.shape
    return fresh((rows, heads, x.k.shape[-1], width), 0.0, jnp.float32, varying_axes(*x))


def _dot(spec: str, a: Array, b: Array) -> Array:
    """A product in full float32: the default of accelerators rounds its inputs to fewer bits."""
    return jnp.einsum(spec, a, b, precision=lax.Precision.HIGHEST)
