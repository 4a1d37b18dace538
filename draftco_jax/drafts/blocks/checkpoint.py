"""What the files of both block drafts have in common: body, block, taps, attention pattern, and what is refused.

| publisher | classes | block settings | tap ids |
|---|---|---|---|
| z-lab, SpecForge | DFlashDraftModel, DSparkDraftModel | top level, dflash_config | target_layer_ids there: OUTPUT |
| DeepSpec | Qwen3DSparkModel (its "dflash" drafts too) | top level | target_layer_ids: OUTPUT |
| speculators | speculators_model_type dflash, dspark | top level | aux_hidden_state_layer_ids: BOUNDARY |

`mask_token_id` has no default. An id that is also the pad or stop token is accepted, since published drafts have it,
but such a draft cannot tell a blank from that token; an id outside the vocabulary is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from draftco_jax.drafts.blocks.config import BlockDraftConfig, default_taps
from draftco_jax.drafts.files import (
    SIZES,
    Settings,
    check_plain,
    read_settings,
    rope_theta_of,
    sizes_of,
    tensor_names,
)
from draftco_jax.errors import UserError

SECTION = "dflash_config"
ANCHOR_KEYS = ("sample_from_anchor", "query_zero_predicts_next")
REQUIRED = ("num_hidden_layers", "block_size", "mask_token_id", "tap_layers")
HINTS = {
    "head_dim": "Qwen3 files always state it",
    "rope_theta": "the target's own is usual",
    "block_size": "16 in most published DFlash drafts, 7 in DSpark",
    "mask_token_id": "a reserved token of the target, 151669 for Qwen3; it is part of what the draft learnt",
    "tap_layers": "target_layer_ids, outputs of 0-based target layers, round(1 + i (N - 4) / (n - 1)) as published",
}

_PACKED = ("qkv_proj", "gate_up_proj", "weight_scale", "weight_packed")
_OWN_TABLES = {
    "mask_embedding": "its own mask embedding",
    "sink": "attention sinks",
    "d2t": "a reduced vocabulary",
    "t2d": "a reduced vocabulary",
}


def open_block_draft(folder: Path) -> Settings:
    """config.json of a block draft, after models that go by its name and compute something else are refused."""
    settings, names = read_settings(folder), tensor_names(folder)
    nested = settings.section(SECTION).raw
    kind = nested.get("projector_type")
    _refuse_other_models(settings, names, kind)
    if kind not in (None, "dflash", "dspark"):
        raise settings.refusal(f"projector_type={json.dumps(kind)} is not supported; supported: dflash, dspark")
    if _any_holds(names, *_PACKED):
        raise settings.refusal("projections are packed or quantised, as in NVFP4 files; give the bf16 checkpoint")
    for part, what in _OWN_TABLES.items():
        if _any_holds(names, part):
            raise settings.refusal(
                f"the draft has {what} ({part}); supported: drafts that read the policy's own tables"
            )
    size, full = settings.raw.get("draft_vocab_size"), body_of(settings).raw.get("vocab_size")
    if size is not None and size != full:
        raise settings.refusal(f"draft_vocab_size={size} must be vocab_size={full}; supported: the full vocabulary")
    return settings


def _any_holds(names: Iterable[str], *parts: str) -> bool:
    return any(part in name for name in names for part in parts)


def _refuse_other_models(settings: Settings, names: Iterable[str], kind: Any) -> None:
    """Models that go by the name of a block draft, or stand where one is looked for, are told by name."""
    name = settings.architecture or ""
    has = partial(_any_holds, names)

    if name.startswith("DFlash2") or has("candidate_selector", "attention_conv", ".conv"):
        raise settings.refusal("this is a DFlash 2 draft (convolutions and a candidate selector); not supported")
    if kind == "domino" or name.startswith("Domino") or has("prefix_gru", "embed_proj"):
        raise settings.refusal("this is a Domino draft (a recurrent head over the block); not supported")
    stages = any(tensor.startswith("mtp.") for tensor in names)
    if has("main_proj") or (stages and has("markov_head")):
        raise settings.refusal("this is a DeepSeek-V4 style DSpark draft (mtp stages, main_proj); not supported")
    if stages:
        raise settings.refusal("this is a multi-token prediction head (mtp.*); give it to an MtpConfig")


def is_speculators(settings: Settings) -> bool:
    """Whether the file is of vllm-project/speculators, which nests the body."""
    return settings.raw.get("speculators_model_type") is not None


def body_of(settings: Settings) -> Settings:
    """Where the sizes of the layers stand."""
    return settings.section("transformer_layer_config") if is_speculators(settings) else settings


def anchor_flag(settings: Settings) -> bool | None:
    """Whether the anchor's own row is the first draft, under every spelling; None where the file does not say."""
    return settings.flag(*ANCHOR_KEYS, sections=(SECTION,))


