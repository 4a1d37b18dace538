"""The multi-token prediction layer: cached steps for drafting, K recursive uses of it for training.

Use k = 0, 1, ... at index t (the newest token whose hidden state exists) reads the token x_{t+1+k}:

    x   = fc [ norm(E(x_{t+1+k})) ; norm(h) ]      h = the policy's final-normed state at t in use 0, own output after
    y   = x + attention(norm(x))
    z   = y + mlp(norm(y))
    law = softmax(head norm(z))                    of token x_{t+2+k}; embedding E and head are the policy's live ones

Fed back is norm(z) or z, fc reads [e ; h] or [h ; e], norms multiply by 1 + w or w, all by `MtpConfig.style`.
Attribute names are the published ones of Qwen3.5 below the prefix `mtp.`.

Letters: B rows of a batch (R in training), T tokens, D width, N heads, K key-value heads, H head width, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int

from draftco_jax.context_parallel import WHOLE_ROWS, PackedRows
from draftco_jax.drafts.base import Context, Features, Proposal, Shared
from draftco_jax.drafts.chain_attention import ChainAttention
from draftco_jax.drafts.mtp.config import MtpConfig
from draftco_jax.models.attention import attend
from draftco_jax.models.kv_cache import Cache, LayerCache, visible_slots, write
from draftco_jax.models.layers import GatedMLP, Linear, LinearGroup, RMSNorm, rotary_angles, rotate
from draftco_jax.numerics.rows import row_at
from draftco_jax.numerics.sampling import SamplingConfig, draw, law


def norm_of(cfg: MtpConfig, width: int, rngs: nnx.Rngs, axis: str = "embed") -> RMSNorm:
    """A norm whose weight is stored as the style stores it; freshly drawn it multiplies by 1 either way."""
    rule = "offset" if cfg.norms_store_offset else "cast_first"
    return RMSNorm(width, eps=cfg.rms_norm_eps, rngs=rngs, axis=axis, rule=rule)


class Heads(NamedTuple):
    """Projections of one layer input: rotated queries and keys, values, gate."""

    q: jax.Array  # [B, T, N, H]
    k: jax.Array  # [B, T, K, H]
    v: jax.Array  # [B, T, K, H]
    gate: jax.Array | None  # [B, T, N, H] before the sigmoid; None without a gate


class MtpAttention(nnx.Module):
    """Grouped-query attention with per-head norms of queries and keys, optionally gated, rotated in part."""

    def __init__(self, cfg: MtpConfig, *, rngs: nnx.Rngs) -> None:
        self.heads, self.kv_heads, self.width = cfg.num_attention_heads, cfg.num_key_value_heads, cfg.head_dim
        self.gated, self.rotary_width = cfg.attention_output_gate, cfg.rotary_width
        q, kv = self.heads * self.width, self.kv_heads * self.width
        self.qkv = LinearGroup(
            cfg.hidden_size,
            {"q_proj": 2 * q if self.gated else q, "k_proj": kv, "v_proj": kv},
            {"q_proj": "heads", "k_proj": "kv_heads", "v_proj": "kv_heads"},
            rngs=rngs,
        )
        self.o_proj = Linear((q, cfg.hidden_size), ("heads", "embed"), rngs=rngs)
        self.q_norm = norm_of(cfg, self.width, rngs, axis="head_dim")
        self.k_norm = norm_of(cfg, self.width, rngs, axis="head_dim")

    def project(self, x: Float[Array, "B T D"], angles: tuple[Array, Array]) -> Heads:
        """Queries, keys, values and the gate of each head, which stands behind its query in q_proj's output."""
        q, k, v = self.qkv(x)
        q = q.reshape(*x.shape[:2], self.heads, -1)
        k, v = (y.reshape(*x.shape[:2], self.kv_heads, self.width) for y in (k, v))
        gate = q[..., self.width :] if self.gated else None
        q = rotate(self.q_norm(q[..., : self.width]), angles)
        return Heads(q, rotate(self.k_norm(k), angles), v, gate)

    def output(self, heads: Float[Array, "B T N H"], gate: Array | None) -> Float[Array, "B T D"]:
        """Gate and merge the heads."""
        if gate is not None:
            heads = heads * jax.nn.sigmoid(gate)
        return self.o_proj(heads.reshape(*heads.shape[:2], -1))


