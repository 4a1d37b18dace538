"""The multi-token prediction layer: cached steps for drafting, K recursive uses of it for training.

Use k = 0, 1, ... at index t (the newest token whose hidden state exists) reads the token x_{t+1+k}:

    x   = fc [ norm(E(x_{t+1+k})) ; norm(h) ]      h = the policy's final-normed state at t in use 0, own output after
    y   = x + attention(norm(x))
    z   = y + mlp(norm(y))                         or the blocks of a policy family, such as experts for the mlp
    law = softmax(head norm(z))                    of token x_{t+2+k}; embedding E and head are the policy's live ones

Fed back is norm(z) or z, fc reads [e ; h] or [h ; e], norms multiply by 1 + w or w, all by `MtpConfig.style`.
Attribute names are the published ones of Qwen3.5 below the prefix `mtp.`.

Letters: B rows of a batch (R in training), T tokens, D width, N heads, K key-value heads, H head width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int

from draftco_jax.context_parallel import WHOLE_ROWS, PackedRows
from draftco_jax.drafts.base import Context, DraftSampling, Features, Growth, Proposal, Shared, TreeCall
from draftco_jax.drafts.mtp.chain import chain_rows
from draftco_jax.drafts.mtp.config import MtpConfig
from draftco_jax.drafts.tree_rows import tree_rows
from draftco_jax.models.block import Block
from draftco_jax.models.calls import CachedCall, PackedCall
from draftco_jax.models.full_attention import AttentionSpec, FullAttention
from draftco_jax.models.kv_cache import Cache, visible_slots
from draftco_jax.models.layers import GatedMLP, Linear, RMSNorm, rotary_angles
from draftco_jax.numerics.rows import row_at
from draftco_jax.numerics.sampling import draw


def norm_of(cfg: MtpConfig, rngs: nnx.Rngs) -> RMSNorm:
    """A norm of the residual stream, its weight stored as the head's are; freshly drawn it multiplies by 1."""
    return RMSNorm(cfg.hidden_size, eps=cfg.rms_norm_eps, rngs=rngs, rule=cfg.norm_rule)


def dense_block(cfg: MtpConfig, rngs: nnx.Rngs) -> Block:
    """The layer of a head without a policy's blocks: attention with norms of each head, gated or not, and SwiGLU."""
    # Drawn in the order of the tensors, which fixes what a seed gives.
    before = norm_of(cfg, rngs)
    attention = FullAttention(
        AttentionSpec(
            hidden_size=cfg.hidden_size,
            heads=cfg.num_attention_heads,
            kv_heads=cfg.num_key_value_heads,
            head_dim=cfg.head_dim,
            eps=cfg.rms_norm_eps,
            qk_norm=cfg.norm_rule,
            gated=cfg.attention_output_gate,
        ),
        rngs=rngs,
    )
    after = norm_of(cfg, rngs)
    mlp = GatedMLP(cfg.hidden_size, cfg.intermediate_size, rngs=rngs)
    norms = iter((before, after))
    return Block(
        mixer=("input_layernorm", "self_attn", attention),
        ffn=("post_attention_layernorm", "mlp", mlp),
        norm=lambda: next(norms),
    )


def blocks_of(cfg: MtpConfig, rngs: nnx.Rngs) -> list[Block]:
    """The body: the dense layer, or the policy family's blocks."""
    if cfg.layer is None:
        return [dense_block(cfg, rngs)]
    return [cfg.layer.block(index, rngs) for index in range(cfg.layer.num_hidden_layers)]


def angles_of(cfg: MtpConfig, positions: Int[Array, "R T"]) -> tuple[Array, Array] | None:
    """cos and sin of every position; None where the policy's attention has no positions."""
    if cfg.layer is None:
        return rotary_angles(positions, cfg.rotary_width, cfg.rope_theta)
    rotary = cfg.layer.rotary
    return None if rotary is None else rotary.angles(positions)


class MtpState(NamedTuple):
    """What drafting remembers of each request."""

    cache: Cache
    hidden: jax.Array  # [B, D] output, before the final norm, at index anchor - 1: the law of the first draft


