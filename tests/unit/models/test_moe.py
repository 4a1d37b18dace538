"""Experts against a loop over all of them, in value and gradients."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from draftco_jax.models.functional import abstract_params, graph_of
from draftco_jax.models.grouped_matmul import grouped_matmul
from draftco_jax.models.moe import MoE, MoEConfig, mix
from draftco_jax.models.moe_routing import RouterConfig, Routing

ROUTERS = {
    "swiglu": RouterConfig(num_experts=5, num_experts_per_tok=2),
    "clamped_swiglu": RouterConfig(num_experts=5, num_experts_per_tok=2, kind="topk_softmax"),
    "relu2": RouterConfig(num_experts=5, num_experts_per_tok=2, kind="sigmoid_bias", routed_scaling_factor=2.5),
}
CONFIGS = {
    "swiglu": MoEConfig(
        hidden_size=8,
        moe_intermediate_size=6,
        router=ROUTERS["swiglu"],
        shared_expert_intermediate_size=4,
        shared_expert_gate=True,
    ),
    # A limit of 1, so that both clamps are reached by inputs of order 1.
    "clamped_swiglu": MoEConfig(
        hidden_size=8,
        moe_intermediate_size=6,
        router=ROUTERS["clamped_swiglu"],
        expert="clamped_swiglu",
        swiglu_limit=1.0,
    ),
    "relu2": MoEConfig(
        hidden_size=8,
        moe_intermediate_size=6,
        router=ROUTERS["relu2"],
        expert="relu2",
        shared_expert_intermediate_size=4,
    ),
}
X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 7, 8)), jnp.float32)


def layer(kind: str):
    """Graph, and random parameters of order 1 / sqrt(inputs)."""
    build = lambda rngs: MoE(CONFIGS[kind], rngs=rngs)  # noqa: E731
    rng = np.random.default_rng(1)

    def draw(leaf):
        fan = leaf.shape[-2] if leaf.ndim > 1 else 1
        return jnp.asarray(rng.normal(size=leaf.shape) * fan**-0.5, leaf.dtype)

    return graph_of(build), jax.tree.map(draw, abstract_params(build))


def dense(cfg: MoEConfig, params, x, routing: Routing):
    """Every expert on every token, weighed by the routing's weights or by zero, plus the shared expert."""
    held, flat = params["experts"], x.reshape(-1, x.shape[-1])
    spread = jnp.sum(jax.nn.one_hot(routing.ids, cfg.router.num_experts) * routing.weights[..., None], axis=-2).reshape(
        -1, cfg.router.num_experts
    )
    y = jnp.zeros_like(flat)
    for e in range(cfg.router.num_experts):
        if cfg.expert == "relu2":
            out = jnp.maximum(flat @ held["up_proj"][e], 0.0) ** 2 @ held["down_proj"][e]
        else:
            if cfg.expert == "swiglu":
                gate, up = flat @ held["gate_proj"][e], flat @ held["up_proj"][e]
                out = gate / (1 + jnp.exp(-gate)) * up @ held["down_proj"][e]
            else:
                hidden = flat @ held["gate_up_proj"][e] + held["gate_up_proj_bias"][e][None, :]
                gate = jnp.minimum(hidden[:, ::2], cfg.swiglu_limit)
                up = jnp.minimum(jnp.maximum(hidden[:, 1::2], -cfg.swiglu_limit), cfg.swiglu_limit)
                out = (up + 1) * gate / (1 + jnp.exp(-1.702 * gate)) @ held["down_proj"][e]
                out = out + held["down_proj_bias"][e][None, :]
        y = y + spread[:, e : e + 1] * out
    if cfg.expert == "relu2":
        shared = params["shared_expert"]
        y = y + jnp.maximum(flat @ shared["up_proj"]["kernel"], 0.0) ** 2 @ shared["down_proj"]["kernel"]
    if cfg.expert == "swiglu":
        group, down = params["shared_expert"]["gate_up"], params["shared_expert"]["down_proj"]["kernel"]
        gate, up = flat @ group["gate_proj"]["kernel"], flat @ group["up_proj"]["kernel"]
        weight = 1 / (1 + jnp.exp(-flat @ params["shared_expert_gate"]["kernel"]))
        y = y + weight * (gate / (1 + jnp.exp(-gate)) * up @ down)
    return y.reshape(x.shape)


def value_and_gradients(function):
    """jit of (params, x) -> y, gradients of sum(sin(y))."""

    def loss(params, x):
        y = function(params, x)
        return jnp.sum(jnp.sin(y)), y

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))


def assert_close(found, expected):
    """float32 rounding in another order of summation: 1e-6 of the largest entry."""
    for (path, one), other in zip(
        jax.tree_util.tree_flatten_with_path(found)[0], jax.tree.leaves(expected), strict=True
    ):
        scale = max(1.0, float(jnp.abs(other).max(initial=0)))
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6 * scale, err_msg=jax.tree_util.keystr(path))


