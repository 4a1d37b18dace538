"""Conversions are held to the tensors that went in: bit for bit, or rounded once; refusals leave nothing behind."""

from __future__ import annotations

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from draftco_jax.checkpoint import Checkpointer, fingerprint
from draftco_jax.config import load_config
from draftco_jax.config_io import to_json
from draftco_jax.convert import Wishes, convert, parse_size
from draftco_jax.drafts.dspark.checkpoint import load_dspark
from draftco_jax.drafts.eagle3.checkpoint import load_draft, save_draft
from draftco_jax.drafts.eagle3.config import Eagle3Config
from draftco_jax.drafts.mtp.checkpoint import load_mtp
from draftco_jax.drafts.vocabulary import CONSTANT, graph_with_map
from draftco_jax.errors import UserError
from draftco_jax.models.compute import ComputeConfig, cast_params
from draftco_jax.models.functional import abstract_params
from draftco_jax.models.hf_weights import load_policy
from draftco_jax.models.qwen3_moe import Qwen3MoeConfig
from draftco_jax.training.optimizer import make_optimizer
from draftco_jax.training.update import Optimizers, init_state

FAMILIES = ("qwen3", "qwen3_tied", "qwen3_moe", "qwen3_5_moe", "nemotron_h", "gpt_oss", "llama")
ASSETS = "draftco_jax/assets/arithmetic3"


@pytest.fixture(scope="session")
def golden(repository):
    return repository / "tests" / "golden" / "data"


@pytest.fixture
def copy_of(golden, tmp_path):
    """(family) -> a copy of its recorded checkpoint that may be changed."""

    def copy(family):
        folder = tmp_path / family
        folder.mkdir()
        for name in ("config.json", "model.safetensors"):
            shutil.copyfile(golden / family / name, folder / name)
        return folder

    return copy


def tensors_in(folder):
    """All tensors of a folder by the safetensors library; of shards, those of the files its index names."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return load_file(folder / "model.safetensors")
    places, found = json.loads(index.read_text())["weight_map"], {}
    for file in sorted(set(places.values())):
        part = load_file(folder / file)
        assert part.keys() == {name for name, place in places.items() if place == file}
        found |= part
    return found


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        np.testing.assert_array_equal(found[name], tensor, err_msg=name)


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def rewrite(folder, change):
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors")


def refused(tmp_path, source, said, out=None, **wishes):
    """One line that says so, and every file of the test's folder as it was."""
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with pytest.raises(UserError, match=said) as caught:
        convert(source, out or tmp_path / "out", Wishes(**wishes))
    assert "\n" not in str(caught.value)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


# ---- policies ----


@pytest.mark.parametrize("family", FAMILIES)
def test_bug_cases_b59_and_b63_a_policy_goes_through_bit_for_bit(family, golden, tmp_path):
    """The recorded files are what transformers wrote, so the names and layouts must be the same again."""
    found = convert(golden / family, tmp_path / "out")
    assert found.written == {"policy": tmp_path / "out"} and found.notes == []
    assert_same(tensors_in(tmp_path / "out"), load_file(golden / family / "model.safetensors"))
    assert load_policy(tmp_path / "out")[0] == load_policy(golden / family)[0]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


