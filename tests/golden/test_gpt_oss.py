"""GPT-OSS folders as they are published: experts in MXFP4, and settings of rotary that are told, not assumed.

The packer below is written from the definition of the format and shares nothing with `models/mxfp4.py`.
"""

from __future__ import annotations

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from draftco_jax.models.functional import abstract_params, graph_of
from draftco_jax.models.hf_weights import load_config, load_policy, save_policy

PACKED = ("gate_up_proj", "down_proj")


def pack(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """f32[E, K, O] to blocks u8[E, O, K / 32, 16], scales u8[E, O, K / 32], and the numbers that they stand for."""
    numbers = [(1 + m / 2) * 2.0 ** (e - 1) if e else m / 2 for e in range(4) for m in range(2)]
    codes = np.array([*numbers, *(-number for number in numbers)])
    experts, inputs, outputs = weights.shape
    groups = np.swapaxes(weights, 1, 2).astype(np.float64).reshape(experts, outputs, inputs // 32, 32)
    # The largest number of a block comes to lie between 3 and 6, the largest that there is.
    exponent = np.ceil(np.log2(np.abs(groups).max(axis=-1) / 6.0)).astype(int)
    scaled = groups / 2.0 ** exponent[..., None]
    chosen = np.abs(scaled[..., None] - codes).argmin(axis=-1)
    stands_for = (codes[chosen] * 2.0 ** exponent[..., None]).reshape(experts, outputs, inputs)
    blocks = (chosen[..., 0::2] + 16 * chosen[..., 1::2]).astype(np.uint8)
    return blocks, (exponent + 127).astype(np.uint8), np.swapaxes(stands_for, 1, 2).astype(np.float32)


@pytest.fixture(scope="module")
def folders(golden, tmp_path_factory):
    """The recorded policy with its experts packed, and with the numbers that the packed ones stand for."""
    made = [tmp_path_factory.mktemp(name) for name in ("packed", "plain")]
    tensors = load_file(golden / "gpt_oss" / "model.safetensors")
    packed, plain = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith(PACKED):
            del packed[name]
            packed[f"{name}_blocks"], packed[f"{name}_scales"], plain[name] = pack(tensor)
            assert 0 < np.abs(plain[name] - tensor).max() < 0.2 * np.abs(tensor).max()
    for folder, weights in zip(made, (packed, plain), strict=True):
        shutil.copy(golden / "gpt_oss" / "config.json", folder)
        save_file({name: np.ascontiguousarray(x) for name, x in weights.items()}, folder / "model.safetensors")
    config = json.loads((made[0] / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (made[0] / "config.json").write_text(json.dumps(config))
    return made


def test_packed_experts_give_the_logits_of_the_numbers_they_stand_for(folders, golden):
    (cfg, packed), (_, plain) = (load_policy(folder) for folder in folders)
    leaves = jax.tree_util.tree_leaves_with_path(packed)
    for (path, leaf), expected in zip(leaves, jax.tree.leaves(plain), strict=True):
        np.testing.assert_array_equal(leaf, expected, err_msg=jax.tree_util.keystr(path))
    with np.load(golden / "gpt_oss" / "golden.npz") as values:
        tokens, recorded = jnp.asarray(values["ids"], jnp.int32), values["logits"]
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
    graph = graph_of(cfg.build)

    @jax.jit
    def logits(params):
        policy = graph.merge(params)
        return policy.logits(policy(tokens, positions, jnp.ones_like(tokens))[0])

    found = logits(packed)
    np.testing.assert_array_equal(found, logits(plain))
    # Rounded to four bits it is still that policy: a transposed or shuffled kernel would be another.
    assert np.corrcoef(found.ravel(), recorded.ravel())[0, 1] > 0.98
    assert np.abs(found - recorded).max() > 1e-3


def test_packed_experts_in_bfloat16_are_the_same_numbers(folders):
    """Four bits and a power of two fit."""
    wide, narrow = load_policy(folders[0])[1], load_policy(folders[0], dtype=jnp.bfloat16)[1]
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), wide)
    jax.tree.map(np.testing.assert_array_equal, narrow, rounded)


def test_plain_rotary_is_not_replaced_by_the_published_one(golden, tmp_path):
    cfg = dataclasses.replace(load_config(golden / "gpt_oss"), rope_scaling=None)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract_params(cfg.build))
    save_policy(tmp_path, cfg, zeros)
    assert load_config(tmp_path) == cfg
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["rope_parameters"] == {"rope_type": "default", "rope_theta": cfg.rope_theta}
