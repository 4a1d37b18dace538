"""Fields of a draft that repeats the previous epoch's text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from draftco_jax.drafts.base import DraftConfig
from draftco_jax.models.transformer import DecoderConfig

if TYPE_CHECKING:
    from flax import nnx

    from draftco_jax.drafts.previous.module import Previous


@dataclass(frozen=True, kw_only=True)
class PreviousConfig(DraftConfig):
    """Whose weights wrote the earlier texts, and how long these may be."""

    tap_layers: ClassVar[tuple[int, ...]] = ()
    policy: DecoderConfig
    """The policy being trained: the draft's weights are an older version of it."""
    history_tokens: int
    """H: room for a request's earlier text, prompt included; a longer one is cut."""

    def __post_init__(self) -> None:
        """Refuse texts that the policy cannot read."""
        if not 1 <= self.history_tokens <= self.policy.max_position_embeddings:
            raise ValueError(
                f"history_tokens={self.history_tokens} must be in 1..max_position_embeddings="
                f"{self.policy.max_position_embeddings} of the policy; prompt capacity + max_new_tokens fits all texts"
            )

    def check_target(self, target: DecoderConfig) -> None:
        """Raise ValueError where the old policy is another model."""
        if target != self.policy:
            raise ValueError(
                f"draft policy={self.policy} must equal the run's policy {target}, it is an older version of it; "
                "use PreviousConfig(policy=policy)"
            )

    def check_run(self, *, from_checkpoint: bool) -> None:
        """Refuse the training loop: its texts are of many versions of the policy, and exactness needs the very one."""
        raise ValueError(
            "draft=PreviousConfig must not be trained with: earlier texts were drawn by other weights than the draft's "
            "own, so the output would not follow the policy; use it through the engine, or choose the suffix draft"
        )

    def build(self, rngs: nnx.Rngs) -> Previous:
        """The Flax module with freshly drawn weights."""
        from draftco_jax.drafts.previous.module import Previous

        return Previous(self, rngs=rngs)
