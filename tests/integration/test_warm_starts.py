"""Checks that the shipped policies and drafts are what their cards say."""

from __future__ import annotations

import json

import pytest

from draftco_jax import warm_start
from draftco_jax.config import resolve_checkpoint
from draftco_jax.config_io import to_json
from draftco_jax.drafts.catalog import family_of
from draftco_jax.drafts.eagle3.checkpoint import load_draft
from draftco_jax.environments.arithmetic import ArithmeticConfig, ArithmeticTask
from draftco_jax.environments.base import split_of
from draftco_jax.evaluation import Evaluator
from draftco_jax.models.functional import abstract_params
from draftco_jax.models.hf_weights import load_policy
from draftco_jax.models.transformer import count_parameters
from draftco_jax.warm_start import DRAFTS, RECIPES, WarmStart, draft_recipe, measure, measure_draft

# The same numbers come out on the machine that made the card. Another processor may sum in another order, so that a
# draw within rounding of a boundary (about one in a million) takes another token, and one prompt another answer.
ANSWERS_THAT_MAY_CHANGE = 2
ACCEPTED_LENGTH_TOLERANCE = 0.02
MAX_FILE_BYTES = 2 * 2**20


@pytest.fixture(params=sorted(RECIPES))
def digits(request) -> int:
    return request.param


# What is measured anew every day is the policy of the demo and its drafts; cards and files of both are always read.
measured = pytest.mark.parametrize("digits", [pytest.param(2, marks=pytest.mark.slow), 3], indirect=True)


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
    # The fields of the recipe and the draft's config file are two accounts of one training.
    config = draft_recipe(digits, "eagle3")
    assert config.draft == draft_cfg and config.policy == cfg and config.seed == recipe.seed
    assert (config.steps, config.optimizer.learning_rate) == (recipe.draft_steps, recipe.draft_learning_rate)
    assert (config.rollout.sequences, config.batch_rows) == (recipe.draft_rollouts, recipe.batch_rows)


def test_the_card_says_how_each_draft_was_made(digits, card, folder):
    assert list(card["drafts"]) == [name for name in DRAFTS if name != "eagle3"]  # that one is the card's own
    for name, entry in card["drafts"].items():
        config = draft_recipe(digits, name)
        assert entry["recipe"] == json.loads(json.dumps(to_json(config))), name
        assert config.task == ArithmeticConfig(digits=digits)
        assert config.policy_checkpoint == f"shipped:arithmetic{digits}/policy"
        load = family_of(config.draft).load
        assert load is not None and load(folder / DRAFTS[name], config.draft)[0] == config.draft
        assert entry["parameters"] == count_parameters(abstract_params(config.draft.build))
        assert entry["accepted_length_draft_length_4"] > entry["accepted_length_draft_length_4_untrained"] + 2.0


@measured
@pytest.mark.parametrize("name", [name for name in DRAFTS if name != "eagle3"])
def test_the_accepted_length_of_a_draft_is_that_of_the_card(digits, name, card, folder):
    expected = card["drafts"][name]["accepted_length_draft_length_4"]
    assert measure_draft(digits, name, folder) == pytest.approx(expected, abs=ACCEPTED_LENGTH_TOLERANCE)


@measured
def test_the_pass_rates_and_the_accepted_length_are_those_of_the_card(digits, card, folder, monkeypatch):
    asked = []

    class Recorded(Evaluator):
        def __init__(self, task, prompts):
            super().__init__(task, prompts)
            asked.extend(task.problem(index) for index in range(prompts))

    monkeypatch.setattr(warm_start, "Evaluator", Recorded)
    recipe, task = RECIPES[digits], ArithmeticTask(ArithmeticConfig(digits=digits), seed=RECIPES[digits].seed)
    found = measure(recipe, folder)

    assert [*found, "drafts"] == list(card) and found["eval_prompts"] == card["eval_prompts"] == len(asked)
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
