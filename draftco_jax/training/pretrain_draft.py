"""Train a draft alone on a fixed policy's own rollouts, before any co-training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from draftco_jax.drafts.eagle3 import training as eagle3_training
from draftco_jax.drafts.eagle3.config import Eagle3Config
from draftco_jax.drafts.eagle3.training import DraftReport, Target
from draftco_jax.models.functional import ModelGraph, Params
from draftco_jax.numerics.sampling import SamplingConfig
from draftco_jax.training.optimizer import OptimizerConfig, apply_gradients, make_optimizer
from draftco_jax.types import PackedBatch


def draft_from_policy(draft: Params, policy: Params) -> Params:
    """A fresh draft whose head and final norm are copies of the policy's (full draft vocabulary, equal widths)."""
    head = policy["lm_head"]["kernel"] if "lm_head" in policy else policy["embed_tokens"].T
    own = draft["lm_head"]["kernel"].shape
    if own != head.shape:
        raise ValueError(
            f"draft head {own} must have the shape {head.shape} of the policy's; "
            "start a draft of a reduced vocabulary or another width from a checkpoint"
        )
    return draft | {"lm_head": {"kernel": jnp.array(head)}, "norm": jax.tree.map(jnp.array, policy["norm"])}


def pretrain_draft(
    policy_graph: ModelGraph,
    policy: Params,
    draft_graph: ModelGraph,
    draft: Params,
    draft_cfg: Eagle3Config,
    batches: Iterator[PackedBatch],
    cfg: OptimizerConfig,
    *,
    steps: int,
    sampling: SamplingConfig,
    chunk_tokens: int = 4096,
    on_step: Callable[[int, Array, DraftReport], None] = lambda step, loss, report: None,
) -> Params:
    """Take `steps` optimizer steps of the draft's loss; the policy does not change."""
    optimizer = make_optimizer(cfg, steps)

    def loss_fn(draft_params: Params, policy: Params, batch: PackedBatch) -> tuple[Array, DraftReport]:
        target_model = policy_graph.merge(policy)
        hidden, taps = target_model(batch.tokens, batch.positions, batch.segment_ids, tap_layers=draft_cfg.tap_layers)
        target = Target(taps, hidden, target_model.head_kernel(), target_model.embed_tokens[...])
        return eagle3_training.passes_loss(
            draft_graph.merge(draft_params),
            target,
            batch,
            sampling=sampling,
            denominator=eagle3_training.denominator(batch, draft_cfg),
            chunk_tokens=chunk_tokens,
            draft_length=draft_cfg.passes,
        )

    # The policy is an argument: closed over, its weights would be constants of the program.
    @jax.jit
    def step_fn(
        params: Params, state: Any, policy: Params, batch: PackedBatch
    ) -> tuple[Params, Any, Array, DraftReport]:
        (loss, report), gradients = jax.value_and_grad(loss_fn, has_aux=True)(params, policy, batch)
        params, state = apply_gradients(optimizer, gradients, state, params)
        return params, state, loss, report

    state = optimizer.init(draft)
    for step in range(1, steps + 1):
        draft, state, loss, report = step_fn(draft, state, policy, next(batches))
        on_step(step, loss, report)
    return draft
