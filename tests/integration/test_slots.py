"""A run whose sequences go through fewer slots than there are sequences."""

from __future__ import annotations

import numpy as np

from draftco_jax import loop


def test_a_step_in_slots_has_the_rollouts_of_a_step_at_once(small, set_up):
    """16 sequences in 5 slots: same keys, same texts; log-probs to the rounding of attention over pages."""

    def step(*overrides: str):
        run, models = set_up(small(*overrides))
        weights = loop.publish(run, run.layout.start(models.policy, models.draft, run.optimizers, run.spec))
        return loop.generate(run, weights, next(run.prompts), 1)

    at_once, in_slots = step(), step("rollout.slots=5")
    for name in ("tokens", "lengths", "finished", "committed", "rounds", "accepted"):
        assert np.array_equal(getattr(in_slots, name), getattr(at_once, name)), name
    np.testing.assert_allclose(in_slots.logprobs, at_once.logprobs, atol=1e-5)
