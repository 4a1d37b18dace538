"""A policy with int8 weights: the same layers, caches and calls, other products (`models.quantised`).

A row of the embedding table has one scale, which is that of an output of the head where the head is tied to it.

Letters as in `transformer`.
"""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int

from draftco_jax.context_parallel import WHOLE_ROWS, PackedRows
from draftco_jax.models.compute import FloatName
from draftco_jax.models.quantised import dequantised, quantise, quantise_layers, times
from draftco_jax.models.transformer import Decoder


class QuantisedDecoder(Decoder):
    """Made of a policy in the rollout layout, whose blocks it takes over and changes."""

    def __init__(self, policy: Decoder) -> None:
        self.cfg, self.packed_head = policy.cfg, False
        self.compute = replace(policy.compute, step_matmul="xla")
        table = quantise(policy.embed_tokens[...], summed=1)
        self.embed_values, self.embed_scales = nnx.Param(table.values), nnx.Param(table.scales)
        if not self.cfg.tie_word_embeddings:
            head = quantise(policy.head_kernel(), summed=0)
            self.head_values, self.head_scales = nnx.Param(head.values), nnx.Param(head.scales)
        self.layers, self.norm = policy.layers, policy.norm
        quantise_layers(self)

    def embed(self, tokens: Int[Array, "*b"], packed: PackedRows = WHOLE_ROWS) -> Float[Array, "*b D"]:
        """Rows of the table; every id is below V."""
        del packed
        values = self.embed_values[...].at[tokens].get(mode="promise_in_bounds").astype(jnp.float32)
        scales = self.embed_scales[...].at[tokens].get(mode="promise_in_bounds")
        return (values * scales[..., None]).astype(self.compute.dtype)

    def logits(self, hidden: Float[Array, "*b D"], packed: PackedRows = WHOLE_ROWS) -> Float32[Array, "*b V"]:
        """Of normed hidden states."""
        del packed
        if self.cfg.tie_word_embeddings:
            return times(hidden, self.embed_values[...].T, self.embed_scales[...])
        return times(hidden, self.head_values[...], self.head_scales[...])

    def head_kernel(self) -> Float[Array, "D V"]:
        """What `logits` multiplies by, as one float32 array."""
        if self.cfg.tie_word_embeddings:
            return dequantised(self.embed_values[...], self.embed_scales[...], 1).T
        return dequantised(self.head_values[...], self.head_scales[...], 0)

    def tables(self, dtype: FloatName) -> tuple[Float[Array, "V D"], Float[Array, "D V"]]:
        """What `embed` looks up in `dtype`, and `head_kernel`."""
        return dequantised(self.embed_values[...], self.embed_scales[...], 1).astype(dtype), self.head_kernel()
