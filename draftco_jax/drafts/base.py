"""What a draft family is: the records it exchanges with engine and update, and its entry in the catalog.

    decoding   empty_state, absorb(prompt), then rounds of  propose -> (the policy verifies) -> absorb(verified tokens)
    training   denominator(batch), summed over all shards of a step, then loss(draft, target, batch, denominator)

The engine and the update know these records only. What a family does with them is its own folder's business.

Letters: B requests, T consecutive tokens, k drafts, D policy width, A width of the concatenated taps, V vocabulary,
H history tokens, G siblings, R packed rows, n steps (passes of EAGLE-3 and MTP, slots of a block draft).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from draftco_jax.context_parallel import WHOLE_ROWS, PackedRows
from draftco_jax.models.token_tree import Tree
from draftco_jax.models.vocabulary import whole
from draftco_jax.numerics.masked import safe_count
from draftco_jax.numerics.sampling import SamplingConfig
from draftco_jax.types import PackedBatch

if TYPE_CHECKING:
    from flax import nnx

    from draftco_jax.models.compute import FloatName
    from draftco_jax.models.functional import ModelGraph, Params
    from draftco_jax.models.transformer import Decoder, DecoderConfig, PolicyOutput


class Shared(NamedTuple):
    """The policy's live tables, which every draft reads and none owns."""

    embedding: jax.Array  # [V, D]
    head: jax.Array  # [D, V]

    def embed(self, tokens: Int[Array, "*b"]) -> Float[Array, "*b D"]:
        """Rows of the embedding table; every id is below V."""
        return self.embedding.at[tokens].get(mode="promise_in_bounds")


class Context(NamedTuple):
    """What a request brings beside its prompt. Empty (H = 0, G = 0) for drafts that are models."""

    history: jax.Array  # i32[B, H] earlier texts to look for matches in, -1 between them and as padding
    siblings: jax.Array  # i32[B, G] rows of the batch that answer the same prompt, -1 for none


class Features(NamedTuple):
    """What is known of T consecutive indices start, start + 1, ... of each request once the policy has read them.

    Rows 0..last are true, and start + last + 1 is the new anchor. Rows after `last` come from rejected tokens: a draft
    may store what it makes of them, but must not read it before it is overwritten.
    """

    tokens: jax.Array  # i32[B, T] token AT each index
    following: jax.Array  # i32[B, T] token after it; at `last` the newest committed one
    taps: jax.Array  # [B, T, A]
    hidden: jax.Array  # [B, T, D] after the final norm
    start: jax.Array  # i32[B]
    last: jax.Array  # i32[B]

    def astype(self, dtype: FloatName) -> Features:
        """The same for a draft that computes in `dtype`."""
        return self._replace(taps=self.taps.astype(dtype), hidden=self.hidden.astype(dtype))


class Proposal(NamedTuple):
    """Up to k drafted tokens and the very laws they were drawn from."""

    tokens: jax.Array  # i32[B, k]
    laws: jax.Array  # f32[B, k, V]; a row of zeros where nothing is proposed, which verification always refuses
    count: jax.Array  # i32[B] how many are proposed; the rest is padding


@runtime_checkable
class DraftSampling(Protocol):
    """How logits become the laws that drafts are drawn from: `SamplingConfig`, or the settings of each request
    (`decoding.options.RequestLaw`)."""

    def law(
        self, logits: Float[Array, "B *t W"], first: int | Int[Array, ""] = 0, ids: Int[Array, " W"] | None = None
    ) -> Float[Array, "B *t W"]:
        """Laws of consecutive drafts, float32.

        Args:
            logits: of one draft [B, W] or of several [B, t, W].
            first: which draft of the round the first one is, from 0.
            ids: the target's id of each column; None: the columns are the target's vocabulary.
        """
        ...


