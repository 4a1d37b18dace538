"""Multi-token prediction heads in and out of checkpoints, most often those of the policy itself.

| style | prefix | input norms | fuse | output norm |
|---|---|---|---|---|
| qwen3_5 | mtp. | pre_fc_norm_embedding, pre_fc_norm_hidden | fc | norm |
| deepseek | model.layers.N. after the N layers of the policy | enorm, hnorm | eh_proj | shared_head.norm |
| mimo | model.mtp_layers.0. | token_layernorm, hidden_layernorm | input_proj | final_layernorm |

Only these tensors are read, so the folder may be that of the policy. Copies of embedding and head are left aside: the
live ones are used. The body is one dense layer or, under `mtp.`, blocks of a policy family (`policy_layer`), such as
those of Qwen3.5-MoE. Latent attention, other mixtures of experts, biases and several heads are refused by name, and so
are Nemotron-3.5's heads. The style decides what a head computes, so names that do not tell it need `mtp_style` in
config.json.

Written are the `mtp.` names, ready to be laid beside a policy's, with `mtp_style` in a config.json of the head alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints

import numpy as np

from draftco_jax.drafts.base import Shared
from draftco_jax.drafts.files import (
    SIZES,
    Settings,
    build_config,
    check_plain,
    complete,
    read_draft_tensors,
    read_settings,
    renamed,
    rope_theta_of,
    rotary_fraction_of,
    sizes_of,
    tensor_names,
    write_draft,
)
from draftco_jax.drafts.mtp.config import MtpConfig
from draftco_jax.drafts.mtp.policy_layer import (
    PREFIX,
    has_policy_layer,
    load_with_policy_layer,
    written_settings,
    written_tensors,
)
from draftco_jax.errors import UserError
from draftco_jax.models.functional import ModelGraph, Params, abstract_params, graph_of
from draftco_jax.models.hf_weights import from_tensors, to_tensors

_CLASS = "Qwen3_5MTP"
_STYLES = get_args(get_type_hints(MtpConfig)["style"])
_QWEN_TYPES = ("qwen3_5", "qwen3_next")
_COUNTS = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
"""Keys under which config.json counts the layers of heads."""
_REFUSED = {
    "kv_a_proj": "latent attention (MLA)",
    "q_a_proj": "latent attention (MLA)",
    "experts": "a mixture of experts",
    "mlp.gate.": "a mixture of experts",
    ".bias": "biases",
    "weight_scale": "quantised weights",
}
_HINTS = {"rope_theta": "the policy's own", "head_dim": "the policy's own", "rotary_fraction": "0.25 in Qwen3.5"}


class _Naming(NamedTuple):
    """Where a head stands in a checkpoint, and what its own tensors are called there."""

    prefix: str
    names: dict[str, str]  # published -> canonical, below the prefix; the rest is the layer
    style: str | None
    policy_layer: bool = False


def save_mtp(folder: Path, cfg: MtpConfig, graph: ModelGraph, params: Params, shared: Shared | None = None) -> None:
    """Write a head under `mtp.` names. `shared` is not written: the head has no copies of the policy's tables."""
    del graph, shared
    if cfg.layer is not None:
        write_draft(folder, written_settings(cfg, cfg.layer), written_tensors(cfg.layer, params))
        return
    config = sizes_of(cfg, "style", "layer", "attention_output_gate", "rotary_fraction", "rope_theta") | {
        "architectures": [_CLASS],
        "model_type": "qwen3_5_mtp",
        "mtp_num_hidden_layers": 1,
        "mtp_style": cfg.style,
        "attn_output_gate": cfg.attention_output_gate,
        "hidden_act": "silu",
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": cfg.rope_theta,
            "partial_rotary_factor": cfg.rotary_fraction,
        },
    }
    write_draft(folder, config, to_tensors(params, prefix=PREFIX))


def load_mtp(folder: Path, training: MtpConfig | None = None) -> tuple[MtpConfig, ModelGraph, Params]:
    """Read the head of a folder; `training` says how it is to be trained, and supplies what the file does not say."""
    outer = read_settings(folder)
    settings, naming = _inner(outer), _find(folder, outer)
    if naming.policy_layer:
        assert naming.style is not None, "refused where it is not known"
        return load_with_policy_layer(folder, settings, naming.style, training)
    tensors = _canonical(read_draft_tensors(folder, lambda name: name.startswith(naming.prefix)), naming, str(folder))
    values = _values(settings, tensors, naming, training)
    extra = ("rotary_fraction",) if naming.style == "qwen3_5" else ()
    cfg = build_config(MtpConfig, complete(settings, values, training, _HINTS, *extra), settings, training)
    return cfg, graph_of(cfg.build), from_tensors(abstract_params(cfg.build), tensors, str(folder), prefix="")


def _inner(outer: Settings) -> Settings:
    """Settings of the text model, which multimodal policies nest."""
    return outer.section("text_config") if outer.raw.get("text_config") else outer


