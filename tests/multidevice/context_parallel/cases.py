"""Problems of context parallelism with their float64 answers: four predicates on ragged packed rows.

Row 0 holds documents of 3, 1, 17, 5, 50 and 20 tokens: none divisible by 2 C, some inside one chunk at C = 8 (chunks of
8), one across the fold at 64, then padding that fills whole chunks. Row 1 is one document that all ranks share, with 3
tokens of padding in its tail.
"""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from draftco_jax.context_parallel import (
    Branch,
    KeyRange,
    RingSpec,
    Striped,
    Zigzag,
    anchor_range,
    branch_attention,
    causal_range,
    from_ranks,
    local_index,
    share_trunk,
    to_ranks,
)

LENGTHS = ((3, 1, 17, 5, 50, 20), (125,))
TOKENS, WIDTH, HEADS = 128, 8, 4
SCALE = WIDTH**-0.5
PASSES, BLOCK = 3, 5
AXIS = "context"
TILE = 8


def _dense_module():
    path = Path(__file__).resolve().parents[2] / "kernels" / "dense_attention.py"
    spec = importlib.util.spec_from_file_location("dense_attention", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


DENSE = _dense_module()


def packed_rows(lengths=LENGTHS, tokens=TOKENS):
    """Segment ids and positions [R, N]."""
    segments, positions = np.zeros((2, len(lengths), tokens), np.int32)
    for row, documents in enumerate(lengths):
        start = 0
        for number, length in enumerate(documents):
            segments[row, start : start + length] = number + 1
            positions[row, start : start + length] = np.arange(length)
            start += length
    return segments, positions


SEGMENTS, POSITIONS = packed_rows()
# Tokens of documents as anchors: a first token (empty trunk), last tokens of chunks at C = 8 (their blocks run into
# another rank), the last token of a document, one beside the fold, the last token of a row, and two places not taken.
ANCHORS = np.array(
    [[0, 3, 7, 20, 31, 63, 64, 75, 90, 95, 0, 0], [0, 1, 7, 15, 40, 55, 63, 71, 79, 120, 124, 0]], np.int32
)
KEEP = np.array([[True] * 10 + [False] * 2, [True] * 11 + [False]])


@dataclass(frozen=True)
class Case:
    """One kind of attention."""

    kind: str  # "policy", "ttt", "dflash", "dspark"
    kv_heads: int = 2
    dtype: str = "float32"
    window: int | None = None
    sinks: bool = False

    @property
    def rule(self):
        return "causal" if self.kind == "dspark" else "all"

    @property
    def blocks(self):
        return self.kind in ("dflash", "dspark")


def inputs(case: Case):
    """Arrays in natural order: q, k, v, branch keys and values, weights of out and lse, sinks."""
    rng = np.random.default_rng(7)
    dtype = jnp.dtype(case.dtype)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)  # noqa: E731
    rows, k = len(LENGTHS), case.kv_heads
    queries = (ANCHORS.shape[1], BLOCK) if case.blocks else (TOKENS, 1)
    keys = BLOCK if case.blocks else PASSES
    q, out_weights = draw(rows, *queries, HEADS, WIDTH), draw(rows, *queries, HEADS, WIDTH)
    lse_weights = jnp.asarray(rng.normal(size=q.shape[:-1]), jnp.float32)
    trunk = draw(rows, TOKENS, k, WIDTH), draw(rows, TOKENS, k, WIDTH)
    branch = draw(rows, queries[0], keys, k, WIDTH), draw(rows, queries[0], keys, k, WIDTH)
    return q, *trunk, *branch, out_weights, lse_weights, draw(HEADS) if case.sinks else None


def live_tokens(case: Case):
    """Queries in use: in the last TTT pass t is live while t + PASSES lies in its document."""
    live = SEGMENTS > 0
    if case.kind == "ttt":
        ahead = np.zeros_like(SEGMENTS)
        ahead[:, : TOKENS - PASSES] = SEGMENTS[:, PASSES:]
        live &= ahead == SEGMENTS
    return live


def masks(case: Case):
    """[R, X, Y]: what each query sees of the trunk and of all branch keys of its row."""
    place = np.arange(TOKENS)
    rows = len(LENGTHS)
    if case.blocks:
        anchors = np.repeat(ANCHORS[:, :, None], BLOCK, axis=2)
        own = np.take_along_axis(SEGMENTS, ANCHORS, axis=1)
        query_place = anchors + np.arange(BLOCK)[None, None]
        trunk = (place < anchors[..., None]) & (SEGMENTS[:, None, None, :] == own[:, :, None, None])
        trunk &= KEEP[:, :, None, None]
        inside = np.tril(np.ones((BLOCK, BLOCK), bool)) if case.rule == "causal" else np.ones((BLOCK, BLOCK), bool)
        branch = KEEP[:, :, None, None, None] & (
            np.eye(ANCHORS.shape[1], dtype=bool)[None, :, None, :, None] & inside[None, None, :, None, :]
        )
    else:
        live = live_tokens(case)
        query_place = np.broadcast_to(place[None, :, None], (rows, TOKENS, 1))
        trunk = (place[None, None, :] <= place[None, :, None]) & (SEGMENTS[:, :, None] == SEGMENTS[:, None, :])
        trunk = (trunk & live[:, :, None])[:, :, None]
        diagonal = np.eye(TOKENS, dtype=bool)[None, :, None, :, None] & live[:, :, None, None, None]
        branch = np.broadcast_to(diagonal, (rows, TOKENS, 1, TOKENS, PASSES))
    if case.window is not None:
        trunk = trunk & (place > query_place[..., None] - case.window)
    trunk = trunk.reshape(rows, -1, TOKENS)
    branch = branch.reshape(rows, trunk.shape[1], -1)
    return trunk if case.kind == "policy" else np.concatenate([trunk, branch], axis=2)


