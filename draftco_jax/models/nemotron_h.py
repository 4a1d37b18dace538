"""Nemotron-H: blocks of one kind each, by a pattern: Mamba-2, attention without positions, experts, MLP."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from flax import nnx

from draftco_jax.models.block import Block
from draftco_jax.models.full_attention import FullAttention
from draftco_jax.models.gpt_oss import check_layer_types
from draftco_jax.models.layers import NormRule
from draftco_jax.models.mamba2 import Mamba2, Mamba2Sizes
from draftco_jax.models.moe import MoE, MoEConfig, SquaredReluMLP
from draftco_jax.models.moe_routing import RouterConfig
from draftco_jax.models.transformer import DecoderConfig

BlockKind = Literal["mamba", "attention", "moe", "mlp"]
PATTERN: dict[str, BlockKind] = {"M": "mamba", "*": "attention", "E": "moe", "-": "mlp"}
SPELLINGS: dict[str, BlockKind] = {"linear_attention": "mamba", "full_attention": "attention"}
NANO_30B = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"


@dataclass(frozen=True, kw_only=True)
class NemotronHConfig(DecoderConfig):
    """Sizes of a Nemotron-H policy."""

    block_types: tuple[BlockKind, ...]
    """One for each block."""
    mamba_num_heads: int
    mamba_head_dim: int
    ssm_state_size: int
    n_groups: int
    moe_intermediate_size: int
    moe_shared_expert_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float = 2.5
    norm_topk_prob: bool = True
    conv_kernel: int = 4
    chunk_size: int = 128
    time_step_limit: tuple[float, float | None] = (0.0, None)
    """Bounds of dt (None: no upper one), everywhere the same; transformers clamps at time_step_min in prefill alone."""
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 262144

    def __post_init__(self) -> None:
        """Refuse patterns that do not fit the blocks."""
        super().__post_init__()
        check_layer_types(self.block_types, self.num_hidden_layers, tuple(PATTERN.values()))
        _ = self.mamba  # checks its sizes

    @property
    def rotary(self) -> None:
        """Attention has no positions."""

    @property
    def norm_rule(self) -> NormRule:
        """The weight is multiplied in float32."""
        return "cast_last"

    @property
    def layer_kinds(self) -> tuple[BlockKind, ...]:
        """As stated."""
        return self.block_types

    @property
    def recurrent(self) -> bool:
        """Mamba-2 blocks are."""
        return "mamba" in self.block_types

    @property
    def mamba(self) -> Mamba2Sizes:
        """Its recurrent mixers."""
        low, high = self.time_step_limit
        return Mamba2Sizes(
            hidden_size=self.hidden_size,
            heads=self.mamba_num_heads,
            head_dim=self.mamba_head_dim,
            state=self.ssm_state_size,
            groups=self.n_groups,
            conv_width=self.conv_kernel,
            eps=self.rms_norm_eps,
            time_step_limit=(low, math.inf if high is None else high),
            chunk=self.chunk_size,
        )

    @property
    def mixture(self) -> MoEConfig | None:
        """Its experts; None where no block has any."""
        return self._experts if "moe" in self.block_types else None

    @property
    def _experts(self) -> MoEConfig:
        return MoEConfig(
            hidden_size=self.hidden_size,
            moe_intermediate_size=self.moe_intermediate_size,
            router=RouterConfig(
                num_experts=self.n_routed_experts,
                num_experts_per_tok=self.num_experts_per_tok,
                kind="sigmoid_bias",
                norm_topk_prob=self.norm_topk_prob,
                routed_scaling_factor=self.routed_scaling_factor,
            ),
            expert="relu2",
            shared_expert_intermediate_size=self.moe_shared_expert_intermediate_size,
        )

    def block(self, index: int, rngs: nnx.Rngs) -> Block:
        """One mixer, or one MLP or mixture, after one norm."""
        kind, init = self.block_types[index], nnx.initializers.normal(self.output_scale)
        norm = lambda: self.make_norm(rngs)  # noqa: E731
        if kind == "mamba":
            return Block(mixer=("norm", "mixer", Mamba2(self.mamba, rngs=rngs, out_init=init)), ffn=None, norm=norm)
        if kind == "attention":
            attention = FullAttention(self.attention(), rngs=rngs)
            return Block(mixer=("norm", "mixer", attention), ffn=None, norm=norm)
        if kind == "moe":
            ffn: nnx.Module = MoE(self._experts, rngs=rngs, down_init=init)
        else:
            ffn = SquaredReluMLP(self.hidden_size, self.intermediate_size, rngs=rngs, down_init=init)
        return Block(mixer=None, ffn=("norm", "mixer", ffn), norm=norm)

    @classmethod
    def nemotron3_nano_30b(cls) -> NemotronHConfig:
        """Nemotron-3-Nano-30B-A3B as published."""
        return cls(
            vocab_size=131072,
            hidden_size=2688,
            intermediate_size=1856,
            num_hidden_layers=52,
            num_attention_heads=32,
            num_key_value_heads=2,
            head_dim=128,
            block_types=tuple(PATTERN[letter] for letter in NANO_30B),
            mamba_num_heads=64,
            mamba_head_dim=64,
            ssm_state_size=128,
            n_groups=8,
            moe_intermediate_size=1856,
            moe_shared_expert_intermediate_size=3712,
            n_routed_experts=128,
            num_experts_per_tok=6,
        )

    @classmethod
    def tiny(cls) -> NemotronHConfig:
        """A few thousand weights, two blocks of each kind: for tests and first steps."""
        return cls(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=8,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=512,
            block_types=("mamba", "moe", "attention", "mlp") * 2,
            mamba_num_heads=4,
            mamba_head_dim=8,
            ssm_state_size=8,
            n_groups=2,
            moe_intermediate_size=8,
            moe_shared_expert_intermediate_size=8,
            n_routed_experts=4,
            num_experts_per_tok=2,
            chunk_size=8,
        )
