"""One mixture layer of each family against transformers 5.24 in float32: output and every gradient.

`tests/golden/data/moe.npz` holds, for width 16, expert width 8, 6 experts, 3 a token, shared width 12: `x` [2, 5, 16],
`c`, `y`, weights `w.NAME` under the names of transformers (fused experts), and gradients `g.NAME`, `dx` of sum(c * y).
All weights are random, also biases and the router's correction; GPT-OSS's are so large that both clamps are reached.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.models.functional import abstract_params, graph_of
from draftco_jax.models.moe import MoE, MoEConfig
from draftco_jax.models.moe_routing import RouterConfig

SIZES = {"num_experts": 6, "num_experts_per_tok": 3}
SWIGLU = MoEConfig(hidden_size=16, moe_intermediate_size=8, router=RouterConfig(**SIZES))
FAMILIES = {
    "qwen3_moe": SWIGLU,
    "qwen3_moe_not_normed": MoEConfig(
        hidden_size=16, moe_intermediate_size=8, router=RouterConfig(**SIZES, norm_topk_prob=False)
    ),
    "qwen3_5_moe": MoEConfig(
        hidden_size=16,
        moe_intermediate_size=8,
        router=RouterConfig(**SIZES),
        shared_expert_intermediate_size=12,
        shared_expert_gate=True,
    ),
    "nemotron_h": MoEConfig(
        hidden_size=16,
        moe_intermediate_size=8,
        router=RouterConfig(**SIZES, kind="sigmoid_bias", routed_scaling_factor=2.5),
        expert="relu2",
        shared_expert_intermediate_size=12,
    ),
    "gpt_oss": MoEConfig(
        hidden_size=16,
        moe_intermediate_size=8,
        router=RouterConfig(**SIZES, kind="topk_softmax"),
        expert="clamped_swiglu",
    ),
}


def published_name(path) -> str:
    """Name of a parameter in transformers."""
    name = ".".join(str(key.key) for key in path).replace("gate_up.", "").replace("kernel", "weight")
    return name


def name_in(family: str, path) -> str:
    name = published_name(path)
    if family == "gpt_oss":
        return name.replace("gate.", "router.", 1) if name.startswith("gate.") else name
    return name.replace("shared_expert.", "shared_experts.") if family == "nemotron_h" else name


def to_ours(family: str, name: str, array: np.ndarray) -> jax.Array:
    """[out, in] to [in, out]; GPT-OSS holds its experts as we do."""
    stays = array.ndim == 1 or name.endswith("_bias") or (family == "gpt_oss" and array.ndim == 3)
    return jnp.asarray(array if stays else np.swapaxes(array, -1, -2))


@pytest.fixture(scope="module")
def golden(repository):
    with np.load(repository / "tests" / "golden" / "data" / "moe.npz") as file:
        return dict(file)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mixture_layer_equals_transformers_in_value_and_gradients(family, golden):
    held = {name.removeprefix(f"{family}/"): array for name, array in golden.items() if name.startswith(f"{family}/")}
    build = lambda rngs: MoE(FAMILIES[family], rngs=rngs)  # noqa: E731
    graph, tree = graph_of(build), abstract_params(build)

    def fill(prefix):
        def one(path, leaf):
            name = name_in(family, path)
            array = held.get(f"{prefix}.{name}")
            if name in ("experts.gate_proj", "experts.up_proj") and f"{prefix}.experts.gate_up_proj" in held:
                array = np.split(held[f"{prefix}.experts.gate_up_proj"], 2, axis=1)[name == "experts.up_proj"]
            if array is None:  # transformers keeps the correction as a buffer, which has no gradient
                assert name == "gate.e_score_correction_bias" and prefix == "g"
                return jnp.zeros(leaf.shape, leaf.dtype)
            array = to_ours(family, name, array)
            assert array.shape == leaf.shape, name
            return array

        return jax.tree_util.tree_map_with_path(one, tree)

    weights = fill("w")
    stored = [name for name in held if name.startswith("w.")]
    joined = "w.experts.gate_up_proj" in stored and family != "gpt_oss"  # one tensor there, two arrays here
    assert len(jax.tree.leaves(weights)) == len(stored) + joined

    @jax.jit
    def run(params, x):
        y, pull = jax.vjp(lambda params, x: graph.merge(params)(x)[0], params, x)
        return y, pull(jnp.asarray(held["c"]))

    y, (by_weight, by_input) = run(weights, jnp.asarray(held["x"]))
    # float32 rounding in another order of summation, relative to the largest entry: measured 2e-7 to 7e-7.
    close = lambda found, expected, name: np.testing.assert_allclose(  # noqa: E731
        found, expected, rtol=0, atol=2e-6 * float(np.abs(expected).max(initial=0)), err_msg=name
    )
    close(y, held["y"], "y")
    close(by_input, held["dx"], "dx")
    expected = jax.tree_util.tree_flatten_with_path(fill("g"))[0]
    for (path, wanted), found in zip(expected, jax.tree.leaves(by_weight), strict=True):
        close(found, np.asarray(wanted), name_in(family, path))
