"""Checks evaluation with an engine that answers from a script."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from draftco_jax.decoding.engine import Engine, EngineShape, Request
from draftco_jax.environments.arithmetic import ArithmeticConfig, ArithmeticTask
from draftco_jax.errors import UserError
from draftco_jax.evaluation import Evaluator, build_request, rates_at_k
from draftco_jax.metrics.intervals import wilson_interval
from draftco_jax.rewards.scores import verdict
from draftco_jax.types import Prompt, Rollouts

TASK = ArithmeticTask(ArithmeticConfig(digits=2), seed=0, split="held_out")
TOKENIZER = TASK.tokenizer
SHAPE = EngineShape(
    prompt_capacity=TASK.max_prompt_tokens,
    max_new_tokens=TASK.max_response_tokens,
    stop_ids=(TOKENIZER.eos_id,),
    pad_id=TOKENIZER.pad_id,
)


class Scripted(Engine):
    """Answers request b with `respond(b)`: a text, and whether it ends by itself."""

    def __init__(self, respond, rounds=0):
        self.shape, self.respond, self.rounds = SHAPE, respond, rounds
        self.requests: list[Request] = []

    def generate(self, policy_weights, draft_weights, request, draft_length=0):
        self.requests.append(request)
        prompts, starts = np.asarray(request.prompts), np.asarray(request.prompt_lengths)
        batch = len(starts)
        tokens = np.full((batch, SHAPE.prompt_capacity + SHAPE.max_new_tokens), TOKENIZER.pad_id, np.int32)
        lengths, finished = starts.copy(), np.zeros(batch, bool)
        for b in range(batch):
            text, finished[b] = self.respond(b)
            ids = TOKENIZER.encode_response(text)[: None if finished[b] else -1]
            tokens[b, : starts[b]] = prompts[b, : starts[b]]
            tokens[b, starts[b] : starts[b] + len(ids)] = ids
            lengths[b] += len(ids)
        counts = np.full(batch, self.rounds, np.int32)
        accepted = np.tile(np.array([self.rounds, 1], np.int32)[:draft_length], (batch, 1))
        logprobs = np.zeros(tokens.shape, np.float32)
        return Rollouts(
            tokens, starts, lengths, logprobs, finished, counts, 2 * counts, accepted, draft_length * counts
        )


def evaluate(evaluator: Evaluator, engine: Engine, seed: int = 0, draft_length: int = 0):
    return evaluator.run(engine, {}, None, jax.random.key(seed), draft_length=draft_length)


def test_the_pass_rate_is_the_share_of_right_and_finished_answers():
    answers = [TASK.problem(index).answer for index in range(4)]
    wrong = str(int(answers[1]) + 1)
    responses = [(f">{answers[0]}", True), (f">{wrong}", True), (f">{answers[2]}", False), (f">{answers[3]}", True)]
    result = evaluate(Evaluator(TASK, 4), Scripted(lambda b: responses[b]))
    assert result.pass_rate == 0.5 and result.prompts == 4


def test_accepted_length_is_pooled_and_absent_without_speculation():
    evaluator = Evaluator(TASK, 4)
    assert evaluate(evaluator, Scripted(lambda _: (">1", True), rounds=3), draft_length=2).accepted_length == 2.0
    plain = evaluate(evaluator, Scripted(lambda _: (">1", True)))
    assert plain.accepted_length is None and plain.speculation.rounds == 0


def test_every_evaluation_asks_the_same_of_other_problems_than_training():
    engine, evaluator = Scripted(lambda _: (">1", True)), Evaluator(TASK, 32)
    evaluate(evaluator, engine)
    evaluate(evaluator, engine)
    first, second = engine.requests
    assert np.array_equal(first.prompts, second.prompts)
    assert np.array_equal(jax.random.key_data(first.keys), jax.random.key_data(second.keys))
    asked = {TASK.problem(index).text for index in range(32)}
    training = ArithmeticTask(TASK.config, seed=0)
    assert not asked & {training.problem(index).text for index in range(500)}


def test_a_request_repeats_each_prompt_for_its_samples_with_a_key_each():
    prompts = tuple(Prompt(prompt_id=i, text="", answer="", token_ids=(2, *range(3, 4 + i))) for i in range(3))
    request = build_request(prompts, 2, SHAPE, jax.random.key(1))
    assert np.array_equal(request.prompt_lengths, [2, 2, 3, 3, 4, 4])
    assert np.array_equal(request.prompts[4], [2, 3, 4, 5] + [TOKENIZER.pad_id] * (SHAPE.prompt_capacity - 4))
    assert np.array_equal(request.prompts[::2], request.prompts[1::2])
    keys = {tuple(key) for key in np.asarray(jax.random.key_data(request.keys)).tolist()}
    assert len(keys) == 6
    # A request keeps its key whatever comes after it.
    fewer = build_request(prompts[:1], 2, SHAPE, jax.random.key(1))
    assert np.array_equal(jax.random.key_data(fewer.keys), jax.random.key_data(request.keys)[:2])


@pytest.mark.parametrize("tokens", [0, SHAPE.prompt_capacity + 1])
def test_a_prompt_that_does_not_fit_is_refused(tokens):
    prompt = Prompt(prompt_id=7, text="", answer="", token_ids=(3,) * tokens)
    with pytest.raises(UserError, match=f"prompt 7 has {tokens} tokens, the cache holds prompts of 1 to"):
        build_request((prompt,), 1, SHAPE, jax.random.key(0))


def test_several_samples_of_a_prompt_give_the_rate_of_all_and_pass_at_k():
    answers = [TASK.problem(index).answer for index in range(2)]
    # Prompt 0: one of four is right; prompt 1: all are.
    said = [">1", ">1", f">{answers[0]}", ">1", *[f">{answers[1]}"] * 4]
    engine = Scripted(lambda b: (said[b], True))
    result = evaluate(Evaluator(TASK, 2, 4), engine)
    assert len(np.asarray(engine.requests[0].prompts)) == 8
    assert (result.pass_rate, result.prompts) == (5 / 8, 2)
    low, high = wilson_interval(0.75, 2)
    assert result.at_k["pass_at_2"] == 0.75, "1 - C(3, 2) / C(4, 2) = 1/2, and 1"
    assert (result.at_k["pass_at_2_low"], result.at_k["pass_at_2_high"]) == (low, high)
    assert result.at_k["pass_at_4"] == 1.0
    assert set(result.at_k) == {f"pass_at_{k}{end}" for k in (2, 4) for end in ("", "_low", "_high")}
    assert evaluate(Evaluator(TASK, 2), engine).at_k == {}


def test_votes_are_counted_where_answers_were_read():
    def scores(said, gold):
        return [verdict(one == gold, found=one is not None, answer=one) for one in said]

    # "5" wins three of five votes; "7" ties with "6" in the draw of all three that speak.
    rates = rates_at_k([*scores(["5", "5", "5", "6", "6"], "5"), *scores(["7", "6", None, None, None], "7")], 5)
    assert rates["majority_at_5"] == (1.0 + 0.5) / 2
    assert {name for name in rates if name.startswith("majority")} == {
        f"majority_at_{k}{end}" for k in (2, 4, 5) for end in ("", "_low", "_high")
    }
    silent = [verdict(True, found=True, answer=None), verdict(False, found=True, answer="6")]
    assert "majority_at_2" not in rates_at_k(silent, 2), "a right answer that cannot vote would lose to every other"