@runtime_checkable
class Draft(Protocol):
    """A draft as the engine sees it: a Flax module with a state per request."""

    @property
    def cfg(self) -> DraftConfig:
        """The family's config; the engine asks it for the taps."""
        ...

    def empty_state(self, batch: int, capacity: int, context: Context) -> Any:
        """State before anything was read; `capacity` indices must fit."""
        ...

    def absorb(self, state: Any, features: Features, shared: Shared) -> Any:
        """Read what the policy has verified."""
        ...

    def propose(
        self,
        state: Any,
        newest: Int[Array, " B"],
        anchor: Int[Array, " B"],
        uniforms: Float[Array, "B k"],
        sampling: DraftSampling,
        shared: Shared,
    ) -> tuple[Proposal, Any]:
        """Draft the k tokens after `newest`, which stands at `anchor`.

        `uniforms` holds one number per drafted position; `sampling` is the policy's, of each row where requests have
        their own. Token i is drawn from law i given the drafted tokens before it, and nothing else that the engine
        draws.
        """
        ...


@runtime_checkable
class ReadsSiblings(Protocol):
    """A draft that looks at the texts of other rows: it is told where they are whenever they may have moved."""

    def place_siblings(self, state: Any, rows: Int[Array, "B G"]) -> Any:
        """The state with `Context.siblings` as rows of now, -1 for one that is in no row."""
        ...


@runtime_checkable
class MadeOfPolicy(Protocol):
    """A draft whose weights a publish makes of the policy's; it has none to train, to save or to load."""

    def made_of(self, policy: Decoder) -> nnx.Module:
        """The draft of a published policy, whose modules it may take over."""
        ...


@runtime_checkable
class SharesCache(Protocol):
    """A draft that proposes over the policy's own cache and has none.

    What it writes lies from the anchor on, where the verify forward writes before it reads.
    """

    def borrow(self, state: Any, cache: Any, live: Bool[Array, " B"]) -> Any:
        """The state for `Draft.propose`; `live` requests decode, and nothing is written for the others."""
        ...

    def give_back(self, state: Any) -> tuple[Any, Any]:
        """The state apart from the cache, of which the verify forward reads what is before the anchor."""
        ...


def borrowed(draft: Draft, state: Any, cache: Any, live: Bool[Array, " B"]) -> Any:
    """The state that a draft of any family proposes with."""
    return draft.borrow(state, cache, live) if isinstance(draft, SharesCache) else state


def given_back(draft: Draft, state: Any, cache: Any) -> tuple[Any, Any]:
    """State and cache after the draft has proposed; `cache` is what it was lent."""
    return draft.give_back(state) if isinstance(draft, SharesCache) else (state, cache)


class TreeCall(NamedTuple):
    """What is the same for all levels of a tree that is drafted."""

    tree: Tree
    newest: jax.Array  # i32[B]
    anchor: jax.Array  # i32[B]
    sampling: SamplingConfig  # of the laws; need not be the policy's
    shared: Shared


class Growth(NamedTuple):
    """A tree drafted down to some level."""

    laws: jax.Array  # f32[B, m, V] of the token after each of the m nodes of the level that have children
    state: Any  # of the draft, which may hold guesses from the anchor on
    branches: Any  # the family's own, of these m nodes; leaves [B, m, ...]


@runtime_checkable
class GrowsTrees(Protocol):
    """A draft that says what comes after any node of a token tree (`decoding.tree_drafts` chooses the nodes)."""

    @property
    def draws_tokens(self) -> bool:
        """Whether tokens are to be drawn from its laws where the policy's are; if not, the likeliest are taken."""
        ...

    def begin_tree(self, state: Any, call: TreeCall) -> Growth:
        """The law of the first tokens, m = 1."""
        ...

    def extend_tree(self, growth: Growth, depth: int, tokens: Int[Array, "B m"], call: TreeCall) -> Growth:
        """One level on: `tokens` of the nodes of `depth` >= 1 that have children, of which there is one at least."""
        ...


