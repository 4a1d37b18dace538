"""Grown policies against the small ones: a dense decoder written out in float64, and the module in float32."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.models.functional import abstract_params, graph_of
from draftco_jax.models.growth import grow, layer_places, scale
from draftco_jax.models.qwen3 import Qwen3Config

TOKENS = np.array([[5, 1, 17, 3, 3, 28, 0, 11, 9], [2, 2, 4, 8, 16, 23, 27, 26, 1]])
WIDER = {
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 50_000,
}
DEEPER = {"num_hidden_layers": 5}
GROWTH = {
    "wider": WIDER,
    "deeper": DEEPER,
    "both": WIDER | {"num_hidden_layers": 3},
    "heads": {"num_attention_heads": 12, "num_key_value_heads": 4},
}


def config(tied, **changes):
    sizes = {
        "vocab_size": 29,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rope_theta": 1e4,
        "tie_word_embeddings": tied,
    }
    return Qwen3Config(**(sizes | changes))


@pytest.fixture(scope="module")
def small(make_params):
    """tied -> config and lively weights in float64."""
    cfgs = {tied: config(tied) for tied in (False, True)}
    weights = {tied: jax.tree.map(lambda x: np.asarray(x, np.float64), make_params(cfgs[tied], 3)) for tied in cfgs}
    return {tied: (cfgs[tied], weights[tied]) for tied in cfgs}


def normed(x, weight, eps):
    return weight * x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)


def turned(x, cfg):
    """[T, n, H] at positions 0, 1, ..."""
    half = cfg.head_dim // 2
    angles = np.arange(x.shape[0])[:, None] * cfg.rope_theta ** -(np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def dense_logits(cfg, params, tokens):
    """[T, V] of one document, head by head."""
    x, count = params["embed_tokens"][tokens], len(tokens)
    for layer in params["layers"].values():
        a = layer["self_attn"]
        u = normed(x, layer["input_layernorm"]["weight"], cfg.rms_norm_eps)
        q, k, v = (
            (u @ a["qkv"][name]["kernel"]).reshape(count, -1, cfg.head_dim) for name in ("q_proj", "k_proj", "v_proj")
        )
        q = turned(normed(q, a["q_norm"]["weight"], cfg.rms_norm_eps), cfg)
        k = turned(normed(k, a["k_norm"]["weight"], cfg.rms_norm_eps), cfg)
        heads = []
        for n in range(cfg.num_attention_heads):
            j = n // (cfg.num_attention_heads // cfg.num_key_value_heads)
            scores = np.where(np.tri(count, dtype=bool), q[:, n] @ k[:, j].T / cfg.head_dim**0.5, -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            heads.append(weights / weights.sum(-1, keepdims=True) @ v[:, j])
        x = x + np.concatenate(heads, axis=-1) @ a["o_proj"]["kernel"]
        u = normed(x, layer["post_attention_layernorm"]["weight"], cfg.rms_norm_eps)
        mlp = layer["mlp"]
        gate, up = (u @ mlp["gate_up"][name]["kernel"] for name in ("gate_proj", "up_proj"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ mlp["down_proj"]["kernel"]
    head = params["embed_tokens"].T if cfg.tie_word_embeddings else params["lm_head"]["kernel"]
    return normed(x, params["norm"]["weight"], cfg.rms_norm_eps) @ head


def all_logits(cfg, params):
    return np.stack([dense_logits(cfg, params, row) for row in TOKENS])


def module_logits(cfg, params):
    """float32 [R, T, V] of the module, and the stream after each layer."""
    logits, taps = jax.jit(lambda weights: forward(cfg, weights))(jax.tree.map(jnp.float32, params))
    return np.asarray(logits), np.asarray(taps).reshape(*TOKENS.shape, cfg.num_hidden_layers, cfg.hidden_size)


def forward(cfg, weights):
    policy, tokens = graph_of(cfg.build).merge(weights), jnp.asarray(TOKENS, jnp.int32)
    places = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    out = policy(tokens, places, jnp.ones_like(tokens), tap_layers=range(cfg.num_hidden_layers))
    return policy.logits(out.hidden), out.taps


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", GROWTH)
def test_the_law_is_kept_to_the_last_digits_of_float64(small, name, tied):
    cfg, params = small[tied]
    new, grown = grow((cfg, params), config(tied, **GROWTH[name]), jax.random.key(1))
    want, got = all_logits(cfg, params), all_logits(new, grown)
    assert np.abs(want).max() > 1.0
    assert np.abs(got - want).max() < 1e-9
    assert (got.argmax(-1) == want.argmax(-1)).all()


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_law_and_the_taps_are_kept_by_the_module_in_float32(small, tied):
    cfg, params = small[tied]
    params = jax.tree.map(lambda x: np.asarray(x, np.float32), params)
    new, grown = grow((cfg, params), config(tied, **GROWTH["both"]), jax.random.key(1))
    assert {leaf.dtype for leaf in jax.tree.leaves(grown)} == {np.dtype(np.float32)}
    (want, old_taps), (got, taps) = module_logits(cfg, params), module_logits(new, grown)
    assert np.abs(got - want).max() < 1e-5 * np.abs(want).max()  # seen: 2e-6
    assert (got.argmax(-1) == want.argmax(-1)).all()
    held, s, width = taps[:, :, layer_places(cfg, new)], scale(cfg, new), cfg.hidden_size
    assert np.abs(held[..., :width] / s - old_taps).max() < 1e-5 * np.abs(old_taps).max()
    assert not held[..., width:].any()


def test_shapes_are_those_of_the_config_and_what_nothing_reads_is_drawn(small):
    new, grown = grow(small[False], config(False, **GROWTH["both"]), jax.random.key(1))
    wanted = jax.tree.map(lambda leaf: leaf.shape, abstract_params(new.build))
    assert jax.tree.map(lambda leaf: leaf.shape, grown) == wanted
    # Zeros are where the law needs them: new columns of what writes to the stream, rows of new units, new layers.
    for place, layer in grown["layers"].items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(layer):
            writes = path[-2].key in ("o_proj", "down_proj")
            silent = place not in layer_places(small[False][0], new)
            assert np.any(leaf == 0.0) == writes and (leaf.any() or (writes and silent)), (place, path)
    other = grow(small[False], new, jax.random.key(2))[1]
    assert np.abs(other["layers"][0]["mlp"]["gate_up"]["up_proj"]["kernel"]).sum() > 0
    drawn = [np.any(a != b) for a, b in zip(jax.tree.leaves(grown), jax.tree.leaves(other), strict=True)]
    assert any(drawn), "the key says what is drawn"


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_without_s_in_the_final_norm_the_law_is_another(small, tied):
    cfg, params = small[tied]
    new, grown = grow((cfg, params), config(tied, **WIDER), jax.random.key(1))
    grown["norm"]["weight"] = grown["norm"]["weight"] * scale(cfg, new)
    off = np.abs(all_logits(new, grown) - all_logits(cfg, params)).max()
    assert off > 0.1


def test_what_nothing_reads_does_get_gradients(small):
    cfg, params = small[True]
    new, grown = grow(
        (cfg, jax.tree.map(lambda x: np.asarray(x, np.float32), params)),
        config(True, **GROWTH["both"]),
        jax.random.key(1),
    )
    loss = lambda weights: jnp.sum(jax.nn.log_softmax(forward(new, weights)[0])[..., 0])  # noqa: E731
    layers = jax.jit(jax.grad(loss))(jax.tree.map(jnp.asarray, grown))["layers"]
    fresh = next(place for place in layers if place not in layer_places(cfg, new))
    assert np.abs(layers[fresh]["self_attn"]["o_proj"]["kernel"]).min() > 0
    old = layer_places(cfg, new)[0]
    assert np.abs(layers[old]["mlp"]["down_proj"]["kernel"][cfg.intermediate_size :]).min() > 0


@pytest.mark.parametrize(("old", "new"), [(1, 1), (1, 4), (2, 5), (2, 8), (3, 7), (4, 6), (5, 5)])
def test_old_layers_are_spread_in_order_and_the_last_stays_last(old, new):
    places = layer_places(config(True, num_hidden_layers=old), config(True, num_hidden_layers=new))
    assert len(set(places)) == old and list(places) == sorted(places) and places[-1] == new - 1
    gaps = np.diff([-1, *places])
    assert gaps.max() - gaps.min() <= 1


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"vocab_size": 30}, "vocab_size=30"),
        ({"head_dim": 16}, "head_dim=16"),
        ({"rope_theta": 1e6}, "rope_theta="),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps="),
        ({"tie_word_embeddings": True}, "tie_word_embeddings=True"),
        ({"hidden_size": 15}, "hidden_size=15"),
        ({"intermediate_size": 8}, "intermediate_size=8"),
        ({"num_hidden_layers": 1}, "num_hidden_layers=1"),
        ({"num_key_value_heads": 1}, "num_key_value_heads=1"),
        ({"max_position_embeddings": 64}, "max_position_embeddings=64"),
        ({"num_key_value_heads": 4}, "num_attention_heads=4"),
    ],
)
def test_what_cannot_hold_the_old_function_is_refused_in_one_line(small, change, name):
    with pytest.raises(ValueError, match=name) as refusal:
        grow(small[False], dataclasses.replace(small[False][0], **change), jax.random.key(0))
    assert "\n" not in str(refusal.value)