class MtpLayer(nnx.Module):
    """The one decoder layer."""

    def __init__(self, cfg: MtpConfig, *, rngs: nnx.Rngs) -> None:
        self.input_layernorm = norm_of(cfg, cfg.hidden_size, rngs)
        self.self_attn = MtpAttention(cfg, rngs=rngs)
        self.post_attention_layernorm = norm_of(cfg, cfg.hidden_size, rngs)
        self.mlp = GatedMLP(cfg.hidden_size, cfg.intermediate_size, rngs=rngs)

    def project(self, x: Float[Array, "B T D"], angles: tuple[Array, Array]) -> Heads:
        """What attention reads of the normed input."""
        return self.self_attn.project(self.input_layernorm(x), angles)

    def finish(self, x: Array, heads: Array, gate: Array | None) -> Float[Array, "B T D"]:
        """Residuals and MLP."""
        y = x + self.self_attn.output(heads, gate)
        return y + self.mlp(self.post_attention_layernorm(y))


class MtpState(NamedTuple):
    """What drafting remembers of each request."""

    cache: Cache
    hidden: jax.Array  # [B, D] output, before the final norm, at index anchor - 1: the law of the first draft


class Mtp(nnx.Module):
    """The draft. It owns neither embedding nor head."""

    def __init__(self, cfg: MtpConfig, *, rngs: nnx.Rngs) -> None:
        self.cfg = cfg
        self.pre_fc_norm_embedding = norm_of(cfg, cfg.hidden_size, rngs)
        self.pre_fc_norm_hidden = norm_of(cfg, cfg.hidden_size, rngs)
        self.fc = Linear((2 * cfg.hidden_size, cfg.hidden_size), ("taps", "embed"), rngs=rngs)
        self.layers = nnx.List([MtpLayer(cfg, rngs=rngs)])
        self.norm = norm_of(cfg, cfg.hidden_size, rngs)

    def combine(
        self, embeds: Float[Array, "B T D"], hidden: Float[Array, "B T D"], positions: Int[Array, "B T"]
    ) -> Float[Array, "B T D"]:
        """Input of the layer: both normed, side by side, through fc."""
        if self.cfg.zeroes_first_embedding:
            embeds = jnp.where((positions == 0)[:, :, None], jnp.zeros_like(embeds), embeds)
        pair = [self.pre_fc_norm_embedding(embeds), self.pre_fc_norm_hidden(hidden)]
        return self.fc(jnp.concatenate(pair[::-1] if self.cfg.hidden_first else pair, axis=-1))

    def fed_back(self, hidden: Float[Array, "*b D"]) -> Float[Array, "*b D"]:
        """The hidden state that the next step reads of an output z."""
        return self.norm(hidden) if self.cfg.feeds_back_normed else hidden

    def laws(self, hidden: Float[Array, "*b D"], shared: Shared, sampling: SamplingConfig) -> Float32[Array, "*b V"]:
        """Law of the next token of an output z."""
        normed = self.norm(hidden)
        logits = jnp.matmul(normed, shared.head.astype(normed.dtype), preferred_element_type=jnp.float32)
        return law(logits, sampling)

    # ---- decoding ----

    def empty_state(self, batch: int, capacity: int, context: Context) -> MtpState:
        """An empty cache; history and siblings are not looked at."""
        cfg, dtype = self.cfg, self.fc.kernel[...].dtype
        zeros = jnp.zeros((batch, cfg.num_key_value_heads, capacity, cfg.head_dim), dtype)
        cos, sin = rotary_angles(jnp.arange(capacity)[None], cfg.rotary_width, cfg.rope_theta)
        cache = Cache((LayerCache(zeros, zeros),), cos[0, :, 0], sin[0, :, 0])
        return MtpState(cache, jnp.zeros((batch, cfg.hidden_size), dtype))

    def absorb(self, state: MtpState, features: Features, shared: Shared) -> MtpState:
        """One pass over the verified indices, from the policy's own hidden states: guesses there are overwritten."""
        embeds = shared.embed(features.following)
        hidden, cache = self.step(embeds, features.hidden, features.start, state.cache)
        return MtpState(cache, row_at(hidden, features.last))

    def propose(
        self,
        state: MtpState,
        newest: Int[Array, " B"],
        anchor: Int[Array, " B"],
        uniforms: Float[Array, "B k"],
        sampling: SamplingConfig,
        shared: Shared,
    ) -> tuple[Proposal, MtpState]:
        """Draw d_1 .. d_k in a chain: each step reads the token just drawn and the own output before it.

        Steps write their own keys at anchor, anchor + 1, ...; `absorb` overwrites them before a query may see them.
        """
        count, (cache, hidden), tokens, laws = uniforms.shape[1], state, [], []
        for i in range(count):
            laws.append(self.laws(hidden, shared, sampling))
            tokens.append(draw(laws[-1], uniforms[:, i]))
            if i + 1 < count:
                fed = self.fed_back(hidden)[:, None]
                outputs, cache = self.step(shared.embed(tokens[-1])[:, None], fed, anchor + i, cache)
                hidden = outputs[:, 0]
        proposed = jnp.full(newest.shape, count, jnp.int32)
        return Proposal(jnp.stack(tokens, axis=1), jnp.stack(laws, axis=1), proposed), MtpState(cache, hidden)

    def step(
        self, embeds: Float[Array, "B T D"], hidden: Float[Array, "B T D"], start: Int[Array, " B"], cache: Cache
    ) -> tuple[Float[Array, "B T D"], Cache]:
        """Outputs z at T consecutive indices: `embeds` of the tokens AFTER each index, `hidden` at it."""
        count, layer = embeds.shape[1], self.layers[0]
        x = self.combine(embeds, hidden, start[:, None] + jnp.arange(count, dtype=start.dtype)[None, :])
        q, k, v, gate = layer.project(x, cache.angles_at(start, count))
        written = write(cache.layers[0], k, v, start)
        heads = attend(q, written.keys, written.values, visible_slots(cache.capacity, start, count))
        return layer.finish(x, heads, gate), cache._replace(layers=(written,))

    # ---- training ----

    def unroll(
        self,
        embeds: list[Float[Array, "R T D"]],
        hidden: Float[Array, "R T D"],
        positions: Int[Array, "R T"],
        segment_ids: Int[Array, "R T"],
        packed: PackedRows = WHOLE_ROWS,
    ) -> list[Float[Array, "R T D"]]:
        """Outputs z of each training step; `embeds[k]` holds the embeddings of x_{t+1+k}, `hidden` the policy's states.

        chain   query (t, k) sees the keys (s, 0), s <= t in its document, and its own (t, i), 1 <= i <= k, in one
                softmax; step i at index t stands at position t + i. These are the keys that a chain of k drafting
                steps from t has in its cache.
        step    query (t, k) sees the keys (s, k), s <= t in its document; all steps stand at position t.
        """
        cfg, layer = self.cfg, self.layers[0]
        chain, outputs = cfg.attention_pattern == "chain", []
        attention = ChainAttention(segment_ids, positions, packed, reads=len(embeds)) if chain else None
        seen = packed.causal(segment_ids, positions)
        for k, embed in enumerate(embeds):
            at = positions + k if chain else positions
            x = self.combine(embed, hidden, at)
            q, key, value, gate = layer.project(x, rotary_angles(at, cfg.rotary_width, cfg.rope_theta))
            heads = attention(q, key, value) if attention else packed.attention(q, key, value, seen)
            z = layer.finish(x, heads, gate)
            outputs.append(z)
            hidden = self.fed_back(z)
        return outputs