class Target(NamedTuple):
    """What a draft learns from: the policy's own forward on the batch, cut from its gradient."""

    taps: jax.Array  # [R, T, A]
    hidden: jax.Array | None  # [R, T, D] after the final norm; None where no loss needs the policy's law
    head: jax.Array  # [D, V]
    embedding: jax.Array  # [V, D]

    @classmethod
    def of(cls, policy: Decoder, output: PolicyOutput, dtype: FloatName, packed: PackedRows = WHOLE_ROWS) -> Target:
        """What a draft that computes in `dtype` is given of a policy and its forward.

        Drafts are whole on every rank of a tensor axis, and so are the tables that they read.
        """
        taps, embedding = (x.astype(dtype) for x in (output.taps, policy.embed_tokens[...]))
        head = whole(policy.head_kernel(), packed.tensor_axis, dim=1)
        return cls(taps, output.hidden, head, whole(embedding, packed.tensor_axis, dim=0))


class DraftReport(NamedTuple):
    """Statistics of a draft's training forward as sums, float32, no gradient: micro-batches and devices add them up."""

    loss_sums: jax.Array  # [n] loss of each step over its live labels
    acceptance_sums: jax.Array  # [n] 1 - TV of each step over its live labels
    labels: jax.Array  # [n] live labels of each step
    reached_sum: jax.Array  # [] over anchors of 1 + sum_k prod_{j<=k} (1 - TV_j)
    anchors: jax.Array  # []
    extra_sums: dict[str, jax.Array] = {}  # noqa: RUF012  over all live labels: a family's own, by metric name

    @property
    def losses(self) -> Float32[Array, " n"]:
        """Mean loss of each step over its live labels."""
        return self.loss_sums / safe_count(self.labels)

    @property
    def acceptances(self) -> Float32[Array, " n"]:
        """Mean 1 - TV of each step over its live labels."""
        return self.acceptance_sums / safe_count(self.labels)

    @property
    def tau_prob(self) -> Float32[Array, ""]:
        """Mean over anchors of 1 + sum_k prod_{j<=k} (1 - TV_j); 0 without anchors."""
        return self.reached_sum / safe_count(self.anchors)

    @property
    def extra(self) -> dict[str, jax.Array]:
        """Means over the live labels of all steps."""
        return {name: value / safe_count(jnp.sum(self.labels)) for name, value in self.extra_sums.items()}


class TrainingContext(NamedTuple):
    """What the update tells a draft's loss beside the batch. Python values are compiled in."""

    sampling: SamplingConfig
    chunk_tokens: int
    """Tokens whose logits exist at one time."""
    draft_length: int
    """k of the rollouts: tau_prob counts no step beyond it."""
    tile: int = 8192
    """Columns of a head whose logits exist at one time."""
    packed: PackedRows = WHOLE_ROWS
    """How the batch is spread over devices."""


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """Base of all family configs. Subclasses are frozen dataclasses with exactly their own fields.

    Each has ``tap_layers`` (policy layers whose outputs it reads: 0-based, OUTPUT convention, low to high; empty for
    none) and the class methods and checks below.
    """

    training_fields: ClassVar[tuple[str, ...]] = ()
    """Fields that say how the draft is trained, not what it is: a run may change them for a checkpoint it loads."""

    if TYPE_CHECKING:

        @property
        def tap_layers(self) -> tuple[int, ...]:
            """Policy layers whose outputs are read."""
            ...

    @property
    def label_reach(self) -> int:
        """Tokens after an index that its labels lie within: what devices exchange, and what a piece must hold."""
        return 0

    @property
    def max_draft_length(self) -> int | None:
        """Most tokens the draft can propose in a round; None: no limit."""
        return None

    @property
    def memory(self) -> tuple[int, int]:
        """Tokens of earlier rollouts that a request is given, and that a run remembers in all; (0, 0): none."""
        return 0, 0

    def check_target(self, target: DecoderConfig) -> None:
        """Raise ValueError where this draft cannot read that policy."""

    def check_run(self, *, from_checkpoint: bool) -> None:
        """Raise ValueError where this draft cannot start a run, from a checkpoint or from fresh weights."""

    def build(self, rngs: nnx.Rngs) -> Any:
        """The Flax module with freshly drawn weights."""
        raise NotImplementedError

    def with_training_of(self, other: Any) -> Any:
        """This draft, trained as `other` (a config of the same family, or None) says."""
        return self if other is None else replace(self, **{name: getattr(other, name) for name in self.training_fields})


