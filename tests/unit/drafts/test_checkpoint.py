"""Tests of drafts in EAGLE-3 layout: what is written, what is read back, what is refused."""

from __future__ import annotations

import json
import re

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from draftco_jax.drafts.eagle3.checkpoint import load_draft, save_draft, vocabulary_map
from draftco_jax.errors import UserError

FILE = "model.safetensors"
TAPS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture
def saved(draft, tmp_path):
    """A folder with the draft, full vocabulary and reduced in turn."""
    save_draft(tmp_path, draft.cfg, draft.graph, draft.params)
    return tmp_path


@pytest.fixture
def reduced(make_draft, tmp_path):
    draft = make_draft(draft_vocab_size=11)
    save_draft(tmp_path, draft.cfg, draft.graph, draft.params)
    return tmp_path


def rewrite(folder, **changes):
    """Replace tensors of the file; None takes one away."""
    tensors = load_file(folder / FILE) | changes
    save_file({name: t for name, t in tensors.items() if t is not None}, folder / FILE)


def edit_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def assert_one_line(folder, pattern):
    with pytest.raises(UserError, match=pattern) as caught:
        load_draft(folder)
    assert "\n" not in str(caught.value)


def test_bug_case_b21_draft_and_map_survive_the_round_trip_bit_for_bit(draft, saved):
    cfg, graph, params = load_draft(saved)
    assert cfg == draft.cfg
    assert jax.tree.structure(params) == jax.tree.structure(draft.params)
    jax.tree.map(np.testing.assert_array_equal, params, draft.params)
    assert graph.constants.keys() == draft.graph.constants.keys()
    for name, constant in graph.constants.items():
        np.testing.assert_array_equal(constant, draft.graph.constants[name])
        np.testing.assert_array_equal(graph.merge(params).draft_to_target[...], draft.kept)


def test_bug_case_b59_every_exported_tensor_is_the_live_one(draft, saved):
    tensors = load_file(saved / FILE)
    layer = draft.params["midlayer"]
    live = {
        "fc.weight": draft.params["fc"]["kernel"].T,
        "norm.weight": draft.params["norm"]["weight"],
        "lm_head.weight": draft.params["lm_head"]["kernel"].T,
        "midlayer.mlp.gate_proj.weight": layer["mlp"]["gate_up"]["gate_proj"]["kernel"].T,
        "midlayer.mlp.up_proj.weight": layer["mlp"]["gate_up"]["up_proj"]["kernel"].T,
        "midlayer.mlp.down_proj.weight": layer["mlp"]["down_proj"]["kernel"].T,
        "midlayer.self_attn.o_proj.weight": layer["self_attn"]["o_proj"]["kernel"].T,
    }
    for name in "qkv":
        live[f"midlayer.self_attn.{name}_proj.weight"] = layer["self_attn"]["qkv"][f"{name}_proj"]["kernel"].T
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        live[f"midlayer.{name}.weight"] = layer[name]["weight"]
    # The maps are there for a full vocabulary too: SGLang's loader asks for them. No embedding: the policy's is used.
    assert tensors.keys() == live.keys() | {"d2t", "t2d"}
    for name, tensor in live.items():
        np.testing.assert_array_equal(tensors[name], tensor, err_msg=name)


def test_bug_case_b21_the_map_is_written_as_offsets(reduced, make_draft):
    kept, tensors = make_draft(draft_vocab_size=11).kept, load_file(reduced / FILE)
    assert tensors["d2t"].dtype == np.int64 and tensors["t2d"].dtype == bool
    np.testing.assert_array_equal(np.arange(11) + tensors["d2t"], kept)
    np.testing.assert_array_equal(np.flatnonzero(tensors["t2d"]), kept)


def test_bug_case_b60_the_export_never_claims_a_tied_head(saved):
    assert json.loads((saved / "config.json").read_text())["tie_word_embeddings"] is False


