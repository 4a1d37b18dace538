"""Fields of an EAGLE-3 draft."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from draftco_jax.models.transformer import DecoderConfig, check_sizes

if TYPE_CHECKING:
    from flax import nnx

    from draftco_jax.drafts.eagle3.module import Eagle3


@dataclass(frozen=True, kw_only=True)
class Eagle3Config:
    """Sizes and training constants of a classic EAGLE-3 draft."""

    tap_layers: tuple[int, ...]
    """Target layers whose outputs are read, 0-based, OUTPUT convention, low to high."""
    vocab_size: int
    draft_vocab_size: int
    """Fewer than `vocab_size` only with a map from draft ids to target ids, which a checkpoint carries."""
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e4
    max_position_embeddings: int = 40960
    passes: int = 3
    """Training-time-test passes; 3 in co-training, 7 in pre-training."""
    pass_decay: float = 0.8
    """Pass k weighs pass_decay^k."""

    def __post_init__(self) -> None:
        """Refuse sizes that do not fit together."""
        if not self.tap_layers or list(self.tap_layers) != sorted(set(self.tap_layers)) or self.tap_layers[0] < 0:
            raise ValueError(f"tap_layers={self.tap_layers} must be increasing layer numbers >= 0; give e.g. (0, 1)")
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            raise ValueError(
                f"draft_vocab_size={self.draft_vocab_size} must be in 1..vocab_size={self.vocab_size}; "
                "set it to vocab_size for a full draft vocabulary"
            )
        check_sizes(self, ("max_position_embeddings",))
        if self.passes < 1:
            raise ValueError(f"passes={self.passes} must be >= 1; 3 is usual in co-training")
        if not 0.0 < self.pass_decay <= 1.0:
            raise ValueError(f"pass_decay={self.pass_decay} must be in (0, 1]; 0.8 is usual")

    @classmethod
    def for_target(
        cls, target: DecoderConfig, *, tap_layers: tuple[int, ...] | None = None, **changes: Any
    ) -> Eagle3Config:
        """A draft of the target's own width that reads three of its layers (all of them below seven layers)."""
        layers = target.num_hidden_layers
        default = (1, layers // 2 - 1, layers - 4) if layers >= 7 else tuple(range(layers))
        values: dict[str, Any] = {
            "tap_layers": tap_layers or default,
            "vocab_size": target.vocab_size,
            "draft_vocab_size": target.vocab_size,
            "hidden_size": target.hidden_size,
            "intermediate_size": target.intermediate_size,
            "num_attention_heads": target.num_attention_heads,
            "num_key_value_heads": target.num_key_value_heads,
            "head_dim": target.head_dim,
            "rms_norm_eps": target.rms_norm_eps,
            "rope_theta": target.rope_theta,
            "max_position_embeddings": target.max_position_embeddings,
        }
        return cls(**(values | changes))

    def check_target(self, target: DecoderConfig) -> None:
        """Raise ValueError where this draft cannot read that target."""
        if self.vocab_size != target.vocab_size:
            raise ValueError(
                f"draft vocab_size={self.vocab_size} must equal the policy's {target.vocab_size}; "
                "use Eagle3Config.for_target(policy)"
            )
        if self.hidden_size != target.hidden_size:
            raise ValueError(
                f"draft hidden_size={self.hidden_size} must equal the policy's {target.hidden_size}, "
                "because the draft reads the policy's embeddings; use Eagle3Config.for_target(policy)"
            )
        if self.tap_layers[-1] >= target.num_hidden_layers:
            raise ValueError(
                f"tap_layers={self.tap_layers} must be below num_hidden_layers={target.num_hidden_layers} of the "
                "policy; layers are counted from 0"
            )
        if self.max_position_embeddings < target.max_position_embeddings:
            raise ValueError(
                f"draft max_position_embeddings={self.max_position_embeddings} must be >= the policy's "
                f"{target.max_position_embeddings}, or drafts past it are noise; raise it in the draft's config"
            )

    def build(self, rngs: nnx.Rngs) -> Eagle3:
        """The Flax module with freshly drawn weights."""
        from draftco_jax.drafts.eagle3.module import Eagle3

        return Eagle3(self, rngs=rngs)
