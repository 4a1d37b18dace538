"""The joint objective L = L_RL(theta) + lambda * L_draft(phi; x, stop_gradient(H_theta(x))) on one forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Key

from draftco_jax.context_parallel import WHOLE_ROWS, PackedRows
from draftco_jax.drafts.base import DraftConfig, DraftReport, Target, TrainingContext
from draftco_jax.drafts.catalog import family_of
from draftco_jax.losses.chunked import map_tokens
from draftco_jax.losses.experts import expert_metrics
from draftco_jax.losses.policy import clipped_surrogate, kl_k3
from draftco_jax.models.compute import FloatName
from draftco_jax.models.functional import ModelGraph
from draftco_jax.models.moe_routing import RoutingSums
from draftco_jax.models.transformer import Decoder
from draftco_jax.numerics.logprobs import entropy, token_logprobs
from draftco_jax.numerics.masked import masked_max, masked_mean
from draftco_jax.numerics.sampling import SamplingConfig
from draftco_jax.types import PackedBatch

Params = Any


@dataclass(frozen=True, kw_only=True)
class GrpoConfig:
    """Group-relative policy optimisation."""

    std_normalise: bool = True
    """Divide advantages by the group's standard deviation."""
    leave_one_out: bool = False
    """Baseline and deviation from the other samples of the group."""
    clip_low: float = 0.2
    """Probability ratios below 1 - clip_low get no gradient where the advantage is negative."""
    clip_high: float = 0.28
    """Probability ratios above 1 + clip_high get no gradient where the advantage is positive."""
    kl_coefficient: float = 0.0
    """Weight of the k3 penalty towards the initial policy; 0 skips its forward."""
    router_balance_coefficient: float = 0.0
    """Weight of the load-balancing loss of a policy with experts, mean over its layers; 0 leaves it out."""

    def __post_init__(self) -> None:
        """Refuse clips and weights that mean nothing."""
        if not 0.0 < self.clip_low <= 1.0:
            raise ValueError(f"clip_low={self.clip_low} must be in (0, 1]; 0.2 is usual")
        if self.clip_high <= 0.0:
            raise ValueError(f"clip_high={self.clip_high} must be > 0; 0.2 is usual, 0.28 in DAPO")
        if self.kl_coefficient < 0.0:
            raise ValueError(f"kl_coefficient={self.kl_coefficient} must be >= 0; 0 switches the penalty off")
        if self.router_balance_coefficient < 0.0:
            raise ValueError(
                f"router_balance_coefficient={self.router_balance_coefficient} must be >= 0; 0 leaves the loss out, "
                "0.001 is usual"
            )


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


class Counts(NamedTuple):
    """Global denominators of a step, float32 scalars; policy and draft have their own."""

    policy_tokens: jax.Array
    draft_labels: jax.Array


def global_counts(
    batch: PackedBatch, draft_cfg: DraftConfig | None, key: Key[Array, ""], packed: PackedRows = WHOLE_ROWS
) -> Counts:
    """Denominators of one batch, over all devices; with micro-batches, their sum is passed to each."""
    labels = jnp.float32(0.0)
    if draft_cfg is not None and (denominator := family_of(draft_cfg).denominator) is not None:
        labels = denominator(batch, draft_cfg, key, packed)
    return packed.total(Counts(jnp.sum(label_mask_ahead(batch, packed)), labels))


def label_mask_ahead(batch: PackedBatch, packed: PackedRows) -> Float32[Array, "R T"]:
    """1 at indices whose next token is trained on and of the same document: the first token of one has no law."""
    return packed.ahead(batch.label_mask, 1) * packed.same_document(batch.segment_ids, 1).astype(jnp.float32)


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
    loss, metrics = _policy_objective(policy, output.hidden, batch, counts, reference, spec)
    if output.routing is not None:
        balance, load = _routing_terms(output.routing.sums, batch, packed)
        metrics |= load
        if spec.algorithm.router_balance_coefficient > 0:
            loss = loss + spec.algorithm.router_balance_coefficient * balance
    target = Target.of(policy, output, spec.draft_dtype, packed)

    def draft_terms(draft_params: Params) -> tuple[Array, DraftReport]:
        assert spec.draft_graph is not None and spec.draft_cfg is not None
        loss = family_of(spec.draft_cfg).loss
        assert loss is not None, "a family without a loss has no parameters"
        draft = spec.draft_graph.merge(draft_params)
        return loss(draft, target, batch, denominator=counts.draft_labels, key=key, context=spec.context)

    if "draft" in params:
        draft_loss, report = draft_terms(params["draft"])
        draft_loss = packed.total(draft_loss)
        loss = loss + draft_loss_weight * draft_loss
        metrics |= {"draft/loss": draft_loss} | _draft_metrics("draft", report, with_losses=True)
    if frozen_draft is not None:
        _, report = draft_terms(jax.lax.stop_gradient(frozen_draft))
        metrics |= _draft_metrics("frozen_draft", report, with_losses=False)
    return loss, metrics