def test_a_published_embedding_is_left_aside_and_training_settings_may_be_overridden(draft, saved, make_draft):
    rewrite(saved, **{"embed_tokens.weight": np.zeros((19, 16), np.float32)})
    cfg, _, params = load_draft(saved, training=make_draft(passes=7, pass_decay=0.5).cfg)
    assert (cfg.passes, cfg.pass_decay, cfg.draft_vocab_size) == (7, 0.5, draft.cfg.draft_vocab_size)
    assert "embed_tokens" not in params


def test_bug_case_b19_a_reduced_vocabulary_without_a_map_is_refused(reduced):
    rewrite(reduced, d2t=None, t2d=None)
    assert_one_line(reduced, "draft_vocab_size=11 is below vocab_size=19 but there is no map")


def test_bug_case_b19_the_full_vocabulary_needs_no_map_but_may_have_the_identity(full_draft, tmp_path):
    save_draft(tmp_path, full_draft.cfg, full_draft.graph, full_draft.params)
    rewrite(tmp_path, d2t=np.zeros(19, np.int64), t2d=np.ones(19, bool))
    assert load_draft(tmp_path)[1].constants == {}
    rewrite(tmp_path, d2t=np.arange(19)[::-1] - np.arange(19))
    assert_one_line(tmp_path, "d2t moves ids")


@pytest.mark.parametrize(
    "offsets",
    [
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, -1],  # 9 twice
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 9],  # 19 is past the vocabulary
        [-1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        [0, 0, 0, 0],
        [],
    ],
)
def test_bug_case_b21_offsets_that_name_no_set_of_ids_are_refused(reduced, offsets):
    rewrite(reduced, d2t=np.array(offsets, np.int64), t2d=None)
    assert_one_line(reduced, "d2t must map 11 draft ids to different target ids below 19")


def test_bug_case_b21_ids_instead_of_offsets_are_refused(make_draft):
    draft = make_draft(draft_vocab_size=11)
    with pytest.raises(UserError, match="it holds offsets"):
        vocabulary_map(draft.cfg, draft.kept.astype(np.int64), None, "here")


def test_bug_case_b21_disagreement_of_both_maps_is_refused(reduced):
    wrong = load_file(reduced / FILE)["t2d"]
    wrong[[0, 1]] = wrong[[1, 0]]
    rewrite(reduced, t2d=wrong)
    assert_one_line(reduced, "d2t and t2d name different target ids")


def test_bug_case_b61_a_missing_head_is_named(saved):
    rewrite(saved, **{"lm_head.weight": None})
    assert_one_line(saved, r"missing tensors \['lm_head.weight'\]")


def test_damaged_weights_are_named(saved, draft):
    good = load_file(saved / FILE)["norm.weight"]
    rewrite(saved, **{"norm.weight": np.full_like(good, np.nan)})
    assert_one_line(saved, "norm.weight holds a value that is not finite")
    rewrite(saved, **{"norm.weight": good, "lm_head.weight": np.zeros((7, 16), np.float32)})
    assert_one_line(
        saved, rf"lm_head.weight has shape \(7, 16\), config.json asks for \({draft.cfg.draft_vocab_size}, 16\)"
    )
    path = saved / FILE
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert_one_line(saved, "cut short")
    path.unlink()
    assert_one_line(saved, "does not exist")


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({"eagle_config": None, TAPS: None}, "eagle_aux_hidden_state_layer_ids is missing"),
        ({"eagle_config": {TAPS: [1, 0]}, TAPS: None}, r"tap_layers=\(1, 0\)"),
        ({"eagle_config": {TAPS: 3}}, "tap_layers=3"),
        ({"head_dim": None}, r"\['head_dim'\] missing"),
        ({"rope_theta": None}, r"\['rope_theta'\] missing"),
        ({"draft_vocab_size": 20}, "draft_vocab_size=20"),
        ({"num_attention_heads": 3}, "num_attention_heads=3"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"ttt_length": 0}, "passes=0"),
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
