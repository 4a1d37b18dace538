"""Fields of a multi-token prediction head."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from draftco_jax.drafts.base import DraftConfig, check_model_draft, sizes_from
from draftco_jax.losses.draft import DraftLossConfig
from draftco_jax.models.layers import NormRule
from draftco_jax.models.transformer import DecoderConfig, check_sizes

if TYPE_CHECKING:
    from flax import nnx

    from draftco_jax.drafts.mtp.module import Mtp

ATTENTION = ("block", "full_attention", "attention")
"""Kinds of blocks (`DecoderConfig.layer_kinds`) that attend to all keys."""
FEED_FORWARD = ("moe", "mlp")
"""Kinds of blocks that work on each token alone."""


@dataclass(frozen=True, kw_only=True)
class MtpConfig(DraftConfig):
    """Sizes, style and training constants.

    The body is one dense layer with query and key norms, or the blocks of a policy family (`layer`). DeepSeek's latent
    attention and MiMo's attention biases are not part of it.
    """

    training_fields: ClassVar[tuple[str, ...]] = ("steps", "step_decay", "attention_pattern", "loss")
    tap_layers: ClassVar[tuple[int, ...]] = ()

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e7
    max_position_embeddings: int = 262144
    style: Literal["qwen3_5", "deepseek", "mimo"] = "qwen3_5"
    """Whose conventions: order of the fused pair, what is fed back, how norms store weights, the first embedding.

    The hidden state that the first step reads is the policy's AFTER its final norm in every style."""
    layer: DecoderConfig | None = None
    """Body of the head: the blocks of this config, which say their attention, experts, rotation and norm rule
    themselves. None: one dense layer, of the fields here. Sizes must be those of this config (`for_target`)."""
    attention_output_gate: bool = False
    """Heads are multiplied by sigmoid of a gate that q_proj makes beside each query (Qwen3.5)."""
    rotary_fraction: float = 1.0
    """Leading share of each head that is rotated; 0.25 in Qwen3.5."""
    steps: int = 3
    """K training steps: recursive uses of the one layer."""
    step_decay: float = 0.6
    """Step k weighs step_decay^k over the sum of all steps' weights."""
    attention_pattern: Literal["chain", "step"] = "chain"
    """Which keys a training step sees. chain: those that drafting with one cache has, so training is what inference
    does. step: those of the same step only, at unshifted positions, as FastMTP trains."""
    loss: DraftLossConfig = DraftLossConfig(hard_cross_entropy=1.0)

    def __post_init__(self) -> None:
        """Refuse sizes that do not fit together."""
        check_sizes(self, ("vocab_size", "max_position_embeddings"))
        if not 0.0 < self.rotary_fraction <= 1.0 or self.rotary_width % 2 or self.rotary_width < 2:
            raise ValueError(
                f"rotary_fraction={self.rotary_fraction} must be in (0, 1] and leave an even number of the "
                f"head_dim={self.head_dim} to rotate; 1.0 rotates all, 0.25 is usual in Qwen3.5"
            )
        if self.layer is not None:
            _check_layer(self, self.layer)
        if self.steps < 1:
            raise ValueError(f"steps={self.steps} must be >= 1; 3 is usual")
        if not 0.0 < self.step_decay <= 1.0:
            raise ValueError(f"step_decay={self.step_decay} must be in (0, 1]; 0.6 is usual")

    @property
    def rotary_width(self) -> int:
        """Entries of a head that are rotated."""
        return int(self.head_dim * self.rotary_fraction)

    @property
    def hidden_first(self) -> bool:
        """Whether fc reads [hidden ; embedding] (MiMo) and not [embedding ; hidden] (Qwen3.5, DeepSeek)."""
        return self.style == "mimo"

    @property
    def feeds_back_normed(self) -> bool:
        """Whether the next step reads the output after the final norm (Qwen3.5) or before it (DeepSeek).

        For MiMo no source that we have read settles it; after the norm is our choice.
        """
        return self.style != "deepseek"

    @property
    def norm_rule(self) -> NormRule:
        """What a norm multiplies by: 1 + weight (Qwen3.5) or weight. A head of policy blocks has their rule."""
        if self.layer is not None:
            return self.layer.norm_rule
        return "offset" if self.style == "qwen3_5" else "cast_first"

    @property
    def zeroes_first_embedding(self) -> bool:
        """Whether the embedding read at position 0 is replaced by zeros (DeepSeek)."""
        return self.style == "deepseek"

    @property
    def step_weights(self) -> tuple[float, ...]:
        """step_decay^k, normalised to sum 1 over the K steps."""
        total = sum(self.step_decay**k for k in range(self.steps))
        return tuple(self.step_decay**k / total for k in range(self.steps))

    @classmethod
    def for_target(cls, target: DecoderConfig, *, like_policy: bool = False, **changes: Any) -> MtpConfig:
        """A head of the target's own sizes: a dense layer or, `like_policy`, a block of the target's own family."""
        body: dict[str, Any] = {"layer": one_layer_of(target)} if like_policy else {}
        return cls(**(sizes_from(target) | body | changes))

    @property
    def label_reach(self) -> int:
        """Tokens after an index that its labels lie within."""
        return self.steps + 1

    def check_target(self, target: DecoderConfig) -> None:
        """Raise ValueError where this draft cannot read that target."""
        check_model_draft(self, target)

    def build(self, rngs: nnx.Rngs) -> Mtp:
        """The Flax module with freshly drawn weights."""
        from draftco_jax.drafts.mtp.module import Mtp

        return Mtp(self, rngs=rngs)


def one_layer_of(target: DecoderConfig) -> DecoderConfig:
    """The blocks of a head as the family has them: full attention, then experts or MLP, and nothing recurrent."""
    names = {field.name for field in fields(target)}
    if "block_types" in names:  # Nemotron-H: attention and experts are blocks of their own
        feed_forward = next((kind for kind in FEED_FORWARD if kind in target.layer_kinds), FEED_FORWARD[0])
        changes: dict[str, Any] = {"num_hidden_layers": 2, "block_types": ("attention", feed_forward)}
    else:
        changes = {"num_hidden_layers": 1} | ({"layer_types": ("full_attention",)} if "layer_types" in names else {})
    return replace(target, **changes)


def _check_layer(cfg: MtpConfig, layer: DecoderConfig) -> None:
    """Refuse blocks of other sizes, blocks that a chain of steps cannot run, and a body stated twice."""
    for name, value in sizes_from(layer).items():
        if getattr(cfg, name) != value:
            raise ValueError(
                f"{name}={getattr(cfg, name)} must equal that of layer, {value}; "
                "use MtpConfig.for_target(policy, like_policy=True)"
            )
    if cfg.attention_output_gate or cfg.rotary_fraction != 1.0:
        raise ValueError(
            f"attention_output_gate={cfg.attention_output_gate}, rotary_fraction={cfg.rotary_fraction} must be left "
            "out where layer is given, which says them itself; remove them"
        )
    strange = [kind for kind in layer.layer_kinds if kind not in ATTENTION + FEED_FORWARD]
    if strange or not any(kind in ATTENTION for kind in layer.layer_kinds):
        raise ValueError(
            f"layer of blocks {layer.layer_kinds} must have attention to all keys and nothing recurrent or in a "
            "window; use MtpConfig.for_target(policy, like_policy=True)"
        )
