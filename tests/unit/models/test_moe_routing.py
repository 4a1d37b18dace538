"""Routers and what is counted of them, against loops over tokens in numpy."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.models.functional import initialise
from draftco_jax.models.moe_routing import (
    Router,
    RouterConfig,
    Routing,
    balance_loss,
    choose,
    distinct_experts,
    routing_metrics,
    routing_sums,
    weigh,
)

CONFIGS = {
    "softmax_topk": RouterConfig(num_experts=5, num_experts_per_tok=2),
    "softmax_topk_not_normed": RouterConfig(num_experts=5, num_experts_per_tok=2, norm_topk_prob=False),
    "sigmoid_bias": RouterConfig(num_experts=5, num_experts_per_tok=2, kind="sigmoid_bias", routed_scaling_factor=2.5),
    "sigmoid_bias_not_normed": RouterConfig(
        num_experts=5, num_experts_per_tok=2, kind="sigmoid_bias", norm_topk_prob=False
    ),
    "topk_softmax": RouterConfig(num_experts=5, num_experts_per_tok=2, kind="topk_softmax"),
}
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(7, 4)), jnp.float32)


def router(name: str, scale: float = 1.0):
    """Graph and random parameters, biases as large as logits."""
    graph, params = initialise(lambda rngs: Router(4, CONFIGS[name], rngs=rngs), jax.random.key(0))
    rng = np.random.default_rng(1)
    return graph, jax.tree.map(lambda leaf: jnp.asarray(scale * rng.normal(size=leaf.shape), leaf.dtype), params)


def expected_weights(name: str, logits: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """The formula of the module docstring for one token, in float64."""
    cfg = CONFIGS[name]
    if cfg.kind == "topk_softmax":
        chosen = np.exp(logits[ids])
        return chosen / chosen.sum()
    scores = np.exp(logits) / np.exp(logits).sum() if cfg.kind == "softmax_topk" else 1 / (1 + np.exp(-logits))
    chosen = scores[ids]
    return cfg.routed_scaling_factor * (chosen / chosen.sum() if cfg.norm_topk_prob else chosen)


def logits_of(params, x) -> np.ndarray:
    bias = np.asarray(params["bias"], np.float64) if "bias" in params else 0.0
    return np.asarray(x, np.float64) @ np.asarray(params["kernel"], np.float64) + bias


@pytest.mark.parametrize("name", CONFIGS)
def test_the_best_experts_are_chosen_and_weighed_by_the_rule(name):
    graph, params = router(name)
    routing = jax.jit(lambda params, x: graph.merge(params)(x))(params, X)
    correction = np.asarray(params.get("e_score_correction_bias", np.zeros(5)), np.float64)
    moved = 0
    for token, logits in enumerate(logits_of(params, X)):
        scores = 1 / (1 + np.exp(-logits)) if CONFIGS[name].kind == "sigmoid_bias" else logits
        ids = np.argsort(-(scores + correction))[:2]
        moved += set(ids) != set(np.argsort(-scores)[:2])
        np.testing.assert_array_equal(routing.ids[token], ids)
        # float32 exponentials of numbers of order 1.
        np.testing.assert_allclose(routing.weights[token], expected_weights(name, logits, ids), rtol=2e-6)
    assert (moved > 0) == (CONFIGS[name].kind == "sigmoid_bias"), "the correction must matter where there is one"
    np.testing.assert_allclose(jnp.sum(routing.probabilities, axis=-1), np.ones(7), rtol=1e-6)
    assert routing.weights.dtype == routing.probabilities.dtype == jnp.float32 and routing.ids.dtype == jnp.int32


@pytest.mark.parametrize("name", ["softmax_topk", "sigmoid_bias", "topk_softmax"])
def test_replayed_ids_are_used_and_weighed_by_the_present_router(name):
    graph, params = router(name)
    own = graph.merge(params)(X)
    ids = np.array(list(itertools.permutations(range(5), 2))[:7], np.int32)
    ids[3] = -1
    replayed = graph.merge(params)(X, jnp.asarray(ids))
    ids[3] = own.ids[3]
    np.testing.assert_array_equal(replayed.ids, ids)
    assert not np.array_equal(ids, own.ids)
    for token, logits in enumerate(logits_of(params, X)):
        np.testing.assert_allclose(replayed.weights[token], expected_weights(name, logits, ids[token]), rtol=2e-6)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_replayed_choice_that_has_become_impossible_is_finite_in_value_and_gradient(name):
    logits = jnp.array([[300.0, 200.0, 0.0, -200.0, -300.0]])

    def total(logits):
        return jnp.sum(weigh(logits, jnp.array([[3, 4]], jnp.int32), CONFIGS[name]) ** 2)

    value, gradient = jax.jit(jax.value_and_grad(total))(logits)
    assert np.isfinite(float(value)) and np.isfinite(np.asarray(gradient)).all()
    if name in ("softmax_topk", "topk_softmax"):
        np.testing.assert_allclose(value, 1.0, rtol=1e-6)


def test_an_id_that_is_no_expert_shows():
    assert np.isnan(weigh(jnp.zeros((1, 5)), jnp.array([[0, 5]], jnp.int32), CONFIGS["topk_softmax"])).any()


def test_what_a_recorded_routing_does_not_hold_shows():
    routing = Routing.recorded(jnp.zeros((2, 3, 2), jnp.int32))
    assert routing.weights.shape == (2, 3, 2) and np.isnan(routing.weights).all()
    assert routing.probabilities.shape == (2, 3, 0)


def test_the_correction_gets_no_gradient_and_the_logits_do():
    graph, params = router("sigmoid_bias")
    gradient = jax.jit(jax.grad(lambda params: jnp.sum(jnp.sin(graph.merge(params)(X).weights))))(params)
    np.testing.assert_array_equal(gradient["e_score_correction_bias"], np.zeros(5))
    assert float(jnp.abs(gradient["kernel"]).max()) > 1e-2


def test_logits_are_float32_also_for_bfloat16_input():
    # Two logits that differ by 2^-12 near 1: one number in bfloat16.
    graph, params = router("topk_softmax")
    params = params | {"kernel": jnp.ones((4, 5)).at[0, 3].add(2.0**-12), "bias": jnp.zeros(5)}
    x = jnp.full((1, 4), 0.25, jnp.bfloat16).at[0, 0].set(1.0)
    assert int(graph.merge(params)(x).ids[0, 0]) == 3


def test_of_equal_scores_the_lower_id_is_chosen():
    np.testing.assert_array_equal(choose(jnp.zeros((1, 5)), CONFIGS["softmax_topk"]), [[0, 1]])


def sample_routing(name="softmax_topk"):
    graph, params = router(name, scale=0.7)
    return jax.jit(lambda params, x: graph.merge(params)(x))(params, X)


def test_sums_count_only_what_counts_and_add_up():
    counted = jnp.array([True, False, True, True, False, True, True])
    routing = sample_routing()
    poisoned = routing._replace(probabilities=routing.probabilities.at[1].set(jnp.nan), ids=routing.ids.at[1].set(99))
    sums = routing_sums(poisoned, counted)
    law, ids = np.asarray(routing.probabilities, np.float64)[counted], np.asarray(routing.ids)[counted]
    np.testing.assert_array_equal(sums.load, np.bincount(ids.ravel(), minlength=5))
    np.testing.assert_allclose(sums.mass, law.sum(axis=0), rtol=1e-6)
    np.testing.assert_allclose(sums.entropy, -(law * np.log(law)).sum(), rtol=1e-6)
    assert float(sums.tokens) == 5
    half = [jnp.logical_and(counted, jnp.arange(7) < 3), jnp.logical_and(counted, jnp.arange(7) >= 3)]
    together = jax.tree.map(jnp.add, *(routing_sums(poisoned, part) for part in half))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), together, sums)


def test_balance_loss_is_the_published_form():
    routing = sample_routing()
    sums = routing_sums(routing, jnp.ones(7, bool))
    hot = np.zeros((7, 2, 5))
    for token, slot in np.ndindex(7, 2):
        hot[token, slot, int(routing.ids[token, slot])] = 1
    law = np.asarray(routing.probabilities, np.float64)
    expected = 5 * sum((hot[:, slot].mean(axis=0) * law.mean(axis=0)).sum() for slot in range(2))
    np.testing.assert_allclose(balance_loss(sums), expected, rtol=1e-6)


def test_balance_loss_is_k_when_balanced_and_e_when_one_expert_has_all():
    ids = jnp.array([[i, (i + 1) % 5] for i in range(5)], jnp.int32)
    even = Routing(ids, jnp.ones((5, 2)), jnp.full((5, 5), 0.2))
    np.testing.assert_allclose(balance_loss(routing_sums(even, jnp.ones(5, bool))), 2.0, rtol=1e-6)
    one = Routing(jnp.zeros((5, 1), jnp.int32), jnp.ones((5, 1)), jax.nn.one_hot(jnp.zeros(5, jnp.int32), 5))
    sums = routing_sums(one, jnp.ones(5, bool))
    np.testing.assert_allclose(balance_loss(sums), 5.0, rtol=1e-6)
    metrics = routing_metrics(sums)
    assert float(metrics["load_max"]) == 5 and float(metrics["load_min"]) == 0 and float(metrics["entropy"]) == 0


@pytest.mark.parametrize("name", ["softmax_topk", "sigmoid_bias"])
def test_nothing_counted_gives_zeros_and_a_zero_gradient(name):
    graph, params = router(name)

    def loss(params):
        sums = routing_sums(graph.merge(params)(X), jnp.zeros(7, bool))
        return balance_loss(sums) + sums.entropy, routing_metrics(sums)

    (value, metrics), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    assert float(value) == 0 and all(float(metric) == 0 for metric in metrics.values())
    jax.tree.map(lambda leaf: np.testing.assert_array_equal(leaf, np.zeros(leaf.shape)), gradient)


def test_descending_the_balance_loss_evens_the_load():
    graph, params = router("softmax_topk")
    x = jnp.asarray(RNG.normal(size=(200, 4)) + 1.0, jnp.float32)

    @jax.jit
    def sums(params):
        return routing_sums(graph.merge(params)(x), jnp.ones(200, bool))

    step = jax.jit(
        lambda params: jax.tree.map(lambda p, g: p - 0.5 * g, params, jax.grad(lambda p: balance_loss(sums(p)))(params))
    )
    before = float(routing_metrics(sums(params))["load_max"])
    for _ in range(40):
        params = step(params)
    after = float(routing_metrics(sums(params))["load_max"])
    assert after < 0.8 * before, (before, after)


def test_distinct_experts_of_a_verify_block():
    ids = RNG.integers(0, 9, (3, 4, 2)).astype(np.int32)
    counted = RNG.random((3, 4)) < 0.6
    counted[1] = False
    found = distinct_experts(jnp.asarray(ids), jnp.asarray(counted), 9)
    np.testing.assert_array_equal(found, [len(set(ids[row][counted[row]].ravel().tolist())) for row in range(3)])
    assert int(found[1]) == 0 and int(found.max()) > 2


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_experts": 0}, "num_experts=0 must be >= 1"),
        ({"num_experts_per_tok": 9}, r"num_experts_per_tok=9 must be in 1\.\.num_experts=8"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok=0"),
        ({"n_group": 4}, "n_group=4 must be 1"),
        ({"topk_group": 2}, "topk_group=2 must be 1"),
        ({"routed_scaling_factor": 0.0}, r"routed_scaling_factor=0\.0 must be > 0"),
        ({"routed_scaling_factor": 2.5}, r"routed_scaling_factor=2\.5 must be 1 with kind='softmax_topk'"),
        ({"kind": "topk_softmax", "norm_topk_prob": False}, "norm_topk_prob=False must be True"),
    ],
)
def test_settings_that_no_rule_describes_are_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        RouterConfig(**{"num_experts": 8, "num_experts_per_tok": 2} | changed)
