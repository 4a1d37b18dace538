"""Tests of policies in Hugging Face layout: what is written, what is read back, what is refused."""

from __future__ import annotations

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from draftco_jax.errors import UserError
from draftco_jax.models.hf_weights import load_policy, save_policy


@pytest.fixture
def saved(tiny, tmp_path):
    save_policy(tmp_path, tiny.cfg, tiny.params)
    return tmp_path


def rewrite(folder, **changes):
    """Replace tensors of the file; None takes one away."""
    tensors = load_file(folder / "model.safetensors") | changes
    save_file({name: t for name, t in tensors.items() if t is not None}, folder / "model.safetensors")


def edit_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def assert_one_line(folder, pattern):
    with pytest.raises(UserError, match=pattern) as caught:
        load_policy(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("tied", [False, True])
def test_bug_cases_b59_and_b62_export_holds_exactly_the_live_weights(tiny, make_params, tmp_path, tied):
    cfg = dataclasses.replace(tiny.cfg, tie_word_embeddings=tied)
    params = make_params(cfg, seed=2)
    save_policy(tmp_path, cfg, params)
    found_cfg, found = load_policy(tmp_path)
    assert found_cfg == cfg
    assert jax.tree.structure(found) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, found, params)
    # With numpy alone: published names, projections as [out, in], no head beside a tied embedding.
    tensors = load_file(tmp_path / "model.safetensors")
    assert ("lm_head.weight" in tensors) == (not tied)
    q_proj = tensors["model.layers.1.self_attn.q_proj.weight"]
    np.testing.assert_array_equal(q_proj, params["layers"][1]["self_attn"]["qkv"]["q_proj"]["kernel"].T)
    np.testing.assert_array_equal(tensors["model.embed_tokens.weight"], params["embed_tokens"])


def test_a_bfloat16_file_is_read_into_float32(saved, tiny):
    tensors = load_file(saved / "model.safetensors")
    low = {name: np.asarray(jnp.asarray(t).astype(jnp.bfloat16)) for name, t in tensors.items()}
    rewrite(saved, **low)
    params = load_policy(saved)[1]
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    np.testing.assert_allclose(params["embed_tokens"], tiny.params["embed_tokens"], rtol=2**-8)


def test_rope_settings_of_newer_files_are_read(saved):
    edit_config(saved, rope_theta=None, rope_parameters={"rope_theta": 5e5, "rope_type": "default"})
    assert load_policy(saved)[0].rope_theta == 5e5


def test_bug_case_b61_a_missing_or_unknown_tensor_is_named(saved):
    rewrite(saved, **{"lm_head.weight": None})
    assert_one_line(saved, r"missing tensors lm_head.weight")
    rewrite(saved, **{"model.extra.weight": np.zeros(3, np.float32)})
    assert_one_line(saved, "model.extra.weight")


def test_damaged_weights_are_named(saved):
    name, good = "model.norm.weight", load_file(saved / "model.safetensors")["model.norm.weight"]
    rewrite(saved, **{name: np.full_like(good, np.nan)})
    assert_one_line(saved, f"{name} holds a value that is not finite")
    rewrite(saved, **{name: good[:-1]})
    assert_one_line(saved, rf"{name} in model.safetensors with stored shape \(15,\) .* but \(16,\) is asked for")
    path = saved / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert_one_line(saved, "cut short")
    path.unlink()
    assert_one_line(saved, "holds neither model.safetensors nor model.safetensors.index.json")


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({"model_type": "mamba"}, "model_type='mamba' is not supported; supported: gpt_oss, llama"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope scaling .*yarn"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ({"hidden_size": "wide"}, "hidden_size=.*whole number"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"rope_theta": None}, "rope_theta is missing"),
    ],
)
def test_a_config_that_cannot_be_used_is_refused(saved, changes, pattern):
    edit_config(saved, **changes)
    assert_one_line(saved, pattern)


def test_a_config_that_is_not_there_or_not_json_is_refused(saved):
    path = saved / "config.json"
    path.write_text(path.read_text()[:-20])
    assert_one_line(saved, re.escape(str(path)))
    path.unlink()
    assert_one_line(saved, "holds no config.json")
