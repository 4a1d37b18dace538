"""`draftco generate` on a shipped policy: responses do not depend on draft, slots or company, and say why they end."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import replace

import jax
import pytest

from draftco_jax.cli import main
from draftco_jax.config import resolve_checkpoint
from draftco_jax.decoding.engine import Engine
from draftco_jax.errors import UserError
from draftco_jax.generate import GenerateConfig, Generator, load_model
from draftco_jax.generate.prompts import PromptLine, read_prompts
from draftco_jax.numerics.sampling import SamplingConfig

POLICY = "shipped:arithmetic2/policy"
FOLDER = resolve_checkpoint(POLICY)
TEXTS = ["12+34=", "99+9=", "55+66="]
GREEDY = GenerateConfig(sampling=SamplingConfig(temperature=0.0), max_new_tokens=40, slots=2)


@pytest.fixture(scope="module")
def plain():
    return load_model(FOLDER, None)


@pytest.fixture(scope="module")
def drafted():
    return load_model(FOLDER, str(resolve_checkpoint("shipped:arithmetic2/draft")))


def standard_input(text):
    return io.TextIOWrapper(io.BytesIO(text.encode()))


def responses(model, cfg, texts=TEXTS, form="text"):
    generator = Generator(model, cfg, read_prompts(texts, "prompts", form, FOLDER, model.tokenizer))
    return list(generator.run()), generator


@pytest.fixture(scope="module")
def greedy(plain):
    return responses(plain, GREEDY)[0]


def test_a_draft_changes_nothing_but_the_time(greedy, drafted):
    """Three prompts in two slots: the third prompt takes the place of the one that ends first."""
    found, generator = responses(drafted, GREEDY)
    assert [(r.index, r.tokens, r.text) for r in found] == [(r.index, r.tokens, r.text) for r in greedy]
    for one, other in zip(found, greedy, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    assert sum(s.committed for s in generator.stats) > 1.5 * sum(s.rounds for s in generator.stats)


@pytest.mark.slow
def test_the_policys_int8_copy_is_a_draft_without_a_folder(greedy):
    found, generator = responses(load_model(FOLDER, "self_int8"), GREEDY)
    assert [(r.index, r.tokens) for r in found] == [(r.index, r.tokens) for r in greedy]
    for one, other in zip(found, greedy, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    assert sum(s.committed for s in generator.stats) > 3 * sum(s.rounds for s in generator.stats)


def test_a_response_says_why_it_ended(plain, greedy):
    assert {r.stop_reason for r in greedy} == {"stop_token"}
    assert all(r.tokens[-1] == r.stop == plain.tokenizer.eos_id for r in greedy)
    assert all(len(r.tokens) == len(r.logprobs) for r in greedy)


def test_each_line_of_a_file_has_its_own_settings(plain, greedy):
    """The file samples and stops at a string; its lines ask for other things, through two slots of one program."""
    string, third, whole = greedy[0].text[3:5], greedy[2].tokens[2], len(greedy[1].tokens)
    lines = [
        {"prompt": TEXTS[0], "temperature": 0},
        {"prompt": TEXTS[0], "temperature": 0, "stop": []},
        {"prompt": TEXTS[1], "top_k": 1, "stop": [], "max_tokens": 3},
        {"prompt": TEXTS[2], "temperature": 0, "stop": [], "stop_token_ids": [third]},
        {"prompt": TEXTS[1], "temperature": 0, "stop": [], "min_tokens": whole + 1},
        *({"prompt": TEXTS[0], "seed": seed, "stop": [], "temperature": 3} for seed in (7, 8, 7)),
    ]
    cfg = GenerateConfig(max_new_tokens=40, slots=2, stop_strings=(string,))
    cut, free, short, by_id, long, *seeded = responses(plain, cfg, [json.dumps(line) for line in lines], "jsonl")[0]
    assert (cut.stop_reason, cut.stop) == ("stop_string", string)
    assert cut.text == greedy[0].text[: greedy[0].text.index(string)]
    assert cut.tokens == greedy[0].tokens[: len(cut.tokens)] and len(cut.tokens) == len(cut.logprobs)
    assert free.tokens == greedy[0].tokens and free.logprobs == pytest.approx(greedy[0].logprobs, abs=1e-5)
    assert (short.tokens, short.stop_reason, short.stop) == (greedy[1].tokens[:3], "length", None)
    assert (by_id.tokens[-1], by_id.stop_reason, by_id.stop) == (third, "stop_token", third)
    assert by_id.tokens == greedy[2].tokens[: len(by_id.tokens)]
    assert long.tokens[: whole - 1] == greedy[1].tokens[:-1] and len(long.tokens) > whole
    assert plain.tokenizer.eos_id not in long.tokens[: whole + 1]
    assert seeded[0].tokens == seeded[2].tokens != seeded[1].tokens


def test_samples_depend_on_seed_prompt_and_number_alone(plain):
    cfg = GenerateConfig(max_new_tokens=40, slots=4, samples=2)
    found = responses(plain, cfg)[0]
    assert [(r.index, r.sample) for r in found] == [(p, s) for p in range(3) for s in range(2)]
    tokens = {(r.index, r.sample): r.tokens for r in found}
    alone = responses(plain, replace(cfg, samples=1, slots=3))[0]
    assert all(tokens[r.index, 0] == r.tokens for r in alone)
    other = responses(plain, replace(cfg, seed=1))[0]
    assert [r.tokens for r in other] != [r.tokens for r in found]


def test_the_context_limits_a_response(plain):
    room = plain.cfg.max_position_embeddings - len(plain.tokenizer.encode(TEXTS[0]))
    assert responses_of(plain, replace(GREEDY, max_new_tokens=10**6)).engine.shape.max_new_tokens == room
    with pytest.raises(UserError, match=f"prompts line 2: prompt_length={room + 9} must be <="):
        responses_of(plain, GREEDY, [TEXTS[0], "1" * (room + 8)])


def responses_of(model, cfg, texts=TEXTS[:1], form="text"):
    return Generator(model, cfg, read_prompts(texts, "prompts", form, FOLDER, model.tokenizer))


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"temperature": -1}, "temperature=-1.0 must be 0"),
        ({"max_tokens": -5}, "max_tokens=-5 must be >= 1"),
        ({"min_tokens": 41}, "min_tokens=41 must be <= max_new_tokens=40"),
        ({"min_tokens": 3, "max_tokens": 2}, "min_tokens=3 must be <= max_tokens=2"),
        ({"stop_token_ids": [99999]}, "must lie in 0.."),
    ],
)
def test_a_line_that_asks_for_what_cannot_be_is_refused_by_its_place(plain, asked, says):
    lines = [json.dumps({"prompt": "1"}), json.dumps({"prompt": "1"} | asked)]
    with pytest.raises(UserError, match=f"prompts line 2: .*{says}"):
        responses_of(plain, GREEDY, lines, "jsonl")


def test_the_command_writes_a_line_for_each_response(tmp_path, monkeypatch, capsys, greedy):
    """Of a file that takes two calls, the second of which has a row to spare."""
    monkeypatch.setattr("draftco_jax.generate.ROWS_OF_A_CALL", 2)
    monkeypatch.setattr("sys.stdin", standard_input("\n".join(TEXTS) + "\n"))
    out = tmp_path / "responses.jsonl"
    settings = ["sampling.temperature=0", "max_new_tokens=40"]
    options = [part for setting in settings for part in ("--set", setting)]
    assert main(["generate", POLICY, "--prompts", "-", "--out", str(out), "--slots", "2", *options]) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["given"]["prompt"] for line in lines] == TEXTS
    assert [line["tokens"] for line in lines] == [r.tokens for r in greedy]
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"3 responses to 3 prompts are in {out}: ")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere", "--prompts", "-"], "nowhere is not a folder"),
        ([POLICY, "--prompts", "nowhere.txt"], "--prompts nowhere.txt cannot be read"),
        ([POLICY, "--prompts", "-", "--out", "nowhere/x"], "there is no folder nowhere"),
        (
            [POLICY, "--prompts", "-", "--draft", "nowhere"],
            "draft nowhere is neither a folder nor 'ngram' nor 'self_int8'",
        ),
        ([POLICY, "--prompts", "-", "--draft", POLICY], "holds no draft that is known here"),
        ([POLICY, "--prompts", "-", "--draft", "shipped:arithmetic3/draft"], "is not for"),
        ([POLICY, "--prompts", "-", "--slots", "0"], "slots=0 must be >= 1"),
        ([POLICY, "--prompts", "-", "--set", "seed=99999999999999999999"], "must be in 0..4294967295"),
        ([POLICY, "--prompts", "-", "--set", "min_tokens=-1"], "min_tokens=-1 must be >= 0"),
        ([POLICY, "--prompts", "-", "--set", "min_tokens=257"], "min_tokens=257 must be <= max_new_tokens=256"),
        ([POLICY, "--prompts", "-", "--set", 'stop_strings=["\\ud800"]'], "half a surrogate pair"),
        ([POLICY, "--prompts", "-", "--set", 'stop_strings=["a'], "read as JSON"),
    ],
)
def test_bad_input_is_refused_in_a_line(arguments, says, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", standard_input("12+34=\n"))
    monkeypatch.setattr(Engine, "stream", lambda *_, **__: pytest.fail("nothing is generated"))
    assert main(["generate", *arguments]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1 and says in said[0], said


def test_stop_strings_of_the_command_are_a_json_list(monkeypatch, capsys):
    seen = []
    monkeypatch.setattr("draftco_jax.generate.command.generate_file", lambda cfg, *_, **__: seen.append(cfg) or "")
    assert main(["generate", POLICY, "--prompts", "-", "--set", r'stop_strings=["\n", ", ", " ;"]']) == 0
    assert seen[0].stop_strings == ("\n", ", ", " ;")


def test_a_line_is_given_what_it_can_have(plain):
    """The file's least number of tokens is capped at a line's most; slots at responses; seeds share no key."""
    lines = [{"prompt": "1", "max_tokens": 5}, {"prompt": "1"}, {"prompt": "1", "seed": 3, "stop": ["1", "2"]}]
    generator = responses_of(plain, replace(GREEDY, min_tokens=9, seed=3, slots=64), map(json.dumps, lines), "jsonl")
    assert [each.min_tokens for each in generator.options] == [5, 9, 9]
    assert generator._slots.slots == 3
    # Roots of prompts and keys of samples, as numbers: the line's seed is the file's.
    root, rows = jax.random.key(3), [(2, sample) for sample in range(4)]
    of_line = {tuple(key) for key in jax.random.key_data(generator._keys(rows)).tolist()}
    others = [root, *(jax.random.fold_in(root, number) for number in range(4))]
    assert len(of_line) == 4 and of_line.isdisjoint(tuple(jax.random.key_data(key).tolist()) for key in others)
    ready = [generator._prepared([(p, 0)]) for p in range(3)]
    assert {each.stop_table.complete.shape for each in ready} == {(1 + 4,)}  # of none; empty, any and two strings


def test_an_end_of_turn_ends_a_response_to_a_conversation_alone(plain):
    prompts = [
        PromptLine(place="p", ids=(2, 4), turn_ends=(31, plain.tokenizer.eos_id)),
        PromptLine(place="q", ids=(2, 4)),
    ]
    generator = Generator(plain, GREEDY, prompts)
    assert [set(each.stop_ids) for each in generator.options] == [{31, *plain.stop_ids}, set(plain.stop_ids)]
    assert generator._sizes.stop_ids == 2


def test_a_tokenizer_that_cannot_be_read_token_by_token_is_refused_at_once(tmp_path):
    for file in FOLDER.iterdir():
        shutil.copy(file, tmp_path)
    raw = json.loads((tmp_path / "tokenizer.json").read_text())
    raw["decoder"] = None
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    with pytest.raises(UserError, match=f"tokenizer of {tmp_path}: decoder=none must be ByteLevel"):
        load_model(tmp_path, None)


def test_a_draft_length_beyond_the_draft_is_refused(plain):
    model = load_model(FOLDER, str(resolve_checkpoint("shipped:arithmetic2/dflash")))
    most = model.draft_cfg.max_draft_length
    with pytest.raises(UserError, match=f"draft_length={most + 1} must be <= {most}"):
        responses_of(model, replace(GREEDY, draft_length=most + 1))
