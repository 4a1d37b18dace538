"""Qwen3.5-MoE: three gated delta nets to one gated attention of partial rotation; experts, one of them shared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flax import nnx

from draftco_jax.models.block import Block
from draftco_jax.models.full_attention import FullAttention
from draftco_jax.models.gated_delta import GatedDeltaNet
from draftco_jax.models.gpt_oss import check_layer_types
from draftco_jax.models.layers import NormRule
from draftco_jax.models.moe import MoE, MoEConfig
from draftco_jax.models.moe_routing import RouterConfig
from draftco_jax.models.rotary import Rotary
from draftco_jax.models.transformer import DecoderConfig, pre_norm_block

LayerKind = Literal["linear_attention", "full_attention"]


@dataclass(frozen=True, kw_only=True)
class Qwen35MoeConfig(DecoderConfig):
    """Sizes of a Qwen3.5-MoE policy (its text part). `intermediate_size` is a width for drafts alone."""

    layer_types: tuple[LayerKind, ...]
    """One for each layer."""
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    linear_conv_kernel_dim: int = 4
    partial_rotary_factor: float = 0.25
    rope_theta: float = 1e7
    max_position_embeddings: int = 262144

    def __post_init__(self) -> None:
        """Refuse patterns that do not fit the layers."""
        super().__post_init__()
        check_layer_types(self.layer_types, self.num_hidden_layers, ("linear_attention", "full_attention"))
        for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim"):
            if getattr(self, f"linear_{name}") < 1:
                raise ValueError(f"linear_{name}={getattr(self, f'linear_{name}')} must be >= 1; set it to the model's")
        if self.linear_num_value_heads % self.linear_num_key_heads:
            raise ValueError(
                f"linear_num_value_heads={self.linear_num_value_heads} must be a multiple of "
                f"linear_num_key_heads={self.linear_num_key_heads}; change one of them"
            )

    @property
    def rotary(self) -> Rotary:
        """The first quarter of a head, as published."""
        return Rotary(width=int(self.head_dim * self.partial_rotary_factor), theta=self.rope_theta)

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """By mixer."""
        return self.layer_types

    @property
    def recurrent(self) -> bool:
        """Gated delta nets are."""
        return "linear_attention" in self.layer_types

    @property
    def norm_rule(self) -> NormRule:
        """Norm weights are stored around 0."""
        return "offset"

    @property
    def mixture(self) -> MoEConfig:
        """Its experts."""
        return MoEConfig(
            hidden_size=self.hidden_size,
            moe_intermediate_size=self.moe_intermediate_size,
            router=RouterConfig(num_experts=self.num_experts, num_experts_per_tok=self.num_experts_per_tok),
            shared_expert_intermediate_size=self.shared_expert_intermediate_size,
            shared_expert_gate=True,
        )

    def block(self, index: int, rngs: nnx.Rngs) -> Block:
        """The layer's mixer, then experts."""
        init = nnx.initializers.normal(self.output_scale)
        experts = MoE(self.mixture, rngs=rngs, down_init=init)
        if self.layer_types[index] == "full_attention":
            attention = FullAttention(self.attention(qk_norm="offset", gated=True), rngs=rngs)
            return pre_norm_block(self, ("self_attn", attention), experts, rngs)
        mixer = GatedDeltaNet(
            self.hidden_size,
            key_heads=self.linear_num_key_heads,
            value_heads=self.linear_num_value_heads,
            key_dim=self.linear_key_head_dim,
            value_dim=self.linear_value_head_dim,
            conv_width=self.linear_conv_kernel_dim,
            eps=self.rms_norm_eps,
            rngs=rngs,
            out_init=init,
        )
        return pre_norm_block(self, ("linear_attn", mixer), experts, rngs)

    @classmethod
    def _published(cls, layers: int, hidden: int, heads: int, values: int, expert: int) -> Qwen35MoeConfig:
        period: tuple[LayerKind, ...] = ("linear_attention", "linear_attention", "linear_attention", "full_attention")
        return cls(
            vocab_size=248320,
            hidden_size=hidden,
            intermediate_size=4 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=2,
            head_dim=256,
            layer_types=period * (layers // 4),
            linear_num_key_heads=16,
            linear_num_value_heads=values,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            moe_intermediate_size=expert,
            shared_expert_intermediate_size=expert,
            num_experts=256,
            num_experts_per_tok=8,
        )

    @classmethod
    def qwen35_35b_a3b(cls) -> Qwen35MoeConfig:
        """Qwen3.5-35B-A3B as published."""
        return cls._published(40, 2048, 16, 32, 512)

    @classmethod
    def qwen35_122b_a10b(cls) -> Qwen35MoeConfig:
        """Qwen3.5-122B-A10B, from two copies of its config that agree (not the published file itself)."""
        return cls._published(48, 3072, 32, 64, 1024)

    @classmethod
    def tiny(cls) -> Qwen35MoeConfig:
        """A few thousand weights, two layers of each kind: for tests and first steps."""
        return cls(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=512,
            layer_types=("linear_attention", "full_attention") * 2,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            shared_expert_intermediate_size=8,
            moe_intermediate_size=8,
            num_experts=4,
            num_experts_per_tok=2,
        )