DenominatorFn = Callable[..., Float32[Array, ""]]
"""``denominator(batch, cfg, key, packed)``: what the loss of these rows is divided by; summed over devices and
micro-batches by the caller."""

LossFn = Callable[..., tuple[Float32[Array, ""], DraftReport]]
"""``loss(draft, target, batch, *, denominator, key, context)``: loss of this device's part of the batch over the global
denominator, and its report; both are to be summed over devices and micro-batches."""


@dataclass(frozen=True, kw_only=True)
class DraftFamily:
    """One entry of the catalog."""

    name: str
    config: type[DraftConfig]
    denominator: DenominatorFn | None = None
    """None: the family has nothing to train."""
    loss: LossFn | None = None
    from_policy: Callable[[Params, Params], Params] = lambda draft, policy: draft
    """(fresh draft, policy) -> draft to start from."""
    save: Callable[[Path, Any, ModelGraph, Params], None] | None = None
    load: Callable[[Path, Any], tuple[Any, ModelGraph, Params]] | None = None
    """(folder, config whose training fields apply or None) -> config, structure, weights."""
    check_layout: Callable[[Any], None] = field(default=lambda cfg: None)
    """Raise UserError where no published layout holds such a draft, so that `save` would."""
    check_batch: Callable[[PackedBatch, Any, PackedRows], None] = field(default=lambda batch, cfg, packed: None)
    """Raise UserError, on the host, where a batch does not fit what the update is compiled for. Rows are whole."""

    @property
    def trained(self) -> bool:
        """Whether there is anything to train."""
        return self.loss is not None


def check_model_draft(cfg: Any, target: DecoderConfig) -> None:
    """What every draft that is a model needs of its policy: vocabulary, width, tapped layers, positions."""
    kind = type(cfg).__name__
    if cfg.vocab_size != target.vocab_size:
        raise ValueError(
            f"draft vocab_size={cfg.vocab_size} must equal the policy's {target.vocab_size}; "
            f"use {kind}.for_target(policy)"
        )
    if cfg.hidden_size != target.hidden_size:
        raise ValueError(
            f"draft hidden_size={cfg.hidden_size} must equal the policy's {target.hidden_size}, "
            f"because the draft reads the policy's embeddings; use {kind}.for_target(policy)"
        )
    if cfg.tap_layers and cfg.tap_layers[-1] >= target.num_hidden_layers:
        raise ValueError(
            f"tap_layers={cfg.tap_layers} must be below num_hidden_layers={target.num_hidden_layers} of the "
            "policy; layers are counted from 0"
        )
    if cfg.max_position_embeddings < target.max_position_embeddings:
        raise ValueError(
            f"draft max_position_embeddings={cfg.max_position_embeddings} must be >= the policy's "
            f"{target.max_position_embeddings}, or drafts past it are noise; raise it in the draft's config"
        )


def check_tap_layers(tap_layers: tuple[int, ...]) -> None:
    """Refuse taps that are not increasing layer numbers."""
    if not tap_layers or list(tap_layers) != sorted(set(tap_layers)) or tap_layers[0] < 0:
        raise ValueError(f"tap_layers={tap_layers} must be increasing layer numbers >= 0; give e.g. (0, 1)")


def sizes_from(target: DecoderConfig) -> dict[str, Any]:
    """Sizes and constants of the policy that a draft of its own width takes over, by field name."""
    names = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "rope_theta",
        "max_position_embeddings",
    )
    return {name: getattr(target, name) for name in names}
