"""Experts split over four devices: the numbers and the gradients of one device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from draftco_jax.context_parallel import WHOLE_ROWS, PackedRows
from draftco_jax.models.functional import abstract_params, graph_of
from draftco_jax.models.moe import MoE, MoEConfig
from draftco_jax.models.moe_routing import RouterConfig, Routing

RANKS = 4
CONFIGS = {
    "swiglu": MoEConfig(
        hidden_size=8,
        moe_intermediate_size=6,
        router=RouterConfig(num_experts=8, num_experts_per_tok=3),
        shared_expert_intermediate_size=4,
        shared_expert_gate=True,
    ),
    "clamped_swiglu": MoEConfig(
        hidden_size=8,
        moe_intermediate_size=6,
        router=RouterConfig(num_experts=8, num_experts_per_tok=3, kind="topk_softmax"),
        expert="clamped_swiglu",
        swiglu_limit=1.0,
    ),
}
X = jnp.asarray(np.random.default_rng(0).normal(size=(4, 6, 8)), jnp.float32)
SPLIT, WHOLE = PartitionSpec("expert"), PartitionSpec()


def layer(kind: str):
    """Graph, random parameters, and how each is split: experts over the axis, the rest not."""
    build = lambda rngs: MoE(CONFIGS[kind], rngs=rngs)  # noqa: E731
    graph, tree = graph_of(build), abstract_params(build)
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape) * 0.4, leaf.dtype), tree)
    specs = jax.tree.map(lambda _: WHOLE, tree) | {"experts": jax.tree.map(lambda _: SPLIT, tree["experts"])}
    return graph, params, specs


def over(axis: str | None) -> PackedRows:
    """Rows and experts over an axis; None: one device."""
    return WHOLE_ROWS if axis is None else PackedRows(row_axes=(axis,), expert_axis=axis)


def spread(function, specs, outputs):
    """The function of (params, x, c, ids) as one program over four devices, rows of tokens split too."""
    mesh = Mesh(np.array(jax.devices()[:RANKS]), ("expert",))
    inputs = (specs, SPLIT, SPLIT, SPLIT)
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=inputs, out_specs=outputs, check_vma=True))


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("hot", [False, True], ids=["any", "hot"])
def test_four_devices_equal_one_in_value_and_gradients(kind, hot):
    graph, params, specs = layer(kind)
    rng = np.random.default_rng(2)
    ids = np.stack([rng.permutation(8)[:3] for _ in range(24)]).reshape(4, 6, 3).astype(np.int32)
    ids[1] = -1  # one row of tokens is routed anew, the others are replayed
    if hot:  # nearly all on the third device, none on the second and fourth: nothing is dropped
        ids[:] = [4, 5, 0]
    c = jnp.asarray(rng.normal(size=X.shape), jnp.float32)

    def run(params, x, c, ids, axis):
        def loss(params, x):
            y, routing = graph.merge(params)(x, over(axis), routing=Routing.recorded(ids))
            return jnp.sum(c * y), (y, routing)

        (_, (y, routing)), gradients = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, x)
        return y, routing, gradients

    one = jax.jit(lambda *args: run(*args, axis=None))(params, X, c, jnp.asarray(ids))
    outputs = (SPLIT, Routing(SPLIT, SPLIT, SPLIT, SPLIT), (specs, SPLIT))
    four = spread(lambda *args: run(*args, axis="expert"), specs, outputs)(params, X, c, jnp.asarray(ids))
    np.testing.assert_array_equal(four[1].ids, one[1].ids)
    for (path, found), expected in zip(
        jax.tree_util.tree_flatten_with_path(four)[0], jax.tree.leaves(one), strict=True
    ):
        scale = max(1.0, float(jnp.abs(expected).max()))
        # float32 sums over experts and tokens in another order.
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6 * scale, err_msg=jax.tree_util.keystr(path))


def test_experts_that_were_not_split_are_refused():
    graph, params, specs = layer("swiglu")
    whole = jax.tree.map(lambda _: WHOLE, specs)
    run = spread(lambda params, x, c, ids: graph.merge(params)(x, over("expert"))[0], whole, SPLIT)
    with pytest.raises(ValueError, match=r"experts.count=8 must be num_experts=8 / 4 ranks of 'expert'; split"):
        run(params, X, X, jnp.zeros((4, 6, 3), jnp.int32))


def test_whole_experts_and_split_tokens_give_the_summed_gradients():
    """Data parallel without an expert axis: each device's gradient of the weights is that of its own tokens."""
    graph, params, specs = layer("clamped_swiglu")
    whole = jax.tree.map(lambda _: WHOLE, specs)

    def gradients(params, x, c, ids):
        del ids
        return jax.grad(lambda params: jnp.sum(c * graph.merge(params)(x)[0]))(params)

    ids = jnp.zeros((4, 6, 3), jnp.int32)
    four = spread(gradients, whole, whole)(params, X, jnp.cos(X), ids)
    one = jax.jit(gradients)(params, X, jnp.cos(X), ids)
    for (path, found), expected in zip(
        jax.tree_util.tree_flatten_with_path(four)[0], jax.tree.leaves(one), strict=True
    ):
        scale = max(1.0, float(jnp.abs(expected).max()))
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6 * scale, err_msg=jax.tree_util.keystr(path))
