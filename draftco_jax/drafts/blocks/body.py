"""The network of a block draft: a few Qwen3 layers that fill one block of rows from the policy's features before it.

    c_s  = hidden_norm(fc(taps_s))                      one vector for each index s < a (strictly) of the document
    X    = E([x_a, MASK, MASK, ...])                    rows at positions a, a + 1, ...; E is the policy's embedding
    each layer:
      n      = input_layernorm(X)
      keys   = [ k_norm(Wk c_s) for s < a ; k_norm(Wk n) ]   values alike with Wv, rotated by s and by a + j
      X      = X + Wo softmax(q_norm(Wq n) keys^T / sqrt(H)) values, ONE softmax over context and block
      X      = X + mlp(post_attention_layernorm(X))
    states = norm(X)                                    logits are the policy's head times these

The context of a layer does not depend on the block, so it is cached once for all blocks that follow.

Letters: R rows of a batch (or requests), C blocks in each, n rows of a block, d drafts of it, S indices of context, D
width, A width of the concatenated taps, N heads, K key-value heads, H head width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from draftco_jax.drafts.base import Context, Features, Shared
from draftco_jax.drafts.blocks.config import BlockDraftConfig, LayerType
from draftco_jax.models.attention import MASKED_SCORE
from draftco_jax.models.kv_cache import LayerCache, write
from draftco_jax.models.layers import GatedMLP, Linear, LinearGroup, RMSNorm, rotary_angles, rotate
from draftco_jax.numerics.rows import slice_rows

Angles = tuple[jax.Array, jax.Array]
BranchAttention = Callable[[Array, Array, Array], Array]
"""(queries, keys, values of the rows of all blocks) -> heads, [R, C, n, N or K, H] each: over context and block."""


class BlockState(NamedTuple):
    """What a request has of its draft: the context of each layer, and angles of its slots and of a block after them."""

    context: tuple[LayerCache, ...]
    cos: jax.Array  # f32[S + n, h]
    sin: jax.Array  # f32[S + n, h]

    def angles_at(self, start: Int[Array, " R"], count: int) -> Angles:
        """Angles of `count` positions from `start` on, [R, count, 1, h] each."""
        rows = start.shape[0]
        cos, sin = (
            slice_rows(jnp.broadcast_to(table[None], (rows, *table.shape)), start, count)[:, :, None]
            for table in (self.cos, self.sin)
        )
        return cos, sin


class BlockAttention(nnx.Module):
    """Grouped-query attention with query and key norm whose keys come from the context and from the block itself."""

    def __init__(self, cfg: BlockDraftConfig, *, rngs: nnx.Rngs) -> None:
        self.heads, self.kv_heads, self.width = cfg.num_attention_heads, cfg.num_key_value_heads, cfg.head_dim
        q, kv = self.heads * self.width, self.kv_heads * self.width
        self.qkv = LinearGroup(
            cfg.hidden_size,
            {"q_proj": q, "k_proj": kv, "v_proj": kv},
            {"q_proj": "heads", "k_proj": "kv_heads", "v_proj": "kv_heads"},
            rngs=rngs,
        )
        self.o_proj = Linear((q, cfg.hidden_size), ("heads", "embed"), rngs=rngs)
        self.q_norm = RMSNorm(self.width, eps=cfg.rms_norm_eps, rngs=rngs, axis="head_dim")
        self.k_norm = RMSNorm(self.width, eps=cfg.rms_norm_eps, rngs=rngs, axis="head_dim")

    def project(
        self, x: Float[Array, "R T D"], angles: Angles
    ) -> tuple[Float[Array, "R T N H"], Float[Array, "R T K H"], Float[Array, "R T K H"]]:
        """Rotated queries and keys, and values."""
        q, k, v = (y.reshape(*y.shape[:2], -1, self.width) for y in self.qkv(x))
        return rotate(self.q_norm(q), angles), rotate(self.k_norm(k), angles), v


class BlockLayer(nnx.Module):
    """One decoder layer of the draft."""

    def __init__(self, cfg: BlockDraftConfig, *, rngs: nnx.Rngs) -> None:
        self.input_layernorm = RMSNorm(cfg.hidden_size, eps=cfg.rms_norm_eps, rngs=rngs)
        self.self_attn = BlockAttention(cfg, rngs=rngs)
        self.post_attention_layernorm = RMSNorm(cfg.hidden_size, eps=cfg.rms_norm_eps, rngs=rngs)
        self.mlp = GatedMLP(cfg.hidden_size, cfg.intermediate_size, rngs=rngs)

    def __call__(
        self, x: Float[Array, "R C n D"], angles: Angles, attention: BranchAttention
    ) -> Float[Array, "R C n D"]:
        """The rows of each block, which read their own context and each other."""
        rows, blocks, size, width = x.shape
        normed = self.input_layernorm(x).reshape(rows, blocks * size, width)
        q, k, v = (y.reshape(rows, blocks, size, *y.shape[2:]) for y in self.self_attn.project(normed, angles))
        heads = attention(q, k, v)
        x = x + self.self_attn.o_proj(heads.reshape(rows, blocks, size, -1))
        return x + self.mlp(self.post_attention_layernorm(x))


class BlockDraft(nnx.Module):
    """The draft without its heads. It owns no embedding and no head: both are the policy's live ones."""

    def __init__(self, cfg: BlockDraftConfig, *, rngs: nnx.Rngs) -> None:
        self.cfg = cfg
        self.fc = Linear((len(cfg.tap_layers) * cfg.hidden_size, cfg.hidden_size), ("taps", "embed"), rngs=rngs)
        self.hidden_norm = RMSNorm(cfg.hidden_size, eps=cfg.rms_norm_eps, rngs=rngs)
        self.layers = nnx.List([BlockLayer(cfg, rngs=rngs) for _ in range(cfg.num_hidden_layers)])
        self.norm = RMSNorm(cfg.hidden_size, eps=cfg.rms_norm_eps, rngs=rngs)

    def context(self, taps: Float[Array, "R T A"], angles: Angles) -> list[tuple[Array, Array]]:
        """Keys and values [R, T, K, H] of each layer for T indices whose features are known."""
        fused = self.hidden_norm(self.fc(taps))
        return [layer.self_attn.project(fused, angles)[1:] for layer in self.layers]

    def run(
        self,
        newest: Float[Array, "R C D"],
        mask_token: Float[Array, " D"],
        angles: Angles,
        attention: Sequence[BranchAttention],
    ) -> Float[Array, "R C d D"]:
        """States of the d drafts of each block, after the final norm.

        Args:
            newest: embeddings of the anchors' tokens.
            mask_token: embedding of the mask token.
            angles: of the rows of all blocks, [R, C * n, 1, h] each.
            attention: of each layer, over context and block.
        """
        cfg = self.cfg
        blanks = jnp.broadcast_to(mask_token[None, None, None], (*newest.shape[:2], cfg.rows - 1, newest.shape[2]))
        x = jnp.concatenate([newest[:, :, None], blanks], axis=2)
        for layer, attend in zip(self.layers, attention, strict=True):
            x = layer(x, angles, attend)
        return self.norm(x[:, :, cfg.first_row :])

    def empty_state(self, batch: int, capacity: int, context: Context) -> BlockState:
        """State before anything was read."""
        del context
        cfg, dtype = self.cfg, self.fc.kernel[...].dtype
        zeros = jnp.zeros((batch, cfg.num_key_value_heads, capacity, cfg.head_dim), dtype)
        positions = jnp.arange(capacity + cfg.rows)[None]
        cos, sin = rotary_angles(positions, cfg.head_dim, cfg.rope_theta)
        return BlockState(tuple(LayerCache(zeros, zeros) for _ in self.layers), cos[0, :, 0], sin[0, :, 0])

    def absorb(self, state: BlockState, features: Features, shared: Shared) -> BlockState:
        """Write the context of T indices. That of rejected tokens lies past the new anchor, unread."""
        del shared
        new = self.context(features.taps, state.angles_at(features.start, features.taps.shape[1]))
        context = (write(old, k, v, features.start) for old, (k, v) in zip(state.context, new, strict=True))
        return state._replace(context=tuple(context))

    def block(
        self, state: BlockState, newest: Int[Array, " B"], anchor: Int[Array, " B"], shared: Shared
    ) -> Float[Array, "B d D"]:
        """States of all drafts of one block. Its rows read each other, so it is run whole even if fewer are wanted."""
        embedding = shared.embedding
        angles = state.angles_at(anchor, self.cfg.rows)
        first = embedding.at[newest].get(mode="promise_in_bounds")[:, None]
        slots = state.context[0].keys.shape[2]
        masks = {kind: cached_masks(self.cfg, kind, anchor[:, None], slots) for kind in set(self.cfg.layer_types)}
        attention = [
            partial(cached_attention, context, *masks[kind])
            for kind, context in zip(self.cfg.layer_types, state.context, strict=True)
        ]
        return self.run(first, embedding[self.cfg.mask_token_id], angles, attention)[:, 0]

    def label_features(
        self, states: Float[Array, "R C d D"], previous: Int[Array, "R C d"], head: Float[Array, "D V"]
    ) -> tuple[Float[Array, "R C d F"], Float[Array, "F V"]]:
        """What the logits of training labels are the product of; `previous` is the token before each label."""
        raise NotImplementedError

    def check_length(self, count: int) -> None:
        """Refuse more drafts than a block holds."""
        if not 1 <= count <= self.cfg.max_draft_length:
            raise ValueError(
                f"draft_length={count} must be in 1..{self.cfg.max_draft_length}, the drafts of a block; "
                "lower it, or train a draft with another block_size"
            )


