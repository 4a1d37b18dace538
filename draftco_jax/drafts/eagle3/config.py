"""Fields of an EAGLE-3 draft."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from draftco_jax.drafts.base import DraftConfig, check_model_draft, check_tap_layers, sizes_from
from draftco_jax.losses.draft import DraftLossConfig
from draftco_jax.models.transformer import DecoderConfig, check_sizes

if TYPE_CHECKING:
    from flax import nnx

    from draftco_jax.drafts.eagle3.module import Eagle3


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(DraftConfig):
    """Sizes, variant flags and training constants of an EAGLE-3 draft; all flags off is the classic one."""

    training_fields: ClassVar[tuple[str, ...]] = ("passes", "pass_decay", "label_mask", "loss")

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
    norm_before_residual: bool = False
    """The residual of attention is the normed hidden state."""
    norm_before_fc: bool = False
    """One norm over all taps before they are fused (gpt-oss drafts)."""
    fc_norm: bool = False
    """One norm for each tap before they are fused (EAGLE-3.1)."""
    norm_output: bool = False
    """The state fed back, and read by the head, is the one after the final norm (EAGLE-3.1)."""
    qk_norm: bool = False
    """Per-head norm of queries and keys (DeepSpec's Qwen3 variant)."""
    passes: int = 3
    """Training-time-test passes; 3 in co-training, 7 in pre-training."""
    pass_decay: float = 0.8
    """Pass k weighs pass_decay^k."""
    label_mask: Literal["label", "official"] = "label"
    """label: pass k at t is trained where x_{t+2+k} is supervised. official: where x_{t+k} is, as SpecForge does."""
    loss: DraftLossConfig = DraftLossConfig(soft_cross_entropy=1.0)

    def __post_init__(self) -> None:
        """Refuse sizes that do not fit together."""
        check_tap_layers(self.tap_layers)
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
        taps = {"tap_layers": tap_layers or default, "draft_vocab_size": target.vocab_size}
        return cls(**(sizes_from(target) | taps | changes))

    @property
    def label_reach(self) -> int:
        """Tokens after an index that its labels lie within."""
        return self.passes + 1

    def check_target(self, target: DecoderConfig) -> None:
        """Raise ValueError where this draft cannot read that target."""
        check_model_draft(self, target)

    def check_run(self, *, from_checkpoint: bool) -> None:
        """A reduced vocabulary needs the map of a checkpoint."""
        if self.draft_vocab_size < self.vocab_size and not from_checkpoint:
            raise ValueError(
                f"draft.draft_vocab_size={self.draft_vocab_size} is below vocab_size={self.vocab_size} without a map "
                "from draft ids to target ids; give a draft_checkpoint with d2t, or set it to vocab_size"
            )

    def build(self, rngs: nnx.Rngs) -> Eagle3:
        """The Flax module with freshly drawn weights."""
        from draftco_jax.drafts.eagle3.module import Eagle3

        return Eagle3(self, rngs=rngs)
