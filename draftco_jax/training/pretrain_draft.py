"""Train a draft alone on a fixed policy's own rollouts, before any co-training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
from jaxtyping import Array

from draftco_jax.drafts.base import DraftConfig, DraftReport, Target, TrainingContext
from draftco_jax.drafts.catalog import family_of
from draftco_jax.models.functional import ModelGraph, Params
from draftco_jax.numerics.sampling import SamplingConfig
from draftco_jax.training.optimizer import OptimizerConfig, apply_gradients, make_optimizer
from draftco_jax.types import PackedBatch


def pretrain_draft(
    policy_graph: ModelGraph,
    policy: Params,
    draft_graph: ModelGraph,
    draft: Params,
    draft_cfg: DraftConfig,
    batches: Iterator[PackedBatch],
    cfg: OptimizerConfig,
    *,
    steps: int,
    sampling: SamplingConfig,
    draft_length: int,
    seed: int = 0,
    chunk_tokens: int = 4096,
    on_step: Callable[[int, Array, DraftReport], None] = lambda step, loss, report: None,
) -> Params:
    """Take `steps` optimizer steps of the draft's loss; the policy does not change."""
    optimizer, family = make_optimizer(cfg, steps), family_of(draft_cfg)
    context = TrainingContext(sampling, chunk_tokens, draft_length)

    def loss_fn(draft_params: Params, policy: Params, batch: PackedBatch, key: Array) -> tuple[Array, DraftReport]:
        target_model = policy_graph.merge(policy)
        hidden, taps = target_model(batch.tokens, batch.positions, batch.segment_ids, tap_layers=draft_cfg.tap_layers)
        target = Target(taps, hidden, target_model.head_kernel(), target_model.embed_tokens[...])
        assert family.loss is not None and family.denominator is not None
        denominator = family.denominator(batch, draft_cfg, key)
        draft_model = draft_graph.merge(draft_params)
        return family.loss(draft_model, target, batch, denominator=denominator, key=key, context=context)

    # The policy is an argument: closed over, its weights would be constants of the program.
    @jax.jit
    def step_fn(
        params: Params, state: Any, policy: Params, batch: PackedBatch, key: Array
    ) -> tuple[Params, Any, Array, DraftReport]:
        (loss, report), gradients = jax.value_and_grad(loss_fn, has_aux=True)(params, policy, batch, key)
        params, state = apply_gradients(optimizer, gradients, state, params)
        return params, state, loss, report

    state = optimizer.init(draft)
    for step in range(1, steps + 1):
        key = jax.random.fold_in(jax.random.key(seed), step)
        draft, state, loss, report = step_fn(draft, state, policy, next(batches), key)
        on_step(step, loss, report)
    return draft
