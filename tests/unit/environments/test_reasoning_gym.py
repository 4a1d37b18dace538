from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from draftco_jax.environments import reasoning_gym
from draftco_jax.environments.catalog import build_task
from draftco_jax.environments.reasoning_gym import ReasoningGymConfig, ReasoningGymTask, strict_answer
from draftco_jax.errors import UserError
from draftco_jax.text.tokenizer import Tokenizer, arithmetic_tokenizer

needs_the_package = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None,
    reason="the optional package is missing: pip install reasoning-gym",
)


class FakeDataset:
    """Scores as the package does: full for equality, part for any text that contains the answer."""

    def __init__(self, size: int, seed: int) -> None:
        self.size, self.seed = size, seed

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        number = random.Random(self.seed + index).randrange(10**6)
        return {"question": f"What is {number} + 1?", "answer": str(number + 1), "metadata": {}}

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
        if answer == "int('x')":
            raise ValueError("invalid literal for int()")
        if answer == entry["answer"]:
            return 1.0
        return len(entry["answer"]) / len(answer) if answer and entry["answer"] in answer else 0.0


class FakeLibrary:
    def create_dataset(self, name: str, **options: Any) -> FakeDataset:
        if name != "plus_one":
            raise ValueError(f"Dataset '{name}' not registered")
        return FakeDataset(**options)


