"""A tiny policy whose every weight matters."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.models.functional import ModelGraph, abstract_params, graph_of
from draftco_jax.models.qwen3 import Qwen3Config


class Model(NamedTuple):
    """Sizes, structure, parameters."""

    cfg: Qwen3Config
    graph: ModelGraph
    params: dict[str, Any]


def lively(params, seed):
    """Weights of such a size that attention is not flat, and norms that are not 1: a mistake in either shows."""
    rng = np.random.default_rng(seed)

    def draw(leaf):
        noise = rng.normal(size=leaf.shape)
        return jnp.asarray(1 + 0.3 * noise if leaf.ndim == 1 else noise * leaf.shape[0] ** -0.5, leaf.dtype)

    return jax.tree.map(draw, params)


@pytest.fixture(scope="session")
def make_params():
    """(config, seed) -> lively weights of its module."""
    return lambda cfg, seed: lively(abstract_params(cfg.build), seed)


@pytest.fixture(scope="session")
def tiny(make_params) -> Model:
    cfg = Qwen3Config(
        vocab_size=29,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        rope_theta=1e4,
    )
    return Model(cfg, graph_of(cfg.build), make_params(cfg, seed=1))
