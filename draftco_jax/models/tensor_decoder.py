"""A policy whose weights are split over a tensor axis, as decoding calls it: like any other, inside shard_map.

Its parameters are those of a `Decoder` with layers one by one and projections apart, so that each is split as in
training. What it gives (hidden states, taps, logits, tables) is whole and the same on all ranks of the axis; its caches
hold the heads of one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from draftco_jax.context_parallel import WHOLE_ROWS, PackedRows
from draftco_jax.models.compute import FLOAT32, ComputeConfig, FloatName
from draftco_jax.models.kv_cache import Cache
from draftco_jax.models.paged_cache import PagedCache
from draftco_jax.models.transformer import Decoder, DecoderConfig, StepOutput
from draftco_jax.models.vocabulary import whole


def rollout_rows(packed: PackedRows) -> PackedRows:
    """What of the split of training stays in rollouts: the tensor axis, and experts where they are split over it."""
    tensor = packed.tensor_axis
    return PackedRows(tensor_axis=tensor, expert_axis=tensor if tensor in packed.expert_axes else None)


class TensorDecoder(Decoder):
    """`over` names the axis."""

    def __init__(
        self, cfg: DecoderConfig, over: PackedRows, compute: ComputeConfig = FLOAT32, *, rngs: nnx.Rngs
    ) -> None:
        self.over = over
        super().__init__(cfg, replace(compute, scan_layers=False), rngs=rngs)

    def step(
        self,
        tokens: Int[Array, "B T"],
        start: Int[Array, " B"],
        cache: Cache | PagedCache,
        *,
        tap_layers: Sequence[int],
        lengths: Int[Array, " B"] | None = None,
        active: Bool[Array, "B T"] | None = None,
        packed: PackedRows = WHOLE_ROWS,
    ) -> StepOutput:
        """`Decoder.step`."""
        del packed
        return super().step(
            tokens, start, cache, tap_layers=tap_layers, lengths=lengths, active=active, packed=self.over
        )

    def logits(self, hidden: Float[Array, "*b D"], packed: PackedRows = WHOLE_ROWS) -> Float[Array, "*b V"]:
        """`Decoder.logits`."""
        del packed
        return super().logits(hidden, self.over)

    def tables(self, dtype: FloatName) -> tuple[Float[Array, "V D"], Float[Array, "D V"]]:
        """`Decoder.tables`, gathered: once a call, since no loop changes them."""
        embedding, head = super().tables(dtype)
        axis = self.over.tensor_axis
        return whole(embedding, axis, dim=0), whole(head, axis, dim=1)
