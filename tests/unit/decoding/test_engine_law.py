"""The compiled engine draws texts from the policy's own law: chi-square tests against the exact law of every text.

Each test refuses a right engine with probability ALARM (over the keys, which are fixed here, so it never flickers) and
broken engines, made by exchanging one function before the program is traced, are refused at BROKEN.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.decoding import engine as engine_module
from draftco_jax.decoding import rejection
from draftco_jax.decoding.engine import Engine
from draftco_jax.drafts.eagle3 import module
from draftco_jax.numerics.sampling import SamplingConfig

ALARM = 1e-6
BROKEN = 1e-9
UNTOUCHED = SamplingConfig()
FILTERED = SamplingConfig(temperature=2.0, top_k=3, top_p=0.85)


@pytest.mark.parametrize("sampling", [UNTOUCHED, FILTERED], ids=["temperature1", "filtered"])
@pytest.mark.parametrize(
    "policy, draft, k", [("deep", "good", 0)] + [("deep", d, 3) for d in ("good", "random", "wrong")]
)
def test_texts_follow_the_law_of_the_policy(small_toy, law_batch, law_shape, p_value, policy, draft, k, sampling):
    rollouts = small_toy.generate(policy, draft, law_batch, k, law_shape, sampling)
    p = p_value(small_toy, policy, rollouts, sampling)
    print(f"p-value {p:.2g}")
    assert p > ALARM


def test_the_filters_of_these_tests_cut_texts_and_leave_a_choice(small_toy, text_laws):
    for whole, cut in zip(*(text_laws(small_toy, "deep", sampling) for sampling in (UNTOUCHED, FILTERED)), strict=True):
        possible = [sum(p > 0 for p in law.values()) for law in (whole, cut)]
        assert 10 < possible[1] < possible[0] == 121


def test_texts_follow_the_law_of_the_policy_with_a_reduced_draft_vocabulary(
    small_toy_with_reduced_draft, law_batch, law_shape, p_value
):
    toy = small_toy_with_reduced_draft
    rollouts = toy.generate("deep", "good", law_batch, 2, law_shape, UNTOUCHED)
    assert 0.3 < rollouts.accepted[:, 0].sum() / rollouts.rounds.sum() < 0.95
    p = p_value(toy, "deep", rollouts, UNTOUCHED)
    print(f"p-value {p:.2g}")
    assert p > ALARM


def argmax_draw(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    del uniform
    return jnp.argmax(weights, axis=-1).astype(jnp.int32)


@pytest.fixture(params=["argmax draft with softmax q", "residual replaced by p", "one uniform proposes and judges"])
def broken_engine(request, small_toy, law_shape, monkeypatch) -> Iterator[Engine]:
    """An engine whose speculative program holds one wrong rule."""
    if request.param == "argmax draft with softmax q":
        monkeypatch.setattr(module, "draw", argmax_draw)
    elif request.param == "residual replaced by p":
        monkeypatch.setattr(rejection, "residual", lambda p, q: p)
    else:
        monkeypatch.setattr(engine_module, "ACCEPT", engine_module.PROPOSE)
    yield Engine(*small_toy.graphs, shape=law_shape, sampling=UNTOUCHED)


def test_a_broken_rule_is_caught(small_toy, law_batch, p_value, broken_engine):
    weights = small_toy.published("deep", "random")
    rollouts = jax.tree.map(np.asarray, broken_engine.generate(*weights, law_batch, 3))
    p = p_value(small_toy, "deep", rollouts, UNTOUCHED)
    print(f"p-value {p:.2g}")
    assert p < BROKEN


@pytest.mark.parametrize("k", [0, 3])
def test_bug_case_b29_no_path_turns_greedy(small_toy, law_batch, law_shape, k):
    # The uniform law over four tokens: 400 requests without all four as first token have probability below 1e-49.
    rollouts = small_toy.generate("flat", "random", law_batch, k, law_shape, UNTOUCHED)
    first = rollouts.tokens[np.arange(rollouts.tokens.shape[0]), rollouts.prompt_lengths][:400]
    second = rollouts.tokens[np.arange(rollouts.tokens.shape[0]), rollouts.prompt_lengths + 1][
        first_is_not_stop(rollouts)
    ][:400]
    assert set(first) == set(second) == {0, 1, 2, 3}


def first_is_not_stop(rollouts) -> np.ndarray:
    return rollouts.lengths - rollouts.prompt_lengths > 1
