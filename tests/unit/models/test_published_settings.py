"""Tests of config.json files: what an absent setting means, and that a useless one is one line and not a traceback."""

from __future__ import annotations

import json

import pytest

from draftco_jax.config_io import to_json
from draftco_jax.errors import UserError
from draftco_jax.models.families import FAMILIES, family_of
from draftco_jax.models.hf_weights import load_config

YARN = {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
NAMES = {family.model_types[-1]: family for family in FAMILIES}


def write(folder, model_type, **changes):
    """The config.json of a tiny policy of the family with some settings changed; "absent" takes one away."""
    cfg = NAMES[model_type].config.tiny()
    raw = {name: value for name, value in to_json(cfg).items() if name not in ("type", "rope_scaling")}
    raw |= family_of(cfg).to_hf(cfg) | {"model_type": model_type} | changes
    raw = {name: value for name, value in raw.items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


@pytest.mark.parametrize(
    ("model_type", "setting", "meaning"),
    [
        # The defaults of the configuration classes of transformers 5.24.
        ("qwen3_moe", "norm_topk_prob", False),
        ("qwen3_moe", "rms_norm_eps", 1e-6),
        ("qwen3", "rms_norm_eps", 1e-6),
        ("qwen3", "tie_word_embeddings", False),
        ("llama", "rms_norm_eps", 1e-6),
        ("llama", "tie_word_embeddings", False),
        ("llama", "head_dim", 4),
        ("qwen3_5_moe", "linear_conv_kernel_dim", 4),
        ("gpt_oss", "rms_norm_eps", 1e-5),
        ("gpt_oss", "sliding_window", 128),
        ("nemotron_h", "chunk_size", 128),
    ],
)
def test_an_absent_setting_means_what_it_does_in_transformers(model_type, setting, meaning, tmp_path):
    assert getattr(load_config(write(tmp_path, model_type, **{setting: "absent"})), setting) == meaning


@pytest.mark.parametrize(
    ("model_type", "changes", "pattern"),
    [
        ("qwen3", {"rope_parameters": "x", "rope_theta": "absent"}, "rope_parameters='x' must be an object"),
        ("llama", {"rope_parameters": [1]}, r"rope_parameters=\[1\] must be an object"),
        ("qwen3_moe", {"num_experts_per_tok": 99}, r"num_experts_per_tok=99 must be in 1\.\.num_experts=4"),
        ("qwen3_moe", {"moe_intermediate_size": 0}, "moe_intermediate_size=0 must be >= 1"),
        ("qwen3_5_moe", {"text_config": [2]}, r"text_config=\[2\] must be an object"),
        ("qwen3_5_moe", {"hidden_size": None, "intermediate_size": "absent"}, "hidden_size"),
        ("qwen3_5_moe", {"linear_num_key_heads": 0}, "linear_num_key_heads=0 must be >= 1"),
        ("qwen3_5_moe", {"linear_num_key_heads": 3}, "linear_num_value_heads=4 must be a multiple"),
        ("qwen3_5_moe", {"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.1}}, "width=0 must be even"),
        ("nemotron_h", {"layers_block_type": 7}, "layers_block_type=7 must name the kind"),
        ("nemotron_h", {"time_step_limit": ["x", 1]}, r"time_step_limit=\['x', 1\] must be two numbers"),
        ("nemotron_h", {"n_groups": 3}, "heads=4 must be a multiple of groups=3"),
        ("nemotron_h", {"chunk_size": 0}, "chunk=0 must be >= 1"),
        ("llama", {"rope_parameters": YARN | {"mscale_all_dim": 0.5}}, "mscale_all_dim=0.5 is not supported"),
        ("llama", {"rope_parameters": YARN | {"factor": 0.0}}, "factor=0.0 must be > 0"),
        ("llama", {"rope_parameters": {"rope_type": ["yarn"]}}, r"rope_type=\['yarn'\] is not supported"),
        ("gpt_oss", {"rope_parameters": "absent"}, "rope_parameters is missing"),
        ("gpt_oss", {"sliding_window": 0}, "sliding_window=0 must be >= 1"),
        ("gpt_oss", {"num_local_experts": 0}, "num_experts=0 must be >= 1"),
    ],
)
def test_a_setting_that_no_model_can_have_is_one_line_that_names_the_file(model_type, changes, pattern, tmp_path):
    with pytest.raises(UserError, match=pattern) as caught:
        load_config(write(tmp_path, model_type, **changes))
    assert str(tmp_path / "config.json") in str(caught.value) and "\n" not in str(caught.value)


def test_a_pattern_without_experts_has_no_mixture(tmp_path):
    """What a run goes by when it is asked to record or to balance experts."""
    folder = write(tmp_path, "nemotron_h", layers_block_type="M-*-")
    assert load_config(folder).mixture is None
    assert load_config(write(tmp_path, "nemotron_h", layers_block_type="ME*-")).mixture is not None
