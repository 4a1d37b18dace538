"""Math problems from files: what is asked, what ends an answer, what counts as right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers

from draftco_jax.config_io import apply_overrides, from_json, to_json
from draftco_jax.data.problem_files import FileRules
from draftco_jax.environments.base import Task, split_of
from draftco_jax.environments.catalog import build_task
from draftco_jax.environments.math import MathConfig, MathTask
from draftco_jax.errors import UserError
from draftco_jax.rewards.pool import PoolConfig

TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'][0] }}:{{ m['content'] }}<e>{% endfor %}"
    "{% if add_generation_prompt %}<s>{% if think %}<think>{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """A byte-level tokenizer with three control tokens: 0 and 1 mark turns, 2 ends texts."""
    folder = tmp_path_factory.mktemp("model")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    control = ["<s>", "<e>", "<end>"]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({t: i for i, t in enumerate([*control, *alphabet])}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(token, special=True) for token in control])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<e>", "chat_template": TEMPLATE}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 1]}))
    return str(folder)


def write(tmp_path: Path, rows: list[tuple[str, str]], name: str = "train.jsonl") -> str:
    path = tmp_path / name
    path.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in rows))
    return str(path)


def task_of(model_dir: str, train: str, split: str = "train", **changes) -> MathTask:
    settings = {"held_out": None, "reward": "dapo", "model_dir": model_dir, "train": train, **changes}
    task = build_task(MathConfig(**settings), 0, split)
    assert isinstance(task, MathTask) and isinstance(task, Task)
    return task


@pytest.fixture
def files(tmp_path):
    """Both files of a task."""
    train = write(tmp_path, [("2 + 3?", "5"), ("4 + " + "4" * 80, "7"), ("3 + 3?", "6"), ("2 + 3?", "5")])
    return {"train": train, "held_out": write(tmp_path, [("3  + 3?", "6"), ("1 + 1?", "2")], "test.jsonl")}


def test_a_question_is_asked_by_the_chat_template_and_the_config(model_dir, files):
    task = task_of(model_dir, **files, template="{question} Go.", system="Add.", max_prompt_tokens=40)
    prompt = task.problem(0)
    text = task.tokenizer.decode(prompt.token_ids, skip_special=False)
    assert text == "<s>s:Add.<e><s>u:2 + 3? Go.<e><s>"
    assert (prompt.text, prompt.answer, prompt.prompt_id) == ("2 + 3?", "5", 0)
    plain = task_of(model_dir, **files, prompt_format="plain", template="Q: {question}\nA:")
    assert plain.tokenizer.decode(plain.problem(0).token_ids, skip_special=False) == "Q: 2 + 3?\nA:"


def test_every_row_is_accounted_for_and_no_question_is_in_both_splits(model_dir, files):
    task, held_out = (task_of(model_dir, split=s, **files, max_prompt_tokens=40) for s in ("train", "held_out"))
    assert [task.problem(i).text for i in range(task.num_problems or 0)] == ["2 + 3?"]
    assert [held_out.problem(i).text for i in range(held_out.num_problems or 0)] == ["3  + 3?", "1 + 1?"]
    assert task.left_out == 1
    assert task.notes == (
        f"{files['train']}: 4 rows, 3 used, 1 duplicate (line 4 repeats line 1)",
        f"{files['train']}: 1 questions of {files['held_out']} left out",
        "train: 1 problems, 1 with prompts of more than 40 tokens left out",
    )
    with pytest.raises(UserError, match=r"index=1 must be in 0\.\.0"):
        task.problem(1)


def test_without_a_second_file_the_splits_are_parted_by_the_question(model_dir, tmp_path):
    questions = [f"{i} + 1?" for i in range(60)]
    train = write(tmp_path, [(question, "1") for question in questions])
    for split in ("train", "held_out"):
        task = task_of(model_dir, train, split)
        found = [task.problem(i).text for i in range(task.num_problems or 0)]
        assert found == [question for question in questions if split_of(question) == split] != []


def test_each_file_is_read_by_its_own_rules(model_dir, tmp_path):
    train = write(tmp_path, [("2 x 617?", "2 x 617 = 1234\n#### 1,234")])
    other = tmp_path / "other.jsonl"
    other.write_text('{"problem": "1 + 1?", "answer": 2}\n')
    rules = {"files": FileRules(layout="gsm8k"), "held_out_files": FileRules(question_field="problem")}
    found = [task_of(model_dir, train, s, held_out=str(other), **rules).problem(0) for s in ("train", "held_out")]
    assert [(prompt.text, prompt.answer) for prompt in found] == [("2 x 617?", "1234"), ("1 + 1?", "2")]


def test_all_stop_ids_of_the_policys_folder_end_a_response(model_dir, files):
    assert task_of(model_dir, **files).stop_ids == (2, 1)
    assert task_of(model_dir, **files, prompt_format="plain").stop_ids == (2, 1)


def test_scores_carry_their_parts_and_what_was_cut_is_wrong(model_dir, files):
    task = task_of(model_dir, **files)
    asked = task.problem(0)
    responses = ["Answer: 5", "Answer: 6", "5", "Answer: 5"]
    scores = task.score_responses([asked] * 4, responses, [True, True, True, False])
    assert [score.total for score in scores] == [1.0, 0.0, 0.0, 0.0]
    assert [dict(score.components) for score in scores] == [
        {"correct": 1.0, "format": 1.0},
        {"correct": 0.0, "format": 1.0},
        {"correct": 0.0, "format": 0.0},
        {"correct": 0.0},
    ]
    assert task.reward(asked, "Answer: 5", True) == 1.0
    assert task_of(model_dir, **files, score_truncated=True).reward(asked, "Answer: 5", False) == 1.0


def test_bug_case_b86_thinking_must_end_before_the_answer(model_dir, files):
    def reward(response: str, **changes) -> float:
        task = task_of(model_dir, **files, **changes)
        return task.reward(task.problem(0), response, True)

    opened = {"switches": (("think", True),)}
    assert reward("<think>Answer: 5") == reward("Answer: 5", **opened) == 0.0
    assert reward("<think>hm</think>Answer: 5") == reward("hm</think>Answer: 5", **opened) == 1.0
    assert reward("<think>Answer: 5</think>6") == 0.0
    assert reward("<think>Answer: 5", unfinished_thinking="read") == 1.0


def test_a_config_survives_its_file_and_is_set_from_the_command_line(model_dir, files):
    config = MathConfig(**files, model_dir=model_dir, reward="dapo", switches=(("think", False),))
    assert from_json(MathConfig, json.loads(json.dumps(to_json(config)))) == config
    changed = apply_overrides(config, ["reward=gsm8k", "files.layout=gsm8k", "scoring.workers=4"])
    assert (changed.reward, changed.files, changed.scoring) == (
        "gsm8k",
        FileRules(layout="gsm8k"),
        PoolConfig(workers=4),
    )
    with pytest.raises(UserError, match="reward=best must be one of math_verify, dapo"):
        apply_overrides(config, ["reward=best"])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"template": "Add."}, r"template='Add\.' must hold \{question\} once"),
        ({"max_prompt_tokens": 0}, "max_prompt_tokens=0 must be 1 or more"),
        ({"prompt_format": "plain", "system": "Add."}, "prompt_format=plain must go without system and switches"),
        (
            {"max_prompt_tokens": 5},
            "max_prompt_tokens=5 leaves none of the 2 train problems, whose shortest prompt has",
        ),
        ({"template": "<e>{question}"}, "train.jsonl row 1: messages.* must not hold the control token '<e>'"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_a_line(changes: dict, said: str, model_dir, files):
    with pytest.raises(ValueError, match=said) as caught:
        task_of(model_dir, **files, **changes)
    assert "\n" not in str(caught.value)


def test_a_training_file_that_is_the_held_out_file_is_refused(model_dir, files):
    with pytest.raises(UserError, match="holds no question that .* does not"):
        task_of(model_dir, files["train"], held_out=files["train"])


def test_questions_that_differ_in_white_space_are_in_one_split(model_dir, tmp_path):
    rows = [(f"{i} + 1?", str(i + 1)) for i in range(24)]
    path = write(tmp_path, [*rows, *((question.replace(" ", "  "), answer) for question, answer in rows)])
    texts = {}
    for split in ("train", "held_out"):
        task = task_of(model_dir, path, split, files=FileRules(duplicates="keep"))
        texts[split] = [" ".join(task.problem(i).text.split()) for i in range(task.num_problems or 0)]
    assert texts["train"] and texts["held_out"] and not set(texts["train"]) & set(texts["held_out"])
    assert all(found.count(text) == 2 for found in texts.values() for text in found)


def test_a_gold_answer_that_the_reward_cannot_match_is_refused_when_the_task_is_built(model_dir, tmp_path):
    files = {"train": write(tmp_path, [("2 + 3?", "5")]), "held_out": write(tmp_path, [("?", "3/4")], "test.jsonl")}
    task_of(model_dir, **files, split="held_out", reward="dapo")
    with pytest.raises(UserError, match="test.jsonl row 1: answer='3/4' must be a number as a whole for reward=gsm8k"):
        task_of(model_dir, **files, split="held_out", reward="gsm8k")


def test_a_task_tells_its_problems_from_others_of_that_number(model_dir, tmp_path):
    held_out = write(tmp_path, [("1 + 1?", "2")], "test.jsonl")
    files = [
        write(tmp_path, [("2 + 3?", answer)], f"{name}.jsonl") for name, answer in (("a", "5"), ("b", "6"), ("c", "5"))
    ]
    digests = [task_of(model_dir, file, held_out=held_out).problems_digest for file in files]
    assert digests[0] == digests[2] != digests[1]
