"""`draftco bench text`: plans, what it keeps and goes on from, and a whole run on a small policy of random weights."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pytest
import tokenizers

from draftco_jax import bench_text as bench
from draftco_jax import cli
from draftco_jax.bench_decode.machine import describe_machine
from draftco_jax.bench_text import table, training
from draftco_jax.drafts.recognise import draft_family_in
from draftco_jax.models.functional import abstract_params
from draftco_jax.models.hf_weights import save_policy
from draftco_jax.models.llama import LlamaConfig
from draftco_jax.text.tokenizer import Tokenizer

KEYS = {
    "settings", "step_matmul", "texts", "drafts", "cells", "worst_over_plain", "over_transformers", "timed_prompts",
    "over_transformers_reason", "date", "hardware", "versions",
}  # fmt: skip
TEMPLATE = "{% for m in messages %}<s>{{ m['content'] }}<e>{% endfor %}{% if add_generation_prompt %}<s>{% endif %}"
SMALL = (
    "minutes=1e-6 max_prompt_tokens=16 max_new_tokens=8 rollout_batch=4 draft_vocab_size=24 passes=1 batches=2 "
    "evaluation_prompts=2 timed_tokens=6 draft_lengths=2 repetitions=1 dflash_block=3 dflash_layers=1 peer=false "
    "samplings=temperature_1 choosing_turns=1"
).split()


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """A folder with a Llama of random weights and a byte-level tokenizer."""
    folder = tmp_path_factory.mktemp("policy")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<s>", "<e>", "<idle>", *alphabet])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(token, special=True) for token in list(vocab)[:3]])
    Tokenizer(backend, eos_token="<e>", bos_token="<s>", settings={"chat_template": TEMPLATE}).save(folder)
    cfg = dataclasses.replace(LlamaConfig.tiny(), vocab_size=len(vocab), num_hidden_layers=1, rope_scaling=None)
    rng = np.random.default_rng(0)
    draw = lambda leaf: np.asarray(rng.normal(size=leaf.shape) * leaf.shape[0] ** -0.5, np.float32)  # noqa: E731
    save_policy(folder, cfg, jax.tree.map(draw, abstract_params(cfg.build)))
    return folder


class Files(NamedTuple):
    train: Path
    held_out: Path


def write_problems(path: Path, words: str) -> Path:
    rows = [{"question": f"what is {word}?", "answer": "#### 1"} for word in words]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Files:
    folder = tmp_path_factory.mktemp("prompts")
    return Files(
        write_problems(folder / "train.jsonl", "abcdefgh"), write_problems(folder / "held_out.jsonl", "ijklmnop")
    )


def arguments(policy, prompts, folder, settings=SMALL):
    files = ["--prompts", str(prompts.train), "--held-out", str(prompts.held_out)]
    given = ["--policy", str(policy), *files, "--run-dir", str(folder)]
    return ["bench", "text", *given, *(word for setting in settings for word in ("--set", setting))]


def test_a_small_run_goes_through_and_a_second_one_does_nothing_again(policy, prompts, tmp_path, capsys, monkeypatch):
    asked = arguments(policy, prompts, tmp_path / "run", [*SMALL, "drafts=eagle3"])
    assert cli.main([*asked, "--json", str(tmp_path / "a.json")]) == 0
    first = json.loads((tmp_path / "a.json").read_text())
    assert first.keys() == KEYS and first["over_transformers_reason"] == "left out by peer=false"
    assert first["texts"]["sequences"] == 4 and 4 <= first["texts"]["tokens"] <= 4 * 8
    draft = first["drafts"]["eagle3"]
    assert draft["steps"] == 1 and draft["accepted_length"].keys() >= {"untrained", "end"}
    assert 0 < draft["mass_outside_vocabulary"] < 1, "235 of 259 ids are left out"
    assert [(c["policy"], c["batch"], c["sampling"]) for c in first["cells"]] == [
        ("eagle3", 2, "temperature_1"),
    ]
    for cell in first["cells"]:
        assert 1.0 <= cell["choices"]["2"]["accepted_length"] <= 3.0
        assert cell["plain"]["tokens_per_second"] > 0
    assert "of plain" in capsys.readouterr().out

    def again(*found):
        raise AssertionError("it was done before")

    for name in ("own_rollouts", "_seconds_of_a_step"):
        monkeypatch.setattr(training, name, again)
    monkeypatch.setattr(bench, "measure_cell", again)
    assert cli.main([*asked, "--json", str(tmp_path / "b.json")]) == 0
    second = json.loads((tmp_path / "b.json").read_text())
    assert (second["cells"], second["drafts"], second["texts"]) == (first["cells"], first["drafts"], first["texts"])
    assert cli.main([*asked, "--minutes", "1", "--set", "minutes=2"]) == 2
    assert "is of other settings (minutes=1e-06)" in capsys.readouterr().err
    assert first["timed_prompts"] == {"first": 2, "distinct": 4, "asked": 4}


def test_other_problems_under_the_same_name_are_other_settings(policy, tmp_path):
    def content(words: str) -> str:
        path = write_problems(tmp_path / "train.jsonl", words)
        cfg = bench.BenchTextConfig(policy=str(policy), prompts=str(path))
        return training.learnt_settings(cfg)["content of prompts"]

    assert content("abc") == content("abc") != content("abd")


def test_held_out_problems_that_drafts_learn_from_are_refused(policy, prompts, tmp_path, capsys):
    same = Files(prompts.train, write_problems(tmp_path / "held_out.jsonl", "hijklmno"))
    assert cli.main(arguments(policy, same, tmp_path / "run")) == 2
    assert "shares 1 questions with prompts=" in capsys.readouterr().err


def test_cells_of_another_machine_or_other_versions_are_not_kept():
    here = describe_machine(None)
    assert bench._measured_alike({"measured": here})
    for part, name in (("versions", "jax"), ("hardware", "processor")):
        assert not bench._measured_alike({"measured": here | {part: here[part] | {name: "another"}}})


@pytest.mark.slow
def test_both_drafts_learn_the_same_texts_and_are_measured(policy, prompts, tmp_path):
    assert cli.main([*arguments(policy, prompts, tmp_path / "run"), "--json", str(tmp_path / "a.json")]) == 0
    found = json.loads((tmp_path / "a.json").read_text())
    for family in ("eagle3", "dflash"):
        folder = tmp_path / "run" / family
        seen = draft_family_in(folder / "draft")
        assert seen is not None and seen.name == family
        assert (folder / "rollouts.npz").resolve() == tmp_path / "run" / "rollouts.npz"
    assert [cell["policy"] for cell in found["cells"]] == ["eagle3", "dflash"]
    text = table.table(found).splitlines()
    assert text[1].startswith("eagle3: ") and text[2].startswith("dflash: ") and len(text) == 8
    assert "at worst" in table.last_line(found)


def test_the_time_is_shared_out():
    cfg = bench.BenchTextConfig(minutes=20.0, rollout_share=0.25)
    assert (cfg.seconds_of_rollouts, cfg.seconds_of_a_draft) == (300.0, 450.0)
    assert dataclasses.replace(cfg, drafts=("dflash",)).seconds_of_a_draft == 900.0


def test_the_mask_token_is_an_id_that_no_text_uses(policy):
    tokenizer = Tokenizer.load(policy)
    assert training.mask_token_of(tokenizer, tokenizer.vocab_size) == 2, "<idle>, the only one without a job"
    assert training.mask_token_of(tokenizer, tokenizer.vocab_size + 5) == tokenizer.vocab_size + 4, "a padding row"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["drafts=mtp"], "drafts=('mtp',) must name some of eagle3, dflash"),
        (["rollout_share=1.0"], "rollout_share=1.0 must be in (0, 1)"),
        (["minutes=0"], "minutes=0.0 must be above 0"),
        (["samplings=beam"], "samplings=('beam',) must name some of greedy, temperature_1"),
        (["draft_lengths=2,8"], "draft_lengths=(2, 8) must be below dflash_block=8"),
        (["repetitions=0"], "repetitions=0 must be >= 1"),
        (["evaluation_prompts=9", "max_prompt_tokens=40"], "evaluation_prompts=9 must be <= 8"),
    ],
)
def test_bad_settings_are_refused_in_a_line(settings, said, policy, prompts, tmp_path, capsys):
    assert cli.main(arguments(policy, prompts, tmp_path / "run", settings)) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and said in lines[0]
    assert not (tmp_path / "run").exists()


def test_a_folder_of_something_else_is_refused(policy, prompts, tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    assert cli.main(arguments(policy, prompts, tmp_path, ["drafts=eagle3", *SMALL])) == 2
    assert "exists and is not of this command" in capsys.readouterr().err
    assert cli.main(["bench", "text", "--policy", "x"]) == 2
    assert "needs --policy DIR and --prompts FILE" in capsys.readouterr().err
    assert cli.main(["bench", "decode", "--held-out", "x"]) == 2
    assert "--held-out is an option of `draftco bench text`" in capsys.readouterr().err
