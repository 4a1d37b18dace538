"""DSpark checkpoints: DeepSpec's, SpecForge's and speculators' layouts in; DeepSpec's out.

Which token a row stands for is part of what a draft has learnt and cannot be seen in its weights. It is read under
every spelling, implied by the classes of DeepSpec and SpecForge (the anchor's row is the first draft), and refused
where a file is silent. Drafts whose anchor row is not read exist in speculators' files only and are written so; such
files count that row in block_size, this project counts drafts.

Frozen copies of the policy's embedding and head are left aside on load, since the policy has moved on; on save they are
written from the live tables where the caller gives these. Serving engines share the policy's and need none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draftco_jax.drafts.base import Shared
from draftco_jax.drafts.blocks.checkpoint import (
    ANCHOR_KEYS,
    HINTS,
    REQUIRED,
    SECTION,
    anchor_flag,
    block_config,
    block_values,
    causality,
    is_speculators,
    open_block_draft,
)
from draftco_jax.drafts.dspark.config import DSparkConfig
from draftco_jax.drafts.files import (
    Settings,
    build_config,
    complete,
    live_tables,
    read_draft_tensors,
    renamed,
    write_draft,
)
from draftco_jax.errors import UserError
from draftco_jax.models.functional import ModelGraph, Params, abstract_params, graph_of
from draftco_jax.models.hf_weights import from_tensors, to_tensors

_DEEPSPEC, _SPECFORGE, _SPECULATORS = "Qwen3DSparkModel", "DSparkDraftModel", "DSparkSpeculator"
_HEADS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")


def save_dspark(
    folder: Path,
    cfg: DSparkConfig,
    graph: ModelGraph,
    params: Params,
    shared: Shared | None = None,
    *,
    target_layers: int | None = None,
) -> None:
    """Write a draft in DeepSpec's layout.

    `shared` adds copies of the policy's live tables, which DeepSpec's own class asks for when it loads strictly.
    `target_layers` is the policy's depth.
    """
    del graph
    check_layout(cfg)
    body = block_config(cfg, target_layers, *_HEADS, "block_size", "sample_from_anchor")
    settings: dict[str, Any] = {name: getattr(cfg, name) for name in (*_HEADS, "block_size", "sample_from_anchor")}
    settings |= {"mask_token_id": cfg.mask_token_id, "num_anchors": cfg.num_anchors} | causality(cfg)
    if cfg.sample_from_anchor:
        config = body | settings | {"architectures": [_DEEPSPEC], "target_layer_ids": list(cfg.tap_layers)}
    else:
        config = settings | {
            "architectures": [_SPECULATORS],
            "speculators_model_type": "dspark",
            "block_size": cfg.rows,
            "draft_vocab_size": cfg.vocab_size,
            "aux_hidden_state_layer_ids": [tap + 1 for tap in cfg.tap_layers],
            "transformer_layer_config": body,
        }
    write_draft(folder, config, to_tensors(params, prefix="") | live_tables(shared, head=True))


def check_layout(cfg: DSparkConfig) -> None:
    """Refuse what no published layout says."""
    causality(cfg)
    if not cfg.sample_from_anchor and "sliding_attention" in cfg.layer_types:
        raise UserError("sample_from_anchor=false with sliding layers has no published layout; use full attention")


def load_dspark(folder: Path, training: DSparkConfig | None = None) -> tuple[DSparkConfig, ModelGraph, Params]:
    """Read a draft; `training` says how it is to be trained, and supplies what the file does not say."""
    settings = open_block_draft(folder)
    values = block_values(settings) | {"sample_from_anchor": _sample_from_anchor(settings)} | _heads(settings)
    if not values["sample_from_anchor"] and isinstance(values["block_size"], int):
        values["block_size"] -= 1  # the row of the anchor is not a draft
    cfg = build_config(DSparkConfig, complete(settings, values, training, HINTS, *REQUIRED), settings, training)
    tensors = renamed(read_draft_tensors(folder), {"logit_head.": ""}, str(folder))
    for name in ("embed_tokens.weight", "lm_head.weight"):
        tensors.pop(name, None)
    return cfg, graph_of(cfg.build), from_tensors(abstract_params(cfg.build), tensors, str(folder), prefix="")


def _sample_from_anchor(settings: Settings) -> bool:
    """Stated, or implied by the class; never assumed."""
    stated, name = anchor_flag(settings), settings.architecture
    kind = settings.raw.get("speculators_model_type")
    if name == "DFlashDraftModel" or kind == "dflash":
        raise settings.refusal("this is a DFlash draft; load it as family dflash")
    known = kind == "dspark" if is_speculators(settings) else name in (_DEEPSPEC, _SPECFORGE)
    if not known and (name is not None or stated is None):
        raise settings.refusal(
            f"architectures={name} does not say which token a row stands for, and a wrong guess drafts noise; "
            f"supported: {_DEEPSPEC}, {_SPECFORGE}, speculators' dspark"
        )
    if stated is not None:
        return stated
    if is_speculators(settings):
        raise settings.refusal(
            f"speculators_model_type=dspark without {' / '.join(ANCHOR_KEYS)}: older versions trained either layout; "
            "add it, true if the anchor's row is the first draft"
        )
    return True


def _heads(settings: Settings) -> dict[str, Any]:
    """Markov and confidence heads; absent ones are off, as in SpecForge."""
    values = {name: settings.find(name, sections=(SECTION,)) for name in _HEADS}
    if values["enable_confidence_head"] is None:
        weight = settings.find("confidence_head_alpha", sections=(SECTION,))
        values["enable_confidence_head"] = bool(weight)
    defaults = {"markov_rank": 0, "markov_head_type": "vanilla", "confidence_head_with_markov": False}
    return values | {name: value for name, value in defaults.items() if values[name] is None}