@pytest.fixture(scope="module")
def grouped():
    """Per kind: graph, parameters, and the compiled layer's value and gradients."""
    made = {}
    for kind in CONFIGS:
        graph, params = layer(kind)
        made[kind] = graph, params, value_and_gradients(lambda params, x, graph=graph: graph.merge(params)(x)[0])
    return made


@pytest.mark.parametrize("kind", CONFIGS)
def test_grouped_experts_equal_a_loop_over_experts(kind, grouped):
    graph, params, run = grouped[kind]
    cfg = CONFIGS[kind]
    reference = value_and_gradients(lambda params, x: dense(cfg, params, x, graph.merge(params)(x)[1]))
    (_, y), gradients = run(params, X)
    (_, expected), wanted = reference(params, X)
    assert_close((y, gradients), (expected, wanted))
    for path, leaf in jax.tree_util.tree_flatten_with_path(gradients)[0]:
        if "e_score_correction_bias" not in jax.tree_util.keystr(path):
            assert float(jnp.abs(leaf).max()) > 1e-3, f"{jax.tree_util.keystr(path)} must matter in this test"


@pytest.mark.parametrize("kind", CONFIGS)
def test_what_padding_holds_changes_no_bit_of_the_rest(kind, grouped):
    graph, params, _ = grouped[kind]
    run = jax.jit(lambda params, x: graph.merge(params)(x)[0])
    changed = X.at[:, 5:].set(jnp.asarray(np.random.default_rng(5).normal(size=(2, 2, 8)) * 9, jnp.float32))
    one, other = run(params, X), run(params, changed)
    np.testing.assert_array_equal(one[:, :5], other[:, :5])
    assert not np.array_equal(one[:, 5:], other[:, 5:])
    # Not even numbers that are not finite: rows of one expert share a matmul, but no sum.
    poisoned = run(params, X.at[1, 6].set(jnp.nan))
    np.testing.assert_array_equal(poisoned[0], one[0])
    np.testing.assert_array_equal(poisoned[1, :6], one[1, :6])


def test_padding_without_a_loss_adds_nothing_to_gradients(grouped):
    graph, params, _ = grouped["clamped_swiglu"]

    def gradient(x, mask):
        total = lambda params: jnp.sum(jnp.where(mask, jnp.sin(graph.merge(params)(x)[0]), 0.0))  # noqa: E731
        return jax.jit(jax.grad(total))(params)

    padded = jnp.concatenate([X, 3.0 * X[:, :2]], axis=1)
    mask = (jnp.arange(9) < 7)[None, :, None]
    assert_close(gradient(padded, mask), gradient(X, jnp.ones((1, 1, 1), bool)))


def test_no_token_is_dropped_when_all_want_the_same_experts(grouped):
    graph, params, run = grouped["clamped_swiglu"]
    params = params | {"gate": params["gate"] | {"bias": jnp.array([0.0, 50.0, 0.0, 40.0, 0.0])}}
    _, routing = jax.jit(lambda params, x: graph.merge(params)(x))(params, X)
    np.testing.assert_array_equal(routing.ids, np.broadcast_to([1, 3], (2, 7, 2)))
    (_, y), (by_weight, _) = run(params, X)
    assert_close(y, jax.jit(partial(dense, CONFIGS["clamped_swiglu"]))(params, X, routing))
    # Experts with no token at all get an exact zero.
    for leaf in jax.tree.leaves(by_weight["experts"]):
        np.testing.assert_array_equal(leaf[jnp.array([0, 2, 4])], np.zeros((3, *leaf.shape[1:])))


def test_replay_uses_the_given_ids_and_says_so(grouped):
    graph, params, _ = grouped["swiglu"]
    run = jax.jit(lambda routing: graph.merge(params)(X, routing=routing))
    y, own = run(None)
    other = jnp.asarray((np.asarray(own.ids) + 1) % 5, jnp.int32)
    replayed, routing = run(Routing.recorded(other))
    np.testing.assert_array_equal(routing.ids, other)
    assert routing.weights.shape == (2, 7, 2) and routing.probabilities.shape == (2, 7, 5)
    assert_close(replayed, jax.jit(partial(dense, CONFIGS["swiglu"]))(params, X, routing))
    assert float(jnp.abs(replayed - y).max()) > 1e-2
    again, _ = run(own)
    assert_close(again, y)  # not bit for bit: without replay it is another program


def test_bfloat16_is_rounded_once_a_matmul(grouped):
    graph, params, _ = grouped["relu2"]
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32), params)
    low = X.astype(jnp.bfloat16)
    y, routing = jax.jit(lambda params, x: graph.merge(params)(x))(params, low)
    assert y.dtype == jnp.bfloat16 and routing.weights.dtype == jnp.float32
    expected = jax.jit(partial(dense, CONFIGS["relu2"]))(params, low.astype(jnp.float32), routing)
    # Activations and the result have 8 bits: a few units of 2^-9 of the largest term.
    np.testing.assert_allclose(y.astype(jnp.float32), expected, rtol=0, atol=2**-7 * float(jnp.abs(expected).max()))
    total = lambda params: jnp.sum(graph.merge(params)(low)[0].astype(jnp.float32))  # noqa: E731
    gradient = jax.eval_shape(jax.grad(total), params)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(gradient))


