"""Behaviour log-probs are the policy's own, whichever path emitted the token."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.numerics.logprobs import token_logprobs
from draftco_jax.numerics.sampling import SamplingConfig

SAMPLINGS = {
    "temperature1": SamplingConfig(),
    "filtered": SamplingConfig(temperature=0.7, top_p=0.9),
}
K = 3


@pytest.fixture(scope="module", params=SAMPLINGS, ids=str)
def sampling(request) -> SamplingConfig:
    return SAMPLINGS[request.param]


def teacher_forced(toy, policy, rollouts, sampling):
    """Log-prob of the token AT each index by one forward of whole rows, and which indices hold response tokens."""
    logits = jnp.asarray(toy.logits(policy, rollouts.tokens)[:, :-1])
    scores = jax.jit(token_logprobs, static_argnums=2)(logits, jnp.asarray(rollouts.tokens[:, 1:]), sampling)
    index = np.arange(rollouts.tokens.shape[1])[None, :]
    response = (index >= rollouts.prompt_lengths[:, None]) & (index < rollouts.lengths[:, None])
    return np.pad(np.asarray(scores), ((0, 0), (1, 0))), response


@pytest.mark.parametrize("draft, k", [("good", 0), ("good", K), ("random", K), ("wrong", K)])
def test_bug_case_b32_logprobs_equal_one_forward_of_the_policy(toy, mixed_requests, sampled_shape, sampling, draft, k):
    rollouts = toy.generate("deep", draft, mixed_requests, k, sampled_shape, sampling)
    expected, response = teacher_forced(toy, "deep", rollouts, sampling)
    difference = np.abs(rollouts.logprobs - expected)[response].max()
    print(f"max difference {difference:.2g} over {response.sum()} tokens")
    assert difference < 1e-5
    assert (rollouts.logprobs[~response] == 0).all()
    assert response.sum() == (rollouts.lengths - rollouts.prompt_lengths).sum()


@pytest.mark.parametrize("draft", ["good", "wrong"])
def test_logprobs_equal_one_forward_of_the_policy_with_block_verification(toy, mixed_requests, sampled_shape, draft):
    shape, sampling = replace(sampled_shape, verification="block"), SAMPLINGS["temperature1"]
    rollouts = toy.generate("deep", draft, mixed_requests, K, shape, sampling)
    expected, response = teacher_forced(toy, "deep", rollouts, sampling)
    assert np.abs(rollouts.logprobs - expected)[response].max() < 1e-5
    assert rollouts.rounds.sum() < rollouts.committed.sum() == response.sum() - len(response)


def test_the_rollouts_above_hold_accepted_residual_and_bonus_tokens(toy, mixed_requests, sampled_shape):
    parts = [
        toy.generate("deep", "good", mixed_requests, K, sampled_shape, sampling) for sampling in SAMPLINGS.values()
    ]
    rounds, accepted = (sum(getattr(part, name).sum(axis=0) for part in parts) for name in ("rounds", "accepted"))
    bonus = accepted[-1]
    assert accepted[0] > 10 and bonus > 3 and rounds - bonus > 10
    # Several rounds and several texts per request: the caches of every row were continued from earlier positions.
    assert max(part.rounds.max() for part in parts) > 3