class Mtp(nnx.Module):
    """The draft. It owns neither embedding nor head."""

    def __init__(self, cfg: MtpConfig, *, rngs: nnx.Rngs) -> None:
        self.cfg = cfg
        self.pre_fc_norm_embedding = norm_of(cfg, rngs)
        self.pre_fc_norm_hidden = norm_of(cfg, rngs)
        self.fc = Linear((2 * cfg.hidden_size, cfg.hidden_size), ("taps", "embed"), rngs=rngs)
        self.layers = nnx.List(blocks_of(cfg, rngs))
        self.norm = norm_of(cfg, rngs)

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

    def law_of_step(
        self, hidden: Float[Array, "B D"], shared: Shared, sampling: DraftSampling, step: int
    ) -> Float32[Array, "B V"]:
        """Law of the next token of an output z, which is that of draft `step`, from 0."""
        return sampling.law(self._logits(hidden, shared), step)

    def _logits(self, hidden: Float[Array, "*b D"], shared: Shared) -> Float32[Array, "*b V"]:
        """Of the next token of an output z."""
        normed = self.norm(hidden)
        return jnp.matmul(normed, shared.head.astype(normed.dtype), preferred_element_type=jnp.float32)

    def _laws_of_nodes(self, hidden: Float[Array, "B m D"], call: TreeCall) -> Float32[Array, "B m V"]:
        """Laws after the nodes of one depth of a tree."""
        return call.sampling.law(self._logits(hidden, call.shared))

    # ---- decoding ----

    def empty_state(self, batch: int, capacity: int, context: Context) -> MtpState:
        """An empty cache; history and siblings are not looked at."""
        cfg, dtype = self.cfg, self.fc.kernel[...].dtype
        states = tuple(block.empty_state(batch, capacity, 0, dtype) for block in self.layers)
        angles = angles_of(cfg, jnp.arange(capacity)[None])
        cos, sin = (jnp.zeros((capacity, 0)),) * 2 if angles is None else (table[0, :, 0] for table in angles)
        return MtpState(Cache(states, cos, sin), jnp.zeros((batch, cfg.hidden_size), dtype))

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
        sampling: DraftSampling,
        shared: Shared,
    ) -> tuple[Proposal, MtpState]:
        """Draw d_1 .. d_k in a chain: each step reads the token just drawn and the own output before it.

        Steps write their own keys at anchor, anchor + 1, ...; `absorb` overwrites them before a query may see them.
        """
        count, (cache, hidden), tokens, laws = uniforms.shape[1], state, [], []
        for i in range(count):
            laws.append(self.law_of_step(hidden, shared, sampling, i))
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
        count = embeds.shape[1]
        z = self.combine(embeds, hidden, start[:, None] + jnp.arange(count, dtype=start.dtype)[None, :])
        angles = cache.angles_at(start, count) if cache.cos.shape[1] else None
        return self._read(z, CachedCall(start, angles, visible_slots(cache.capacity, start, count)), cache)

    def _read(self, z: Float[Array, "B T D"], call: CachedCall, cache: Cache) -> tuple[Float[Array, "B T D"], Cache]:
        """The layers, over the cache."""
        states = []
        for block, state in zip(self.layers, cache.layers, strict=True):
            z, state, _ = block.step(z, state, call)
            states.append(state)
        return z, cache._replace(layers=tuple(states))

    @property
    def draws_tokens(self) -> bool:
        """Always."""
        return True

    def begin_tree(self, state: MtpState, call: TreeCall) -> Growth:
        """`branches` holds the output z [B, m, D] of each node whose law is said."""
        hidden = state.hidden[:, None]
        return Growth(self._laws_of_nodes(hidden, call), state, hidden)

    def extend_tree(self, growth: Growth, depth: int, tokens: Int[Array, "B m"], call: TreeCall) -> Growth:
        """Each node reads its token and its parent's output, over its own ancestors in the cache."""
        cache: Cache = growth.state.cache
        rows = tree_rows(call, depth, cache)
        before = growth.branches[:, call.tree.levels[depth - 1].growing_parents]
        positions = jnp.broadcast_to(rows.position[:, None], tokens.shape)
        z = self.combine(call.shared.embed(tokens), self.fed_back(before), positions)
        outputs, cache = self._read(z, CachedCall(rows.start, rows.angles, rows.visible), cache)
        laws = self._laws_of_nodes(outputs, call)
        return Growth(laws, growth.state._replace(cache=cache), outputs)

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
        chain, outputs = self.cfg.attention_pattern == "chain", []
        whole = replace(packed, tensor_axis=None, expert_axis=None)  # a draft is whole on every rank
        rows = [chain_rows(whole, segment_ids, reads=len(embeds)) if chain else whole for _ in self.layers]
        for k, embed in enumerate(embeds):
            at = positions + k if chain else positions
            z, angles = self.combine(embed, hidden, at), angles_of(self.cfg, at)
            for block, own in zip(self.layers, rows, strict=True):
                z, _ = block(z, PackedCall(positions, segment_ids, angles, own))
            outputs.append(z)
            hidden = self.fed_back(z)
        return outputs
