"""The joint objective L = L_RL(theta) + lambda * L_draft(phi; x, stop_gradient(H_theta(x))) on one forward."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Key

from draftco_jax.context_parallel import WHOLE_ROWS, PackedRows
from draftco_jax.drafts.base import DraftConfig, DraftReport, Target, TrainingContext
from draftco_jax.drafts.catalog import family_of
from draftco_jax.losses.chunked import map_tokens
from draftco_jax.losses.experts import expert_metrics
from draftco_jax.models.compute import FloatName
from draftco_jax.models.functional import ModelGraph
from draftco_jax.models.moe_routing import RoutingSums
from draftco_jax.models.transformer import Decoder
from draftco_jax.numerics.logprobs import entropy, token_logprobs
from draftco_jax.numerics.sampling import SamplingConfig
from draftco_jax.pipeline.spec import PipelineSpec
from draftco_jax.training.algorithm import GRPO, GrpoConfig
from draftco_jax.training.policy_loss import (
    Labels,
    PolicyMaxima,
    PolicySums,
    label_mask_ahead,
    labels_of,
    policy_loss,
    policy_metrics,
    weights_of,
)
from draftco_jax.types import PackedBatch

Params = Any


@dataclass(frozen=True, kw_only=True)
class ObjectiveSpec:
    """What is fixed when the update is compiled."""

    policy_graph: ModelGraph
    draft_graph: ModelGraph | None
    draft_cfg: DraftConfig | None
    algorithm: GrpoConfig
    sampling: SamplingConfig
    chunk_tokens: int
    draft_length: int
    """k of the rollouts."""
    seed: int = 0
    """Root of what a draft's loss draws at random (its anchors)."""
    packed: PackedRows = WHOLE_ROWS
    """How the batch is spread over devices."""
    draft_dtype: FloatName = "float32"
    """Of the draft's activations; the policy's is part of its graph."""
    vocabulary_tile: int = 8192
    """Columns of a head whose logits exist at one time in the draft's loss."""

    pipeline: PipelineSpec | None = None
    """How the policy is cut into stages; None: every device has all layers."""
    shard_optimizer_state: bool = True
    """Split the optimizer state over the data axis, where rows are split over one; False: it lies as the parameters."""

    @property
    def everywhere(self) -> PackedRows:
        """`packed`, with stages as one more axis that micro-batches differ over."""
        return across(self.packed, self.pipeline)

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """Policy layers whose outputs the draft reads."""
        return self.draft_cfg.tap_layers if self.draft_cfg is not None else ()

    @property
    def context(self) -> TrainingContext:
        """What the draft's loss is told."""
        return TrainingContext(
            self.sampling, self.chunk_tokens, self.draft_length, tile=self.vocabulary_tile, packed=self.packed
        )

    def draft_key(self, step: Int[Array, ""]) -> Key[Array, ""]:
        """Key of the draft's loss: a function of the seed and of the optimizer steps taken."""
        return jax.random.fold_in(jax.random.key(self.seed), step)


def across(packed: PackedRows, pipeline: PipelineSpec | None) -> PackedRows:
    """The rows of all stages: each micro-batch's draft trains on one, so that stages count as an axis of rows."""
    return packed if pipeline is None else replace(packed, row_axes=(*packed.row_axes, pipeline.stage_axis))


class Counts(NamedTuple):
    """Global denominators of a step, float32 scalars; policy and draft have their own."""

    policy_tokens: jax.Array
    draft_labels: jax.Array
    policy_weight: jax.Array | None = None  # what the policy's loss is divided by; None: policy_tokens

    @property
    def loss_denominator(self) -> jax.Array:
        """What the policy's loss is divided by."""
        return self.policy_tokens if self.policy_weight is None else self.policy_weight


def global_counts(
    batch: PackedBatch,
    draft_cfg: DraftConfig | None,
    key: Key[Array, ""],
    packed: PackedRows = WHOLE_ROWS,
    algorithm: GrpoConfig = GRPO,
) -> Counts:
    """Denominators of one batch, over all devices; with micro-batches, their sum is passed to each."""
    labels = jnp.float32(0.0)
    if draft_cfg is not None and (denominator := family_of(draft_cfg).denominator) is not None:
        labels = denominator(batch, draft_cfg, key, packed)
    mask, weight = label_mask_ahead(batch, packed), None
    if algorithm.aggregation != "token":
        weight = weights_of(mask, batch, packed, algorithm)[1]
    return packed.total(Counts(jnp.sum(mask), labels, weight))


