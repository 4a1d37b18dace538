"""Prediction heads out of policies' checkpoints, in every style of names."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from draftco_jax.drafts.catalog import FAMILIES
from draftco_jax.drafts.mtp.checkpoint import load_mtp, save_mtp
from draftco_jax.drafts.mtp.config import MtpConfig
from draftco_jax.drafts.recognise import draft_family_in
from draftco_jax.models.functional import abstract_params, graph_of
from draftco_jax.models.hf_weights import to_tensors
from draftco_jax.models.qwen3_5_moe import Qwen35MoeConfig

SIZES = {
    "vocab_size": 19,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
}
STYLES = {
    "qwen3_5": {"style": "qwen3_5", "attention_output_gate": True, "rotary_fraction": 0.25, "rope_theta": 1e7},
    "deepseek": {"style": "deepseek", "rope_theta": 1e4},
    "mimo": {"style": "mimo", "rope_theta": 1e4},
}
LAYER = "model.layers.3."
NAMES = {
    "deepseek": (LAYER, {"pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "fc": "eh_proj"}),
    "mimo": (
        "model.mtp_layers.0.",
        {"pre_fc_norm_embedding": "token_layernorm", "pre_fc_norm_hidden": "hidden_layernorm", "fc": "input_proj"},
    ),
}
FINAL = {"deepseek": "shared_head.norm", "mimo": "final_layernorm"}


@pytest.fixture(scope="module")
def heads():
    """Style -> config and weights."""
    rng = np.random.default_rng(3)
    made = {}
    for style, changes in STYLES.items():
        cfg = MtpConfig(**(SIZES | changes))
        params = jax.tree.map(
            lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype), abstract_params(cfg.build)
        )
        made[style] = cfg, params
    return made


def published(style, params):
    """The head's tensors under its publisher's names, amid those of the policy."""
    tensors = to_tensors(params, prefix="")
    policy = {
        "model.embed_tokens.weight": np.zeros((19, 16), np.float32),
        "model.layers.0.mlp.experts.0.up_proj.weight": np.zeros((2, 16), np.int8),  # not read, so not refused
    }
    if style == "qwen3_5":
        return policy | {f"mtp.{name}": t for name, t in tensors.items()}
    prefix, own = NAMES[style]
    renamed = {}
    for name, tensor in tensors.items():
        part, _, rest = name.partition(".")
        if part == "layers":
            renamed[prefix + name.removeprefix("layers.0.")] = tensor
        else:
            renamed[f"{prefix}{FINAL[style] if part == 'norm' else own[part]}.{rest}"] = tensor
    if style == "deepseek":  # copies of the policy's tables
        renamed |= {f"{prefix}{n}.weight": np.zeros((19, 16), np.float32) for n in ("embed_tokens", "shared_head.head")}
    return policy | renamed


def config_of(style):
    theta, fraction = STYLES[style]["rope_theta"], STYLES[style].get("rotary_fraction")
    if style == "qwen3_5":
        rope = {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": fraction, "mrope_section": [1]}
        text = SIZES | {"model_type": "qwen3_5_text", "num_hidden_layers": 3, "rope_parameters": rope}
        return {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text}
    return SIZES | {"num_hidden_layers": 3, "rope_theta": theta, "model_type": "any"}


@pytest.mark.parametrize("style", STYLES)
def test_every_style_survives_import_export_import(style, heads, write_files, same_tree, tmp_path):
    cfg, params = heads[style]
    found, graph, read = load_mtp(write_files(tmp_path / "in", config_of(style), published(style, params)))
    assert found == cfg
    same_tree(read, params)
    save_mtp(tmp_path / "once", found, graph, read)
    again = load_mtp(tmp_path / "once")
    assert again[0] == cfg
    same_tree(again[2], params)
    save_mtp(tmp_path / "twice", *again)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "once" / name).read_bytes() == (tmp_path / "twice" / name).read_bytes()
    assert all(name.startswith("mtp.") for name in load_file(tmp_path / "once" / "model.safetensors"))


def test_only_the_shards_that_hold_the_head_are_read(heads, write_files, same_tree, refused, tmp_path):
    cfg, params = heads["qwen3_5"]
    tensors = published("qwen3_5", params)
    write_files(tmp_path, config_of("qwen3_5"), tensors)
    (tmp_path / "model.safetensors").unlink()
    fc = "mtp.fc.weight"
    shards = {"model-1.safetensors": {fc: tensors[fc]}}
    shards["model-2.safetensors"] = {n: t for n, t in tensors.items() if n.startswith("mtp.") and n != fc}
    for file, part in shards.items():
        save_file(part, tmp_path / file)
    places = {name: file for file, part in shards.items() for name in part}
    absent = {name: "model-3.safetensors" for name in tensors if not name.startswith("mtp.")}  # not downloaded
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places | absent}))
    found, _, read = load_mtp(tmp_path)
    assert found == cfg
    same_tree(read, params)
    index.write_text(json.dumps({"weight_map": places | absent | {"mtp.lost.weight": "model-1.safetensors"}}))
    refused(load_mtp, tmp_path, r"disagree about the tensors \['mtp.lost.weight'\]")
    index.write_text(json.dumps({"weight_map": {"mtp.norm.weight": "../model-1.safetensors"}}))
    refused(load_mtp, tmp_path, "must map tensor names to files beside it")
    index.write_text(json.dumps({"weight_map": places}))
    (tmp_path / "model-2.safetensors").unlink()
    refused(load_mtp, tmp_path, "model-2.safetensors does not exist")


@pytest.mark.parametrize(
    ("style", "change", "pattern"),
    [
        ("deepseek", {f"{LAYER}self_attn.kv_a_proj_with_mqa.weight": 1}, "latent attention"),
        ("deepseek", {f"{LAYER}mlp.experts.0.up_proj.weight": 1}, "mixture of experts"),
        ("deepseek", {"model.layers.4.enorm.weight": 1}, "several prediction heads"),
        ("qwen3_5", {"mtp.layers.0.mlp.gate.weight": 1}, "mixture of experts"),
        ("qwen3_5", {"mtp.layers.1.mlp.up_proj.weight": 1}, "several prediction heads"),
        ("mimo", {"model.mtp_layers.0.self_attn.q_proj.bias": 1}, "biases"),
        ("mimo", {"mtp.fc.weight": 1}, "must hold one prediction head"),
        ("qwen3_5", {"mtp.norm.weight": None}, r"missing tensors \['norm.weight'\]"),
    ],
)
def test_heads_of_another_kind_are_refused(style, change, pattern, heads, write_files, refused, tmp_path):
    tensors = published(style, heads[style][1])
    tensors |= {name: None if value is None else np.ones((2, 2), np.float32) for name, value in change.items()}
    refused(load_mtp, write_files(tmp_path, config_of(style), tensors), pattern)


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        ({"model_type": "glm4"}, "model_type=glm4 may follow any style; add mtp_style"),
        ({"model_type": "nemotron_h"}, "heads of model_type=nemotron_h are a block of attention and one of experts"),
        ({"mtp_num_hidden_layers": 2}, "num_nextn_predict_layers=2 must be 1"),
        ({"num_nextn_predict_layers": 0}, "num_nextn_predict_layers=0 must be 1"),
        ({"mtp_layer": "sparse"}, "mtp_layer='sparse' must be 'policy' or left out"),
        ({"mtp_style": "other"}, "mtp_style='other' must be one of"),
        ({"rope_parameters": {"rope_theta": 1e7}}, r"\['rotary_fraction'\] missing.*0.25"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, r"\['rope_theta'\] missing"),
        ({"head_dim": None}, r"\['head_dim'\] missing"),
        ({"attn_output_gate": False}, "attn_output_gate=False does not fit q_proj"),
        ({"attention_bias": True}, "attention_bias=true"),
    ],
)
def test_what_a_config_does_not_say_is_named(change, pattern, heads, write_files, refused, tmp_path):
    config = config_of("qwen3_5")
    text = {key: value for key, value in (config["text_config"] | change).items() if value is not None}
    tensors = published("qwen3_5", heads["qwen3_5"][1])
    refused(load_mtp, write_files(tmp_path, config | {"text_config": text}, tensors), pattern)


def test_a_policy_without_a_head_is_refused(write_files, refused, tmp_path):
    tensors = {"model.embed_tokens.weight": np.zeros((19, 16), np.float32)}
    refused(load_mtp, write_files(tmp_path, config_of("mimo"), tensors), "found: none")


def test_a_policy_saved_without_the_head_that_its_config_counts_is_refused(write_files, refused, tmp_path):
    tensors = {"model.embed_tokens.weight": np.zeros((19, 16), np.float32)}
    config = config_of("qwen3_5")
    config["text_config"] |= {"mtp_num_hidden_layers": 1}
    refused(load_mtp, write_files(tmp_path, config, tensors), "=1, but the files hold no prediction head")


def test_the_style_is_not_asked_for_where_the_body_is_refused_anyway(heads, write_files, refused, tmp_path):
    config = config_of("qwen3_5")
    config["text_config"] |= {"model_type": "glm4", "num_nextn_predict_layers": 1}
    experts = {"mtp.layers.0.mlp.experts.0.up_proj.weight": np.ones((2, 2), np.float32)}
    refused(
        load_mtp, write_files(tmp_path, config, published("qwen3_5", heads["qwen3_5"][1]) | experts), "a mixture of"
    )


def test_an_expected_config_supplies_the_width_of_heads(heads, write_files, tmp_path):
    cfg, params = heads["qwen3_5"]
    config = config_of("qwen3_5")
    config["text_config"].pop("head_dim")
    folder = write_files(tmp_path, config, published("qwen3_5", params))
    assert load_mtp(folder, cfg)[0] == cfg


def test_half_precision_is_written_as_it_is(heads, same_tree, tmp_path):
    cfg, params = heads["mimo"]
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    save_mtp(tmp_path, cfg, graph_of(cfg.build), half)
    assert {str(t.dtype) for t in load_file(tmp_path / "model.safetensors").values()} == {"bfloat16"}
    same_tree(load_mtp(tmp_path)[2], jax.tree.map(lambda leaf: leaf.astype(jnp.float32), half))


# ---- heads whose body is blocks of a policy family ----

MOE = Qwen35MoeConfig.tiny()


@pytest.fixture(scope="module")
def expert_head():
    """Config and weights of a Qwen3.5-MoE head."""
    cfg, rng = MtpConfig.for_target(MOE, like_policy=True), np.random.default_rng(5)
    return cfg, jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype), abstract_params(cfg.build)
    )


@pytest.fixture
def moe_folder(expert_head, write_files, tmp_path):
    """A multimodal policy's folder as published, of which only the shard with the head is here.

    Tensors to be added or left out, keyword changes of the text settings -> the folder.
    """

    def write(tensors=(), **changes):
        cfg, params = expert_head
        save_mtp(tmp_path / "own", cfg, graph_of(cfg.build), params)
        own = json.loads((tmp_path / "own" / "config.json").read_text())
        text = own | {"layer_types": MOE.layer_types, "num_hidden_layers": MOE.num_hidden_layers}
        text = {name: value for name, value in text.items() if name not in ("mtp_style", "mtp_layer", "architectures")}
        config = {"model_type": "qwen3_5_moe", "text_config": text | changes}
        head = load_file(tmp_path / "own" / "model.safetensors") | dict(tensors)
        folder = write_files(tmp_path / "policy", config, {})
        (folder / "model.safetensors").unlink()
        head = {name: tensor for name, tensor in head.items() if tensor is not None}
        save_file(head, folder / "model-2.safetensors")
        places = dict.fromkeys(head, "model-2.safetensors")
        places["model.language_model.embed_tokens.weight"] = "model-1.safetensors"
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
        return folder

    return write


def test_a_head_of_experts_is_read_out_of_a_policys_folder_of_which_only_its_shard_is_here(
    moe_folder, expert_head, same_tree, tmp_path
):
    cfg, params = expert_head
    found, graph, read = load_mtp(moe_folder({"mtp.embed_tokens.weight": np.zeros((32, 16), np.float32)}))
    assert found == cfg
    same_tree(read, params)
    save_mtp(tmp_path / "again", found, graph, read)
    written = tmp_path / "again"
    for name in ("config.json", "model.safetensors"):
        assert (written / name).read_bytes() == (tmp_path / "own" / name).read_bytes()
    said = json.loads((written / "config.json").read_text())
    assert (said["architectures"], said["mtp_layer"], said["mtp_style"]) == (["Qwen3_5MoeMTP"], "policy", "qwen3_5")
    assert "mtp.layers.0.mlp.experts.3.down_proj.weight" in load_file(written / "model.safetensors")
    assert draft_family_in(written) is FAMILIES["mtp"]


@pytest.mark.parametrize(
    ("tensors", "changes", "pattern"),
    [
        ({"mtp.norm.weight": None}, {}, r"missing tensors mtp\.norm\.weight"),
        (
            {"mtp.layers.0.mlp.experts.3.up_proj.weight": None},
            {},
            r"missing tensors mtp\.layers\.0\.mlp\.experts\.3\.up",
        ),
        ({"mtp.layers.0.mlp.experts.4.up_proj.weight": np.ones((8, 16), np.float32)}, {}, "unexpected tensors"),
        ({"mtp.fc.weight": np.ones((16, 31), np.float32)}, {}, r"mtp.fc.weight .*shape \(16, 31\)"),
        (
            {"mtp.fc.weight": np.full((16, 32), np.nan, np.float32)},
            {},
            "mtp.fc.weight holds a value that is not finite",
        ),
        ({"mtp.layers.1.mlp.gate.weight": np.ones((4, 16), np.float32)}, {}, "several prediction heads"),
        ({}, {"mtp_num_hidden_layers": 2}, "=2 must be 1"),
        ({}, {"attn_output_gate": False}, "attn_output_gate=False is not supported"),
    ],
)
def test_a_head_of_experts_that_does_not_fit_is_refused(tensors, changes, pattern, moe_folder, refused):
    refused(load_mtp, moe_folder(tensors, **changes), pattern)


def test_a_head_of_experts_keeps_half_precision(expert_head, same_tree, tmp_path):
    cfg, params = expert_head
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    save_mtp(tmp_path, cfg, graph_of(cfg.build), half)
    assert {str(t.dtype) for t in load_file(tmp_path / "model.safetensors").values()} == {"bfloat16"}
    same_tree(load_mtp(tmp_path)[2], jax.tree.map(lambda leaf: leaf.astype(jnp.float32), half))
