"""Llama (and SmolLM2, Mistral without window): the plain dense decoder, with the long-context rotary of Llama 3.1."""

from __future__ import annotations

from dataclasses import dataclass

from flax import nnx

from draftco_jax.models.block import Block
from draftco_jax.models.full_attention import FullAttention
from draftco_jax.models.rotary import Llama3Scaling, Rotary, Scaling
from draftco_jax.models.transformer import DecoderConfig, pre_norm_block


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    """Sizes of a Llama policy."""

    rms_norm_eps: float = 1e-5
    rope_theta: float = 1e4
    rope_scaling: Scaling | None = None

    @property
    def rotary(self) -> Rotary:
        """All dims of a head, frequencies scaled."""
        return Rotary(width=self.head_dim, theta=self.rope_theta, scaling=self.rope_scaling)

    def block(self, index: int, rngs: nnx.Rngs) -> Block:
        """Every block: attention, SwiGLU."""
        del index
        attention = FullAttention(self.attention(), rngs=rngs)
        return pre_norm_block(self, ("self_attn", attention), self.gated_mlp(rngs), rngs)

    @classmethod
    def llama31_8b(cls) -> LlamaConfig:
        """Llama-3.1-8B as published."""
        return cls(
            vocab_size=128256,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            rope_theta=5e5,
            max_position_embeddings=131072,
            rope_scaling=Llama3Scaling(
                factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
            ),
        )

    @classmethod
    def smollm2_135m(cls) -> LlamaConfig:
        """SmolLM2-135M as published."""
        return cls(
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            head_dim=64,
            rope_theta=1e5,
            max_position_embeddings=8192,
            tie_word_embeddings=True,
        )

    @classmethod
    def tiny(cls) -> LlamaConfig:
        """A few thousand weights, scaled rotary: for tests and first steps."""
        return cls(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=512,
            rope_scaling=Llama3Scaling(
                factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16
            ),
        )