def _find(folder: Path, outer: Settings) -> _Naming:
    """Which of the layouts the folder holds a head in, after heads of another kind are refused."""
    settings, names = _inner(outer), tensor_names(folder)
    depth, count = settings.raw.get("num_hidden_layers"), outer.find(*_COUNTS, sections=("text_config",))
    found = [naming for naming in _namings(settings) if any(name.startswith(naming.prefix) for name in names)]
    if not found and count:
        raise outer.refusal(
            f"{' / '.join(_COUNTS)}={count}, but the files hold no prediction head: transformers leaves it out when it "
            "saves a policy; give the checkpoint as it was published"
        )
    if len(found) != 1:
        seen = ", ".join(naming.prefix for naming in found) or "none"
        raise UserError(
            f"{folder} must hold one prediction head, under mtp., model.layers.N. (N = num_hidden_layers) or "
            f"model.mtp_layers.0., found: {seen}; give the checkpoint of a policy that has one"
        )
    naming = found[0]
    of_head = {name for name in names if name.startswith(naming.prefix)}
    policy_layer = naming.prefix == PREFIX and has_policy_layer(settings, of_head)
    further = {PREFIX: f"{PREFIX}layers.1.", "model.mtp_layers.0.": "model.mtp_layers.1."}
    next_head = further.get(naming.prefix) or f"model.layers.{(depth or 0) + 1}."
    several_blocks = settings.raw.get("mtp_layer") is not None  # of one head
    if any(name.startswith(next_head) for name in names) and not several_blocks:
        raise UserError(f"{folder} holds several prediction heads ({next_head}*); supported: one head of one layer")
    if count not in (None, 1):
        raise outer.refusal(f"{' / '.join(_COUNTS)}={count} must be 1; supported: one head of one layer")
    if not policy_layer:
        _refuse_nemotron(settings)
        _refuse_other_bodies(of_head, folder)
    if naming.style is None:
        raise _unknown_style(settings)
    return naming._replace(policy_layer=policy_layer)


def _namings(settings: Settings) -> tuple[_Naming, ...]:
    """The layouts there are."""
    return (
        _Naming(PREFIX, {}, _style(settings)),
        _Naming(
            f"model.layers.{settings.raw.get('num_hidden_layers')}.",
            {
                "enorm.": "pre_fc_norm_embedding.",
                "hnorm.": "pre_fc_norm_hidden.",
                "eh_proj.": "fc.",
                "shared_head.norm.": "norm.",
            },
            "deepseek",
        ),
        _Naming(
            "model.mtp_layers.0.",
            {
                "token_layernorm.": "pre_fc_norm_embedding.",
                "hidden_layernorm.": "pre_fc_norm_hidden.",
                "input_proj.": "fc.",
                "final_layernorm.": "norm.",
            },
            "mimo",
        ),
    )


def _unknown_style(settings: Settings) -> UserError:
    return settings.refusal(
        f"mtp.* tensors of model_type={settings.raw.get('model_type')} may follow any style; add mtp_style, one of "
        f"{', '.join(_STYLES)}: it decides the order of the fused pair, what is fed back and how norms are stored"
    )


def _refuse_nemotron(settings: Settings) -> None:
    if settings.raw.get("model_type") == "nemotron_h":
        raise settings.refusal(
            "prediction heads of model_type=nemotron_h are a block of attention and one of experts, whose tensor names "
            "and conventions no source known here states; train a head of such blocks, "
            "MtpConfig.for_target(policy, like_policy=True), or another draft"
        )


def _refuse_other_bodies(names: set[str], source: Path) -> None:
    for part, what in _REFUSED.items():
        culprit = next((name for name in sorted(names) if part in name), None)
        if culprit:
            raise UserError(
                f"{source}: {culprit} belongs to a head with {what}; supported: one dense layer or Qwen3.5-MoE's"
            )


def _style(settings: Settings) -> str | None:
    """Style of `mtp.` names: stated, or Qwen's own."""
    stated = settings.raw.get("mtp_style")
    if stated is not None and stated not in _STYLES:
        raise settings.refusal(f"mtp_style={stated!r} must be one of {', '.join(_STYLES)}; take the head's")
    qwen = str(settings.raw.get("model_type", "")).startswith(_QWEN_TYPES)
    return stated or ("qwen3_5" if qwen else None)


def _canonical(tensors: dict[str, np.ndarray], naming: _Naming, source: str) -> dict[str, np.ndarray]:
    """Names below `mtp.`."""
    tensors = renamed(tensors, {naming.prefix: ""}, source)
    for copy in ("embed_tokens.weight", "shared_head.head.weight", "lm_head.weight"):
        tensors.pop(copy, None)  # the policy's live tables are used
    if naming.prefix == PREFIX:
        return tensors
    layer = {f"{part}.": f"layers.0.{part}." for part in ("self_attn", "mlp")}
    layer |= {f"{part}.": f"layers.0.{part}." for part in ("input_layernorm", "post_attention_layernorm")}
    return renamed(tensors, naming.names | layer, source)


def _values(
    settings: Settings, tensors: dict[str, np.ndarray], naming: _Naming, training: MtpConfig | None
) -> dict[str, Any]:
    """Fields that the file states. Whether heads are gated is told by the rows of q_proj."""
    check_plain(settings)
    sizes = {key: settings.raw.get(key) for key in SIZES}
    query = tensors.get("layers.0.self_attn.q_proj.weight")
    heads, width = (
        value if isinstance(value := sizes[key] or getattr(training, key, None), int) else 0
        for key in ("num_attention_heads", "head_dim")
    )
    gated = query is not None and query.shape[0] == 2 * heads * width > 0
    stated = settings.flag("attn_output_gate")
    if stated is not None and stated != gated and query is not None:
        raise settings.refusal(
            f"attn_output_gate={stated} does not fit q_proj of shape {query.shape}; get config and weights from one "
            "checkpoint"
        )
    fraction = rotary_fraction_of(settings)
    return sizes | {
        "rope_theta": rope_theta_of(settings, partial=True),
        "style": naming.style,
        "attention_output_gate": gated,
        "rotary_fraction": 1.0 if fraction is None and naming.style != "qwen3_5" else fraction,
    }