def label_logprobs(
    policy: Decoder,
    hidden: Float[Array, "R T D"],
    labels: Int[Array, "R T"],
    sampling: SamplingConfig,
    chunk: int,
    packed: PackedRows = WHOLE_ROWS,
) -> tuple[Float32[Array, "R T"], Float32[Array, "R T"]]:
    """Log-prob of each label by the state at its index, and entropy of the law it was drawn from.

    The label of an index is the token after it, so what is known of labels (masks, advantages) must be brought one
    index back too: `PackedRows.ahead(x, 1)`.
    """

    def terms(states: Array, labels: Array) -> tuple[Array, Array]:
        logits = policy.logits(states, packed)
        return token_logprobs(logits, labels, sampling), jax.lax.stop_gradient(entropy(logits, sampling))

    return map_tokens(terms, (hidden, labels), chunk_tokens=chunk)


def _policy_objective(
    policy: Decoder, hidden: Array, batch: PackedBatch, counts: Counts, reference: Params | None, spec: ObjectiveSpec
) -> tuple[Array, dict[str, Array]]:
    """Clipped surrogate, optional k3 penalty, agreement of generator and trainer."""
    algorithm, packed, count = spec.algorithm, spec.packed, counts.policy_tokens
    of_labels = (batch.tokens, batch.label_logprobs, batch.label_advantages)
    labels, generator_logprobs, advantages = (packed.ahead(x, 1) for x in of_labels)
    mask = label_mask_ahead(batch, packed)
    logprobs, entropies = label_logprobs(policy, hidden, labels, spec.sampling, spec.chunk_tokens, packed)
    loss, aux = clipped_surrogate(
        logprobs,
        generator_logprobs,
        advantages,
        mask,
        token_count=count,
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
    )
    trained = jax.lax.stop_gradient(logprobs)
    metrics = {
        "policy/entropy": masked_mean(entropies, mask, count=count),
        "policy/clip_low_fraction": aux.clip_low_fraction,
        "policy/clip_high_fraction": aux.clip_high_fraction,
        "agreement/kl_k3": masked_mean(kl_k3(generator_logprobs, trained), mask, count=count),
    }
    maxima = {
        "policy/ratio_max": aux.ratio_max,
        "agreement/logprob_diff_max": masked_max(jnp.abs(trained - generator_logprobs), mask, empty=0.0),
    }
    loss, metrics = packed.total((loss, metrics))
    metrics |= {"policy/loss": loss} | packed.largest(maxima)
    if reference is not None:
        initial: Decoder = spec.policy_graph.merge(jax.lax.stop_gradient(reference))
        states = initial(batch.tokens, batch.positions, batch.segment_ids, packed=packed).hidden
        initial_logprobs, _ = label_logprobs(initial, states, labels, spec.sampling, spec.chunk_tokens, packed)
        penalty = packed.total(masked_mean(kl_k3(logprobs, initial_logprobs), mask, count=count))
        loss = loss + algorithm.kl_coefficient * penalty
        metrics["policy/kl_reference"] = penalty
    return loss, metrics


def _routing_terms(sums: RoutingSums, batch: PackedBatch, packed: PackedRows) -> tuple[Array, dict[str, Array]]:
    """Balance loss and metrics of the experts' use, over all devices."""
    replayed = None
    if batch.experts is not None:
        taken = jnp.all(batch.experts >= 0, axis=-1) & (batch.segment_ids > 0)[..., None]
        replayed = packed.total(jnp.sum(taken, dtype=jnp.float32))
    return expert_metrics(packed.total(sums), replayed)


def _draft_metrics(group: str, report: DraftReport, *, with_losses: bool) -> dict[str, Array]:
    """Flat names, drafted positions counted from 1."""
    metrics = {f"{group}/tau_prob": report.tau_prob}
    for k in range(report.losses.shape[0]):
        metrics[f"{group}/tv_position_{k + 1}"] = 1.0 - report.acceptances[k]
        if with_losses:
            metrics[f"{group}/loss_position_{k + 1}"] = report.losses[k]
    return metrics | {f"{group}/{name}": value for name, value in report.extra.items()}
