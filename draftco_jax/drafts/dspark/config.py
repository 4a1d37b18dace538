"""Fields of a DSpark draft."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from draftco_jax.drafts.blocks.config import BlockDraftConfig, values_for
from draftco_jax.losses.draft import DraftLossConfig

if TYPE_CHECKING:
    from flax import nnx

    from draftco_jax.drafts.dspark.module import DSpark
    from draftco_jax.models.transformer import DecoderConfig


@dataclass(frozen=True, kw_only=True)
class DSparkConfig(BlockDraftConfig):
    """gamma = `block_size` drafts, each corrected by a low-rank bias of the token before it, and a confidence head.

    The published loss is 0.1 cross-entropy of the texts' own tokens + 0.9 full L1 + 1.0 confidence.
    """

    training_fields: ClassVar[tuple[str, ...]] = (
        *BlockDraftConfig.training_fields,
        "confidence_loss_weight",
        "confidence_cut_inputs",
    )
    cut_at_gap: ClassVar[bool] = True

    block_size: int = 7
    sample_from_anchor: bool = True
    """True: the anchor's own row is the first draft, gamma rows. False: it is not read, gamma + 1 rows."""
    markov_rank: int = 256
    """Width r of the bias W2 W1[previous token]; 0: no bias."""
    markov_head_type: Literal["vanilla", "gated", "rnn"] = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True
    """The confidence head reads W1[previous token] beside the state."""

    loss: DraftLossConfig = field(default_factory=lambda: DraftLossConfig(hard_cross_entropy=0.1, l1=0.9))
    loss_decay_gamma: float | None = 4.0
    confidence_loss_weight: float = 1.0
    confidence_cut_inputs: bool = True
    """No gradient of the confidence loss reaches what the head reads. The official code lets it through."""

    def __post_init__(self) -> None:
        """Refuse heads that do not fit together."""
        super().__post_init__()
        if self.markov_rank < 0:
            raise ValueError(f"markov_rank={self.markov_rank} must be >= 0; use 0 for no Markov head")
        if self.enable_confidence_head and self.confidence_head_with_markov and not self.markov_rank:
            raise ValueError(
                "confidence_head_with_markov=True must be False where markov_rank is 0, there is no W1 to read; "
                "set one of them"
            )
        if not self.confidence_loss_weight >= 0:
            raise ValueError(
                f"confidence_loss_weight={self.confidence_loss_weight} must be >= 0; use 0 to leave the head as it is"
            )

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return self.block_size if self.sample_from_anchor else self.block_size + 1

    @property
    def max_draft_length(self) -> int:
        """Drafts of a block."""
        return self.block_size

    @property
    def trains_confidence(self) -> bool:
        """Whether the loss has a confidence term."""
        return self.enable_confidence_head and self.confidence_loss_weight > 0

    def build(self, rngs: nnx.Rngs) -> DSpark:
        """The Flax module with freshly drawn weights."""
        from draftco_jax.drafts.dspark.module import DSpark

        return DSpark(self, rngs=rngs)

    @classmethod
    def for_target(cls, target: DecoderConfig, *, mask_token_id: int, **changes: Any) -> DSparkConfig:
        """A draft of the policy's own width with the published taps, block, heads and loss."""
        return cls(**values_for(target, {"mask_token_id": mask_token_id} | changes))
