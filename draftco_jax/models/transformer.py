"""The decoder-only policy: packed rows for training, cached steps for decoding; families say what a block is.

Letters as in `layers`: B batch, T tokens, D width, N heads, K key-value heads, H head width, V vocabulary, plus
A = number of taps * D, the width of the concatenated target features that a draft reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from draftco_jax.context_parallel import WHOLE_ROWS, PackedRows
from draftco_jax.models.calls import CachedCall, PackedCall
from draftco_jax.models.full_attention import AttentionSpec
from draftco_jax.models.kv_cache import Cache, visible_slots
from draftco_jax.models.layers import GatedMLP, Linear, LinearGroup, NormRule, RMSNorm, parameter
from draftco_jax.models.rotary import Rotary

Norm = Callable[[], RMSNorm]


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """What every family states, and the parts that it makes of it; subclasses say what a block is.

    Field names are those of the published config.json.
    """

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

    @property
    def rotary(self) -> Rotary | None:
        """What queries and keys are turned with; None: nothing."""
        return Rotary(width=self.head_dim, theta=self.rope_theta)

    @property
    def norm_rule(self) -> NormRule:
        """Rule of the norms of the residual stream."""
        return "cast_first"

    @property
    def output_scale(self) -> float:
        """Standard deviation of fresh projections back into the residual stream: 0.02 / sqrt(2 * layers)."""
        return 0.02 / (2 * self.num_hidden_layers) ** 0.5

    def make_norm(self, rngs: nnx.Rngs) -> RMSNorm:
        """A norm of the residual stream."""
        return RMSNorm(self.hidden_size, eps=self.rms_norm_eps, rngs=rngs, rule=self.norm_rule)

    def attention(self, **changes: Any) -> AttentionSpec:
        """The attention of a layer: plain grouped-query, with `changes`."""
        sizes: dict[str, Any] = {
            "hidden_size": self.hidden_size,
            "heads": self.num_attention_heads,
            "kv_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "eps": self.rms_norm_eps,
            "out_scale": self.output_scale,
        }
        return AttentionSpec(**(sizes | changes))

    def gated_mlp(self, rngs: nnx.Rngs) -> GatedMLP:
        """SwiGLU of `intermediate_size`."""
        down_init = nnx.initializers.normal(self.output_scale)
        return GatedMLP(self.hidden_size, self.intermediate_size, rngs=rngs, down_init=down_init)

    def block(self, index: int, rngs: nnx.Rngs) -> Block:
        """Block `index` with freshly drawn weights."""
        raise NotImplementedError

    def build(self, rngs: nnx.Rngs) -> Decoder:
        """The Flax module with freshly drawn weights."""
        return Decoder(self, rngs=rngs)


def pre_norm_block(cfg: DecoderConfig, mixer: tuple[str, nnx.Module], ffn: nnx.Module, rngs: nnx.Rngs) -> Block:
    """A mixer (by its attribute name) and an MLP or experts, each after its norm: the block of most families."""
    return Block(
        mixer=("input_layernorm", *mixer),
        ffn=("post_attention_layernorm", "mlp", ffn),
        norm=lambda: cfg.make_norm(rngs),
    )


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


class Block(nnx.Module):
    """x + mixer(norm(x)), then x + ffn(norm(x)); a block may lack either half.

    Norms and halves are attributes under the family's published names, so that tensor names follow by a rule.
    """

    def __init__(
        self, *, mixer: tuple[str, str, nnx.Module] | None, ffn: tuple[str, str, nnx.Module] | None, norm: Norm
    ) -> None:
        self.mixer_names = self.ffn_names = ("", "")
        if mixer is not None:
            self.mixer_names = mixer[:2]
            setattr(self, mixer[0], norm())
            setattr(self, mixer[1], mixer[2])
        if ffn is not None:
            self.ffn_names = ffn[:2]
            setattr(self, ffn[0], norm())
            setattr(self, ffn[1], ffn[2])

    def __call__(self, x: Float[Array, "R T D"], call: PackedCall) -> Float[Array, "R T D"]:
        """Packed rows."""
        norm, mixer = self.mixer_names
        if mixer:
            x = x + getattr(self, mixer)(getattr(self, norm)(x), call)
        return self._feed_forward(x)

    def empty_state(self, batch: int, capacity: int, lookahead: int, dtype: Any) -> Any:
        """State of the mixer; () without one."""
        mixer = self.mixer_names[1]
        return getattr(self, mixer).empty_state(batch, capacity, lookahead, dtype) if mixer else ()

    def step(self, x: Float[Array, "B T D"], state: Any, call: CachedCall) -> tuple[Float[Array, "B T D"], Any]:
        """A few new tokens, whose past is in the state."""
        norm, mixer = self.mixer_names
        if mixer:
            y, state = getattr(self, mixer).step(getattr(self, norm)(x), state, call)
            x = x + y
        return self._feed_forward(x), state

    def _feed_forward(self, x: Array) -> Array:
        norm, ffn = self.ffn_names
        if not ffn:
            return x
        y = getattr(self, ffn)(getattr(self, norm)(x))
        return x + (y[0] if isinstance(y, tuple) else y)  # experts also say where the tokens went


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
        self.layers = nnx.List([cfg.block(i, rngs) for i in range(cfg.num_hidden_layers)])
        self.norm = cfg.make_norm(rngs)
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
        rotary = self.cfg.rotary
        call = PackedCall(positions, segment_ids, None if rotary is None else rotary.angles(positions), packed)
        x, outputs = self.embed(tokens), []
        for block in self.layers:
            x = block(x, call)
            outputs.append(x)
        return self.norm(x), concatenate_taps(outputs, tap_layers)

    def step(
        self,
        tokens: Int[Array, "B T"],
        start: Int[Array, " B"],
        cache: Cache,
        *,
        tap_layers: Sequence[int],
        lengths: Int[Array, " B"] | None = None,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T A"], Cache]:
        """The same for T new tokens at positions start, start + 1, ... whose past is in the cache.

        `lengths`: the tokens are prompts of these lengths, padded; None: they are a call of lookahead + 1 tokens.
        """
        count = tokens.shape[1]
        angles = None if self.cfg.rotary is None else cache.angles_at(start, count)
        call = CachedCall(start, angles, visible_slots(cache.capacity, start, count), lengths)
        x, outputs, layers = self.embed(tokens), [], []
        for block, layer in zip(self.layers, cache.layers, strict=True):
            x, layer = block.step(x, layer, call)
            outputs.append(x)
            layers.append(layer)
        return self.norm(x), concatenate_taps(outputs, tap_layers), cache._replace(layers=tuple(layers))

    def empty_cache(self, batch: int, capacity: int, lookahead: int = 0) -> Cache:
        """Room for `capacity` tokens of each request, read in calls of lookahead + 1 tokens after the prompt."""
        cfg, dtype = self.cfg, self.embed_tokens[...].dtype
        layers = tuple(block.empty_state(batch, capacity, lookahead, dtype) for block in self.layers)
        if cfg.rotary is None:
            return Cache(layers, jnp.zeros((capacity, 0)), jnp.zeros((capacity, 0)))
        cos, sin = cfg.rotary.angles(jnp.arange(capacity)[None])
        return Cache(layers, cos[0, :, 0], sin[0, :, 0])


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