def head_logits(states: Float[Array, "*b F"], kernel: Float[Array, "F V"]) -> Float[Array, "*b V"]:
    """Logits of states, accumulated in float32."""
    return jnp.matmul(states, kernel.astype(states.dtype), preferred_element_type=jnp.float32)


def cached_attention(
    trunk: LayerCache,
    trunk_mask: Bool[Array, "R C m S"],
    block_mask: Bool[Array, "n n"],
    queries: Float[Array, "R C n N H"],
    keys: Float[Array, "R C n K H"],
    values: Float[Array, "R C n K H"],
) -> Float[Array, "R C n N H"]:
    """One softmax over the cached context of a request and the rows of its block; scores and softmax in float32.

    Dense: scores are [R, C, n, N, S + n]. `trunk_mask` has m = 1 where all rows of a block see the same context, and
    m = n otherwise.
    """
    rows, blocks, size, heads, width = queries.shape
    slots, kv_heads = trunk.keys.shape[2], keys.shape[3]
    q = (queries * (width**-0.5)).reshape(rows, blocks, size, kv_heads, heads // kv_heads, width)
    before = jnp.einsum("rcnkgh,rksh->rcnkgs", q, trunk.keys, preferred_element_type=jnp.float32)
    before = jnp.where(trunk_mask[:, :, :, None, None, :], before, MASKED_SCORE)
    within = jnp.einsum("rcnkgh,rcmkh->rcnkgm", q, keys, preferred_element_type=jnp.float32)
    within = jnp.where(block_mask[None, None, :, None, None, :], within, MASKED_SCORE)
    weights = jax.nn.softmax(jnp.concatenate([before, within], axis=-1), axis=-1)
    # A cache has the dtype of the draft, the rows of a block that of the policy's embeddings.
    out = jnp.einsum("rcnkgs,rksh->rcnkgh", weights[..., :slots].astype(trunk.values.dtype), trunk.values)
    within = jnp.einsum("rcnkgm,rcmkh->rcnkgh", weights[..., slots:].astype(values.dtype), values)
    out = out.astype(values.dtype) + within
    return out.reshape(rows, blocks, size, heads, width).astype(queries.dtype)


def cached_masks(
    cfg: BlockDraftConfig, kind: LayerType, anchors: Int[Array, "R C"], slots: int
) -> tuple[Bool[Array, "R C m S"], Bool[Array, "n n"]]:
    """Which context, s < a within the window, and which rows of its own block a row of such a layer sees."""
    window = cfg.window_of(kind)
    index = jnp.arange(slots, dtype=anchors.dtype)[None, None, None, :]
    seen = index < anchors[:, :, None, None]
    if window is not None:
        row = anchors[:, :, None] + jnp.arange(cfg.rows, dtype=anchors.dtype)[None, None, :]
        seen = seen & (index > (row - window)[..., None])
    whole = jnp.ones((cfg.rows, cfg.rows), bool)
    return seen, jnp.tril(whole) if cfg.rule_of(kind) == "causal" else whole