def objective(
    params: dict[str, Params],
    batch: PackedBatch,
    counts: Counts,
    draft_loss_weight: Float32[Array, ""],
    reference: Params | None,
    frozen_draft: Params | None,
    spec: ObjectiveSpec,
    key: Key[Array, ""],
) -> tuple[Float32[Array, ""], dict[str, Array]]:
    """The joint loss and its metrics, of all devices; runs on one device's part of the batch (`PackedRows`).

    Args:
        params: ``{"policy": ..., "draft": ...}``; without "draft" the draft is not in the program at all.
        batch: packed rows; where they hold the generator's routing, the policy is trained with that (the reference
            policy of the penalty chooses its own).
        counts: global denominators.
        draft_loss_weight: lambda, a runtime value: the program, and so the policy's gradient, is the same for all.
        reference: initial policy for the k3 penalty, or None.
        frozen_draft: a draft that is only evaluated on the same forward, or None.
        spec: compiled-in choices.
        key: `spec.draft_key(step)`, the same that the counts were made with.
    """
    packed = spec.packed
    params, reference, frozen_draft = packed.varying((params, reference, frozen_draft))
    policy: Decoder = spec.policy_graph.merge(params["policy"])
    output = policy(
        batch.tokens,
        batch.positions,
        batch.segment_ids,
        tap_layers=spec.tap_layers,
        packed=packed,
        experts=None if batch.experts is None else batch.experts.astype(jnp.int32),
    )
    of_reference = None if reference is None else reference_logprobs(reference, batch, spec)
    labels = labels_of(batch, packed, of_reference, spec.algorithm)
    loss, sums, maxima = policy_terms(policy, output.hidden, labels, counts, spec)
    loss, sums, maxima = packed.total(loss), packed.total(sums), packed.largest(maxima)
    metrics = policy_metrics(sums, maxima, with_reference=reference is not None)
    if output.routing is not None:
        balance, load = routing_terms(output.routing.sums, batch, packed)
        metrics |= load
        if spec.algorithm.router_balance_coefficient > 0:
            loss = loss + spec.algorithm.router_balance_coefficient * balance
    target = Target.of(policy, output, spec.draft_dtype, packed)
    of_draft = partial(
        draft_terms,
        target=target,
        batch=batch,
        denominator=counts.draft_labels,
        spec=spec,
        key=key,
        context=spec.context,
    )
    if "draft" in params:
        draft_loss, report = packed.total(of_draft(params["draft"]))
        loss = loss + draft_loss_weight * draft_loss
        metrics |= {"draft/loss": draft_loss} | draft_metrics("draft", report, with_losses=True)
    if frozen_draft is not None:
        _, report = of_draft(jax.lax.stop_gradient(frozen_draft))
        metrics |= draft_metrics("frozen_draft", packed.total(report), with_losses=False)
    return loss, metrics


def label_logprobs(
    policy: Decoder,
    hidden: Float[Array, "R T D"],
    labels: Int[Array, "R T"],
    sampling: SamplingConfig,
    chunk: int,
    packed: PackedRows = WHOLE_ROWS,
    *,
    entropy_gradient: bool = False,
) -> tuple[Float32[Array, "R T"], Float32[Array, "R T"]]:
    """Log-prob of each label by the state at its index, and entropy of the law it was drawn from.

    The entropy has a gradient where it is asked for.

    The label of an index is the token after it, so what is known of labels (masks, advantages) must be brought one
    index back too: `PackedRows.ahead(x, 1)`.
    """

    def terms(states: Array, labels: Array) -> tuple[Array, Array]:
        logits = policy.logits(states, packed)
        spread = entropy(logits, sampling)
        return token_logprobs(logits, labels, sampling), spread if entropy_gradient else jax.lax.stop_gradient(spread)

    return map_tokens(terms, (hidden, labels), chunk_tokens=chunk)


def reference_logprobs(reference: Params, batch: PackedBatch, spec: ObjectiveSpec) -> Float32[Array, "R T"]:
    """Log-prob of the token after each index by the policy of the penalty; no gradient."""
    packed = spec.packed
    initial: Decoder = spec.policy_graph.merge(jax.lax.stop_gradient(reference))
    states = initial(batch.tokens, batch.positions, batch.segment_ids, packed=packed).hidden
    tokens = packed.ahead(batch.tokens, 1)
    return label_logprobs(initial, states, tokens, spec.sampling, spec.chunk_tokens, packed)[0]


def policy_terms(
    policy: Decoder, hidden: Array, labels: Labels, counts: Counts, spec: ObjectiveSpec
) -> tuple[Float32[Array, ""], PolicySums, PolicyMaxima]:
    """The policy's loss of these rows, and what is logged of them; to be summed over devices.

    No collective but those of the tensor axis, so that it may stand under a condition of the stage; what looks at whole
    sequences adds one of the context axis.
    """
    found = label_logprobs(
        policy,
        hidden,
        labels.tokens,
        spec.sampling,
        spec.chunk_tokens,
        spec.packed,
        entropy_gradient=spec.algorithm.entropy_coefficient > 0,
    )
    return policy_loss(*found, labels, counts.policy_tokens, counts.loss_denominator, spec.algorithm, spec.packed)


def draft_terms(
    draft_params: Params,
    target: Target,
    batch: PackedBatch,
    denominator: Array,
    spec: ObjectiveSpec,
    key: Key[Array, ""],
    context: TrainingContext,
) -> tuple[Float32[Array, ""], DraftReport]:
    """The draft's loss of these rows and its report; to be summed over devices."""
    assert spec.draft_graph is not None and spec.draft_cfg is not None
    loss = family_of(spec.draft_cfg).loss
    assert loss is not None, "a family without a loss has no parameters"
    draft = spec.draft_graph.merge(draft_params)
    return loss(draft, target, batch, denominator=denominator, key=key, context=context)


def routing_terms(sums: RoutingSums, batch: PackedBatch, packed: PackedRows) -> tuple[Array, dict[str, Array]]:
    """Balance loss and metrics of the experts' use, over all devices."""
    replayed = None
    if batch.experts is not None:
        taken = jnp.all(batch.experts >= 0, axis=-1) & (batch.segment_ids > 0)[..., None]
        replayed = packed.total(jnp.sum(taken, dtype=jnp.float32))
    return expert_metrics(packed.total(sums), replayed)


def draft_metrics(group: str, report: DraftReport, *, with_losses: bool) -> dict[str, Array]:
    """Flat names, drafted positions counted from 1."""
    metrics = {f"{group}/tau_prob": report.tau_prob}
    for k in range(report.losses.shape[0]):
        metrics[f"{group}/tv_position_{k + 1}"] = 1.0 - report.acceptances[k]
        if with_losses:
            metrics[f"{group}/loss_position_{k + 1}"] = report.losses[k]
    return metrics | {f"{group}/{name}": value for name, value in report.extra.items()}
