"""The doctor of model folders: every fault planted is found by name, and what it calls sound is loaded."""

from __future__ import annotations

import json
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from draftco_jax import cli
from draftco_jax.convert import Wishes, convert
from draftco_jax.drafts.catalog import FAMILIES
from draftco_jax.drafts.mtp.checkpoint import load_mtp
from draftco_jax.drafts.mtp.config import MtpConfig
from draftco_jax.errors import UserError
from draftco_jax.model_doctor import describe_model, lines_of
from draftco_jax.models.functional import abstract_params
from draftco_jax.models.hf_weights import load_policy, tensor_name, to_tensors
from draftco_jax.models.qwen3 import Qwen3Config
from draftco_jax.models.transformer import count_parameters

POLICIES = ("qwen3", "qwen3_tied", "qwen3_moe", "qwen3_5_moe", "nemotron_h", "gpt_oss", "llama")
ASSETS = "draftco_jax/assets/arithmetic3"


@pytest.fixture(scope="session")
def golden(repository):
    return repository / "tests" / "golden" / "data"


@pytest.fixture
def copy_of(golden, tmp_path):
    """(family) -> a copy of its recorded checkpoint that may be changed."""

    def copy(family):
        folder = tmp_path / family
        shutil.copytree(golden / family, folder, ignore=shutil.ignore_patterns("golden.npz", "gradnorms.json"))
        return folder

    return copy


@pytest.fixture
def chat(copy_of, repository):
    """A policy with a tokenizer of 32 tokens, which ends texts with 1."""
    folder = copy_of("qwen3")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(repository / ASSETS / "policy" / name, folder / name)
    return folder


def edit(path, **changes):
    values = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({k: v for k, v in (values | changes).items() if v is not None}))


def rewrite(folder, **changes):
    """Replace tensors of the file; None takes one away."""
    tensors = load_file(folder / "model.safetensors") | changes
    save_file({n: t for n, t in tensors.items() if t is not None}, folder / "model.safetensors")


def refused(folder, *said):
    """The report of a folder that gives these reasons and no other, and that loading refuses as well."""
    report = describe_model(folder)
    assert not report.loads and len(report.reasons) == len(said), report.reasons
    for part, reason in zip(said, report.reasons, strict=True):
        assert part in reason and "\n" not in reason
    with pytest.raises((UserError, ValueError)):
        load_policy(folder)
    return report


@pytest.mark.parametrize("family", POLICIES)
def test_what_loads_is_said_to_load(family, golden):
    report = describe_model(golden / family)
    cfg, params = load_policy(golden / family)
    assert report.loads and report.kind == "policy" and report.family == type(cfg).__name__
    assert report.parameters == count_parameters(params)
    assert report.bytes == sum(t.nbytes for t in load_file(golden / family / "model.safetensors").values())
    assert report.sizes["hidden_size"] == cfg.hidden_size
    assert not report.missing + report.unexpected + report.misshapen + report.left_aside
    assert json.loads(json.dumps(report.as_json()))["loads"] is True


def test_bug_case_b61_missing_unexpected_and_misshapen_tensors_are_named_all_at_once(copy_of):
    folder = copy_of("qwen3_moe")
    gone = [f"model.layers.{n}.mlp.experts.1.up_proj.weight" for n in (0, 1)]
    rewrite(
        folder,
        **dict.fromkeys(gone),
        **{"model.norm.weight": np.ones(65, np.float32), "model.extra.bias": np.ones(2, np.float32)},
    )
    report = refused(folder, f"missing tensors: {gone[0]}", "unexpected tensors: model.extra.bias", "misshapen: ")
    assert (report.missing, report.unexpected) == (gone, ["model.extra.bias"])
    assert len(report.misshapen) == 1
    assert (
        "model.norm.weight in model.safetensors: stored shape (65,) gives (65,) but (64,) is asked for"
        in (report.misshapen[0])
    )


