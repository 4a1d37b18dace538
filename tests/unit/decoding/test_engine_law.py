"""The compiled engine draws texts from the policy's own law: chi-square tests against the exact law of every text.

Each test refuses a right engine with probability ALARM (over the keys, which are fixed here, so it never flickers) and
broken engines, made by exchanging one function before the program is traced, are refused at BROKEN.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chi2

from draftco_jax.decoding import engine as engine_module
from draftco_jax.decoding import rejection
from draftco_jax.decoding.engine import Engine, EngineShape, Request, no_context, request_keys
from draftco_jax.drafts.eagle3 import module
from draftco_jax.numerics.sampling import SamplingConfig

ALARM = 1e-6
BROKEN = 1e-9
REQUESTS = 8192  # half of them for each prompt
PROMPTS = ((1,), (2, 1, 0))
STOP = 3
NEW_TOKENS = 4
SHAPE = EngineShape(prompt_capacity=3, max_new_tokens=NEW_TOKENS, stop_ids=(STOP,), pad_id=0)
UNTOUCHED = SamplingConfig()
FILTERED = SamplingConfig(temperature=2.0, top_k=3, top_p=0.85)
Text = tuple[int, ...]


@pytest.fixture(scope="module")
def request_batch() -> Request:
    rows = [prompt + (0,) * (3 - len(prompt)) for prompt in PROMPTS] * (REQUESTS // 2)
    lengths = [len(prompt) for prompt in PROMPTS] * (REQUESTS // 2)
    keys = request_keys(jax.random.key(2024), REQUESTS)
    return Request(jnp.asarray(rows, jnp.int32), jnp.asarray(lengths, jnp.int32), keys, no_context(REQUESTS))


def exact_laws(logits: np.ndarray, sampling: SamplingConfig) -> np.ndarray:
    """Tempered and filtered laws of the rows of logits, float64, token by token."""
    laws = np.zeros(logits.shape)
    for place in np.ndindex(logits.shape[:-1]):
        scaled = logits[place].astype(np.float64) / sampling.temperature
        order = np.argsort(-scaled, kind="stable")[: sampling.top_k or None]
        weights = np.exp(scaled[order] - scaled.max())
        weights /= weights.sum()
        inside = np.cumsum(weights) - weights < sampling.top_p
        laws[(*place, order[inside])] = weights[inside] / weights[inside].sum()
    return laws


def text_law(toy, policy: str, prompt: Text, sampling: SamplingConfig) -> dict[Text, float]:
    """Probability of every response: a text that ends with the stop token, or NEW_TOKENS tokens without one."""
    continuations = np.array(list(itertools.product(range(toy.vocab), repeat=NEW_TOKENS)))
    rows = np.concatenate([np.tile(prompt, (len(continuations), 1)), continuations], axis=1)
    padded = np.zeros((len(rows), 3 + NEW_TOKENS), np.int32)
    padded[:, : rows.shape[1]] = rows
    logits = toy.logits(policy, padded)[:, len(prompt) - 1 : len(prompt) - 1 + NEW_TOKENS]
    laws = exact_laws(logits, sampling)
    law: dict[Text, float] = {}
    for tokens, conditionals in zip(continuations, laws, strict=True):
        stops = np.flatnonzero(tokens == STOP)
        length = stops[0] + 1 if len(stops) else NEW_TOKENS
        law[tuple(map(int, tokens[:length]))] = float(np.prod(conditionals[np.arange(length), tokens[:length]]))
    assert abs(sum(law.values()) - 1) < 1e-12
    return law


def chi_square(counts: Counter, law: dict[Text, float]) -> tuple[float, int]:
    """Statistic and degrees of freedom; texts expected fewer than five times are one class."""
    assert all(law[text] > 0 for text in counts), "a text of probability 0 was emitted"
    total = sum(counts.values())
    cells = [(counts[text], total * p) for text, p in law.items() if total * p >= 5]
    rest = total - sum(count for count, _ in cells), total - sum(expected for _, expected in cells)
    if rest[1] >= 5:
        cells.append(rest)
    return sum((count - expected) ** 2 / expected for count, expected in cells), len(cells) - 1


@pytest.fixture(scope="module")
def p_value(responses):
    """Probability that a right engine is as far from the exact law as these rollouts."""

    def evaluate(toy, policy, rollouts, sampling) -> float:
        statistic, freedom = 0.0, 0
        texts = [tuple(text) for text in responses(rollouts)]
        for start, prompt in enumerate(PROMPTS):
            parts = chi_square(Counter(texts[start::2]), text_law(toy, policy, prompt, sampling))
            statistic, freedom = statistic + parts[0], freedom + parts[1]
        return float(chi2.sf(statistic, freedom))

    return evaluate


@pytest.mark.parametrize("sampling", [UNTOUCHED, FILTERED], ids=["temperature1", "filtered"])
@pytest.mark.parametrize(
    "policy, draft, k", [("deep", "good", 0)] + [("deep", d, 3) for d in ("good", "random", "wrong")]
)
def test_texts_follow_the_law_of_the_policy(small_toy, request_batch, p_value, policy, draft, k, sampling):
    rollouts = small_toy.generate(policy, draft, request_batch, k, SHAPE, sampling)
    p = p_value(small_toy, policy, rollouts, sampling)
    print(f"p-value {p:.2g}")
    assert p > ALARM


def test_the_filters_of_these_tests_cut_texts_and_leave_a_choice(small_toy):
    for prompt in PROMPTS:
        whole, cut = (text_law(small_toy, "deep", prompt, sampling) for sampling in (UNTOUCHED, FILTERED))
        possible = [sum(p > 0 for p in law.values()) for law in (whole, cut)]
        assert 10 < possible[1] < possible[0] == 121


def test_texts_follow_the_law_of_the_policy_with_a_reduced_draft_vocabulary(
    small_toy_with_reduced_draft, request_batch, p_value
):
    toy = small_toy_with_reduced_draft
    rollouts = toy.generate("deep", "good", request_batch, 2, SHAPE, UNTOUCHED)
    assert 0.3 < rollouts.accepted[:, 0].sum() / rollouts.rounds.sum() < 0.95
    p = p_value(toy, "deep", rollouts, UNTOUCHED)
    print(f"p-value {p:.2g}")
    assert p > ALARM


def argmax_draw(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    del uniform
    return jnp.argmax(weights, axis=-1).astype(jnp.int32)


@pytest.fixture(params=["argmax draft with softmax q", "residual replaced by p", "one uniform proposes and judges"])
def broken_engine(request, small_toy, monkeypatch) -> Iterator[Engine]:
    """An engine whose speculative program holds one wrong rule."""
    if request.param == "argmax draft with softmax q":
        monkeypatch.setattr(module, "draw", argmax_draw)
    elif request.param == "residual replaced by p":
        monkeypatch.setattr(rejection, "residual", lambda p, q: p)
    else:
        monkeypatch.setattr(engine_module, "ACCEPT", engine_module.PROPOSE)
    yield Engine(*small_toy.graphs, shape=SHAPE, sampling=UNTOUCHED)


def test_a_broken_rule_is_caught(small_toy, request_batch, p_value, broken_engine):
    weights = small_toy.published("deep", "random")
    rollouts = jax.tree.map(np.asarray, broken_engine.generate(*weights, request_batch, 3))
    p = p_value(small_toy, "deep", rollouts, UNTOUCHED)
    print(f"p-value {p:.2g}")
    assert p < BROKEN


@pytest.mark.parametrize("k", [0, 3])
def test_bug_case_b29_no_path_turns_greedy(small_toy, request_batch, k):
    # The uniform law over four tokens: 400 requests without all four as first token have probability below 1e-49.
    rollouts = small_toy.generate("flat", "random", request_batch, k, SHAPE, UNTOUCHED)
    first = rollouts.tokens[np.arange(REQUESTS), rollouts.prompt_lengths][:400]
    second = rollouts.tokens[np.arange(REQUESTS), rollouts.prompt_lengths + 1][first_is_not_stop(rollouts)][:400]
    assert set(first) == set(second) == {0, 1, 2, 3}


def first_is_not_stop(rollouts) -> np.ndarray:
    return rollouts.lengths - rollouts.prompt_lengths > 1
