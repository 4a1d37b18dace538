"""The joint objective under a pipeline: the same terms as `objective`, micro-batch by micro-batch, with its gradients.

The rows of a batch are cut into M micro-batches of equal size, padded to groups of as many as there are stages with
rows that hold nothing. The policy goes through the stages (`pipeline.stages`), its features to where the draft trains
(`pipeline.tap_channel`). Counts are those of the whole step, so the micro-batches' losses, gradients and statistics add
up to those of one device; the balance loss of a policy with experts is the exception: each micro-batch has its own,
weighed by its tokens, since the load of the whole step is not known when its first tokens come back.

Letters: R rows of T tokens of this device, M micro-batches of r rows, D width, F features.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Float32, Int, Key

from draftco_jax.context_parallel import PackedRows
from draftco_jax.drafts.base import Target, TrainingContext
from draftco_jax.losses.experts import expert_metrics
from draftco_jax.models.calls import PackedCall
from draftco_jax.models.moe_routing import RoutingSums, balance_loss
from draftco_jax.models.vocabulary import lookup_gradient, whole
from draftco_jax.pipeline.spec import PipelineSpec
from draftco_jax.pipeline.staged import RoutedSlots, StagedDecoder, slots_of
from draftco_jax.pipeline.stages import Chunk, Head, PipelineResult, StageProgram, run_pipeline
from draftco_jax.pipeline.tap_channel import TapPlan
from draftco_jax.training.objective import (
    Counts,
    ObjectiveSpec,
    draft_metrics,
    draft_terms,
    policy_terms,
)
from draftco_jax.training.optimizer import sum_gradient
from draftco_jax.training.policy_loss import Labels, labels_of, policy_metrics
from draftco_jax.types import PackedBatch

Params = Any

_SEQUENCES = "a loss that looks at whole sequences: a part of the tokens does not hold them; change it"


class DraftPart(NamedTuple):
    """What the micro-batches of a draft add up."""

    loss: jax.Array
    report: Any
    gradients: Params
    frozen: Any  # report of a draft that is only evaluated; None without


def pipelined_gradients(
    params: dict[str, Params],
    batch: PackedBatch,
    counts: Counts,
    draft_loss_weight: Float32[Array, ""],
    reference: Float32[Array, "R T"] | None,
    frozen_draft: Params | None,
    spec: ObjectiveSpec,
    key: Key[Array, ""],
    specs: dict[str, Params],
) -> tuple[dict[str, Params], dict[str, Array]]:
    """Gradients of the joint loss and its metrics, on each device of a shard_map over all axes.

    As `objective`, but for `reference`: the log-probs of the label of each index by the policy of the penalty.
    Gradients come out summed over rows, context and stages, and split as `specs` says (`sum_gradient`).
    """
    pipeline, tensor = spec.pipeline, spec.packed.tensor_axis
    assert pipeline is not None
    ranks = 1 if tensor is None else lax.axis_size(tensor)
    plan = pipeline.plan(spec.tap_layers, tensor_axis=tensor, tensor_ranks=ranks)
    update = _Update(spec, pipeline, plan, params, batch, counts, reference, frozen_draft, key, specs)
    return update.gradients(draft_loss_weight)


@dataclass(frozen=True)
class _Update:
    """One update on one device; the arrays are traced."""

    spec: ObjectiveSpec
    pipeline: PipelineSpec
    plan: TapPlan
    params: dict[str, Params]
    batch: PackedBatch
    counts: Counts
    reference: Array | None
    frozen_draft: Params | None
    key: Array
    specs: dict[str, Params]  # of the summed gradients

    @property
    def of_draft(self) -> PackedRows:
        """All devices that train the draft on rows of their own: tensor ranks too, where it is dealt out to them."""
        everywhere, tensor = self.spec.everywhere, self.plan.tensor_axis
        if tensor is None:
            return everywhere
        return replace(everywhere, row_axes=(*everywhere.row_axes, tensor), tensor_axis=None)

    def gradients(self, draft_loss_weight: Array) -> tuple[dict[str, Params], dict[str, Array]]:
        spec = self.spec
        everywhere = spec.everywhere
        program, policy = self._program()
        result = run_pipeline(
            program,
            self.plan,
            axis=self.pipeline.stage_axis,
            axes=frozenset(everywhere.axes),
            head_placement=self.pipeline.head_placement,
        )
        gradients = {"policy": self._policy_gradients(result)}
        metrics = self._policy_metrics(result, policy)
        part = result.draft
        if part is not None:
            if "draft" in self.params:
                loss, report = self.of_draft.total_in_order((part.loss, part.report))
                weighed = jax.tree.map(lambda g: draft_loss_weight * g, part.gradients)
                gradients["draft"] = self._summed("draft", weighed, self.of_draft)
                metrics |= {"draft/loss": loss} | draft_metrics("draft", report, with_losses=True)
            if part.frozen is not None:
                metrics |= draft_metrics("frozen_draft", self.of_draft.total_in_order(part.frozen), with_losses=False)
            if self.pipeline.stamps:
                metrics["pipeline/wrong_stamps"] = self.of_draft.total(result.wrong_stamps.astype(jnp.float32))
        return gradients, metrics

    def _program(self) -> tuple[StageProgram, StagedDecoder]:
        """The model as the pipeline sees it."""
        spec, packed = self.spec, self.spec.packed
        params = spec.everywhere.varying(self.params["policy"])
        policy: StagedDecoder = spec.policy_graph.merge(params)
        of_head = {name: tree for name, tree in params.items() if name in ("norm", "lm_head")}
        tied = policy.cfg.tie_word_embeddings
        if tied:
            of_head["embed_tokens"] = params["embed_tokens"]
        batch = self._micro(self.batch)
        labels = self._micro(labels_of(self.batch, packed, self.reference, spec.algorithm))
        tokens = lambda m: _at(batch, m).tokens  # noqa: E731

        def head(head_params: Params, y: Array, m: Array, part: Array | None) -> tuple[Array, Head]:
            # What the head does not read may be anything; the structure wants it.
            model: StagedDecoder = spec.policy_graph.merge({**params, **head_params})
            of_micro: Labels = _at(labels, m)
            if part is not None:
                if spec.algorithm.by_sequence:
                    raise ValueError(f"head_placement=all_stages must be last_stage with {_SEQUENCES}")
                of_micro, y = _part(of_micro, part, y.shape[0], self.pipeline.layout.stages), y[None]
            loss, sums, maxima = policy_terms(model, model.norm(y), of_micro, self.counts, spec)
            return loss, Head(sums, maxima)

        def embedding_gradient(total: Array, m: Array, dx: Array, here: Array) -> Array:
            return lookup_gradient(total, tokens(m), dx, here, packed.tensor_axis)

        program = StageProgram(
            weights=policy.chunk_weights(),
            embedding=params["embed_tokens"],
            head_params=of_head,
            embed=lambda m: policy.embed(tokens(m), packed),
            embedding_gradient=embedding_gradient,
            chunk=_ChunkCall(self, policy, batch),
            head=head,
            draft=_DraftCall(self, policy, batch).make(),
        )
        return program, policy

    def _micro(self, tree: Any) -> Any:
        """Arrays [R, ...] as [M, r, ...], padded with zeros."""
        count, padded = self.pipeline.microbatches, self.pipeline.padded

        def cut(x: Array) -> Array:
            x = x.reshape(count, -1, *x.shape[1:])
            return jnp.pad(x, ((0, padded - count),) + ((0, 0),) * (x.ndim - 1))

        return jax.tree.map(cut, tree)

    def _policy_gradients(self, result: PipelineResult) -> Params:
        """Summed over all devices that share the parameter, in its dtype."""
        embedding, head = result.embedding, dict(result.head)
        if "embed_tokens" in head:
            embedding = embedding + head.pop("embed_tokens")
        policy = {"embed_tokens": embedding, "stages": nnx.to_pure_dict(result.weights)} | head
        return self._summed("policy", policy, self.spec.everywhere)

    def _summed(self, group: str, gradients: Params, over: PackedRows) -> Params:
        axes = frozenset(over.axes)
        one = lambda param, gradient, spec: sum_gradient(gradient, param, spec, axes)  # noqa: E731
        return jax.tree.map(one, self.params[group], gradients, self.specs[group])

    def _policy_metrics(self, result: PipelineResult, policy: StagedDecoder) -> dict[str, Array]:
        everywhere = self.spec.everywhere
        sums, maxima = everywhere.total_in_order(result.head_sums), everywhere.largest(result.head_maxima)
        metrics = policy_metrics(sums, maxima, with_reference=self.reference is not None)
        if result.chunk_sums is None:
            return metrics
        routed = RoutedSlots.of(policy)
        by_layer = everywhere.total(self._by_layer(result.chunk_sums, routed))
        replayed = None
        if self.batch.experts is not None:
            taken = jnp.all(self.batch.experts >= 0, axis=-1) & (self.batch.segment_ids > 0)[..., None]
            replayed = self.spec.packed.total(jnp.sum(taken, dtype=jnp.float32))
        return metrics | expert_metrics(by_layer, replayed)[1]

    def _by_layer(self, sums: RoutingSums, routed: RoutedSlots) -> RoutingSums:
        """Of this stage's chunks [V, slots, ...] at their places among the policy's layers with experts [M, ...]."""
        layout, stage = self.pipeline.layout, lax.axis_index(self.pipeline.stage_axis)
        own = jnp.arange(layout.chunks, dtype=jnp.int32) * layout.stages + stage
        places = jnp.where(jnp.asarray(routed.here)[own], jnp.asarray(routed.ranks)[own], routed.layers)

        def one(x: Array) -> Array:
            zeros = jnp.zeros_like(jnp.broadcast_to(x[0, :1], (routed.layers, *x.shape[2:])))
            return zeros.at[places].add(x, mode="drop")

        return jax.tree.map(one, sums)


@dataclass(frozen=True)
class _ChunkCall:
    """The layers of a chunk, on a micro-batch."""

    update: _Update
    policy: StagedDecoder
    batch: PackedBatch  # [M, r, T]

    def __call__(self, weights: Any, x: Array, m: Array, k: Array, *, with_taps: bool) -> Chunk:
        spec, policy, batch = self.update.spec, self.policy, _at(self.batch, m)
        rotary, packed = policy.cfg.rotary, spec.packed
        angles = None if rotary is None else rotary.angles(batch.positions)
        call = PackedCall(batch.positions, batch.segment_ids, angles, packed)
        plan = self.update.plan
        slots = slots_of(policy.layout, k, plan.slots[0] if with_taps else None, plan.slots[1])
        out = policy.chunk(weights, x, call, slots, self._experts(batch, k))
        coefficient = spec.algorithm.router_balance_coefficient
        penalty = None
        if out.routing is not None and coefficient > 0:
            penalty = coefficient * self._balance(out.routing, batch, k)
        return Chunk(out.x, out.taps, penalty, jax.lax.stop_gradient(out.routing))

    def _experts(self, batch: PackedBatch, k: Array) -> Int[Array, "r T m k"] | None:
        """Routing to be replayed at the slots of this virtual stage."""
        if batch.experts is None:
            return None
        ranks = jnp.asarray(RoutedSlots.of(self.policy).ranks)[k]
        return batch.experts.astype(jnp.int32)[:, :, ranks]

    def _balance(self, sums: RoutingSums, batch: PackedBatch, k: Array) -> Float32[Array, ""]:
        """Balance loss of the layers of a virtual stage on a micro-batch, its share of the mean over all layers."""
        routed, packed = RoutedSlots.of(self.policy), self.update.spec.packed
        losses = jax.vmap(balance_loss)(packed.total(sums)) * jnp.asarray(routed.here, jnp.float32)[k]
        tokens = packed.total(jnp.sum(batch.segment_ids > 0, dtype=jnp.float32))
        everything = packed.total(jnp.sum(self.update.batch.segment_ids > 0, dtype=jnp.float32))
        return jnp.sum(losses) / routed.layers * tokens / jnp.maximum(everything, 1.0)


@dataclass(frozen=True)
class _DraftCall:
    """The draft's loss, gradients and statistics on a micro-batch."""

    update: _Update
    policy: StagedDecoder
    batch: PackedBatch  # [M, r, T]

    def make(self) -> Any:
        """None where there is no draft."""
        update = self.update
        if "draft" not in update.params and update.frozen_draft is None:
            return None
        spec, packed = update.spec, update.spec.packed
        tables = (self.policy.embed_tokens[...].astype(spec.draft_dtype), self.policy.head_kernel())
        embedding, head = whole(tables[0], packed.tensor_axis, dim=0), whole(tables[1], packed.tensor_axis, dim=1)
        trained, frozen = update.of_draft.varying((update.params.get("draft"), update.frozen_draft))

        def loss(draft: Params, target: Target, batch: PackedBatch) -> tuple[Array, Any]:
            context: TrainingContext = spec.context
            return draft_terms(draft, target, batch, update.counts.draft_labels, spec, update.key, context)

        def call(features: Float[Array, "F r T D"], m: Array) -> DraftPart:
            batch: PackedBatch = _at(self.batch, m)
            *taps, final = features
            side_by_side = jnp.concatenate(taps, axis=-1) if taps else final[..., :0]
            target = Target(side_by_side.astype(spec.draft_dtype), self.policy.norm(final), head, embedding)
            target = update.of_draft.varying(jax.lax.stop_gradient(target))
            zero = jnp.zeros_like(final[0, 0, 0], jnp.float32)
            part = DraftPart(zero, None, None, None)
            if trained is not None:
                (value, report), gradients = jax.value_and_grad(loss, has_aux=True)(trained, target, batch)
                part = DraftPart(value, report, _float32(gradients), None)
            if frozen is not None:
                part = part._replace(frozen=loss(jax.lax.stop_gradient(frozen), target, batch)[1])
            return part

        return call


def _at(tree: Any, m: Array) -> Any:
    """One micro-batch."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, m, 0, keepdims=False), tree)


def _part(labels: Labels, part: Array, size: int, parts: int) -> Labels:
    """`size` of all rows' tokens as one row [1, size]; beyond the last token there are zeros, which train nothing."""

    def cut(x: Array) -> Array:
        flat = jnp.pad(x.reshape(-1), (0, parts * size - x.size))
        return lax.dynamic_slice_in_dim(flat, part * size, size)[None]

    return jax.tree.map(cut, labels)


def _float32(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)
