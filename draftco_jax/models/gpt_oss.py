"""GPT-OSS: attention sinks, every other layer in a sliding window, YaRN, biases, and clamped experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flax import nnx

from draftco_jax.models.block import Block
from draftco_jax.models.full_attention import FullAttention
from draftco_jax.models.moe import MoE, MoEConfig
from draftco_jax.models.moe_routing import RouterConfig
from draftco_jax.models.rotary import Rotary, Scaling, YarnScaling
from draftco_jax.models.transformer import DecoderConfig, pre_norm_block

LayerKind = Literal["sliding_attention", "full_attention"]
PUBLISHED_ROPE = YarnScaling(factor=32.0, original_max_position_embeddings=4096, truncate=False)


@dataclass(frozen=True, kw_only=True)
class GptOssConfig(DecoderConfig):
    """Sizes of a GPT-OSS policy; `intermediate_size` is that of one expert."""

    num_experts: int
    num_experts_per_tok: int
    layer_types: tuple[LayerKind, ...]
    """One for each layer."""
    sliding_window: int = 128
    swiglu_limit: float = 7.0
    swiglu_alpha: float = 1.702
    rms_norm_eps: float = 1e-5
    rope_theta: float = 150000.0
    rope_scaling: Scaling | None = None
    max_position_embeddings: int = 131072

    def __post_init__(self) -> None:
        """Refuse patterns that do not fit the layers."""
        super().__post_init__()
        check_layer_types(self.layer_types, self.num_hidden_layers, ("sliding_attention", "full_attention"))
        if self.sliding_window < 1:
            raise ValueError(f"sliding_window={self.sliding_window} must be >= 1, a token sees itself; GPT-OSS has 128")

    @property
    def rotary(self) -> Rotary:
        """All dims of a head, frequencies scaled."""
        return Rotary(width=self.head_dim, theta=self.rope_theta, scaling=self.rope_scaling)

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """By window."""
        return self.layer_types

    @property
    def mixture(self) -> MoEConfig:
        """Its experts."""
        return MoEConfig(
            hidden_size=self.hidden_size,
            moe_intermediate_size=self.intermediate_size,
            router=RouterConfig(
                num_experts=self.num_experts, num_experts_per_tok=self.num_experts_per_tok, kind="topk_softmax"
            ),
            expert="clamped_swiglu",
            swiglu_limit=self.swiglu_limit,
            swiglu_alpha=self.swiglu_alpha,
        )

    def block(self, index: int, rngs: nnx.Rngs) -> Block:
        """Attention with sinks, in the layer's window, then experts."""
        window = self.sliding_window if self.layer_types[index] == "sliding_attention" else None
        attention = FullAttention(self.attention(bias=True, sinks=True, window=window), rngs=rngs)
        experts = MoE(self.mixture, rngs=rngs, down_init=nnx.initializers.normal(self.output_scale))
        return pre_norm_block(self, ("self_attn", attention), experts, rngs)

    @classmethod
    def _published(cls, layers: int, experts: int) -> GptOssConfig:
        return cls(
            vocab_size=201088,
            hidden_size=2880,
            intermediate_size=2880,
            num_hidden_layers=layers,
            num_attention_heads=64,
            num_key_value_heads=8,
            head_dim=64,
            num_experts=experts,
            num_experts_per_tok=4,
            layer_types=("sliding_attention", "full_attention") * (layers // 2),
            rope_scaling=PUBLISHED_ROPE,
        )

    @classmethod
    def gpt_oss_20b(cls) -> GptOssConfig:
        """gpt-oss-20b as published."""
        return cls._published(24, 32)

    @classmethod
    def gpt_oss_120b(cls) -> GptOssConfig:
        """gpt-oss-120b as published."""
        return cls._published(36, 128)

    @classmethod
    def tiny(cls) -> GptOssConfig:
        """A few thousand weights, four experts, a window of 4: for tests and first steps."""
        return cls(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=8,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=512,
            num_experts=4,
            num_experts_per_tok=2,
            layer_types=("sliding_attention", "full_attention") * 2,
            sliding_window=4,
            rope_scaling=YarnScaling(factor=4.0, original_max_position_embeddings=16, truncate=False),
        )


def check_layer_types(types: tuple[str, ...], layers: int, known: tuple[str, ...]) -> None:
    """Refuse a pattern of another length, or with a kind that the family does not have."""
    strange = sorted(set(types) - set(known))
    if len(types) != layers or strange:
        raise ValueError(
            f"layer_types={types} must be num_hidden_layers={layers} of {known}; take the list of the checkpoint"
        )
