"""Files of DFlash and DSpark: every layout is read as what it is, or refused by name."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from draftco_jax.drafts.base import Shared
from draftco_jax.drafts.dflash.checkpoint import load_dflash, save_dflash
from draftco_jax.drafts.dflash.config import DFlashConfig
from draftco_jax.drafts.dspark.checkpoint import load_dspark, save_dspark
from draftco_jax.drafts.dspark.config import DSparkConfig
from draftco_jax.errors import UserError
from draftco_jax.models.functional import abstract_params, graph_of
from draftco_jax.models.hf_weights import to_tensors

SIZES = {
    "vocab_size": 19,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "rope_theta": 5e5,
}
TAPS = (1, 5)  # published for two layers on a policy of eight
TABLES = {name: np.full((19, 16), 7, np.float32) for name in ("embed_tokens.weight", "lm_head.weight")}


def draw(cfg):
    rng = np.random.default_rng(4)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype), abstract_params(cfg.build))


@pytest.fixture(scope="module")
def dflash():
    """Config and weights."""
    cfg = DFlashConfig(**SIZES, tap_layers=TAPS, mask_token_id=18, block_size=8)
    return cfg, draw(cfg)


@pytest.fixture(scope="module")
def dspark_of():
    """Changes of the config -> config and weights; kept, since drawing makes a module."""
    made = {}

    def make(**changes):
        key = json.dumps(changes, sort_keys=True)
        if key not in made:
            cfg = DSparkConfig(**(SIZES | {"tap_layers": TAPS, "mask_token_id": 18, "markov_rank": 5} | changes))
            made[key] = cfg, draw(cfg)
        return made[key]

    return make


def dflash_config(layout):
    """config.json as that publisher writes it."""
    block, nested = {"block_size": 8}, {"mask_token_id": 18, "target_layer_ids": list(TAPS)}
    flat = SIZES | {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_target_layers": 8}
    return {
        "specforge": flat | block | {"dflash_config": nested, "layer_types": ["full_attention"] * 2},
        "z-lab": flat | {"dflash_config": nested | block | {"sample_from_anchor": False}},
        "speculators": block
        | {
            "architectures": ["DFlashDraftModel"],
            "speculators_model_type": "dflash",
            "transformer_layer_config": SIZES,
            "draft_vocab_size": 19,
            "mask_token_id": 18,
            "aux_hidden_state_layer_ids": [tap + 1 for tap in TAPS],
        },
    }[layout]


def dspark_config(layout, cfg):
    heads = {
        "markov_rank": cfg.markov_rank,
        "markov_head_type": cfg.markov_head_type,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    nested = heads | {"mask_token_id": 18, "target_layer_ids": list(TAPS), "projector_type": "dspark"}
    top = heads | {"mask_token_id": 18, "block_size": 7, "num_anchors": 512}
    return {
        "deepspec": SIZES | top | {"architectures": ["Qwen3DSparkModel"], "target_layer_ids": list(TAPS)},
        "specforge": SIZES | {"architectures": ["DSparkDraftModel"], "block_size": 7, "dflash_config": nested},
        "speculators": top
        | {
            "architectures": ["DSparkDraftModel"],
            "speculators_model_type": "dspark",
            "sample_from_anchor": True,
            "transformer_layer_config": SIZES,
            "aux_hidden_state_layer_ids": [tap + 1 for tap in TAPS],
        },
    }[layout]


@pytest.mark.parametrize("layout", ["specforge", "z-lab", "speculators"])
def test_every_dflash_layout_survives_import_export_import(layout, dflash, write_files, same_tree, tmp_path):
    cfg, params = dflash
    tensors = to_tensors(params, prefix="")
    found, graph, read = load_dflash(write_files(tmp_path / "in", dflash_config(layout), tensors))
    assert found == cfg
    same_tree(read, params)
    save_dflash(tmp_path / "once", found, graph, read)
    again = load_dflash(tmp_path / "once")
    assert again[0] == cfg
    same_tree(again[2], params)
    save_dflash(tmp_path / "twice", *again)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "once" / name).read_bytes() == (tmp_path / "twice" / name).read_bytes()
    assert load_file(tmp_path / "once" / "model.safetensors").keys() == tensors.keys()


@pytest.mark.parametrize("layout", ["deepspec", "specforge", "speculators"])
@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_every_dspark_layout_survives_import_export_import(layout, kind, dspark_of, write_files, same_tree, tmp_path):
    cfg, params = dspark_of(markov_head_type=kind)
    tensors = to_tensors(params, prefix="")
    tensors |= TABLES if layout == "deepspec" else {}  # its files hold frozen copies
    found, graph, read = load_dspark(write_files(tmp_path / "in", dspark_config(layout, cfg), tensors))
    assert found == cfg
    same_tree(read, params)
    save_dspark(tmp_path / "once", found, graph, read)
    again = load_dspark(tmp_path / "once")
    assert again[0] == cfg
    same_tree(again[2], params)
    save_dspark(tmp_path / "twice", *again)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "once" / name).read_bytes() == (tmp_path / "twice" / name).read_bytes()


def test_half_precision_blocks_are_written_as_they_are(dflash, dspark_of, same_tree, tmp_path):
    for (cfg, params), save, load in ((dflash, save_dflash, load_dflash), (dspark_of(), save_dspark, load_dspark)):
        half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
        save(tmp_path / cfg.__class__.__name__, cfg, graph_of(cfg.build), half)
        tensors = load_file(tmp_path / cfg.__class__.__name__ / "model.safetensors")
        assert {str(t.dtype) for t in tensors.values()} == {"bfloat16"}
        same_tree(load(tmp_path / cfg.__class__.__name__)[2], jax.tree.map(lambda leaf: leaf.astype(jnp.float32), half))


def test_deepspecs_dflash_is_a_dspark_draft_without_heads(dspark_of, write_files, same_tree, refused, tmp_path):
    bare = {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False}
    cfg, params = dspark_of(**bare)
    config = dspark_config("deepspec", cfg) | {
        "enable_confidence_head": False,
        "confidence_head_with_markov": None,
        "markov_head_type": None,
    }
    folder = write_files(tmp_path / "in", config, to_tensors(params, prefix="") | TABLES)
    found, _, read = load_dspark(folder)
    assert found == cfg and found.sample_from_anchor and found.max_draft_length == 7
    same_tree(read, params)
    refused(load_dflash, folder, "Qwen3DSparkModel is not a DFlash draft.*loaded as family dspark")


def test_names_of_older_specforge_are_read(dspark_of, write_files, same_tree, tmp_path):
    cfg, params = dspark_of()
    tensors = {
        f"logit_head.{name}" if name.startswith(("markov", "confidence")) else name: t
        for name, t in to_tensors(params, prefix="").items()
    }
    assert any(name.startswith("logit_head.markov_head") for name in tensors)
    _, _, read = load_dspark(write_files(tmp_path, dspark_config("specforge", cfg), tensors))
    same_tree(read, params)


def test_bug_case_b59_copies_of_the_policys_tables_are_left_aside_and_written_from_the_live_ones(dspark_of, tmp_path):
    cfg, params = dspark_of()
    rng = np.random.default_rng(1)
    shared = Shared(*(jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((19, 16), (16, 19))))
    save_dspark(tmp_path, cfg, graph_of(cfg.build), params, shared)
    tensors = load_file(tmp_path / "model.safetensors")
    np.testing.assert_array_equal(tensors["embed_tokens.weight"], shared.embedding)
    np.testing.assert_array_equal(tensors["lm_head.weight"], shared.head.T)
    live = to_tensors(params, prefix="")
    assert tensors.keys() == live.keys() | TABLES.keys()
    for name, tensor in live.items():
        np.testing.assert_array_equal(tensors[name], tensor, err_msg=name)
    assert jax.tree.structure(load_dspark(tmp_path)[2]) == jax.tree.structure(params)


@pytest.mark.parametrize("key", ["sample_from_anchor", "query_zero_predicts_next"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("value", [True, False])
def test_bug_case_b04_the_slot_layout_is_read_under_every_spelling(
    key, nested, value, dspark_of, write_files, tmp_path
):
    cfg, params = dspark_of(sample_from_anchor=value)
    config = dspark_config("speculators", cfg) | {"sample_from_anchor": None, "block_size": cfg.rows}
    config |= {"dflash_config": {key: value}} if nested else {key: value}
    found, graph, read = load_dspark(write_files(tmp_path / "in", config, to_tensors(params, prefix="")))
    assert found == cfg
    assert found.rows == (7 if value else 8) and found.max_draft_length == 7  # anchor first: one query fewer
    save_dspark(tmp_path / "out", found, graph, read)
    stored = json.loads((tmp_path / "out" / "config.json").read_text())
    assert stored["sample_from_anchor"] is value
    assert load_dspark(tmp_path / "out")[0] == cfg


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({"architectures": ["SomeDSpark"]}, "architectures=SomeDSpark does not say which token a row stands for"),
        ({"architectures": None}, "architectures=None does not say"),
        ({"architectures": ["Gemma4DSparkModel"]}, "architectures=Gemma4DSparkModel"),
        ({"architectures": ["DFlashDraftModel"]}, "load it as family dflash"),
        ({"speculators_model_type": "dspark"}, "older versions trained either layout"),
        ({"sample_from_anchor": True, "dflash_config": {"query_zero_predicts_next": False}}, "contradict each other"),
        ({"sample_from_anchor": "yes"}, "must be true or false"),
    ],
)
def test_bug_case_b04_an_undeclared_slot_layout_is_refused(changes, pattern, dspark_of, write_files, refused, tmp_path):
    cfg, params = dspark_of()
    base = dspark_config("deepspec", cfg)
    if "speculators_model_type" in changes:
        base |= {"transformer_layer_config": SIZES}
    refused(load_dspark, write_files(tmp_path, base | changes, to_tensors(params, prefix="")), pattern)


@pytest.mark.parametrize("key", ["sample_from_anchor", "query_zero_predicts_next"])
def test_bug_case_b04_a_dflash_file_never_drafts_from_the_anchor(key, dflash, write_files, refused, tmp_path):
    config = dflash_config("specforge")
    config["dflash_config"] = config["dflash_config"] | {key: True}
    refused(load_dflash, write_files(tmp_path, config, to_tensors(dflash[1], prefix="")), "never reads")


SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3, "use_sliding_window": True}


@pytest.mark.parametrize(
    ("said", "causal", "sliding_causal"),
    [
        ({}, False, True),
        ({"is_causal": False}, False, False),
        ({"is_causal": True}, True, True),
        ({"dflash_config": {"causal": False}}, False, False),
    ],
)
def test_windows_and_causality_survive(said, causal, sliding_causal, dflash, write_files, tmp_path):
    config = dflash_config("specforge") | SLIDING | {k: v for k, v in said.items() if k != "dflash_config"}
    config["dflash_config"] = config["dflash_config"] | said.get("dflash_config", {})
    cfg, graph, params = load_dflash(write_files(tmp_path / "in", config, to_tensors(dflash[1], prefix="")))
    assert (cfg.layer_types, cfg.sliding_window) == (("sliding_attention", "full_attention"), 3)
    assert (cfg.causal, cfg.sliding_causal) == (causal, sliding_causal)
    save_dflash(tmp_path / "out", cfg, graph, params)
    assert load_dflash(tmp_path / "out")[0] == cfg


def test_the_policys_depth_is_written_where_it_is_known(dflash, tmp_path):
    cfg, params = dflash
    for folder, given, wanted in (("a", None, 8), ("b", 36, 36)):
        save_dflash(tmp_path / folder, cfg, graph_of(cfg.build), params, target_layers=given)
        assert json.loads((tmp_path / folder / "config.json").read_text())["num_target_layers"] == wanted


@pytest.mark.parametrize(
    ("changes", "nested", "pattern"),
    [
        ({"block_size": None}, {}, r"\['block_size'\] missing"),
        ({"block_size": 8}, {"block_size": 16}, "contradict each other"),
        ({}, {"mask_token_id": None}, r"\['mask_token_id'\] missing.*reserved token"),
        ({}, {"mask_token_id": 19}, r"mask_token_id=19 must be in 0\.\.18"),
        ({}, {"target_layer_ids": None}, r"\['tap_layers'\] missing.*target_layer_ids"),
        ({}, {"target_layer_ids": [5, 1]}, r"tap_layers=\(5, 1\)"),
        ({}, {"target_layer_ids": 5}, "must be a list of layer numbers"),
        ({"num_hidden_layers": None}, {}, r"\['num_hidden_layers'\] missing"),
        ({"rope_theta": None}, {}, r"\['rope_theta'\] missing"),
        ({"head_dim": None}, {}, r"\['head_dim'\] missing"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 16}}, {}, "'yarn' is not supported"),
        ({"layer_types": None, "use_sliding_window": True, "sliding_window": 4}, {}, "add layer_types"),
        ({"draft_vocab_size": 10}, {}, "draft_vocab_size=10 must be vocab_size=19"),
        ({}, {"shift_label": True}, "shift_label=true"),
        ({"architectures": ["DFlash2DraftModel"]}, {}, "DFlash 2 draft"),
        ({"architectures": ["DominoDraftModel"]}, {"projector_type": "domino"}, "Domino draft"),
        ({}, {"projector_type": "dflare"}, 'projector_type="dflare" is not supported'),
        ({"quantization_config": {"quant_algo": "NVFP4"}}, {}, "NVFP4"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 5]}, {}, "name different layers"),
        ({"architectures": ["Other"]}, {}, "architectures=Other is not a DFlash draft"),
    ],
)
def test_what_a_dflash_config_does_not_say_or_asks_in_vain_is_named(
    changes, nested, pattern, dflash, write_files, refused, tmp_path
):
    config = dflash_config("specforge")
    config |= changes | {
        "dflash_config": {k: v for k, v in (config["dflash_config"] | nested).items() if v is not None}
    }
    refused(load_dflash, write_files(tmp_path, config, to_tensors(dflash[1], prefix="")), pattern)


@pytest.mark.parametrize(
    ("name", "tensor", "pattern"),
    [
        ("lm_head.weight", np.zeros((19, 16), np.float32), "holds lm_head.weight, which a DFlash draft reads"),
        ("embed_tokens.weight", np.zeros((19, 16), np.float32), "holds embed_tokens.weight"),
        ("mask_embedding", np.zeros(16, np.float32), "its own mask embedding"),
        ("layers.0.self_attn.attention_sink_bias", np.zeros(4, np.float32), "attention sinks"),
        ("d2t", np.zeros(19, np.int64), "a reduced vocabulary"),
        ("layers.0.attention_conv.weight", np.zeros(4, np.float32), "DFlash 2"),
        ("prefix_gru.weight_ih_l0", np.zeros(4, np.float32), "Domino"),
        ("mtp.0.main_proj.weight", np.zeros(4, np.float32), "DeepSeek-V4"),
        ("layers.0.self_attn.qkv_proj.weight", np.zeros(4, np.uint8), "packed or quantised"),
        ("layers.0.self_attn.q_proj.bias", np.zeros(24, np.float32), "unexpected tensors"),
        ("norm.weight", None, r"missing tensors \['norm.weight'\]"),
        ("norm.weight", np.full(16, np.nan, np.float32), "norm.weight holds a value that is not finite"),
        ("norm.weight", np.zeros(15, np.float32), r"norm.weight has shape \(15,\)"),
    ],
)
def test_tensors_that_do_not_belong_are_named(name, tensor, pattern, dflash, write_files, refused, tmp_path):
    tensors = to_tensors(dflash[1], prefix="") | {name: tensor}
    refused(load_dflash, write_files(tmp_path, dflash_config("specforge"), tensors), pattern)


def test_v4_style_dspark_is_refused_by_name(dspark_of, write_files, refused, tmp_path):
    cfg, params = dspark_of()
    tensors = to_tensors(params, prefix="") | {"mtp.2.markov_head.markov_w1.weight": np.zeros((2, 2), np.float32)}
    refused(load_dspark, write_files(tmp_path, dspark_config("deepspec", cfg), tensors), "DeepSeek-V4 style DSpark")


def test_what_a_file_leaves_out_may_come_from_an_expected_config(dflash, write_files, tmp_path):
    cfg, params = dflash
    config = dflash_config("specforge") | {"rope_theta": None, "head_dim": None}
    folder = write_files(tmp_path, config, to_tensors(params, prefix=""))
    assert load_dflash(folder, cfg)[0] == cfg


def test_a_mixed_causality_has_no_layout(tmp_path, refused):
    cfg = DFlashConfig(
        **SIZES,
        tap_layers=TAPS,
        mask_token_id=18,
        block_size=8,
        layer_types=("sliding_attention", "full_attention"),
        sliding_window=3,
        sliding_causal=False,
        causal=True,
    )
    refused(lambda folder: save_dflash(folder, cfg, graph_of(cfg.build), draw(cfg)), tmp_path, "no published layout")


def test_a_prediction_head_given_to_a_block_draft_is_told_as_what_it_is():
    from draftco_jax.config import resolve_checkpoint

    for load in (load_dflash, load_dspark):
        with pytest.raises(UserError, match="this is a multi-token prediction head .* give it to an MtpConfig"):
            load(resolve_checkpoint("shipped:arithmetic3/mtp"))