@pytest.fixture
def text_tokenizer_dir(tmp_path: Path) -> Path:
    """A byte-level tokenizer: every text has ids."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: token_id for token_id, token in enumerate(["<|pad|>", "<|end|>", *alphabet])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.save(str(tmp_path / "tokenizer.json"))
    settings = {"pad_token": "<|pad|>", "eos_token": "<|end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


def _config(folder: Path, **changes: Any) -> ReasoningGymConfig:
    return ReasoningGymConfig(**{"dataset": "plus_one", "tokenizer_dir": str(folder), "size": 200, **changes})


def _fake_task(folder: Path, split: str = "train", seed: int = 0, **changes: Any) -> ReasoningGymTask:
    tokenizer = Tokenizer.load(folder)
    return ReasoningGymTask(_config(folder, **changes), seed, tokenizer, split, FakeLibrary())  # pyright: ignore[reportArgumentType]


def test_only_the_full_score_is_rewarded(text_tokenizer_dir: Path):
    task = _fake_task(text_tokenizer_dir)
    prompt = task.problem(3)

    def reward(response: str, finished: bool = True) -> float:
        return task.reward(prompt, response, finished)

    assert reward(f"easy: <answer>{prompt.answer}</answer>") == 1.0
    assert reward(f"<answer> {prompt.answer} </answer>\n") == 1.0
    assert reward(f"<answer>{prompt.answer}</answer>", finished=False) == 0.0
    # Everything below earns part of a score from the package, or would if the whole text were handed to it.
    assert reward(f"<answer>it is {prompt.answer}</answer>") == 0.0
    assert reward(f"<answer>{prompt.answer} or {prompt.answer}</answer>") == 0.0
    assert reward(prompt.answer) == 0.0
    assert reward(f"{prompt.answer} <answer></answer>") == 0.0
    assert reward(f"<answer>1</answer><answer>{prompt.answer}</answer>") == 0.0
    assert reward(f"<answer>{prompt.answer}</answer> or else 7") == 0.0
    assert reward("") == 0.0


def test_an_answer_the_scorer_cannot_parse_is_wrong(text_tokenizer_dir: Path):
    task = _fake_task(text_tokenizer_dir)
    assert task.reward(task.problem(0), "<answer>int('x')</answer>", finished=True) == 0.0


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("<answer>4</answer>", "4"),
        ("so\n<answer>\n4\n5\n</answer> \n", "4\n5"),
        ("<answer></answer>", ""),
        ("4", None),
        ("<answer>4", None),
        ("4</answer>", None),
        ("<answer>4</answer>.", None),
        ("<answer><answer>4</answer>", None),
        ("<answer>4</answer></answer>", None),
    ],
)
def test_strict_answer(response: str, answer: str | None):
    assert strict_answer(response) == answer


def test_problems_are_stable_and_fit(text_tokenizer_dir: Path):
    task, again = _fake_task(text_tokenizer_dir), _fake_task(text_tokenizer_dir)
    assert task.num_problems == again.num_problems
    for index in range(task.num_problems or 0):
        prompt = task.problem(index)
        assert prompt == again.problem(index)
        assert prompt.prompt_id == index
        assert len(prompt.token_ids) <= task.max_prompt_tokens
        assert task.tokenizer.decode(prompt.token_ids) == prompt.text
    with pytest.raises(UserError, match="must be in 0.."):
        task.problem(task.num_problems or 0)


def test_splits_share_no_question_whatever_the_seed(text_tokenizer_dir: Path):
    def questions(split: str, seed: int) -> set[str]:
        task = _fake_task(text_tokenizer_dir, split, seed)
        return {task.problem(index).text for index in range(task.num_problems or 0)}

    # Seeds 0 and 1 of the package overlap in all but one item, so a split by index would fail here.
    assert len(questions("train", 0) & questions("train", 1)) > 100
    assert not questions("train", 0) & questions("held_out", 1)
    assert len(questions("train", 0) | questions("held_out", 0)) == 200


def test_the_character_tokenizer_is_refused(text_tokenizer_dir: Path):
    with pytest.raises(UserError, match="must be made of characters in the vocabulary"):
        ReasoningGymTask(_config(text_tokenizer_dir), 0, arithmetic_tokenizer(), "train", FakeLibrary())


def test_bad_input_is_refused_at_the_start(text_tokenizer_dir: Path):
    with pytest.raises(UserError, match="max_prompt_tokens=10 must hold every prompt of plus_one"):
        _fake_task(text_tokenizer_dir, max_prompt_tokens=10)
    with pytest.raises(UserError, match="dataset='minus_one' .* must be accepted by reasoning-gym"):
        _fake_task(text_tokenizer_dir, dataset="minus_one")
    with pytest.raises(UserError, match="must be accepted by reasoning-gym"):
        _fake_task(text_tokenizer_dir, options=(("colour", "red"),))
    with pytest.raises(UserError, match="size=1 must leave problems for the split"):
        for split in ("train", "held_out"):
            _fake_task(text_tokenizer_dir, split, size=1)
    with pytest.raises(ValueError, match="size=0 must be 1 or more"):
        _config(text_tokenizer_dir, size=0)
    with pytest.raises(ValueError, match="dataset='' must be the name"):
        _config(text_tokenizer_dir, dataset="")
    with pytest.raises(ValueError, match=r"options=\['seed'\] must not set size or seed"):
        _config(text_tokenizer_dir, options=(("seed", 3),))


def test_a_missing_package_is_named(text_tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(reasoning_gym.importlib, "import_module", fail)
    with pytest.raises(UserError, match="pip install reasoning-gym"):
        build_task(_config(text_tokenizer_dir), seed=0)


@needs_the_package
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("dataset", ["chain_sum", "gcd", "prime_factorization", "countdown"])
def test_with_the_package_its_own_answers_are_right(text_tokenizer_dir: Path, dataset: str):
    task = build_task(_config(text_tokenizer_dir, dataset=dataset, size=30, max_prompt_tokens=2000), seed=1)
    assert task.num_problems
    for index in range(task.num_problems):
        prompt = task.problem(index)
        assert task.reward(prompt, f"<answer>{prompt.answer}</answer>", finished=True) == 1.0
        assert task.reward(prompt, f"<answer>I say {prompt.answer} yes</answer>", finished=True) == 0.0
        assert task.reward(prompt, prompt.answer, finished=True) == 0.0


@needs_the_package
@pytest.mark.filterwarnings("default")
def test_with_the_package_bad_names_and_options_are_refused(text_tokenizer_dir: Path):
    for changes in ({"dataset": "no_such"}, {"dataset": "chain_sum", "options": (("min_terms", -1),)}):
        with pytest.raises(UserError, match="must be accepted by reasoning-gym"):
            build_task(_config(text_tokenizer_dir, **changes), seed=0)