@functools.cache
def answer(case: Case):
    """Float64: out, lse, gradients of q, k, v, branch keys and values, sinks, in this order."""
    q, k, v, bk, bv, w, wl, sinks = (None if x is None else np.asarray(x, np.float64) for x in inputs(case))
    mask, found = masks(case), []
    for row in range(len(LENGTHS)):
        flat = lambda x, row=row: x[row].reshape(-1, *x.shape[3:])  # noqa: E731
        keys, values = k[row], v[row]
        if case.kind != "policy":
            keys, values = np.concatenate([keys, flat(bk)]), np.concatenate([values, flat(bv)])
        seen = mask[row].any(axis=1) | (sinks is not None)
        if case.blocks:  # a place that is not taken is no query, so not even a sink is seen from it
            seen &= np.repeat(KEEP[row], BLOCK)
        d_lse = np.where(seen[:, None], flat(wl), 0.0)
        found.append(
            DENSE.dense_attention(
                flat(q), keys, values, mask[row], scale=SCALE, d_out=flat(w), d_lse=d_lse, sinks=sinks
            )
        )
    stack = lambda parts, shape: np.stack(list(parts)).reshape(shape)  # noqa: E731
    tokens = [(d.dk[:TOKENS], d.dv[:TOKENS], d.dk[TOKENS:], d.dv[TOKENS:]) for d in found]
    result = {
        "out": stack((d.out for d in found), q.shape),
        "lse": stack((d.lse for d in found), q.shape[:-1]),
        "dq": stack((d.dq for d in found), q.shape),
        "dk": stack((t[0] for t in tokens), k.shape),
        "dv": stack((t[1] for t in tokens), v.shape),
    }
    if case.blocks:
        result["lse"] = np.where(KEEP[:, :, None, None], result["lse"], -np.inf)
    if case.kind != "policy":
        result |= {"dbk": stack((t[2] for t in tokens), bk.shape), "dbv": stack((t[3] for t in tokens), bv.shape)}
    if sinks is not None:
        result["dsinks"] = sum(d.dsinks for d in found)
    return result


def mesh_of(ranks: int, data: int = 1) -> Mesh:
    """`data` x `ranks` of the virtual devices."""
    return Mesh(np.array(jax.devices()[: data * ranks]).reshape(data, ranks), ("data", AXIS))


def spec_of(ranks: int, **changes) -> RingSpec:
    """How the cases run: small tiles, so that even these rows are several."""
    stripe = changes.pop("stripe", None)
    layout = Striped(ranks=ranks, tokens=TOKENS, stripe=stripe) if stripe else Zigzag(ranks=ranks, tokens=TOKENS)
    return RingSpec(**{"layout": layout, "axis": AXIS, "scale": SCALE, "tile": TILE, "unroll": 1} | changes)


def token_op(case: Case, spec: RingSpec, mode="replay"):
    """Per rank: q [R, L, 1, N, H] and everything else by token -> out, lse."""

    def local(q, k, v, bk, bv, segments, positions, live, sinks):
        # A query that is not in use counts as padding, which sees nothing.
        index = local_index(spec.layout, AXIS)
        seen = causal_range(jnp.where(live, segments, 0), positions, index, window=case.window)
        seen = KeyRange(seen.first[:, :, None], seen.last[:, :, None])
        branch = None if case.kind == "policy" else Branch(bk, bv, live)
        return branch_attention(q, share_trunk(k, v, spec, mode=mode), seen, branch, sinks, rule=case.rule, spec=spec)

    return local


class Own(NamedTuple):
    """Anchors of the list whose token is this rank's; the others are not live and hold its first token."""

    place: jax.Array  # i32[R, A] which entry of the list
    local: jax.Array  # i32[R, A] which of this rank's tokens
    index: jax.Array  # i32[R, A] place in the whole sequence
    live: jax.Array  # bool[R, A]


