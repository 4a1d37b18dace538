"""The compiled engine draws texts from the policy's own law: chi-square tests against the exact law of every text.

Each test refuses a right engine with probability ALARM (over the keys, which are fixed here, so it never flickers) and
broken engines, made by exchanging one function before the program is traced, are refused at BROKEN.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.decoding import block_verification, rejection
from draftco_jax.decoding import engine as engine_module
from draftco_jax.decoding.engine import Engine, EngineShape
from draftco_jax.drafts.eagle3 import module
from draftco_jax.numerics.sampling import SamplingConfig

ALARM = 1e-6
BROKEN = 1e-9
UNTOUCHED = SamplingConfig()
FILTERED = SamplingConfig(temperature=2.0, top_k=3, top_p=0.85)


@pytest.mark.parametrize(
    "policy, draft, k, sampling",
    [
        pytest.param(
            *("deep", draft, k, sampling),
            marks=pytest.mark.slow if (k, name) == (0, "filtered") else (),
            id=f"deep-{draft}-{k}-{name}",
        )
        for draft, k in (("good", 0), ("good", 3), ("random", 3), ("wrong", 3))
        for sampling, name in ((UNTOUCHED, "temperature1"), (FILTERED, "filtered"))
    ],
)
def test_texts_follow_the_law_of_the_policy(small_toy, law_batch, law_shape, p_value, policy, draft, k, sampling):
    rollouts = small_toy.generate(policy, draft, law_batch, k, law_shape, sampling)
    p = p_value(small_toy, policy, rollouts, sampling)
    print(f"p-value {p:.2g}")
    assert p > ALARM


@pytest.mark.parametrize(
    "draft, sampling",
    [("good", UNTOUCHED), ("random", UNTOUCHED), pytest.param("random", FILTERED, marks=pytest.mark.slow)],
)
def test_texts_follow_the_law_of_the_policy_with_block_verification(
    small_toy, law_batch, law_shape, p_value, draft, sampling
):
    shape = replace(law_shape, verification="block")
    block = small_toy.generate("deep", draft, law_batch, 3, shape, sampling)
    p = p_value(small_toy, "deep", block, sampling)
    print(f"p-value {p:.2g}")
    assert p > ALARM
    token = small_toy.generate("deep", draft, law_batch, 3, law_shape, sampling)
    gain = block.accepted.sum() / block.rounds.sum() - token.accepted.sum() / token.rounds.sum()
    print(f"accepted drafts a round: {gain:+.4f}")
    assert gain > 0


def test_texts_follow_the_law_of_the_policy_with_block_verification_and_a_budget(
    small_toy, law_batch, law_shape, p_value
):
    shape = replace(law_shape, verification="block", verify_budget=law_batch.prompts.shape[0])
    rollouts = small_toy.generate("deep", "random", law_batch, 2, shape, UNTOUCHED)
    assert rollouts.proposed.sum() < 2 * rollouts.rounds.sum()
    p = p_value(small_toy, "deep", rollouts, UNTOUCHED)
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


# Each compiles an engine. One wrong rule every day shows that the test can fail.
@pytest.fixture(
    params=[
        pytest.param("argmax draft with softmax q", marks=pytest.mark.slow),
        "residual replaced by p",
        pytest.param("one uniform proposes and judges", marks=pytest.mark.slow),
    ]
)
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


@pytest.fixture(
    params=[
        pytest.param("uniforms of positions met again", marks=pytest.mark.slow),
        pytest.param("residual replaced by p", marks=pytest.mark.slow),
        "first failure ends",
    ]
)
def broken_block_engine(request, small_toy, law_shape, monkeypatch) -> Iterator[Engine]:
    """An engine whose block verification holds one wrong rule."""
    if request.param == "uniforms of positions met again":
        monkeypatch.setattr(EngineShape, "fresh_rounds", False)
    elif request.param == "residual replaced by p":
        monkeypatch.setattr(block_verification, "residual", lambda p, q: p)
    else:
        monkeypatch.setitem(engine_module.RULES, "block", first_failure_ends)
    shape = replace(law_shape, verification="block")
    yield Engine(*small_toy.graphs, shape=shape, sampling=UNTOUCHED)


def first_failure_ends(p, q, drafts, accept_uniforms, commit_uniforms):
    """Block verification that does not look at what comes after a draft that fails."""
    laws = jnp.pad(q, ((0, 0), (0, 1), (0, 0)))
    at = drafts[..., None]
    drafted = (jnp.take_along_axis(values[:, :-1], at, axis=-1)[..., 0] for values in (p, laws))
    accept = block_verification.accept_probabilities(p, laws, block_verification.running_weights(*drafted))
    failed = jax.lax.cummax((accept_uniforms >= accept).astype(jnp.int32), axis=1)
    return block_verification.verify(p, q, drafts, failed.astype(jnp.float32), commit_uniforms)


def test_a_broken_block_verification_is_caught(small_toy, law_batch, p_value, broken_block_engine):
    weights = small_toy.published("deep", "good")
    rollouts = jax.tree.map(np.asarray, broken_block_engine.generate(*weights, law_batch, 3))
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
