"""The EAGLE-3 layer: cached steps for drafting, multi-pass branches for training.

One pass over index t (the newest token whose target features exist) reads the token after it:

    u   = [ norm(E(x_{t+1+k})) ; norm(h) ]          h = fc(taps_t) in pass 0, the own output of pass k-1 afterwards
    y   = h + attention(u)                          residual is the un-normed h (normed: `norm_before_residual`)
    z   = y + mlp(norm(y))                          fed back as it is, PRE final norm (after it: `norm_output`)
    law = softmax(lm_head(norm(z)))                 of token x_{t+2+k}

Letters: B rows, T tokens, D width, U = 2 D, A width of the concatenated taps, N heads, K key-value heads, H head width,
W draft vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from draftco_jax.context_parallel import WHOLE_ROWS, PackedRows
from draftco_jax.drafts.base import Context, DraftSampling, Features, Growth, Proposal, Shared, TreeCall
from draftco_jax.drafts.chain_attention import ChainAttention
from draftco_jax.drafts.eagle3.config import Eagle3Config
from draftco_jax.drafts.tree_rows import tree_rows
from draftco_jax.models.attention import attend
from draftco_jax.models.kv_cache import Cache, empty_cache, visible_slots, write
from draftco_jax.models.layers import GatedMLP, Linear, LinearGroup, RMSNorm, rotary_angles, rotate
from draftco_jax.numerics.rows import row_at
from draftco_jax.numerics.sampling import draw


class VocabularyMap(nnx.Variable):
    """Constant i32[W]: target id of each draft id, increasing. Not trained."""


class DraftAttention(nnx.Module):
    """Grouped-query attention whose input is twice as wide as its output; query and key norm only by flag."""

    def __init__(self, cfg: Eagle3Config, *, rngs: nnx.Rngs) -> None:
        self.heads, self.kv_heads, self.width = cfg.num_attention_heads, cfg.num_key_value_heads, cfg.head_dim
        self.normed = cfg.qk_norm
        q, kv = self.heads * self.width, self.kv_heads * self.width
        self.qkv = LinearGroup(
            2 * cfg.hidden_size,
            {"q_proj": q, "k_proj": kv, "v_proj": kv},
            {"q_proj": "heads", "k_proj": "kv_heads", "v_proj": "kv_heads"},
            rngs=rngs,
        )
        self.o_proj = Linear((q, cfg.hidden_size), ("heads", "embed"), rngs=rngs)
        if cfg.qk_norm:
            self.q_norm = RMSNorm(self.width, eps=cfg.rms_norm_eps, rngs=rngs, axis="head_dim")
            self.k_norm = RMSNorm(self.width, eps=cfg.rms_norm_eps, rngs=rngs, axis="head_dim")

    def project(
        self, u: Float[Array, "B T U"], angles: tuple[Array, Array]
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"], Float[Array, "B T K H"]]:
        """Rotated queries and keys, and values."""
        q, k, v = (y.reshape(*y.shape[:2], -1, self.width) for y in self.qkv(u))
        if self.normed:
            q, k = self.q_norm(q), self.k_norm(k)
        return rotate(q, angles), rotate(k, angles), v

    def output(self, heads: Float[Array, "B T N H"]) -> Float[Array, "B T D"]:
        """Merge the heads."""
        return self.o_proj(heads.reshape(*heads.shape[:2], -1))


class DraftLayer(nnx.Module):
    """The one decoder layer of the draft."""

    def __init__(self, cfg: Eagle3Config, *, rngs: nnx.Rngs) -> None:
        self.norm_before_residual = cfg.norm_before_residual
        self.input_layernorm = RMSNorm(cfg.hidden_size, eps=cfg.rms_norm_eps, rngs=rngs)
        self.hidden_norm = RMSNorm(cfg.hidden_size, eps=cfg.rms_norm_eps, rngs=rngs)
        self.self_attn = DraftAttention(cfg, rngs=rngs)
        self.post_attention_layernorm = RMSNorm(cfg.hidden_size, eps=cfg.rms_norm_eps, rngs=rngs)
        self.mlp = GatedMLP(cfg.hidden_size, cfg.intermediate_size, rngs=rngs)

    def project(self, embeds: Array, hidden: Array, angles: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        """Queries, keys and values of [norm(embedding) ; norm(hidden)], embedding first."""
        u = jnp.concatenate([self.input_layernorm(embeds), self.hidden_norm(hidden)], axis=-1)
        return self.self_attn.project(u, angles)

    def finish(self, hidden: Array, heads: Array) -> Float[Array, "B T D"]:
        """Residuals and MLP."""
        residual = self.hidden_norm(hidden) if self.norm_before_residual else hidden
        y = residual + self.self_attn.output(heads)
        return y + self.mlp(self.post_attention_layernorm(y))


class Eagle3State(NamedTuple):
    """What the draft keeps of a request."""

    cache: Cache  # true for every index below the anchor
    hidden: jax.Array  # [B, D] state at index anchor - 1, made from true target features: its law is that of d_1


class Eagle3(nnx.Module):
    """The draft. It owns no embedding: every call is given the policy's live embeddings of its input tokens."""

    def __init__(self, cfg: Eagle3Config, *, rngs: nnx.Rngs) -> None:
        self.cfg = cfg
        width, taps = cfg.hidden_size, len(cfg.tap_layers)
        self.fc = Linear((taps * width, width), ("taps", "embed"), rngs=rngs)
        if cfg.norm_before_fc:
            self.input_norm = RMSNorm(taps * width, eps=cfg.rms_norm_eps, rngs=rngs, axis="taps")
        if cfg.fc_norm:
            self.fc_norm = nnx.List([RMSNorm(width, eps=cfg.rms_norm_eps, rngs=rngs) for _ in range(taps)])
        self.midlayer = DraftLayer(cfg, rngs=rngs)
        self.norm = RMSNorm(width, eps=cfg.rms_norm_eps, rngs=rngs)
        self.lm_head = Linear((width, cfg.draft_vocab_size), ("embed", "vocab"), rngs=rngs)
        if cfg.draft_vocab_size < cfg.vocab_size:
            self.draft_to_target = VocabularyMap(jnp.arange(cfg.draft_vocab_size, dtype=jnp.int32))

    @property
    def kept(self) -> Int[Array, " W"] | None:
        """Target id of each draft id; None for the full vocabulary."""
        return jnp.asarray(self.draft_to_target[...]) if self.cfg.draft_vocab_size < self.cfg.vocab_size else None

    def fuse(self, taps: Float[Array, "B T A"]) -> Float[Array, "B T D"]:
        """h_0 = fc(taps); by flag under one norm over all of them, or one norm for each."""
        if self.cfg.norm_before_fc:
            taps = self.input_norm(taps)
        if self.cfg.fc_norm:
            parts = jnp.split(taps, len(self.cfg.tap_layers), axis=-1)
            taps = jnp.concatenate([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], axis=-1)
        return self.fc(taps)

    def _output(self, state: Array) -> Array:
        """What is fed back: the state as it is, or (`norm_output`) after the final norm."""
        return self.norm(state) if self.cfg.norm_output else state

    def features(self, hidden: Float[Array, "*b D"]) -> Float[Array, "*b D"]:
        """What the head reads of a draft state: logits = features @ lm_head."""
        return hidden if self.cfg.norm_output else self.norm(hidden)

    def logits(self, hidden: Float[Array, "*b D"]) -> Float[Array, "*b W"]:
        """Logits over the draft vocabulary of draft states, accumulated in float32."""
        features = self.features(hidden)
        kernel = self.lm_head.kernel[...].astype(features.dtype)
        return jnp.matmul(features, kernel, preferred_element_type=jnp.float32)

    def to_target_vocabulary(self, laws: Float[Array, "*b W"]) -> Float[Array, "*b V"]:
        """Scatter a law over draft ids to target ids; dropped ids get probability 0."""
        if self.kept is None:
            return laws
        full = jnp.zeros((*laws.shape[:-1], self.cfg.vocab_size), laws.dtype)
        return full.at[..., self.kept].set(laws)

    def empty_cache(self, batch: int, capacity: int) -> Cache:
        """The draft's own cache."""
        cfg, dtype = self.cfg, self.fc.kernel[...].dtype
        return empty_cache(1, batch, cfg.num_key_value_heads, capacity, cfg.head_dim, cfg.rope_theta, dtype)

    def step(
        self,
        embeds: Float[Array, "B T D"],
        hidden: Float[Array, "B T D"],
        start: Int[Array, " B"],
        cache: Cache,
    ) -> tuple[Float[Array, "B T D"], Cache]:
        """T consecutive indices start, start + 1, ...: `embeds` of the tokens AFTER each index, `hidden` at it."""
        count = embeds.shape[1]
        angles, visible = cache.angles_at(start, count), visible_slots(cache.capacity, start, count)
        return self._read((embeds, hidden), start, angles, visible, cache)

    def _read(
        self,
        inputs: tuple[Float[Array, "B T D"], Float[Array, "B T D"]],
        start: Int[Array, " B"],
        angles: tuple[Array, Array],
        visible: Bool[Array, "B T S"],
        cache: Cache,
    ) -> tuple[Float[Array, "B T D"], Cache]:
        """Embeddings and hidden states, into the slots from `start` on."""
        q, k, v = self.midlayer.project(*inputs, angles)
        layer = write(cache.layers[0], k, v, start)
        heads = attend(q, layer.keys, layer.values, visible)
        return self._output(self.midlayer.finish(inputs[1], heads)), cache._replace(layers=(layer,))

    # ---- decoding: the interface of `drafts.base.Draft` ----

    def empty_state(self, batch: int, capacity: int, context: Context) -> Eagle3State:
        """Nothing read yet."""
        return Eagle3State(
            self.empty_cache(batch, capacity), jnp.zeros((batch, self.cfg.hidden_size), self.fc.kernel[...].dtype)
        )

    def absorb(self, state: Eagle3State, features: Features, shared: Shared) -> Eagle3State:
        """Index s reads taps_s and x_{s+1}: keys and values from TRUE target features, over any guesses there."""
        states, cache = self.step(
            shared.embed(features.following), self.fuse(features.taps), features.start, state.cache
        )
        return Eagle3State(cache, row_at(states, features.last))

    def propose(
        self,
        state: Eagle3State,
        newest: Int[Array, " B"],
        anchor: Int[Array, " B"],
        uniforms: Float[Array, "B k"],
        sampling: DraftSampling,
        shared: Shared,
    ) -> tuple[Proposal, Eagle3State]:
        """A chain: d_1 from the state at anchor - 1, then each step reads the token drawn and its own last state.

        Steps of the chain write their own guesses at anchor, anchor + 1, ...; `absorb` overwrites them.
        """
        (cache, hidden), tokens, laws = state, [], []
        count = uniforms.shape[1]
        for i in range(count):
            q = self.to_target_vocabulary(sampling.law(self.logits(hidden), i, self.kept))
            token = draw(q, uniforms[:, i])
            tokens.append(token)
            laws.append(q)
            if i + 1 < count:
                states, cache = self.step(shared.embed(token)[:, None], hidden[:, None], anchor + i, cache)
                hidden = states[:, 0]
        proposal = Proposal(jnp.stack(tokens, axis=1), jnp.stack(laws, axis=1), jnp.full_like(newest, count))
        return proposal, Eagle3State(cache, hidden)

    @property
    def draws_tokens(self) -> bool:
        """Always."""
        return True

    def begin_tree(self, state: Eagle3State, call: TreeCall) -> Growth:
        """`branches` holds the state [B, m, D] of each node whose law is said."""
        hidden = state.hidden[:, None]
        return Growth(self.to_target_vocabulary(call.sampling.law(self.logits(hidden))), state, hidden)

    def extend_tree(self, growth: Growth, depth: int, tokens: Int[Array, "B m"], call: TreeCall) -> Growth:
        """Each node reads its token and its parent's state, over its own ancestors in the cache."""
        cache: Cache = growth.state.cache
        rows = tree_rows(call, depth, cache)
        assert rows.angles is not None
        before = growth.branches[:, call.tree.levels[depth - 1].growing_parents]
        inputs = call.shared.embed(tokens), before
        states, cache = self._read(inputs, rows.start, rows.angles, rows.visible, cache)
        laws = self.to_target_vocabulary(call.sampling.law(self.logits(states)))
        return Growth(laws, growth.state._replace(cache=cache), states)

    # ---- training ----

    def passes(
        self,
        embeds: list[Float[Array, "R T D"]],
        taps: Float[Array, "R T A"],
        positions: Int[Array, "R T"],
        segment_ids: Int[Array, "R T"],
        packed: PackedRows = WHOLE_ROWS,
    ) -> list[Float[Array, "R T D"]]:
        """States of each training pass; `embeds[k]` holds the embeddings of x_{t+1+k}.

        Pass k at index t sees the pass-0 keys (the trunk) of its document up to t, and its own keys of passes 1..k
        (the branch), in one softmax. Key of pass i is rotated by position + i, query of pass k by position + k: exactly
        the keys a chain of k drafting steps from t would have in its cache. Branch keys never leave their device.
        """
        hidden, states = self.fuse(taps), []
        chain = ChainAttention(segment_ids, positions, packed, reads=len(embeds))
        for k, embed in enumerate(embeds):
            angles = rotary_angles(positions + k, self.cfg.head_dim, self.cfg.rope_theta)
            q, key, value = self.midlayer.project(embed, hidden, angles)
            hidden = self._output(self.midlayer.finish(hidden, chain(q, key, value)))
            states.append(hidden)
        return states