def own_anchors(anchors, keep, spec: RingSpec) -> Own:
    """In their order, with room for all of them."""
    mine = keep & (spec.layout.owner(anchors) == lax.axis_index(AXIS))
    entry = lax.pcast(jnp.broadcast_to(jnp.arange(mine.shape[1])[None], mine.shape), (AXIS,), to="varying")
    _, place = lax.sort((jnp.logical_not(mine), entry), dimension=1, is_stable=True, num_keys=1)
    live = jnp.take_along_axis(mine, place, axis=1)
    local = jnp.where(live, spec.layout.local(jnp.take_along_axis(anchors, place, axis=1)), 0)
    return Own(place, local, local_index(spec.layout, AXIS)[local], live)


def block_op(case: Case, spec: RingSpec, mode="replay"):
    """Per rank: all anchors are on all ranks; each rank serves its own, and the results are added up."""

    def local(q, k, v, bk, bv, segments, positions, anchors, keep, sinks):
        own = own_anchors(anchors, keep, spec)
        pick = jax.vmap(lambda x, i: x.at[i].get(mode="promise_in_bounds"))
        starts = own.index - pick(positions, own.local)
        seen = anchor_range(own.index, starts, own.live, rows=BLOCK, window=case.window)
        trunk = share_trunk(k, v, spec, mode=mode)
        branch = Branch(pick(bk, own.place), pick(bv, own.place), own.live)
        out, lse = branch_attention(pick(q, own.place), trunk, seen, branch, sinks, rule=case.rule, spec=spec)

        def everywhere(x, fill):
            zeros = lax.pcast(jnp.full((x.shape[0], anchors.shape[1], *x.shape[2:]), 0.0, x.dtype), AXIS, to="varying")
            live = own.live.reshape(own.live.shape + (1,) * (x.ndim - 2))
            put = jax.vmap(lambda z, i, y: z.at[i].add(y))(zeros, own.place, jnp.where(live, x, 0.0))
            taken = keep.reshape(keep.shape + (1,) * (x.ndim - 2))
            return jnp.where(taken, lax.psum(put, AXIS), fill)

        return everywhere(out, 0.0), everywhere(lse, -jnp.inf)

    return local


def solve_with(case: Case, spec: RingSpec, mode="replay", data=1):
    """A jitted function of the natural-order inputs: out, lse and all gradients, by the names of `answer`."""
    layout, mesh = spec.layout, mesh_of(spec.ranks, data)
    checked = not spec.implementation.endswith("interpret")  # JAX's interpreter of kernels cannot be checked
    tokens, whole = PartitionSpec("data", AXIS), PartitionSpec("data")
    zig = lambda x: to_ranks(jnp.asarray(x), layout)  # noqa: E731
    if case.blocks:
        specs = (whole, tokens, tokens, whole, whole, tokens, tokens, whole, whole, PartitionSpec())
        mapped = jax.shard_map(
            block_op(case, spec, mode), mesh=mesh, in_specs=specs, out_specs=(whole,) * 2, check_vma=checked
        )

        def run(q, k, v, bk, bv, sinks):
            args = (q, zig(k), zig(v), bk, bv, zig(SEGMENTS), zig(POSITIONS), jnp.asarray(ANCHORS), jnp.asarray(KEEP))
            return mapped(*args, sinks)
    else:
        mapped = jax.shard_map(
            token_op(case, spec, mode),
            mesh=mesh,
            in_specs=(tokens,) * 8 + (PartitionSpec(),),
            out_specs=(tokens,) * 2,
            check_vma=checked,
        )

        def run(q, k, v, bk, bv, sinks):
            live = live_tokens(case)
            args = (zig(q), zig(k), zig(v), zig(bk), zig(bv), zig(SEGMENTS), zig(POSITIONS), zig(live))
            return tuple(from_ranks(x, layout) for x in mapped(*args, sinks))

    @jax.jit
    def solve(q, k, v, bk, bv, w, wl, sinks):
        def loss(q, k, v, bk, bv, sinks):
            out, lse = run(q, k, v, bk, bv, sinks)
            total = jnp.sum((out * w).astype(jnp.float32)) + jnp.sum(jnp.where(jnp.isneginf(lse), 0.0, lse * wl))
            return total, (out, lse)

        wrt = (0, 1, 2, 3, 4) if sinks is None else (0, 1, 2, 3, 4, 5)
        grads, (out, lse) = jax.grad(loss, argnums=wrt, has_aux=True)(q, k, v, bk, bv, sinks)
        names = ("dq", "dk", "dv", "dbk", "dbv", "dsinks")
        return {"out": out, "lse": lse} | dict(zip(names, grads, strict=False))

    return solve


@functools.cache
def errors(case: Case, ranks: int, mode: str = "replay", **spec_changes) -> dict[str, float]:
    """Largest difference of each tensor over its largest entry; every anchor served."""
    spec = spec_of(ranks, **spec_changes)
    got = solve_with(case, spec, mode)(*inputs(case))
    if case.kind == "policy":
        assert not np.any(got.pop("dbk")) and not np.any(got.pop("dbv"))
    wanted = answer(case)
    assert set(got) == set(wanted)
    return {name: DENSE.relative(got[name], wanted[name]) for name in wanted}
