"""The joint update: one forward and backward for policy and draft, then each group's own optimizer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from draftco_jax.training.objective import ObjectiveSpec, global_counts, objective
from draftco_jax.training.optimizer import apply_gradients
from draftco_jax.types import PackedBatch

Params = Any


class TrainState(NamedTuple):
    """All that an update changes. Draft fields are None where no draft is trained."""

    step: jax.Array  # i32[] optimizer steps taken
    policy: Params
    draft: Params | None
    policy_optimizer: optax.OptState
    draft_optimizer: optax.OptState | None


class Optimizers(NamedTuple):
    """One group each, with its own clip: a joint norm would make the policy depend on the draft."""

    policy: optax.GradientTransformation
    draft: optax.GradientTransformation | None


def init_state(policy: Params, draft: Params | None, optimizers: Optimizers) -> TrainState:
    """Step 0. Pass draft None unless it is trained."""
    policy_optimizer = optimizers.policy.init(policy)
    if draft is None or optimizers.draft is None:
        return TrainState(jnp.int32(0), policy, None, policy_optimizer, None)
    return TrainState(jnp.int32(0), policy, draft, policy_optimizer, optimizers.draft.init(draft))


UpdateFn = Callable[..., tuple[TrainState, dict[str, Array]]]


def make_update(spec: ObjectiveSpec, optimizers: Optimizers) -> UpdateFn:
    """Compile ``update(state, batch, draft_loss_weight, reference, frozen_draft) -> (state, metrics)``."""
    return jax.jit(partial(update, spec=spec, optimizers=optimizers))


def update(
    state: TrainState,
    batch: PackedBatch,
    draft_loss_weight: Array,
    reference: Params | None = None,
    frozen_draft: Params | None = None,
    *,
    spec: ObjectiveSpec,
    optimizers: Optimizers,
) -> tuple[TrainState, dict[str, Array]]:
    """One optimizer step of every trained group; metrics are float32 scalars."""
    params = {"policy": state.policy} | ({} if state.draft is None else {"draft": state.draft})
    key = spec.draft_key(state.step)
    counts = global_counts(batch, spec.draft_cfg, key)
    gradients, metrics = jax.grad(objective, has_aux=True)(
        params, batch, counts, draft_loss_weight, reference, frozen_draft, spec, key
    )
    policy, policy_optimizer = apply_gradients(
        optimizers.policy, gradients["policy"], state.policy_optimizer, state.policy
    )
    metrics["policy/gradient_norm"] = optax.tree.norm(gradients["policy"])
    draft, draft_optimizer = state.draft, state.draft_optimizer
    if draft is not None and draft_optimizer is not None and optimizers.draft is not None:
        draft, draft_optimizer = apply_gradients(optimizers.draft, gradients["draft"], draft_optimizer, draft)
        metrics["draft/gradient_norm"] = optax.tree.norm(gradients["draft"])
    return TrainState(state.step + 1, policy, draft, policy_optimizer, draft_optimizer), metrics