def block_values(settings: Settings) -> dict[str, Any]:
    """Fields of `BlockDraftConfig` that the file states; None for those it does not."""
    body = body_of(settings)
    check_plain(body)
    sizes = {key: body.raw.get(key) for key in (*SIZES, "num_hidden_layers")}
    return (
        sizes
        | {
            "rope_theta": rope_theta_of(body),
            "block_size": settings.find("block_size", sections=(SECTION,)),
            "mask_token_id": settings.find("mask_token_id", sections=(SECTION,)),
            "tap_layers": _tap_layers(settings),
            "num_anchors": settings.find("num_anchors", sections=(SECTION,)),
        }
        | _attention_pattern(settings, body)
    )


def _tap_layers(settings: Settings) -> list[int] | None:
    """Taps in OUTPUT convention."""
    boundary = settings.find("aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids")
    output = settings.find("target_layer_ids", sections=(SECTION,))
    for ids in (boundary, output):
        if ids is not None and not (isinstance(ids, list) and all(type(tap) is int for tap in ids)):
            raise settings.refusal(f"tap_layers={json.dumps(ids)} must be a list of layer numbers; get the file again")
    from_boundary = None if boundary is None else [tap - 1 for tap in boundary]
    if from_boundary is not None and output is not None and from_boundary != output:
        raise settings.refusal(
            f"target_layer_ids={output} (outputs) and aux_hidden_state_layer_ids={boundary} (boundaries, one more) "
            "name different layers; keep the one the draft was trained with"
        )
    if from_boundary is not None and -1 in from_boundary:
        raise settings.refusal("boundary 0 taps the embeddings; supported: outputs of layers")
    return output if output is not None else from_boundary


def _attention_pattern(settings: Settings, body: Settings) -> dict[str, Any]:
    """Kinds of the layers, window and causality in the block, in vLLM's order of precedence.

    is_causal, then dflash_config.causal, each for all layers; without either, sliding layers are causal and layers of
    full attention are not, as SpecForge trains them.
    """
    kinds, window = body.raw.get("layer_types"), body.raw.get("sliding_window")
    if kinds is None and body.raw.get("use_sliding_window"):
        raise settings.refusal("use_sliding_window=true does not say which layers slide; add layer_types")
    sliding = "sliding_attention" in (kinds or ())
    if sliding and is_speculators(settings):
        raise settings.refusal(
            "speculators' sliding window begins one index earlier than SpecForge's; supported: its full attention"
        )
    causal = settings.flag("is_causal", "causal", sections=(SECTION,))
    pattern = {"layer_types": kinds, "sliding_window": window if sliding else None}
    if causal is None:
        return pattern
    return pattern | {"causal": causal, "sliding_causal": causal if sliding else None}


def block_config(cfg: BlockDraftConfig, target_layers: int | None, *left_out: str) -> dict[str, Any]:
    """The body as transformers' Qwen3 config: what all written layouts have at the top level.

    `target_layers` is the policy's depth, which SpecForge's class asks for; None: it is written where the taps tell it.
    """
    sliding = "sliding_attention" in cfg.layer_types
    common = sizes_of(
        cfg, "tap_layers", "mask_token_id", "layer_types", "sliding_window", "sliding_causal", "causal", *left_out
    ) | {
        "model_type": "qwen3",
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "layer_types": list(cfg.layer_types),
        "sliding_window": cfg.sliding_window if sliding else None,
        "use_sliding_window": sliding,
    }
    layers = target_depth(cfg) if target_layers is None else target_layers
    return common | ({} if layers is None else {"num_target_layers": layers})


def causality(cfg: BlockDraftConfig) -> dict[str, bool]:
    """dflash_config.causal where the pattern is not the one that its absence means."""
    sliding, full = ("sliding_attention" in cfg.layer_types), ("full_attention" in cfg.layer_types)
    said = ([cfg.sliding_causal] if sliding else []) + ([cfg.causal] if full else [])
    if cfg.causal is False and (cfg.sliding_causal or not sliding):
        return {}
    if len(set(said)) > 1:
        raise UserError(
            f"sliding_causal={cfg.sliding_causal} with causal={cfg.causal} has no published layout; "
            "files say one thing for all layers, or nothing for causal sliding layers"
        )
    return {"causal": said[0]}


def target_depth(cfg: BlockDraftConfig) -> int | None:
    """Layers N of the policy where the taps are the published ones, of which the last is N - 3; else not known."""
    guess = cfg.tap_layers[-1] + 3
    published = guess > 4 and default_taps(cfg.num_hidden_layers, guess) == cfg.tap_layers
    return guess if published and len(cfg.tap_layers) > 1 else None
