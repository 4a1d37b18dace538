"""Word problems: what is read of a file, what is asked, and what counts as right."""

from __future__ import annotations

import json
from decimal import Decimal

import pytest
import tokenizers

from draftco_jax.environments.base import Task, split_of
from draftco_jax.environments.catalog import build_task
from draftco_jax.environments.word_problems import WordProblemsConfig, last_number
from draftco_jax.errors import UserError

TEMPLATE = "{% for m in messages %}<s>{{ m['content'] }}<e>{% endfor %}{% if add_generation_prompt %}<s>{% endif %}"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """A byte-level tokenizer whose control tokens are 0 and 1, with a chat template."""
    folder = tmp_path_factory.mktemp("model")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE({token: i for i, token in enumerate(["<s>", "<e>", *alphabet])}, [])
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(token, special=True) for token in ("<s>", "<e>")])
    backend.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<e>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(folder)


def write(tmp_path, rows, name="train.jsonl"):
    path = tmp_path / name
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return str(path)


def row(question, answer="So it is.\n#### 1,234"):
    return {"question": question, "answer": answer}


def task_of(model_dir, train, split="train", **changes):
    return build_task(WordProblemsConfig(train=train, model_dir=model_dir, **changes), 0, split)


def test_a_question_is_asked_in_the_chat_format_and_longer_ones_are_left_out(model_dir, tmp_path):
    train = write(tmp_path, [row("How many?"), row("x" * 40), row("Which?")])
    task = task_of(model_dir, train, held_out=train, max_prompt_tokens=14, instruction="!")
    assert isinstance(task, Task)
    assert (task.num_problems, task.left_out, task.max_prompt_tokens) == (2, 1, 14)
    prompt = task.problem(0)
    assert task.tokenizer.decode(prompt.token_ids, skip_special=False) == "<s>How many?!<e><s>"
    assert (prompt.text, prompt.answer, task.problem(1).text) == ("How many?", "1234", "Which?")
    with pytest.raises(UserError, match="index=2 must be in 0..1"):
        task.problem(2)


def test_without_a_second_file_the_splits_are_parted_by_the_question_alone(model_dir, tmp_path):
    questions = [f"Question {i}?" for i in range(60)]
    train = write(tmp_path, [row(q) for q in questions])
    found = {
        split: [t.problem(i).text for i in range(t.num_problems)]
        for split in ("train", "held_out")
        for t in [task_of(model_dir, train, split)]
    }
    assert found == {s: [q for q in questions if split_of(q) == s] for s in ("train", "held_out")}
    assert found["held_out"], "one in eight of sixty"
    other = write(tmp_path, [row("Another?")], "test.jsonl")
    assert task_of(model_dir, train, "held_out", held_out=other).problem(0).text == "Another?"
    assert task_of(model_dir, train, "train", held_out=other).num_problems == 60


@pytest.mark.parametrize(
    ("text", "number"),
    [("It is 7, so 1,234.50.", "1234.5"), ("-3", "-3"), ("none", None), ("12 - 5 = 7", "7"), ("x=0.50", "0.5")],
)
def test_the_last_number_of_a_text(text, number):
    assert last_number(text) == (None if number is None else Decimal(number))


def test_right_is_the_last_number_of_a_response_that_ended_by_itself(model_dir, tmp_path):
    train = write(tmp_path, [row("How many?")])
    task = task_of(model_dir, train, held_out=train)
    asked = task.problem(0)
    assert task.reward(asked, "2 x 617 = 1234", True) == 1.0
    assert task.reward(asked, "The answer is 1,234.00 dollars.", True) == 1.0
    assert task.reward(asked, "1234 or 1235", True) == task.reward(asked, "many", True) == 0.0
    assert task.reward(asked, "1234", False) == 0.0, "it was cut, and may have gone on"


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([row("a?"), "{"], "line 2 is not JSON"),
        ([row("a?"), {"question": "b?"}], "line 2 must be an object with the texts question and answer"),
        ([row("a?", "#### many")], "line 1: answer must end in a number"),
        ([""], "holds no problem of the split train"),
        ([row("y" * 99)], "max_prompt_tokens=20 leaves none of the 1 train problems, whose shortest prompt has 102"),
    ],
)
def test_files_that_cannot_be_asked_are_refused_in_a_line(rows, said, model_dir, tmp_path):
    train = write(tmp_path, rows)
    with pytest.raises(UserError, match=said) as caught:
        task_of(model_dir, train, held_out=train, max_prompt_tokens=20)
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="cannot be read"):
        task_of(model_dir, str(tmp_path / "absent"), held_out=train)
