"""Qwen3-MoE: Qwen3 attention, and experts in the place of the MLP."""

from __future__ import annotations

from dataclasses import dataclass

from flax import nnx

from draftco_jax.models.block import Block
from draftco_jax.models.full_attention import FullAttention
from draftco_jax.models.moe import MoE, MoEConfig
from draftco_jax.models.moe_routing import RouterConfig
from draftco_jax.models.transformer import DecoderConfig, pre_norm_block


@dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig(DecoderConfig):
    """Sizes of a Qwen3-MoE policy. `intermediate_size` is not used by experts; drafts take it as their own width."""

    moe_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool = True

    @property
    def mixture(self) -> MoEConfig:
        """Its experts."""
        return MoEConfig(
            hidden_size=self.hidden_size,
            moe_intermediate_size=self.moe_intermediate_size,
            router=RouterConfig(
                num_experts=self.num_experts,
                num_experts_per_tok=self.num_experts_per_tok,
                norm_topk_prob=self.norm_topk_prob,
            ),
        )

    def block(self, index: int, rngs: nnx.Rngs) -> Block:
        """Every block: attention with per-head norms, experts."""
        del index
        attention = FullAttention(self.attention(qk_norm="cast_first"), rngs=rngs)
        experts = MoE(self.mixture, rngs=rngs, down_init=nnx.initializers.normal(self.output_scale))
        return pre_norm_block(self, ("self_attn", attention), experts, rngs)

    @classmethod
    def qwen3_30b_a3b(cls) -> Qwen3MoeConfig:
        """Qwen3-30B-A3B as published."""
        return cls(
            vocab_size=151936,
            hidden_size=2048,
            intermediate_size=6144,
            num_hidden_layers=48,
            num_attention_heads=32,
            num_key_value_heads=4,
            head_dim=128,
            moe_intermediate_size=768,
            num_experts=128,
            num_experts_per_tok=8,
        )

    @classmethod
    def qwen3_235b_a22b(cls) -> Qwen3MoeConfig:
        """Qwen3-235B-A22B as published."""
        return cls(
            vocab_size=151936,
            hidden_size=4096,
            intermediate_size=12288,
            num_hidden_layers=94,
            num_attention_heads=64,
            num_key_value_heads=4,
            head_dim=128,
            moe_intermediate_size=1536,
            num_experts=128,
            num_experts_per_tok=8,
        )

    @classmethod
    def tiny(cls) -> Qwen3MoeConfig:
        """A few thousand weights, four experts: for tests and first steps."""
        return cls(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=512,
            moe_intermediate_size=8,
            num_experts=4,
            num_experts_per_tok=2,
        )
