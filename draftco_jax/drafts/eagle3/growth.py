"""An EAGLE-3 draft for a grown policy: the same proposals as for the small one (`models.growth`).

What it reads of the policy is s times as large and 0 in the new dims: taps, which are the outputs of the layers that
hold the old ones, and the live embeddings. The draft's own stream becomes as wide, since a draft has the width of the
embeddings it reads. Heads, hidden units and draft vocabulary stay, so that a pass costs little beside the grown policy.
The head is the draft's own and reads what it read.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np

from draftco_jax.drafts.eagle3.config import Eagle3Config
from draftco_jax.models.functional import Params, initialise
from draftco_jax.models.growth import check_growth, fill_group, fill_output, grown_norm, layer_places, placed, scale
from draftco_jax.models.qwen3 import Qwen3Config


def grow_draft(
    draft: tuple[Eagle3Config, Params], policy_config: Qwen3Config, grown_config: Qwen3Config, key: jax.Array
) -> tuple[Eagle3Config, Params]:
    """The draft of a policy for what `models.growth.grow` makes of that policy.

    Args:
        draft: config and parameters, which fit `policy_config`.
        policy_config: sizes of the policy the draft was trained for.
        grown_config: sizes of the grown policy.
        key: of the entries that read nothing yet.

    Returns:
        Config and numpy arrays. A map of a reduced draft vocabulary stays as it is.

    Raises:
        ValueError: where the draft does not fit the policy, or the policy cannot grow so.
    """
    cfg, params = draft
    cfg.check_target(policy_config)
    check_growth(policy_config, grown_config)
    places, s = layer_places(policy_config, grown_config), scale(policy_config, grown_config)
    new = replace(
        cfg,
        hidden_size=grown_config.hidden_size,
        tap_layers=tuple(places[tap] for tap in cfg.tap_layers),
        max_position_embeddings=max(cfg.max_position_embeddings, grown_config.max_position_embeddings),
    )
    old = jax.tree.map(np.asarray, params)
    dtype = old["fc"]["kernel"].dtype
    grown: Params = jax.tree.map(lambda leaf: np.array(leaf, dtype), initialise(new.build, key)[1])
    stream = np.arange(cfg.hidden_size)
    _fill_fusion(grown, old, cfg, new, s)
    _fill_layer(grown["midlayer"], old["midlayer"], cfg, new, s)
    # With `norm_output` the state after the norm is fed back, so it must be s times as large, like h.
    grown["norm"]["weight"] = grown_norm(
        grown["norm"]["weight"], old["norm"]["weight"], 1.0 if cfg.norm_output else 1 / s
    )
    head = old["lm_head"]["kernel"] / (s if cfg.norm_output else 1.0)
    grown["lm_head"]["kernel"] = placed(grown["lm_head"]["kernel"], head, rows=stream)
    return new, grown


def _fill_fusion(grown: Params, old: Params, cfg: Eagle3Config, new: Eagle3Config, s: float) -> None:
    """h' = s h of taps' = s taps: rows of the old dims stay where the taps are s times as large, others are 0."""
    width, wide, taps = cfg.hidden_size, new.hidden_size, len(cfg.tap_layers)
    rows = np.concatenate([np.arange(width) + tap * wide for tap in range(taps)])
    if cfg.norm_before_fc:
        weight = np.full_like(grown["input_norm"]["weight"], 1 / s)
        weight[rows] = old["input_norm"]["weight"] / s
        grown["input_norm"]["weight"] = weight
    if cfg.fc_norm:
        for tap, norm in grown["fc_norm"].items():
            norm["weight"] = grown_norm(norm["weight"], old["fc_norm"][tap]["weight"], 1 / s)
    factor = s if cfg.norm_before_fc or cfg.fc_norm else 1.0
    fill_output(grown["fc"], old["fc"], rows, np.arange(width), factor)


def _fill_layer(grown: Params, old: Params, cfg: Eagle3Config, new: Eagle3Config, s: float) -> None:
    width = cfg.hidden_size
    stream = np.arange(width)
    # With `norm_before_residual` the normed state is the residual, which must be s times as large; then not the norm
    # but the projections that read it make up for s.
    hidden = 1.0 if cfg.norm_before_residual else 1 / s
    for name, factor in (("input_layernorm", 1 / s), ("hidden_norm", hidden), ("post_attention_layernorm", 1 / s)):
        grown[name]["weight"] = grown_norm(grown[name]["weight"], old[name]["weight"], factor)
    attention, of_old = grown["self_attn"], old["self_attn"]
    for name in ("q_norm", "k_norm") if cfg.qk_norm else ():
        attention[name] = dict(of_old[name])
    reads = np.ones((2 * width, 1))
    reads[width:] = 1 / (hidden * s)
    both = np.concatenate([stream, new.hidden_size + stream])
    projections = {name: {"kernel": module["kernel"] * reads} for name, module in of_old["qkv"].items()}
    fill_group(attention["qkv"], projections, both, {name: None for name in projections})
    fill_output(attention["o_proj"], of_old["o_proj"], None, stream, s)
    fill_group(grown["mlp"]["gate_up"], old["mlp"]["gate_up"], stream, {"gate_proj": None, "up_proj": None})
    fill_output(grown["mlp"]["down_proj"], old["mlp"]["down_proj"], None, stream, s)
