"""Fine-tune a policy on demonstrations: next-token cross-entropy on the response."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from draftco_jax.context_parallel import WHOLE_ROWS
from draftco_jax.models.functional import ModelGraph, Params
from draftco_jax.numerics.masked import masked_mean
from draftco_jax.numerics.sampling import SamplingConfig
from draftco_jax.numerics.shift import look_ahead
from draftco_jax.training.objective import label_logprobs, label_mask_ahead
from draftco_jax.training.optimizer import OptimizerConfig, apply_gradients, make_optimizer
from draftco_jax.types import PackedBatch


def cross_entropy(params: Params, batch: PackedBatch, graph: ModelGraph, chunk_tokens: int) -> Float32[Array, ""]:
    """- sum(label_mask * log pi(x)) / sum(label_mask), nats per label token."""
    policy = graph.merge(params)
    hidden = policy(batch.tokens, batch.positions, batch.segment_ids).hidden
    labels, mask = look_ahead(batch.tokens, 1), label_mask_ahead(batch, WHOLE_ROWS)
    logprobs, _ = label_logprobs(policy, hidden, labels, SamplingConfig(), chunk_tokens)
    return -masked_mean(logprobs, mask, count=jnp.sum(mask))


def fine_tune(
    graph: ModelGraph,
    params: Params,
    batches: Iterator[PackedBatch],
    cfg: OptimizerConfig,
    *,
    steps: int,
    chunk_tokens: int = 4096,
    on_step: Callable[[int, Array], None] = lambda step, loss: None,
) -> Params:
    """Take `steps` optimizer steps; `on_step(step, loss)` sees each one."""
    optimizer = make_optimizer(cfg, steps)

    @jax.jit
    def step_fn(params: Params, state: Any, batch: PackedBatch) -> tuple[Params, Any, Array]:
        loss, gradients = jax.value_and_grad(cross_entropy)(params, batch, graph, chunk_tokens)
        params, state = apply_gradients(optimizer, gradients, state, params)
        return params, state, loss

    state = optimizer.init(params)
    for step in range(1, steps + 1):
        params, state, loss = step_fn(params, state, next(batches))
        on_step(step, loss)
    return params
