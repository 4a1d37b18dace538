"""Growing a policy: more width, heads, hidden units and layers, and the same output law (after arXiv 1511.05641).

    s = sqrt(D' / D)                         of the widths D of the residual stream, ' is grown
    stream' = [s * stream, 0]                so its mean square over D' is the old one over D, and eps means the same
    embedding' = [s * embedding, 0]          o' and down' likewise: columns times s, new columns 0
    norm' = norm / s                         what a layer reads is what it read
    final norm' = norm / s, tied norm / s^2  a tied head carries s once more

Old key-value head j becomes j, and its query heads come first in the group of j. New heads have o rows of 0, new
hidden units down rows of 0, new layers o = down = 0; old layer i of L becomes round((i + 1) L' / L) - 1. Every other
entry is freshly drawn: what nothing reads yet gets gradients through what reads it.

Equal in exact arithmetic. In floating point s is rounded, and sums run over more terms in another order.

What grows is cost, not knowledge: a grown policy is the old function in a larger body.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from draftco_jax.models.functional import Params, initialise
from draftco_jax.models.qwen3 import Qwen3Config

_KEPT = ("vocab_size", "head_dim", "rms_norm_eps", "rope_theta", "tie_word_embeddings")
_GROWING = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)


def grow(policy: tuple[Qwen3Config, Params], target_config: Qwen3Config, key: jax.Array) -> tuple[Qwen3Config, Params]:
    """A policy of `target_config` with the output law of `policy`.

    Args:
        policy: config and parameters, layers one by one; arrays of jax or numpy.
        target_config: sizes to grow to.
        key: of the entries that are drawn.

    Returns:
        The target config and numpy arrays in the dtypes of the old ones.

    Raises:
        ValueError: where the sizes leave no room for the old function.
    """
    cfg, params = policy
    check_growth(cfg, target_config)
    old = jax.tree.map(np.asarray, params)
    fresh = initialise(target_config.build, key)[1]
    dtype = old["embed_tokens"].dtype
    grown: Params = jax.tree.map(lambda leaf: np.array(leaf, dtype), fresh)
    s, stream = scale(cfg, target_config), np.arange(cfg.hidden_size)

    grown["embed_tokens"] = placed(grown["embed_tokens"], s * old["embed_tokens"], cols=stream, rest=0.0)
    exponent = 2 if cfg.tie_word_embeddings else 1
    grown["norm"]["weight"] = grown_norm(grown["norm"]["weight"], old["norm"]["weight"], s**-exponent)
    if not cfg.tie_word_embeddings:
        grown["lm_head"]["kernel"] = placed(grown["lm_head"]["kernel"], old["lm_head"]["kernel"], rows=stream)
    taken = {place: layer for layer, place in enumerate(layer_places(cfg, target_config))}
    for place, fresh_layer in grown["layers"].items():
        if place in taken:
            _fill_layer(fresh_layer, old["layers"][taken[place]], _Places.of(cfg, target_config), s)
        else:
            _silence(fresh_layer)
    return target_config, grown


def check_growth(cfg: Qwen3Config, target: Qwen3Config) -> None:
    """Raise ValueError where `target` cannot hold the function of `cfg`."""
    for name in _KEPT:
        if getattr(cfg, name) != getattr(target, name):
            raise ValueError(
                f"{name}={getattr(target, name)} must stay {getattr(cfg, name)}; growing does not change it"
            )
    for name in _GROWING:
        if getattr(target, name) < getattr(cfg, name):
            raise ValueError(f"{name}={getattr(target, name)} must be >= {getattr(cfg, name)}; a policy only grows")
    old, new = (c.num_attention_heads // c.num_key_value_heads for c in (cfg, target))
    if new < old:
        raise ValueError(
            f"num_attention_heads={target.num_attention_heads} over num_key_value_heads={target.num_key_value_heads} "
            f"must leave each of them >= {old} query heads, as they have now; use more query heads"
        )


def scale(cfg: Qwen3Config, target: Qwen3Config) -> float:
    """s: what the residual stream is multiplied by."""
    return (target.hidden_size / cfg.hidden_size) ** 0.5


def layer_places(cfg: Qwen3Config, target: Qwen3Config) -> tuple[int, ...]:
    """Where the old layers are, spread evenly; the last one stays last."""
    old, new = cfg.num_hidden_layers, target.num_hidden_layers
    # Whole numbers, halves up: floats would round halves to even and could put two layers in one place.
    return tuple((2 * (i + 1) * new + old) // (2 * old) - 1 for i in range(old))


def placed(
    fresh: np.ndarray,
    old: np.ndarray,
    *,
    rows: Sequence[int] | np.ndarray | None = None,
    cols: Sequence[int] | np.ndarray | None = None,
    rest: float | None = None,
) -> np.ndarray:
    """`fresh` with `old` at these rows and columns (None: all); the others are kept, or `rest`."""
    out = fresh.copy() if rest is None else np.full_like(fresh, rest)
    where = (np.arange(n) if chosen is None else chosen for n, chosen in zip(fresh.shape, (rows, cols), strict=True))
    out[np.ix_(*where)] = old
    return out


def grown_norm(fresh: np.ndarray, old: np.ndarray, factor: float) -> np.ndarray:
    """Old weights times a factor, and the factor alone where the stream is 0."""
    out = np.full_like(fresh, factor)
    out[: old.size] = factor * old
    return out


class _Places(NamedTuple):
    """Old rows and columns in the grown matrices of a layer."""

    stream: np.ndarray  # i64[D]
    queries: np.ndarray  # i64[N H]
    keys: np.ndarray  # i64[K H]
    hidden: np.ndarray  # i64[F]

    @classmethod
    def of(cls, cfg: Qwen3Config, target: Qwen3Config) -> _Places:
        """Of all layers alike."""
        width = np.arange(cfg.head_dim)
        old, new = (c.num_attention_heads // c.num_key_value_heads for c in (cfg, target))
        heads = np.array([(n // old) * new + n % old for n in range(cfg.num_attention_heads)])
        return cls(
            np.arange(cfg.hidden_size),
            (heads[:, None] * cfg.head_dim + width[None, :]).ravel(),
            np.arange(cfg.num_key_value_heads * cfg.head_dim),
            np.arange(cfg.intermediate_size),
        )


def _fill_layer(fresh: Params, old: Params, places: _Places, s: float) -> None:
    """Write an old layer into a fresh one."""
    for norm in ("input_layernorm", "post_attention_layernorm"):
        fresh[norm]["weight"] = grown_norm(fresh[norm]["weight"], old[norm]["weight"], 1 / s)
    attention, of_old = fresh["self_attn"], old["self_attn"]
    for norm in ("q_norm", "k_norm"):
        attention[norm] = dict(of_old[norm])
    columns = {"q_proj": places.queries, "k_proj": places.keys, "v_proj": places.keys}
    fill_group(attention["qkv"], of_old["qkv"], places.stream, columns)
    fill_output(attention["o_proj"], of_old["o_proj"], places.queries, places.stream, s)
    hidden = {name: places.hidden for name in ("gate_proj", "up_proj")}
    fill_group(fresh["mlp"]["gate_up"], old["mlp"]["gate_up"], places.stream, hidden)
    fill_output(fresh["mlp"]["down_proj"], old["mlp"]["down_proj"], places.hidden, places.stream, s)


def fill_group(fresh: Params, old: Params, rows: np.ndarray, columns: Mapping[str, np.ndarray | None]) -> None:
    """Write projections that read the stream, into these columns of each (None: all); other entries stay drawn."""
    for name, cols in columns.items():
        fresh[name]["kernel"] = placed(fresh[name]["kernel"], old[name]["kernel"], rows=rows, cols=cols)


def fill_output(fresh: Params, old: Params, rows: np.ndarray | None, stream: np.ndarray, s: float) -> None:
    """Write a projection back into the stream: times s, and 0 from new units and into the new part."""
    fresh["kernel"] = placed(fresh["kernel"], s * old["kernel"], rows=rows, cols=stream, rest=0.0)


def _silence(fresh: Params) -> None:
    """A new layer adds nothing."""
    for module in (fresh["self_attn"]["o_proj"], fresh["mlp"]["down_proj"]):
        module["kernel"] = np.zeros_like(module["kernel"])
