"""DFlash (z-lab): a block whose rows after the first name the tokens at their own places, all in one pass."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from draftco_jax.drafts.base import DraftSampling, Growth, Proposal, Shared, TreeCall
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

    @property
    def draws_tokens(self) -> bool:
        """As `proposals` says."""
        return self.cfg.proposals == "sample"

    def begin_tree(self, state: BlockState, call: TreeCall) -> Growth:
        """The block says the laws of all depths at once; `branches` keeps them, [B, D, V]."""
        depth = call.tree.depth
        self.check_length(depth)
        logits = head_logits(self.block(state, call.newest, call.anchor, call.shared)[:, :depth], call.shared.head)
        laws = call.sampling.law(logits)
        return Growth(laws[:, :1], state, laws)

    def extend_tree(self, growth: Growth, depth: int, tokens: Int[Array, "B m"], call: TreeCall) -> Growth:
        """The law of a depth, after whatever token."""
        laws = growth.branches[:, depth, None]
        return growth._replace(laws=jnp.broadcast_to(laws, (*tokens.shape, laws.shape[-1])))

    def label_features(
        self, states: Float[Array, "R C d D"], previous: Int[Array, "R C d"], head: Float[Array, "D V"]
    ) -> tuple[Float[Array, "R C d D"], Float[Array, "D V"]]:
        """What the logits of training labels are the product of: states and the policy's head."""
        del previous
        return states, head