@pytest.mark.parametrize("family", ["qwen3_5_moe", "nemotron_h", "gpt_oss"])
def test_one_tensor_less_is_found_in_every_family(family, copy_of):
    folder = copy_of(family)
    names = sorted(load_file(folder / "model.safetensors"))
    for name in (names[0], names[len(names) // 2], names[-1]):
        whole = load_file(folder / "model.safetensors")
        rewrite(folder, **{name: None})
        assert refused(folder, f"missing tensors: {name}").missing == [name]
        save_file(whole, folder / "model.safetensors")


def test_a_head_that_is_missing_while_untied_says_the_way_out(copy_of):
    folder = copy_of("qwen3")
    rewrite(folder, **{"lm_head.weight": None})
    refused(folder, "missing tensors: lm_head.weight; if the head is the embedding, set tie_word_embeddings to true")
    edit(folder / "config.json", tie_word_embeddings=True)
    assert describe_model(folder).loads and load_policy(folder)


def test_bug_case_b60_a_head_beside_a_tied_embedding_is_told(copy_of):
    folder = copy_of("qwen3_tied")
    rewrite(folder, **{"lm_head.weight": np.zeros((160, 64), np.float32)})
    report = describe_model(folder)
    assert report.loads and report.left_aside == ["lm_head.weight"]
    assert any("lm_head.weight is stored although tie_word_embeddings" in warning for warning in report.warnings)


def test_bug_case_b64_padded_rows_and_rows_too_few_are_told(copy_of):
    folder = copy_of("qwen3")
    rewrite(folder, **{"lm_head.weight": np.zeros((192, 64), np.float32)})
    refused(folder, "lm_head.weight has 192 rows but vocab_size=160")
    rewrite(folder, **{"lm_head.weight": np.zeros((100, 64), np.float32)})
    refused(folder, "lm_head.weight has 100 rows but vocab_size=160")


def test_integers_where_floats_belong_are_told(copy_of):
    folder = copy_of("qwen3")
    rewrite(folder, **{"model.norm.weight": np.ones(64, np.int32)})
    refused(folder, "model.norm.weight in model.safetensors: stored as int32 but floats are asked for")


def test_several_dtypes_are_a_warning(copy_of):
    folder = copy_of("qwen3")
    rewrite(folder, **{"model.norm.weight": np.ones(64, np.float16)})
    report = describe_model(folder)
    assert report.loads and load_policy(folder)
    assert report.dtypes["float16"] == {"tensors": 1, "bytes": 128}
    assert any("weights of several dtypes: float16, float32" in warning for warning in report.warnings)


@pytest.fixture
def shards(golden, tmp_path):
    """A policy in several files."""
    convert(golden / "qwen3", tmp_path / "shards", Wishes(max_shard_bytes=150_000))
    return tmp_path / "shards"


def test_bug_case_b62_all_damaged_shards_are_named_and_the_others_are_looked_at(shards):
    files = sorted(shards.glob("*.safetensors"))
    assert len(files) > 3
    cut, absent, changed = files[0], files[1], files[-1]
    inside = sorted(load_file(changed))
    cut.write_bytes(cut.read_bytes()[:-8])
    absent.unlink()
    save_file({n: t[:1] if n == inside[0] else t for n, t in load_file(changed).items()}, changed)
    report = refused(shards, f"{cut.name}: cut short", f"{absent.name} does not exist", f"{inside[0]} ")
    assert report.missing == []  # those of the two files are not counted twice
    assert cut.name not in report.files and files[2].name in report.files


def test_an_index_and_files_that_disagree_are_told(shards):
    index = shards / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    edit(index, weight_map=places | {"model.ghost.weight": places["model.norm.weight"]})
    refused(shards, "does not hold tensors that model.safetensors.index.json puts there: model.ghost.weight")
    edit(index, weight_map={n: f for n, f in places.items() if n != "model.norm.weight"})
    refused(shards, "does not name tensors that the files hold: model.norm.weight")
    index.write_text("{")
    refused(shards, "not JSON")


def test_bug_case_b59_no_weight_of_a_policy_is_read(tmp_path):
    """A file of 260 GB that takes no room on the disk: reading it would take minutes and more memory than there is."""
    cfg = Qwen3Config(
        vocab_size=100_000,
        hidden_size=50_000,
        intermediate_size=150_000,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
    )
    shapes = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(abstract_params(cfg.build))[0]:
        name = tensor_name(path)
        shapes[name] = leaf.shape[::-1] if len(leaf.shape) == 2 and "embed" not in name else leaf.shape
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    config = {"model_type": "qwen3", "hidden_act": "silu", "rope_theta": 1e6}
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    config |= {name: getattr(cfg, name) for name in (*names, "num_key_value_heads", "head_dim", "tie_word_embeddings")}
    (tmp_path / "config.json").write_text(json.dumps(config))
    report = describe_model(tmp_path)
    assert report.loads, report.reasons
    assert report.bytes == end > 200e9 and report.parameters == end // 4


# ---- tokens ----


def test_a_tokenizer_that_fits_is_described(chat):
    report = describe_model(chat)
    assert report.loads and report.tokens["ids"] == 32 and report.tokens["largest_id"] == 31
    assert report.tokens["stop_ids"] == {"tokenizer_config.json": [1]}
    assert [warning.split(":")[0] for warning in report.warnings] == ["no chat template"]


def test_ids_beyond_the_model_are_a_reason(chat):
    settings = json.loads((chat / "tokenizer.json").read_text())
    settings["model"]["vocab"]["far"] = 160
    (chat / "tokenizer.json").write_text(json.dumps(settings))
    report = describe_model(chat)
    assert len(report.reasons) == 1
    assert "tokenizer.json has ids up to 160, but vocab_size=160" in report.reasons[0]


def test_stop_tokens_that_disagree_are_a_warning_with_all_of_them(chat):
    edit(chat / "config.json", eos_token_id=1)
    edit(chat / "generation_config.json", eos_token_id=[1, 11])
    report = describe_model(chat)
    said = "stop tokens differ: [1] in config.json, [1, 11] in generation_config.json, [1] in tokenizer_config.json"
    assert report.loads and any(said in warning for warning in report.warnings)
    edit(chat / "generation_config.json", eos_token_id=1)  # a list of one and the id alone are the same
    assert not any("differ" in warning for warning in describe_model(chat).warnings)
    edit(chat / "generation_config.json", eos_token_id="</s>")
    assert any('eos_token_id="</s>" must be an id' in reason for reason in describe_model(chat).reasons)
    edit(chat / "generation_config.json", eos_token_id=[500])
    assert any("stop tokens [500] are outside vocab_size=160" in warning for warning in describe_model(chat).warnings)


def test_damaged_files_of_tokens_are_reasons(chat):
    (chat / "generation_config.json").write_text("[1]")
    edit(chat / "tokenizer_config.json", eos_token="[gone]")
    reasons = describe_model(chat).reasons
    assert any("generation_config.json holds a list" in reason for reason in reasons)
    assert any("eos_token='[gone]' is not in tokenizer.json" in reason for reason in reasons)
    (chat / "tokenizer.json").write_text("{")
    assert any("tokenizer.json cannot be read" in reason for reason in describe_model(chat).reasons)
    (chat / "tokenizer.json").unlink()
    (chat / "tokenizer.model").write_bytes(b"")
    assert any("only tokenizer.model, which is not read here" in warning for warning in describe_model(chat).warnings)


def test_chat_templates_are_found_in_every_place_and_compared(chat):
    edit(chat / "tokenizer_config.json", chat_template="{{ messages }}")
    assert describe_model(chat).tokens["chat_template"] == ["tokenizer_config.json"]
    (chat / "chat_template.jinja").write_text("{{ messages }}\n")
    assert not describe_model(chat).warnings
    edit(chat / "chat_template.json", chat_template="{{ other }}")
    report = describe_model(chat)
    assert report.loads and any("chat templates differ" in warning for warning in report.warnings)


# ---- drafts and heads ----


@pytest.mark.parametrize(
    ("name", "family"), [("draft", "eagle3"), ("dflash", "dflash"), ("dspark", "dspark"), ("mtp", "mtp")]
)
def test_drafts_are_told_by_family_with_the_policy_that_they_fit(name, family, repository):
    folder = repository / ASSETS / name
    report = describe_model(folder)
    load = FAMILIES[family].load
    assert load is not None
    assert report.loads and (report.kind, report.family) == ("draft", family)
    assert report.parameters == count_parameters(load(folder, None)[2])
    text = "\n".join(lines_of(report))
    assert "hidden_size=128, vocab_size=32" in text
    assert ("reads the outputs of 0, 1" in text) == (family != "mtp")


def test_bug_cases_b04_b19_and_b40_a_draft_that_does_not_load_says_why(repository, tmp_path):
    for name, change, said in (
        ("dspark", {"architectures": None, "sample_from_anchor": None, "speculators_model_type": "dspark"}, "anchor"),
        ("draft", {"draft_vocab_size": 5}, "lm_head.weight has shape|no map from draft ids"),
        ("draft", {"max_position_embeddings": None}, "max_position_embeddings"),
    ):
        folder = tmp_path / name
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(repository / ASSETS / name, folder)
        edit(folder / "config.json", **change)
        report = describe_model(folder)
        assert not report.loads and any(part in report.reasons[0] for part in said.split("|")), report.reasons


def test_the_head_that_a_policy_brings_along_is_told(copy_of):
    folder = copy_of("qwen3_5_moe")
    rewrite(folder, **{"mtp.layers.0.mlp.experts.gate_up_proj": np.ones((2, 2), np.float32)})
    report = describe_model(folder)
    assert report.loads and report.left_aside == ["mtp.layers.0.mlp.experts.gate_up_proj"]
    assert report.prediction_head is not None
    assert "not usable as a draft" in report.prediction_head and "missing tensors mtp.fc" in report.prediction_head
    rewrite(folder, **{"mtp.layers.0.mlp.experts.gate_up_proj": None, "mtp.fc.weight": np.ones((64, 128), np.float32)})
    edit(folder / "config.json", intermediate_size=48)
    report = describe_model(folder)
    assert report.loads and report.prediction_head is not None and "missing tensors" in report.prediction_head
    cfg = MtpConfig.for_target(
        load_policy(folder)[0], attention_output_gate=True, rotary_fraction=0.25, intermediate_size=48
    )
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), abstract_params(cfg.build))
    rewrite(folder, **to_tensors(zeros, prefix="mtp."))
    report = describe_model(folder)
    assert report.loads and report.prediction_head == "loads as an mtp draft"
    assert load_mtp(folder)[0] == cfg