@pytest.mark.parametrize("family", ["gpt_oss", "llama"])
def test_scaled_rotary_is_written_under_one_key_in_the_published_form(family, golden, tmp_path):
    """transformers takes rope_scaling for rope_parameters, and knows no type but the published ones."""
    convert(golden / family, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    given = json.loads((golden / family / "config.json").read_text())["rope_parameters"]
    assert "rope_scaling" not in written and given["rope_type"] == written["rope_parameters"]["rope_type"]
    assert {name: written["rope_parameters"][name] for name in given} == given


def fused(tensors):
    """Experts of a layer in one tensor, gate above up: the published layout of Qwen3.5."""
    found, experts = {}, {}
    for name, tensor in tensors.items():
        stem, in_experts, rest = name.partition(".experts.")
        if in_experts:
            number, part, _ = rest.split(".")
            experts.setdefault(f"{stem}.experts", {}).setdefault(part, {})[int(number)] = tensor
        else:
            found[name] = tensor
    for stem, parts in experts.items():
        gate, up, down = (
            np.stack([parts[f"{p}_proj"][e] for e in sorted(parts["up_proj"])]) for p in ("gate", "up", "down")
        )
        found |= {f"{stem}.gate_up_proj": np.concatenate([gate, up], axis=1), f"{stem}.down_proj": down}
    return found


def test_a_multimodal_file_of_fused_experts_becomes_the_text_model(copy_of, tmp_path):
    folder = copy_of("qwen3_5_moe")
    wanted = load_file(folder / "model.safetensors")
    prefixed = {n.replace("model.", "model.language_model.", 1): t for n, t in fused(wanted).items()}
    vision = {"model.visual.patch_embed.weight": np.ones((2, 2), np.float16)}  # of another dtype, and no matter
    head = {"mtp.fc.weight": np.ones((64, 128), np.float16)}
    save_file(prefixed | vision | head, folder / "model.safetensors")
    text = json.loads((folder / "config.json").read_text()) | {"eos_token_id": 7}
    outer = {"model_type": "qwen3_5_moe", "architectures": ["Qwen3_5MoeForConditionalGeneration"], "text_config": text}
    (folder / "config.json").write_text(json.dumps(outer))
    found = convert(folder, tmp_path / "out")
    assert_same(tensors_in(tmp_path / "out"), wanted)
    said = "left out 2 tensors that are no part of the policy: model.visual.patch_embed.weight, mtp.fc.weight"
    assert found.notes == [said]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["eos_token_id"]) == ("qwen3_5_moe_text", 7)