def test_the_gradient_of_a_bfloat16_token_adds_its_experts_in_float32():
    cfg = MoEConfig(
        hidden_size=1,
        moe_intermediate_size=1,
        router=RouterConfig(num_experts=3, num_experts_per_tok=3, kind="sigmoid_bias", norm_topk_prob=False),
        expert="relu2",
    )
    # Router kernel 0: all weights are 1/2. Expert e gives down_e * x^2 / 2, at x = 1 the gradient down_e.
    params = {
        "gate": {"kernel": jnp.zeros((1, 3)), "e_score_correction_bias": jnp.zeros(3)},
        "experts": {"up_proj": jnp.ones((3, 1, 1)), "down_proj": jnp.array([256.0, 1.0, 1.0]).reshape(3, 1, 1)},
    }
    graph = graph_of(lambda rngs: MoE(cfg, rngs=rngs))
    total = lambda x: jnp.sum(graph.merge(params)(x)[0].astype(jnp.float32))  # noqa: E731
    gradient = jax.jit(jax.grad(total))(jnp.ones((1, 1), jnp.bfloat16))
    # 256 + 1 + 1 = 258 is a bfloat16; added one by one in bfloat16 it is 256.
    assert float(gradient[0, 0]) == 258.0


def test_axes_and_shapes_are_those_of_the_sizes():
    state = nnx.eval_shape(lambda: MoE(CONFIGS["swiglu"], rngs=nnx.Rngs(0)))
    assert state.experts.gate_proj.logical_axes == state.experts.up_proj.logical_axes == ("expert", "embed", "mlp")
    assert state.experts.down_proj.logical_axes == ("expert", "mlp", "embed")
    assert state.gate.kernel.logical_axes == ("embed", "router")
    big = dataclasses.replace(
        CONFIGS["swiglu"],
        hidden_size=2048,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        router=RouterConfig(num_experts=256, num_experts_per_tok=8),
    )
    sizes = [leaf.size for leaf in jax.tree.leaves(abstract_params(lambda rngs: MoE(big, rngs=rngs)))]
    assert sum(sizes) == 2048 * (256 * 3 * 512 + 256 + 3 * 512 + 1)  # one layer of Qwen3.5-35B-A3B


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"hidden_size": 0}, "hidden_size=0 must be >= 1"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size=0 must be >= 1"),
        ({"swiglu_limit": 0.0}, r"swiglu_limit=0\.0 must be > 0"),
        ({"shared_expert_intermediate_size": -1}, "shared_expert_intermediate_size=-1 must be >= 0"),
        ({"shared_expert_gate": True}, "shared_expert_gate=True must have a shared expert"),
        ({"expert": "clamped_swiglu", "shared_expert_intermediate_size": 4}, "must be 0 with expert='clamped_swiglu'"),
    ],
)
def test_parts_that_no_family_combines_are_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        MoEConfig(**{"hidden_size": 8, "moe_intermediate_size": 6, "router": ROUTERS["swiglu"]} | changed)


@jax.custom_vjp
def _marked(rows, outside):
    return rows


_marked.defvjp(
    lambda rows, outside: (rows, outside), lambda outside, c: (jnp.where(outside[:, None], jnp.nan, c), None)
)


def test_parts_of_two_ranks_add_up_whatever_a_grouped_matmul_makes_of_rows_outside_its_groups(grouped, monkeypatch):
    """Such rows come back as zeros or as they were found, by backend and way; here as NaN."""
    graph, params, _ = grouped["clamped_swiglu"]
    c = jnp.asarray(np.random.default_rng(3).normal(size=(14, 8)), jnp.float32)

    def undefined(rows, kernels, sizes, way):
        outside = jnp.arange(rows.shape[0]) >= jnp.sum(sizes)
        return jnp.where(outside[:, None], jnp.nan, grouped_matmul(_marked(rows, outside), kernels, sizes, way))

    monkeypatch.setattr("draftco_jax.models.moe.grouped_matmul", undefined)

    def part(params, x, first, last):
        held = jax.tree.map(lambda leaf: leaf[first:last], params["experts"])
        module = graph.merge(params | {"experts": held})
        chosen = module.gate(x)
        return mix(module.experts, x, chosen.ids, chosen.weights, first)

    @jax.jit
    def run(params, x):
        one = lambda params, x: jnp.sum(c * part(params, x, 0, 5))  # noqa: E731
        two = lambda params, x: jnp.sum(c * (part(params, x, 0, 2) + part(params, x, 2, 5)))  # noqa: E731
        return tuple(jax.value_and_grad(loss, argnums=(0, 1))(params, x) for loss in (one, two))

    whole, split = run(params, X.reshape(14, 8))
    assert_close(split, whole)