# ---- the command ----


def test_exit_codes_and_json(golden, chat, tmp_path, capsys):
    assert cli.main(["doctor", str(golden / "qwen3"), "--json", str(tmp_path / "a.json")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"{golden / 'qwen3'} loads as a policy"
    assert json.loads((tmp_path / "a.json").read_text())["loads"] is True
    rewrite(chat, **{"model.norm.weight": None, "model.other.weight": np.ones(1, np.float32)})
    assert cli.main(["doctor", str(chat), "--json", str(tmp_path / "b.json")]) == 2
    captured = capsys.readouterr()
    assert captured.err == f"draftco: {chat} cannot be used: 2 reasons, listed above\n"
    assert [line.split(":")[0] for line in captured.out.splitlines()[-2:]] == ["reason", "reason"]
    assert json.loads((tmp_path / "b.json").read_text())["missing"] == ["model.norm.weight"]


def test_what_is_no_model_is_refused_in_one_line(tmp_path, capsys):
    assert cli.main(["doctor", str(tmp_path / "nowhere")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert "holds no config.json" in describe_model(tmp_path).reasons[0]
    edit(tmp_path / "config.json", type="RunConfig")
    assert f"`draftco convert {tmp_path} OUT`" in describe_model(tmp_path).reasons[0]
    edit(tmp_path / "config.json", type=None, model_type="mamba")
    reasons = describe_model(tmp_path).reasons
    assert any("model_type='mamba' is not supported" in reason for reason in reasons)
    assert any("holds neither model.safetensors nor" in reason for reason in reasons)
