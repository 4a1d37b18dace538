"""DFlash (z-lab): a block whose rows after the first name the tokens at their own places, all in one pass."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from draftco_jax.drafts.base import DraftSampling, Proposal, Shared
from draftco_jax.drafts.blocks.body import BlockDraft, BlockState, head_logits
from draftco_jax.drafts.dflash.config import DFlashConfig
from draftco_jax.numerics.sampling import draw


class DFlash(BlockDraft):
    """Row j, j >= 1, gives the law of x_{a+j}, whatever the drafts before it are."""

    cfg: DFlashConfig

    def propose(
        self,
        state: BlockState,
        newest: Int[Array, " B"],
        anchor: Int[Array, " B"],
        uniforms: Float[Array, "B k"],
        sampling: DraftSampling,
        shared: Shared,
    ) -> tuple[Proposal, BlockState]:
        """The first k drafts of the block, each with the law it was taken from.

        With `proposals` "argmax" a draft is certain given the context, so its law is one-hot and verification accepts
        it with probability p(draft); uniforms are not used.
        """
        count = uniforms.shape[1]
        self.check_length(count)
        logits = head_logits(self.block(state, newest, anchor, shared)[:, :count], shared.head)
        if self.cfg.proposals == "argmax":
            tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
            laws = jax.nn.one_hot(tokens, logits.shape[-1], dtype=jnp.float32)
        else:
            laws = sampling.law(logits)
            tokens = draw(laws, uniforms)
        return Proposal(tokens, laws, jnp.full(newest.shape, count, jnp.int32)), state

    def label_features(
        self, states: Float[Array, "R C d D"], previous: Int[Array, "R C d"], head: Float[Array, "D V"]
    ) -> tuple[Float[Array, "R C d D"], Float[Array, "D V"]]:
        """What the logits of training labels are the product of: states and the policy's head."""
        del previous
        return states, head
