"""Stacked layers in loops compute what layers one by one do, for every family: values, gradients, caches, routing."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.models.compute import ComputeConfig
from draftco_jax.models.functional import abstract_params, graph_of, initialise
from draftco_jax.models.gpt_oss import GptOssConfig
from draftco_jax.models.hf_weights import abstract_policy, load_policy, save_policy
from draftco_jax.models.layer_runs import Run, find_runs, stack_layers, unstack_layers
from draftco_jax.models.llama import LlamaConfig
from draftco_jax.models.nemotron_h import NANO_30B, NemotronHConfig
from draftco_jax.models.qwen3_5_moe import Qwen35MoeConfig

STACKED = ComputeConfig(scan_layers=True)
POLICIES = {
    "llama": LlamaConfig.tiny(),
    "qwen3_5_moe": Qwen35MoeConfig.tiny(),
    "nemotron_h": NemotronHConfig.tiny(),
    "gpt_oss": GptOssConfig.tiny(),
}
TOKENS = np.random.default_rng(0).integers(1, 13, (2, 12)).astype(np.int32)
SEGMENTS = np.array([[1] * 5 + [2] * 7, [1] * 9 + [0] * 3], np.int32)
POSITIONS = np.array([[*range(5), *range(7)], [*range(9), 0, 0, 0]], np.int32)


@pytest.mark.parametrize(
    ("kinds", "runs"),
    [
        ("aaaa", [Run(0, 1, 4)]),
        ("abab", [Run(0, 2, 2)]),
        ("aaab" * 3, [Run(0, 4, 3)]),
        ("abc", [Run(0, 1, 1), Run(1, 1, 1), Run(2, 1, 1)]),
        ("abbb", [Run(0, 1, 1), Run(1, 1, 3)]),
        ("a", [Run(0, 1, 1)]),
    ],
)
def test_runs_cover_all_layers_with_few_blocks(kinds, runs):
    assert list(find_runs(kinds)) == runs


def test_the_pattern_of_nemotron_needs_a_quarter_of_its_blocks():
    runs = find_runs(NANO_30B)
    layers = [run.layer(repeat, place) for run in runs for repeat in range(run.repeats) for place in range(run.period)]
    assert layers == list(range(52))
    assert all(
        len({NANO_30B[layer] for layer in run.layers_at(place)}) == 1 for run in runs for place in range(run.period)
    )
    assert sum(run.period for run in runs) == 14


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=pytest.mark.slow) if name in ("llama", "gpt_oss", "qwen3_5_moe") else name
        for name in POLICIES
    ],
)
def test_loops_equal_layers_one_by_one(family):
    cfg = POLICIES[family]
    one_graph, one = initialise(cfg.build, jax.random.key(1))
    one = jax.tree.map(lambda leaf: leaf * 4 if leaf.ndim >= 2 else leaf, one)
    build = partial(cfg.build, compute=STACKED)
    graph, stacked = graph_of(build), stack_layers(one, cfg.runs)
    shapes = lambda tree: jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)  # noqa: E731
    assert shapes(stacked) == shapes(abstract_params(build))
    assert shapes(one) == shapes(abstract_policy(cfg))
    jax.tree.map(np.testing.assert_array_equal, unstack_layers(stacked, cfg.runs), one)
    taps = (0, cfg.num_hidden_layers - 1)

    def loss(graph, params):
        out = graph.merge(params)(*map(jnp.asarray, (TOKENS, POSITIONS, SEGMENTS)), tap_layers=taps)
        real = jnp.asarray(SEGMENTS > 0)[..., None]
        return jnp.sum(jnp.where(real, out.hidden, 0.0) ** 2 * 0.1), out

    (one_loss, one_out), one_gradient = jax.jit(jax.value_and_grad(partial(loss, one_graph), has_aux=True))(one)
    (found_loss, out), gradient = jax.jit(jax.value_and_grad(partial(loss, graph), has_aux=True))(stacked)
    np.testing.assert_allclose(found_loss, one_loss, rtol=1e-6)
    real = SEGMENTS > 0
    np.testing.assert_allclose(out.taps[real], one_out.taps[real], atol=2e-5)
    assert (out.routing is None) == (one_out.routing is None)
    if out.routing is not None:
        np.testing.assert_array_equal(out.routing.ids[real], one_out.routing.ids[real])
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), out.routing.sums, one_out.routing.sums)
    for (path, found), wanted in zip(
        jax.tree_util.tree_leaves_with_path(unstack_layers(gradient, cfg.runs)),
        jax.tree.leaves(one_gradient),
        strict=True,
    ):
        scale = float(jnp.max(jnp.abs(wanted)))
        np.testing.assert_allclose(found, wanted, atol=1e-5 * scale + 1e-12, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize("family", POLICIES)
def test_files_load_stacked_and_are_written_alike(family, tmp_path):
    cfg = POLICIES[family]
    _, params = initialise(cfg.build, jax.random.key(1))
    save_policy(tmp_path / "one", cfg, params)
    loaded_cfg, stacked = load_policy(tmp_path / "one", compute=STACKED)
    assert loaded_cfg == cfg
    jax.tree.map(np.testing.assert_array_equal, stacked, stack_layers(params, cfg.runs))
    save_policy(tmp_path / "two", cfg, stacked)
    files = [sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("one", "two")]
    assert files[0] == files[1]
    jax.tree.map(np.testing.assert_array_equal, load_policy(tmp_path / "two")[1], params)


@pytest.mark.parametrize("remat", ["attention", pytest.param("block", marks=pytest.mark.slow)])
def test_what_is_made_again_changes_no_gradient(remat):
    cfg = POLICIES["qwen3_5_moe"]
    params = initialise(cfg.build, jax.random.key(1))[1]
    stacked = stack_layers(params, cfg.runs)
    rows = [jnp.asarray(array) for array in (TOKENS, POSITIONS, SEGMENTS)]

    def gradient(compute):
        graph = graph_of(partial(cfg.build, compute=compute))
        return jax.jit(jax.grad(lambda params: jnp.sum(graph.merge(params)(*rows).hidden[:, ::2] ** 3)))

    kept, again = (
        gradient(compute).lower(stacked).compile()
        for compute in (STACKED, ComputeConfig(scan_layers=True, remat=remat))
    )
    for one, other in zip(*(jax.tree.leaves(f(stacked)) for f in (kept, again)), strict=True):
        np.testing.assert_allclose(other, one, rtol=0, atol=1e-6 * float(jnp.max(jnp.abs(one))))
    sizes = [f.memory_analysis().temp_size_in_bytes for f in (kept, again)]
    assert sizes[1] < sizes[0]


def test_what_is_compiled_does_not_grow_with_the_depth():
    """Of layers one by one it does, so the count means something."""

    def operations(layers, compute):
        cfg = replace(POLICIES["llama"], num_hidden_layers=layers)
        build = partial(cfg.build, compute=compute)
        graph, params = graph_of(build), abstract_params(build)
        rows = [jax.ShapeDtypeStruct(TOKENS.shape, jnp.int32)] * 3
        loss = lambda params, *rows: jnp.sum(graph.merge(params)(*rows).hidden)  # noqa: E731
        return jax.jit(jax.grad(loss)).lower(params, *rows).as_text().count(" = ")

    assert operations(2, STACKED) == operations(6, STACKED)
    assert operations(6, ComputeConfig()) > 2 * operations(2, ComputeConfig())
