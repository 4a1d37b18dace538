"""The Mamba-2 layer against transformers: three layers of a tiny Nemotron-H, from what goes in to what comes out."""

from __future__ import annotations

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from draftco_jax.context_parallel import WHOLE_ROWS
from draftco_jax.models.calls import CachedCall, PackedCall
from draftco_jax.models.functional import split
from draftco_jax.models.mamba2 import Mamba2, Mamba2Sizes

# float32 rounding in another order of summation, of residual streams up to 3; measured 1e-6.
ATOL = 1e-5
LENGTH = 40
CLAMP = (1e-3, math.inf)  # what transformers does to whole sequences; it holds for some tokens of the first layer


@pytest.fixture(scope="module")
def golden(repository):
    """Config, tensors and computed values."""
    folder = repository / "tests" / "golden" / "data" / "nemotron_h"
    with np.load(folder / "golden.npz") as values:
        values = dict(values)
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors"), values


def layer_of(golden, number, limit):
    """The layer with its published tensors."""
    cfg, tensors, _ = golden
    sizes = Mamba2Sizes(
        hidden_size=cfg["hidden_size"],
        heads=cfg["mamba_num_heads"],
        head_dim=cfg["mamba_head_dim"],
        state=cfg["ssm_state_size"],
        groups=cfg["n_groups"],
        conv_width=cfg["conv_kernel"],
        eps=cfg["layer_norm_epsilon"],
        time_step_limit=limit,
        chunk=cfg["chunk_size"],
    )
    graph, _ = split(Mamba2(sizes, rngs=nnx.Rngs(0)))
    of = lambda name: tensors[f"backbone.layers.{number}.mixer.{name}"]  # noqa: E731
    widths = {"z": sizes.inner, "x": sizes.inner, "B": sizes.groups * sizes.state, "C": sizes.groups * sizes.state}
    cut = lambda array, first: np.split(array, np.cumsum(list(widths.values())[first:])[: None if first == 0 else -1])  # noqa: E731
    mixed = zip("xBC", cut(of("conv1d.weight")[:, 0], 1), cut(of("conv1d.bias"), 1), strict=True)
    params = {
        "in_proj": {
            name: {"kernel": part.T} for name, part in zip((*widths, "dt"), cut(of("in_proj.weight"), 0), strict=True)
        },
        "conv1d": {name: {"weight": weight, "bias": bias} for name, weight, bias in mixed},
        "A_log": of("A_log"),
        "D": of("D"),
        "dt_bias": of("dt_bias"),
        "norm": {"weight": of("norm.weight")},
        "out_proj": {"kernel": of("out_proj.weight").T},
    }
    return graph.merge(jax.tree.map(jnp.asarray, params))


def normed(golden, x, weight):
    cfg, tensors, _ = golden
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + cfg["layer_norm_epsilon"]) * tensors[weight]


def block(golden, number, run):
    """x + layer(norm(x)) of the golden x before the block, and what transformers has behind it."""
    x, wanted = golden[2]["hidden"][number], golden[2]["hidden"][number + 1]
    got = x + np.asarray(run(jnp.asarray(normed(golden, x, f"backbone.layers.{number}.norm.weight"))))
    last = golden[2]["hidden"].shape[0] - 2
    return (normed(golden, got, "backbone.norm_f.weight") if number == last else got), wanted


def packed(layer):
    ids = jnp.ones((2, LENGTH), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(LENGTH, dtype=jnp.int32)[None], (2, LENGTH))
    return jax.jit(lambda x: layer(x, PackedCall(positions, ids, None, WHOLE_ROWS)))


@pytest.mark.parametrize("number", [0, 2, 6])
def test_packed_rows_are_those_of_transformers(golden, number):
    layer = layer_of(golden, number, CLAMP)
    got, wanted = block(golden, number, packed(layer))
    np.testing.assert_allclose(got, wanted, rtol=0, atol=ATOL)


def test_a_prompt_and_steps_are_those_of_transformers(golden):
    """15 tokens at once, then 5 at a time of which all are kept: the layer's two paths do not differ by the clamp."""
    layer = layer_of(golden, 0, CLAMP)

    @jax.jit
    def step(new, state, start, seen, lengths):
        return layer.step(new, state, CachedCall(start, None, seen, lengths))

    def run(x):
        state = layer.empty_state(2, LENGTH, 4, jnp.float32)
        parts, visible = [], jnp.ones((2, 1, 1), bool)
        for start in (0, 15, 20, 25, 30, 35):
            new = x[:, start : start + (5 if start else 15)]
            lengths = None if start else jnp.full((2,), 15, jnp.int32)
            seen = jnp.broadcast_to(visible, (2, new.shape[1], 1))
            y, state = step(new, state, jnp.full((2,), start, jnp.int32), seen, lengths)
            parts.append(y)
        return jnp.concatenate(parts, axis=1)

    got, wanted = block(golden, 0, run)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=ATOL)