def test_mxfp4_is_unpacked_to_the_dtype_of_the_rest(copy_of, tmp_path):
    """By hand: code 1 is 0.5, code 7 is 6, a scale of 128 doubles; low nibble first, rows are outputs."""
    folder = copy_of("gpt_oss")
    stem = "model.layers.0.mlp.experts.down_proj"
    tensors = load_file(folder / "model.safetensors")
    experts, inside, outside = tensors[stem].shape
    blocks = np.full((experts, outside, inside // 32, 16), 0x71, np.uint8)
    scales = np.full((experts, outside, inside // 32), 128, np.uint8)
    low = {name: t.astype(jnp.bfloat16) for name, t in tensors.items() if name != stem}
    save_file(low | {f"{stem}_blocks": blocks, f"{stem}_scales": scales}, folder / "model.safetensors")
    convert(folder, tmp_path / "out")
    found = tensors_in(tmp_path / "out")
    rows = np.tile(np.array([1.0, 12.0]), inside // 2)[None, :, None]
    np.testing.assert_array_equal(found[stem].astype(np.float32), np.broadcast_to(rows, found[stem].shape))
    assert {str(tensor.dtype) for tensor in found.values()} == {"bfloat16"}


def test_bug_case_b64_padded_rows_are_cut_and_told(copy_of, tmp_path):
    folder = copy_of("qwen3")
    wanted = load_file(folder / "model.safetensors")
    tables = ("model.embed_tokens.weight", "lm_head.weight")
    pad = lambda t: np.concatenate([t, np.full((32, t.shape[1]), 9.0, t.dtype)])  # noqa: E731
    rewrite(folder, lambda tensors: {n: pad(t) if n in tables else t for n, t in tensors.items()})
    assert load_file(folder / "model.safetensors")["lm_head.weight"].shape[0] == 192
    found = convert(folder, tmp_path / "out")
    assert found.notes == ["cut 32 rows beyond vocab_size=160, which are padding"]
    assert_same(tensors_in(tmp_path / "out"), wanted)


def test_bug_case_b60_tied_embeddings_stored_twice_are_written_once_and_another_head_is_not_lost(copy_of, tmp_path):
    folder = copy_of("qwen3_tied")
    wanted = load_file(folder / "model.safetensors")
    table = wanted["model.embed_tokens.weight"]
    rewrite(folder, lambda tensors: tensors | {"lm_head.weight": table.copy()})
    convert(folder, tmp_path / "out")
    assert_same(tensors_in(tmp_path / "out"), wanted)
    shutil.rmtree(tmp_path / "out")
    rewrite(folder, lambda tensors: tensors | {"lm_head.weight": table + np.float32(1)})
    refused(tmp_path, folder, "lm_head.weight is not model.embed_tokens.weight although tie_word_embeddings is true")


def test_bug_case_b61_an_untied_policy_without_its_head_is_refused(copy_of, tmp_path):
    folder = copy_of("qwen3")
    rewrite(folder, lambda tensors: {n: t for n, t in tensors.items() if n != "lm_head.weight"})
    refused(tmp_path, folder, "missing tensors lm_head.weight")


def test_a_tied_policy_with_a_head_alone_is_refused(copy_of, tmp_path):
    folder = copy_of("qwen3_tied")
    table = "model.embed_tokens.weight"
    rewrite(folder, lambda tensors: {"lm_head.weight" if n == table else n: t for n, t in tensors.items()})
    refused(tmp_path, folder, f"missing tensors {table}")


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_tied"])
def test_bug_case_b62_shards_hold_what_their_index_says(family, golden, tmp_path):
    convert(golden / family, tmp_path / "out", Wishes(max_shard_bytes=200_000))
    files = list((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2 and all(file.stat().st_size < 220_000 for file in files)
    assert_same(tensors_in(tmp_path / "out"), load_file(golden / family / "model.safetensors"))
    convert(tmp_path / "out", tmp_path / "one")  # and shards are read again
    assert (tmp_path / "one" / "model.safetensors").is_file()
    assert_same(tensors_in(tmp_path / "one"), load_file(golden / family / "model.safetensors"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_dtype_rounds_once(dtype, golden, tmp_path):
    convert(golden / "qwen3", tmp_path / "out", Wishes(dtype=dtype))
    kind = np.dtype(jnp.bfloat16) if dtype == "bfloat16" else np.dtype(np.float16)
    wanted = {n: t.astype(kind) for n, t in load_file(golden / "qwen3" / "model.safetensors").items()}
    assert_same(tensors_in(tmp_path / "out"), wanted)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["dtype"], config["torch_dtype"]) == (dtype, dtype)
    convert(tmp_path / "out", tmp_path / "again")  # a file of one dtype keeps it
    assert_same(tensors_in(tmp_path / "again"), wanted)


def test_a_mix_of_dtypes_is_widened_and_told_and_an_overflow_is_refused(copy_of, tmp_path):
    folder = copy_of("nemotron_h")
    tensors = load_file(folder / "model.safetensors")
    gates = [name for name in tensors if name.endswith("gate.weight")]
    assert gates
    mixed = {n: t if n in gates else t.astype(jnp.bfloat16) for n, t in tensors.items()}
    save_file(mixed, folder / "model.safetensors")
    found = convert(folder, tmp_path / "out")
    assert found.notes == ["the source mixes bfloat16, float32: written as float32; choose a dtype for less"]
    assert_same(tensors_in(tmp_path / "out"), {n: t.astype(np.float32) for n, t in mixed.items()})
    shutil.rmtree(tmp_path / "out")
    rewrite(folder, lambda tensors: tensors | {gates[0]: np.full_like(tensors[gates[0]], 7e4)})
    refused(tmp_path, folder, f"{gates[0]} holds a value that float16 cannot hold", dtype="float16")


def test_a_fortran_ordered_array_is_written_in_c_order(tmp_path, repository):
    """Parameters are transposed views of what was read; a writer that dumps memory would mix up rows and columns."""
    source = repository / ASSETS / "policy"
    convert(source, tmp_path / "out", Wishes(max_shard_bytes=100_000))
    assert_same(tensors_in(tmp_path / "out"), load_file(source / "model.safetensors"))


def test_files_beside_the_weights_and_token_ids_go_along(copy_of, repository, tmp_path):
    folder = copy_of("qwen3")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(repository / ASSETS / "policy" / name, folder / name)
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 5]}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "notes.txt").write_text("not a file of a model")
    edit_config(folder, eos_token_id=3, bos_token_id=2)
    convert(folder, tmp_path / "out")
    kept = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*kept, "config.json", "model.safetensors"}
    assert all((tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes() for name in kept)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["eos_token_id"], config["bos_token_id"]) == (3, 2)


# ---- drafts ----


@pytest.mark.parametrize("name", ["draft", "dflash", "dspark", "mtp"])
def test_bug_case_b59_a_draft_goes_through_bit_for_bit(name, repository, tmp_path):
    source = repository / ASSETS / name
    found = convert(source, tmp_path / "out")
    assert found.written == {"draft": tmp_path / "out"}
    wanted = load_file(source / "model.safetensors")
    if name == "draft":  # a full vocabulary is the identity map, which the official layout states
        wanted |= {"d2t": np.zeros(32, np.int64), "t2d": np.ones(32, np.bool_)}
    assert_same(tensors_in(tmp_path / "out"), wanted)


@pytest.fixture
def reduced():
    """An EAGLE-3 draft of 5 of 19 tokens."""
    cfg = Eagle3Config(
        vocab_size=19,
        draft_vocab_size=5,
        hidden_size=16,
        intermediate_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tap_layers=(0, 1),
        max_position_embeddings=64,
    )
    rng = np.random.default_rng(5)
    params = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), abstract_params(cfg.build))
    return cfg, graph_with_map(cfg, np.array([1, 2, 6, 11, 18], np.int32)), params


def test_bug_cases_b21_b22_and_b60_a_reduced_draft_keeps_its_map_and_its_own_head(reduced, tmp_path):
    """Written as other publishers do: nested names, embeddings of its own, a config copied from a tied policy."""
    save_draft(tmp_path / "in", *reduced)
    tensors = load_file(tmp_path / "in" / "model.safetensors")
    nested = {f"model.{n}" if n not in ("lm_head.weight", "d2t", "t2d") else n: t for n, t in tensors.items()}
    nested["model.embed_tokens.weight"] = np.ones((19, 16), np.float32)
    save_file(nested, tmp_path / "in" / "model.safetensors")
    edit_config(tmp_path / "in", tie_word_embeddings=True)
    convert(tmp_path / "in", tmp_path / "out")
    found = tensors_in(tmp_path / "out")
    assert_same(found, tensors)
    assert found["lm_head.weight"].shape[0] == 5 and found["d2t"].tolist() == [1, 1, 4, 8, 14]
    assert found["t2d"].sum() == 5
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    assert load_draft(tmp_path / "out")[1].constants[CONSTANT].tolist() == [1, 2, 6, 11, 18]


def test_bug_case_b19_a_reduced_draft_without_its_map_is_refused(reduced, tmp_path):
    save_draft(tmp_path / "in", *reduced)
    rewrite(tmp_path / "in", lambda tensors: {n: t for n, t in tensors.items() if n not in ("d2t", "t2d")})
    refused(tmp_path, tmp_path / "in", "draft_vocab_size=5 is below vocab_size=19 but there is no map")


def test_bug_case_b04_the_row_that_a_block_draft_begins_with_is_stored_and_never_assumed(repository, tmp_path):
    folder = tmp_path / "in"
    shutil.copytree(repository / ASSETS / "dspark", folder)
    convert(folder, tmp_path / "out")
    assert load_dspark(tmp_path / "out")[0].sample_from_anchor is True
    assert json.loads((tmp_path / "out" / "config.json").read_text())["sample_from_anchor"] is True
    config = json.loads((folder / "config.json").read_text())
    body = {n: config[n] for n in config if n not in ("architectures", "sample_from_anchor", "target_layer_ids")}
    speculators = {
        "architectures": ["DSparkSpeculator"],
        "speculators_model_type": "dspark",
        "transformer_layer_config": body,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in config["target_layer_ids"]],
    } | {
        n: config[n]
        for n in (
            "block_size",
            "mask_token_id",
            "markov_rank",
            "markov_head_type",
            "enable_confidence_head",
            "confidence_head_with_markov",
            "num_anchors",
        )
    }
    (folder / "config.json").write_text(json.dumps(speculators))
    shutil.rmtree(tmp_path / "out")
    refused(tmp_path, folder, "older versions trained either layout")
    (folder / "config.json").write_text(json.dumps(speculators | {"query_zero_predicts_next": True}))
    convert(folder, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["sample_from_anchor"] is True and written["architectures"] == ["Qwen3DSparkModel"]


def test_a_policys_own_head_is_taken_out_of_its_folder(copy_of, repository, tmp_path):
    folder, head = copy_of("qwen3"), load_file(repository / ASSETS / "mtp" / "model.safetensors")
    rewrite(folder, lambda tensors: tensors | head)
    own = json.loads((repository / ASSETS / "mtp" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(own | {"model_type": "qwen3_5_text", "architectures": ["Other"]}))
    found = convert(folder, tmp_path / "out", Wishes(kind="draft", draft_family="mtp", dtype="float32"))
    assert found.written == {"draft": tmp_path / "out"}
    assert_same(tensors_in(tmp_path / "out"), head)
    assert load_mtp(tmp_path / "out")[0] == load_mtp(repository / ASSETS / "mtp")[0]


def test_a_draft_of_low_precision_keeps_it(repository, tmp_path):
    convert(repository / ASSETS / "dflash", tmp_path / "low", Wishes(dtype="bfloat16"))
    convert(tmp_path / "low", tmp_path / "again")
    low = {
        n: t.astype(jnp.bfloat16) for n, t in load_file(repository / ASSETS / "dflash" / "model.safetensors").items()
    }
    assert_same(tensors_in(tmp_path / "again"), low)


# ---- runs ----


def save_run(run_dir, cfg, starting_draft=0):
    """A run directory with checkpoints of steps 2 and 4, whose weights are all unlike; returns the states."""
    run_dir.mkdir()
    (run_dir / "config.json").write_text(json.dumps(to_json(cfg)))
    trained = cfg.speculation == "cotrained"
    optimizers = Optimizers(
        policy=make_optimizer(cfg.policy_optimizer, cfg.steps),
        draft=make_optimizer(cfg.draft_optimizer, cfg.steps) if trained else None,
    )
    states = {}
    with Checkpointer(run_dir, keep=5) as checkpoints:
        for step in (2, 4):
            policy = cast_params(drawn(cfg.policy, step), cfg.policy_compute.parameter_dtype)
            state = init_state(policy, drawn(cfg.draft, step + 1) if trained else None, optimizers)
            states[step] = state._replace(step=jnp.int32(step))
            data = {"starting_weights": {"policy": 0, "draft": starting_draft}}
            checkpoints.save(states[step], jax.random.key(cfg.seed), data)
    return states


def drawn(cfg, seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), abstract_params(cfg.build))


@pytest.fixture(scope="module")
def run_of(repository):
    """(directory, overrides) -> config and states of a run saved there."""

    def make(run_dir, *overrides):
        cfg = load_config(repository / "configs" / "grpo_arithmetic2_eagle3_cpu.py", ["steps=4", *overrides])
        return cfg, save_run(run_dir, cfg)

    return make


def same_tree(found, wanted):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_bug_case_b64_policy_and_draft_of_a_checkpoint_are_the_live_weights(run_of, tmp_path):
    cfg, states = run_of(tmp_path / "run")
    found = convert(tmp_path / "run", tmp_path / "out")
    assert found.notes == ["checkpoint of step 4"]
    assert found.written == {"policy": tmp_path / "out" / "policy", "draft": tmp_path / "out" / "draft"}
    policy_cfg, policy = load_policy(found.written["policy"])
    draft_cfg, _, draft = load_draft(found.written["draft"], cfg.draft)
    assert (policy_cfg, draft_cfg) == (cfg.policy, cfg.draft)
    same_tree(policy, states[4].policy)
    same_tree(draft, states[4].draft)
    ids = json.loads((found.written["policy"] / "generation_config.json").read_text())
    assert ids == {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}
    assert (found.written["policy"] / "tokenizer.json").is_file()
    assert json.loads((found.written["draft"] / "config.json").read_text())["torch_dtype"] == "float32"


def test_bug_case_b21_the_map_of_a_trained_draft_is_that_of_the_draft_it_started_from(repository, tmp_path):
    cfg = load_config(repository / "configs" / "grpo_arithmetic2_eagle3_cpu.py", ["steps=4"])
    assert isinstance(cfg.draft, Eagle3Config)
    draft = dataclasses.replace(cfg.draft, draft_vocab_size=3)
    kept, start = np.array([4, 5, 9], np.int32), drawn(draft, 0)
    save_draft(tmp_path / "start", draft, graph_with_map(draft, kept), start)
    cfg = dataclasses.replace(cfg, draft=draft, draft_checkpoint=str(tmp_path / "start"))
    states = save_run(tmp_path / "run", cfg, fingerprint({"weights": start, "map": {CONSTANT: kept}}))
    found = convert(tmp_path / "run", tmp_path / "out")
    assert tensors_in(found.written["draft"])["d2t"].tolist() == [4, 4, 7]
    _, graph, params = load_draft(found.written["draft"])
    assert graph.constants[CONSTANT].tolist() == [4, 5, 9]
    same_tree(params, states[4].draft)
    shutil.rmtree(tmp_path / "out")
    save_draft(tmp_path / "start", draft, graph_with_map(draft, kept + np.int32(1)), start)
    refused(tmp_path, tmp_path / "run", "no longer holds the draft that .* started from")


def test_a_run_in_bfloat16_with_float32_parts_is_widened_and_told(run_of, tmp_path):
    """Routers are float32 whatever the dtype of the rest."""
    cfg, _ = run_of(tmp_path / "unused")
    mixed = dataclasses.replace(
        cfg,
        policy=Qwen3MoeConfig.tiny(),
        policy_checkpoint=None,
        policy_compute=ComputeConfig(dtype="bfloat16", parameter_dtype="bfloat16"),
        speculation="off",
    )
    states = save_run(tmp_path / "run", mixed)
    found = convert(tmp_path / "run", tmp_path / "out")
    assert found.notes[1:] == ["the run mixes bfloat16, float32: written as float32; choose a dtype for less"]
    same_tree(load_policy(found.written["policy"])[1], jax.tree.map(lambda x: x.astype(np.float32), states[4].policy))
    assert len(convert(tmp_path / "run", tmp_path / "low", Wishes(dtype="bfloat16")).notes) == 1


def test_a_step_and_a_kind_may_be_chosen(run_of, tmp_path):
    _, states = run_of(tmp_path / "run")
    found = convert(tmp_path / "run", tmp_path / "out", Wishes(step=2, kind="policy"))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["policy"]
    same_tree(load_policy(found.written["policy"])[1], states[2].policy)
    shutil.rmtree(tmp_path / "out")
    refused(tmp_path, tmp_path / "run", "step=3 is not a checkpoint of .*; it has 2, 4", step=3)


def test_bug_case_b44_the_runs_own_files_are_not_touched(run_of, tmp_path):
    run_of(tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    convert(tmp_path / "run", tmp_path / "out")
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


def test_a_run_without_a_trained_draft_gives_the_policy_alone(run_of, tmp_path):
    _, states = run_of(tmp_path / "run", "speculation=off")
    refused(tmp_path, tmp_path / "run", "trained no draft", kind="draft")
    found = convert(tmp_path / "run", tmp_path / "out")
    assert found.written.keys() == {"policy"}
    same_tree(load_policy(found.written["policy"])[1], states[4].policy)


@pytest.mark.parametrize("lost", ["all", "half"])
def test_bug_case_b68_a_checkpoint_that_is_not_finished_is_refused(lost, run_of, tmp_path):
    run_of(tmp_path / "run")
    checkpoints = tmp_path / "run" / "checkpoints"
    if lost == "all":
        shutil.rmtree(checkpoints)
        refused(tmp_path, tmp_path / "run", "holds no checkpoint")
        return
    for path in (checkpoints / "4").iterdir():
        if path.is_file():
            path.unlink()
    refused(tmp_path, tmp_path / "run", "checkpoint .*4 is damaged", step=4)
    found = convert(tmp_path / "run", tmp_path / "out")  # the newest finished one
    assert found.notes == ["checkpoint of step 2"]


# ---- refusals ----


@pytest.mark.parametrize(
    ("wishes", "said"),
    [
        ({"dtype": "float8"}, "dtype=float8 must be one of bfloat16, float32, float16"),
        ({"kind": "model"}, "kind=model must be policy or draft"),
        ({"max_shard_bytes": 0}, "max_shard_size=0 must be at least 1 byte"),
        ({"draft_family": "eagle9"}, "draft family eagle9 is unknown"),
        ({"draft_family": "ngram"}, "draft family ngram has no weights"),
        ({"draft_family": "mtp", "kind": "policy"}, "draft_family=mtp goes with kind=draft"),
        ({"step": 3}, "step=3 is for run directories"),
        ({"kind": "draft"}, "does not say which draft family"),
    ],
)
def test_wishes_that_cannot_be_met_are_one_line(wishes, said, golden, tmp_path):
    refused(tmp_path, golden / "qwen3", said, **wishes)


def test_a_source_or_an_out_that_cannot_be_used_is_one_line(golden, tmp_path):
    refused(tmp_path, tmp_path / "nowhere", "source=.*nowhere is not a folder")
    refused(tmp_path, "shipped:nothing", "shipped:nothing is not shipped")
    (tmp_path / "empty").mkdir()
    refused(tmp_path, tmp_path / "empty", "holds no config.json")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("kept")
    refused(tmp_path, golden / "qwen3", "out=.*full exists and is not empty", out=tmp_path / "full")
    refused(tmp_path, golden / "qwen3", "out=.*mine.*cannot be made", out=tmp_path / "full" / "mine" / "x")
    (tmp_path / "pretraining").mkdir()
    (tmp_path / "pretraining" / "config.json").write_text('{"type": "PretrainConfig"}')
    refused(tmp_path, tmp_path / "pretraining", "is the training of a draft alone; finish it")
    found = convert(golden / "qwen3", tmp_path / "empty")  # an empty folder may be filled
    assert found.written["policy"] == tmp_path / "empty" and (tmp_path / "empty" / "config.json").is_file()


def test_a_stop_in_the_middle_leaves_nothing(golden, tmp_path, monkeypatch):
    from draftco_jax.models import hf_weights

    def stop(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(hf_weights, "write_sharded", stop)
    with pytest.raises(KeyboardInterrupt):
        convert(golden / "qwen3", tmp_path / "out", Wishes(max_shard_bytes=100_000))
    assert list(tmp_path.iterdir()) == []

    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hf_weights, "write_sharded", full)
    refused(tmp_path, golden / "qwen3", "cannot be written .No space left on device.", max_shard_bytes=100_000)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("cut", "model-00002-of-0000.*cut short"),
        ("absent", "model-00002-of-0000.*does not exist"),
        ("renamed", "names tensors that their files do not hold"),
    ],
)
def test_shards_that_are_not_whole_are_named(fault, said, golden, tmp_path):
    folder = tmp_path / "in"
    convert(golden / "qwen3", folder, Wishes(max_shard_bytes=200_000))
    shard = next(folder.glob("model-00002-*"))
    if fault == "cut":
        shard.write_bytes(shard.read_bytes()[:-10])
    elif fault == "absent":
        shard.unlink()
    else:
        save_file({f"{name}x": t for name, t in load_file(shard).items()}, shard)
    refused(tmp_path, folder, said)


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("1.5mb", 1_500_000), ("2GiB", 2**31), ("700", 700), (" 3 KB ", 3000)]
)
def test_sizes_are_read(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "5 lots", "1e999GB", "nanGB"])
def test_a_size_that_is_none_is_refused(text):
    with pytest.raises(UserError, match="max_shard_size=.* must be a number with a unit"):
        parse_size(text)
