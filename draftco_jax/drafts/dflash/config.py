"""Fields of a DFlash draft."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from draftco_jax.drafts.blocks.config import BlockDraftConfig, published_decay, values_for

if TYPE_CHECKING:
    from flax import nnx

    from draftco_jax.drafts.dflash.module import DFlash
    from draftco_jax.models.transformer import DecoderConfig


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(BlockDraftConfig):
    """A block of B = `block_size` rows; row 0 holds the anchor and is not read, so B - 1 drafts.

    The published loss is the cross-entropy of the texts' own tokens.
    """

    training_fields: ClassVar[tuple[str, ...]] = (*BlockDraftConfig.training_fields, "proposals")

    proposals: Literal["argmax", "sample"] = "argmax"
    """argmax: each draft is the likeliest token of its row, as published, and its law is one-hot. sample: drawn from
    the law of its row. Both leave the law of the output as it is."""

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return self.block_size

    @property
    def max_draft_length(self) -> int:
        """Drafts of a block."""
        return self.block_size - 1

    def build(self, rngs: nnx.Rngs) -> DFlash:
        """The Flax module with freshly drawn weights."""
        from draftco_jax.drafts.dflash.module import DFlash

        return DFlash(self, rngs=rngs)

    @classmethod
    def for_target(cls, target: DecoderConfig, *, mask_token_id: int, **changes: Any) -> DFlashConfig:
        """A draft of the policy's own width with the published taps, block and decay."""
        decay = published_decay(changes.get("block_size", 16))
        return cls(**values_for(target, {"mask_token_id": mask_token_id, "loss_decay_gamma": decay} | changes))
