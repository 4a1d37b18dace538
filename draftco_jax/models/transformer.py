"""The decoder-only transformer: whole packed rows for training, cached steps for decoding.

Letters as in `layers`: B batch, T tokens, D width, N heads, K key-value heads, H head width, V vocabulary, plus
A = number of taps * D, the width of the concatenated target features that a draft reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from draftco_jax.context_parallel import WHOLE_ROWS, KeyRange, PackedRows
from draftco_jax.models.attention import attend
from draftco_jax.models.kv_cache import Cache, LayerCache, empty_cache, visible_slots, write
from draftco_jax.models.layers import (
    GatedMLP,
    Linear,
    LinearGroup,
    RMSNorm,
    parameter,
    rotary_angles,
    rotate,
)


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes and constants of a dense pre-norm decoder."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    max_position_embeddings: int = 40960
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        """Refuse sizes that do not fit together."""
        check_sizes(self, ("vocab_size", "num_hidden_layers", "max_position_embeddings"))


def check_sizes(cfg: Any, names: tuple[str, ...]) -> None:
    """Refuse sizes below 1, heads that do not share evenly, and constants no norm or rotation can use."""
    attention = ("num_attention_heads", "num_key_value_heads", "head_dim")
    for name in ("hidden_size", "intermediate_size", *attention, *names):
        if getattr(cfg, name) < 1:
            raise ValueError(f"{name}={getattr(cfg, name)} must be >= 1; set it to the model's size")
    if cfg.num_attention_heads % cfg.num_key_value_heads:
        raise ValueError(
            f"num_attention_heads={cfg.num_attention_heads} must be a multiple of "
            f"num_key_value_heads={cfg.num_key_value_heads}; change one of them"
        )
    if cfg.head_dim % 2:
        raise ValueError(f"head_dim={cfg.head_dim} must be even, rotary pairs need it; use the next even number")
    for name in ("rms_norm_eps", "rope_theta"):
        if not getattr(cfg, name) > 0:
            raise ValueError(f"{name}={getattr(cfg, name)} must be > 0; 1e-6 and 1e6 are usual")


class Attention(nnx.Module):
    """Grouped-query attention with per-head RMSNorm on queries and keys before the rotation (Qwen3)."""

    def __init__(self, cfg: DecoderConfig, *, rngs: nnx.Rngs) -> None:
        self.heads, self.kv_heads, self.width = cfg.num_attention_heads, cfg.num_key_value_heads, cfg.head_dim
        q, kv = self.heads * self.width, self.kv_heads * self.width
        self.qkv = LinearGroup(
            cfg.hidden_size,
            {"q_proj": q, "k_proj": kv, "v_proj": kv},
            {"q_proj": "heads", "k_proj": "kv_heads", "v_proj": "kv_heads"},
            rngs=rngs,
        )
        out_init = nnx.initializers.normal(0.02 / (2 * cfg.num_hidden_layers) ** 0.5)
        self.o_proj = Linear((q, cfg.hidden_size), ("heads", "embed"), rngs=rngs, init=out_init)
        self.q_norm = RMSNorm(self.width, eps=cfg.rms_norm_eps, rngs=rngs, axis="head_dim")
        self.k_norm = RMSNorm(self.width, eps=cfg.rms_norm_eps, rngs=rngs, axis="head_dim")

    def project(
        self, x: Float[Array, "B T D"], angles: tuple[Array, Array]
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"], Float[Array, "B T K H"]]:
        """Rotated queries and keys, and values."""
        q, k, v = self.qkv(x)
        split = lambda y, n: y.reshape(*y.shape[:2], n, self.width)  # noqa: E731
        q = rotate(self.q_norm(split(q, self.heads)), angles)
        k = rotate(self.k_norm(split(k, self.kv_heads)), angles)
        return q, k, split(v, self.kv_heads)

    def output(self, heads: Float[Array, "B T N H"]) -> Float[Array, "B T D"]:
        """Merge the heads."""
        return self.o_proj(heads.reshape(*heads.shape[:2], -1))


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, cfg: DecoderConfig, *, rngs: nnx.Rngs) -> None:
        self.input_layernorm = RMSNorm(cfg.hidden_size, eps=cfg.rms_norm_eps, rngs=rngs)
        self.self_attn = Attention(cfg, rngs=rngs)
        self.post_attention_layernorm = RMSNorm(cfg.hidden_size, eps=cfg.rms_norm_eps, rngs=rngs)
        down_init = nnx.initializers.normal(0.02 / (2 * cfg.num_hidden_layers) ** 0.5)
        self.mlp = GatedMLP(cfg.hidden_size, cfg.intermediate_size, rngs=rngs, down_init=down_init)

    def __call__(
        self, x: Array, angles: tuple[Array, Array], seen: KeyRange, packed: PackedRows
    ) -> Float[Array, "B T D"]:
        """Packed rows: keys are those of the row itself, wherever they are."""
        q, k, v = self.self_attn.project(self.input_layernorm(x), angles)
        x = x + self.self_attn.output(packed.attention(q, k, v, seen))
        return x + self.mlp(self.post_attention_layernorm(x))

    def step(
        self, x: Array, angles: tuple[Array, Array], mask: Array, cache: LayerCache, start: Array
    ) -> tuple[Float[Array, "B T D"], LayerCache]:
        """A few new tokens: keys are written to the cache and read from it."""
        q, k, v = self.self_attn.project(self.input_layernorm(x), angles)
        cache = write(cache, k, v, start)
        x = x + self.self_attn.output(attend(q, cache.keys, cache.values, mask))
        return x + self.mlp(self.post_attention_layernorm(x)), cache


class Decoder(nnx.Module):
    """Embedding, blocks, final norm, head.

    Taps: the residual stream AFTER the named blocks (OUTPUT convention, 0-based), un-normed, concatenated in the
    order given. They are what a draft reads.
    """

    def __init__(self, cfg: DecoderConfig, *, rngs: nnx.Rngs) -> None:
        self.cfg = cfg
        self.embed_tokens = parameter(
            rngs, (cfg.vocab_size, cfg.hidden_size), ("vocab", "embed"), nnx.initializers.normal(0.02)
        )
        self.layers = nnx.List([Block(cfg, rngs=rngs) for _ in range(cfg.num_hidden_layers)])
        self.norm = RMSNorm(cfg.hidden_size, eps=cfg.rms_norm_eps, rngs=rngs)
        if not cfg.tie_word_embeddings:
            self.lm_head = Linear((cfg.hidden_size, cfg.vocab_size), ("embed", "vocab"), rngs=rngs)

    def embed(self, tokens: Int[Array, "*b"]) -> Float[Array, "*b D"]:
        """Rows of the embedding table; every id is below the vocabulary size."""
        return self.embed_tokens[...].at[tokens].get(mode="promise_in_bounds")

    def head_kernel(self) -> Float[Array, "D V"]:
        """The output projection, tied or not."""
        return self.embed_tokens[...].T if self.cfg.tie_word_embeddings else self.lm_head.kernel[...]

    def logits(self, hidden: Float[Array, "*b D"]) -> Float[Array, "*b V"]:
        """Logits of normed hidden states, accumulated in float32."""
        return jnp.matmul(hidden, self.head_kernel().astype(hidden.dtype), preferred_element_type=jnp.float32)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"],
        *,
        tap_layers: Sequence[int] = (),
        packed: PackedRows = WHOLE_ROWS,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T A"]]:
        """Final-normed hidden states and taps of packed rows; `packed` says how they are spread over devices.

        Positions count 0, 1, 2, ... in each document: where it starts is read off them.
        """
        angles = rotary_angles(positions, self.cfg.head_dim, self.cfg.rope_theta)
        seen = packed.causal(segment_ids, positions)
        x, outputs = self.embed(tokens), []
        for block in self.layers:
            x = block(x, angles, seen, packed)
            outputs.append(x)
        return self.norm(x), concatenate_taps(outputs, tap_layers)

    def step(
        self, tokens: Int[Array, "B T"], start: Int[Array, " B"], cache: Cache, *, tap_layers: Sequence[int]
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T A"], Cache]:
        """The same for T new tokens at positions start, start + 1, ... whose past is in the cache."""
        count = tokens.shape[1]
        angles = cache.angles_at(start, count)
        mask = visible_slots(cache.capacity, start, count)
        x, outputs, layers = self.embed(tokens), [], []
        for block, layer in zip(self.layers, cache.layers, strict=True):
            x, layer = block.step(x, angles, mask, layer, start)
            outputs.append(x)
            layers.append(layer)
        return self.norm(x), concatenate_taps(outputs, tap_layers), cache._replace(layers=tuple(layers))

    def empty_cache(self, batch: int, capacity: int) -> Cache:
        """Room for `capacity` tokens per request."""
        cfg, dtype = self.cfg, self.embed_tokens[...].dtype
        heads, width = cfg.num_key_value_heads, cfg.head_dim
        return empty_cache(cfg.num_hidden_layers, batch, heads, capacity, width, cfg.rope_theta, dtype)


def concatenate_taps(outputs: Sequence[Array], tap_layers: Sequence[int]) -> Float[Array, "B T A"]:
    """Outputs of the tapped layers side by side; width 0 when nothing is tapped."""
    if not tap_layers:
        return outputs[0][..., :0]
    return jnp.concatenate([outputs[layer] for layer in tap_layers], axis=-1)


def fuse_projections(module: nnx.Module) -> None:
    """Turn a module from the train layout to the rollout layout: every `LinearGroup` becomes one matmul."""
    for _, node in nnx.iter_graph(module):
        if isinstance(node, LinearGroup) and not node.fused:
            node.fuse()


def count_parameters(params: dict) -> int:
    """Number of scalars in a parameter tree."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))
