"""Qwen3: the dense decoder with per-head query and key norms."""

from __future__ import annotations

from dataclasses import dataclass

from flax import nnx

from draftco_jax.models.block import Block
from draftco_jax.models.full_attention import FullAttention
from draftco_jax.models.transformer import DecoderConfig, pre_norm_block


@dataclass(frozen=True, kw_only=True)
class Qwen3Config(DecoderConfig):
    """Sizes of a dense Qwen3 policy; field names are those of the published config.json."""

    def block(self, index: int, rngs: nnx.Rngs) -> Block:
        """Every block: attention with per-head norms, SwiGLU."""
        del index
        attention = FullAttention(self.attention(qk_norm="cast_first"), rngs=rngs)
        return pre_norm_block(self, ("self_attn", attention), self.gated_mlp(rngs), rngs)

    @classmethod
    def qwen3_8b(cls) -> Qwen3Config:
        """Qwen3-8B as published."""
        return cls(
            vocab_size=151936,
            hidden_size=4096,
            intermediate_size=12288,
            num_hidden_layers=36,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
        )

    @classmethod
    def tiny(cls, *, vocab_size: int = 32, hidden_size: int = 128, intermediate_size: int = 384) -> Qwen3Config:
        """Two layers, 4 query and 2 key-value heads of width 32, tied head: the arithmetic policies of the demo."""
        return cls(
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            rope_theta=1e4,
            max_position_embeddings=512,
            tie_word_embeddings=True,
        )
