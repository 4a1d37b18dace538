"""The baseline gives the right numbers too: a comparison with something wrong would mean nothing."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from draftco_jax.context_parallel import Contiguous, RingSpec, Zigzag
from draftco_jax.context_parallel.sequential_ring import UspSpec, usp_index, usp_pass
from draftco_jax.context_parallel.traffic import collectives

TOKENS, HEADS, WIDTH, PASSES = 32, 4, 8, 3
SHARDED = PartitionSpec(None, ("ring", "ulysses"))
LENGTHS = (32, 19)  # a row each; the second is padded


def setup(ulysses, ring):
    layout = Contiguous(ranks=ring, tokens=TOKENS)
    ring_spec = RingSpec(layout=layout, axis="ring", scale=WIDTH**-0.5, tile=8, unroll=1)
    spec = UspSpec(ring=ring_spec, ulysses_axis="ulysses" if ulysses > 1 else None, ulysses=ulysses)
    return spec, Mesh(np.array(jax.devices()[: ulysses * ring]).reshape(ring, ulysses), ("ring", "ulysses"))


def run(spec, mesh, qkv):
    def local(*qkv):
        cache, outs = None, []
        for i in range(PASSES):
            out, cache = usp_pass(*qkv[3 * i : 3 * i + 3], cache, spec)
            outs.append(out)
        return tuple(outs)

    return jax.shard_map(local, mesh=mesh, in_specs=(SHARDED,) * len(qkv), out_specs=SHARDED, check_vma=True)


def tensors(kv_heads):
    rng = np.random.default_rng(0)
    shapes = [(HEADS, kv_heads, kv_heads)] * PASSES
    return [jnp.asarray(rng.normal(size=(2, TOKENS, n, WIDTH)), jnp.float32) for three in shapes for n in three]


@pytest.mark.parametrize(("ulysses", "ring", "kv_heads"), [(2, 2, 2), (1, 4, 2), (4, 1, 2)])
def test_three_passes_equal_the_dense_reference(cases, ulysses, ring, kv_heads):
    """Real tokens of a padded row, values and gradients; (4, 1, 2) has fewer key-value heads than ulysses ranks."""
    spec, mesh = setup(ulysses, ring)
    qkv = tensors(kv_heads)
    rng = np.random.default_rng(1)
    real = np.arange(TOKENS)[None, :] < np.array(LENGTHS)[:, None]
    weights = [
        jnp.asarray(rng.normal(size=(2, TOKENS, HEADS, WIDTH)) * real[:, :, None, None], jnp.float32)
        for _ in range(PASSES)
    ]

    @jax.jit
    def solve(qkv):
        def loss(qkv):
            outs = run(spec, mesh, qkv)(*qkv)
            return sum(jnp.sum(o * w) for o, w in zip(outs, weights, strict=True)), outs

        return jax.grad(loss, has_aux=True)(qkv)

    grads, outs = solve(qkv)
    causal, eye = np.tril(np.ones((TOKENS, TOKENS), bool)), np.eye(TOKENS, dtype=bool)
    for row, length in enumerate(LENGTHS):
        wanted = [np.zeros((TOKENS, *x.shape[2:])) for x in qkv]
        for i in range(PASSES):
            keys = np.concatenate([qkv[1 + 3 * j][row] for j in range(i + 1)])
            values = np.concatenate([qkv[2 + 3 * j][row] for j in range(i + 1)])
            d = cases.DENSE.dense_attention(
                qkv[3 * i][row], keys, values, np.concatenate([causal] + [eye] * i, axis=1),
                scale=WIDTH**-0.5, d_out=weights[i][row],
            )  # fmt: skip
            assert cases.DENSE.relative(outs[i][row][:length], d.out[:length]) < 1e-6
            wanted[3 * i] += d.dq
            for j in range(i + 1):
                wanted[1 + 3 * j] += d.dk[TOKENS * j : TOKENS * (j + 1)]
                wanted[2 + 3 * j] += d.dv[TOKENS * j : TOKENS * (j + 1)]
        for got, want in zip(grads, wanted, strict=True):
            assert cases.DENSE.relative(got[row], want) < 2e-6  # three passes are added up


def test_bug_case_b12_sub_ranks_of_a_ring_rank_have_their_own_places():
    spec, mesh = setup(2, 2)
    mapped = jax.shard_map(lambda x: x * 0 + usp_index(spec)[None], mesh=mesh, in_specs=SHARDED, out_specs=SHARDED)
    assert mapped(jnp.zeros((1, TOKENS), jnp.int32))[0].tolist() == list(range(TOKENS))


def test_every_pass_exchanges_q_k_v_and_out_and_sends_the_ring():
    """Four ring ranks: with two XLA sees that all passes send the same one hop, and sends it once."""
    spec, mesh = setup(2, 4)
    qkv = tensors(2)
    found = collectives(jax.jit(run(spec, mesh, qkv)).lower(*qkv).compile().as_text())
    assert sum(c.times for c in found if c.kind == "all-to-all") == 4 * PASSES
    of_a_head = 2 * (TOKENS // 8) * WIDTH * 4  # rows, tokens of a rank, width, bytes
    assert sum(c.total_bytes for c in found if c.kind == "all-to-all") == PASSES * of_a_head * (2 * HEADS + 2 * 2)
    ring = sum(c.total_bytes for c in found if c.kind == "collective-permute")
    keys_and_values = 2 * 2 * (TOKENS // 4) * 1 * WIDTH * 4  # both, rows, tokens and key-value heads of a ring rank
    assert ring == PASSES * (4 - 1) * keys_and_values


def test_refusals():
    ring = RingSpec(layout=Zigzag(ranks=2, tokens=TOKENS), axis="ring", scale=1.0)
    with pytest.raises(ValueError, match="must be Contiguous"):
        UspSpec(ring=ring, ulysses_axis=None, ulysses=1)
    ring = RingSpec(layout=Contiguous(ranks=2, tokens=TOKENS), axis="ring", scale=1.0)
    with pytest.raises(ValueError, match="ulysses=3 must divide 16"):
        UspSpec(ring=ring, ulysses_axis="ulysses", ulysses=3)
