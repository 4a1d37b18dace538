"""Checks that the shipped policies and drafts are what their cards say."""

from __future__ import annotations

import json

import pytest

from draftco_jax import warm_start
from draftco_jax.config import resolve_checkpoint
from draftco_jax.drafts.eagle3.checkpoint import load_draft
from draftco_jax.environments.arithmetic import ArithmeticConfig, ArithmeticTask
from draftco_jax.environments.base import split_of
from draftco_jax.evaluation import Evaluator
from draftco_jax.models.hf_weights import load_policy
from draftco_jax.warm_start import RECIPES, WarmStart, measure

# The same numbers come out on the machine that made the card. Another processor may sum in another order, so that a
# draw within rounding of a boundary (about one in a million) takes another token, and one prompt another answer.
ANSWERS_THAT_MAY_CHANGE = 2
ACCEPTED_LENGTH_TOLERANCE = 0.02
MAX_FILE_BYTES = 2 * 2**20


@pytest.fixture(params=sorted(RECIPES))
def digits(request) -> int:
    return request.param


@pytest.fixture
def folder(digits):
    return resolve_checkpoint(f"shipped:arithmetic{digits}")


@pytest.fixture
def card(folder):
    return json.loads((folder / "card.json").read_text())


def test_files_are_small(folder):
    sizes = {path.name: path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= sizes.keys()
    assert max(sizes.values()) <= MAX_FILE_BYTES, sizes


def test_the_card_names_the_recipe_that_makes_it(digits, card, folder):
    recipe = WarmStart(**card["recipe"])
    assert recipe == RECIPES[digits] and recipe.digits == digits
    cfg, _ = load_policy(folder / "policy")
    assert (cfg.hidden_size, cfg.intermediate_size) == (recipe.hidden_size, recipe.intermediate_size)
    draft_cfg, _, _ = load_draft(folder / "draft")
    assert draft_cfg == warm_start.draft_config(recipe, cfg)


def test_the_pass_rates_and_the_accepted_length_are_those_of_the_card(digits, card, folder, monkeypatch):
    asked = []

    class Recorded(Evaluator):
        def __init__(self, task, prompts):
            super().__init__(task, prompts)
            asked.extend(task.problem(index) for index in range(prompts))

    monkeypatch.setattr(warm_start, "Evaluator", Recorded)
    recipe, task = RECIPES[digits], ArithmeticTask(ArithmeticConfig(digits=digits), seed=RECIPES[digits].seed)
    policy_cfg, policy = load_policy(folder / "policy")
    _, draft_graph, draft = load_draft(folder / "draft")
    found = measure(recipe, task, policy_cfg, policy, draft_graph, draft)

    assert found.keys() == card.keys() and found["eval_prompts"] == card["eval_prompts"] == len(asked)
    for name in [name for name in card if name.startswith("pass_rate")]:
        assert abs(found[name] - card[name]) * card["eval_prompts"] <= ANSWERS_THAT_MAY_CHANGE, (name, found, card)
    name = "accepted_length_draft_length_4"
    assert found[name] == pytest.approx(card[name], abs=ACCEPTED_LENGTH_TOLERANCE)
    assert card["pass_rate_greedy"] == 1.0

    def pair(prompt) -> tuple[str, ...]:
        return tuple(sorted(prompt.text.removesuffix("=").split("+"), key=int))

    assert all(split_of("+".join(pair(prompt))) == "held_out" for prompt in asked)
    trained_on = {pair(task.problem(index)) for index in range(2000)}
    assert len(trained_on) > 1000 and not trained_on & {pair(prompt) for prompt in asked}
