"""DFlash checkpoints: z-lab's and SpecForge's layout in and out, speculators' in.

The draft has no embedding and no head of its own, so files that carry any are refused by name. Files of DeepSpec that
are called dflash hold a DSpark draft without heads: their slots are one further on, and their class says so.
"""

from __future__ import annotations

from pathlib import Path

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
from draftco_jax.drafts.dflash.config import DFlashConfig
from draftco_jax.drafts.files import Settings, build_config, complete, read_draft_tensors, write_draft
from draftco_jax.models.functional import ModelGraph, Params, abstract_params, graph_of
from draftco_jax.models.hf_weights import from_tensors, to_tensors

_CLASS = "DFlashDraftModel"
_SPECULATORS = (_CLASS, "DFlashSpeculator", None)


def save_dflash(
    folder: Path,
    cfg: DFlashConfig,
    graph: ModelGraph,
    params: Params,
    shared: Shared | None = None,
    *,
    target_layers: int | None = None,
) -> None:
    """Write a draft in z-lab's layout, with block_size at both places that readers look at.

    `shared` is not written: the layout has no copies of the policy's tables. `target_layers` is the policy's depth.
    """
    del graph, shared
    settings = {"block_size": cfg.block_size, "mask_token_id": cfg.mask_token_id}
    nested = settings | {"target_layer_ids": list(cfg.tap_layers)} | causality(cfg)
    config = block_config(cfg, target_layers) | {"architectures": [_CLASS], SECTION: nested}
    write_draft(folder, config, to_tensors(params, prefix=""))


def check_layout(cfg: DFlashConfig) -> None:
    """Refuse what no published layout says."""
    causality(cfg)


def load_dflash(folder: Path, training: DFlashConfig | None = None) -> tuple[DFlashConfig, ModelGraph, Params]:
    """Read a draft; `training` says how it is to be trained, and supplies what the file does not say."""
    settings = open_block_draft(folder)
    _check_class(settings)
    values = complete(settings, block_values(settings), training, HINTS, *REQUIRED)
    cfg = build_config(DFlashConfig, values, settings, training)
    tensors = read_draft_tensors(folder)
    for name in ("lm_head.weight", "embed_tokens.weight"):
        if name in tensors:
            raise settings.refusal(
                f"the file holds {name}, which a DFlash draft reads from its policy; take it out if it is a copy"
            )
    return cfg, graph_of(cfg.build), from_tensors(abstract_params(cfg.build), tensors, str(folder), prefix="")


def _check_class(settings: Settings) -> None:
    name = settings.architecture
    kind = settings.raw.get("speculators_model_type")
    known = (kind == "dflash" and name in _SPECULATORS) if is_speculators(settings) else name == _CLASS
    if not known:
        shaped = "DSpark" in (name or "") or kind == "dspark"
        raise settings.refusal(
            f"architectures={name} is not a DFlash draft known here; supported: {_CLASS}"
            + ("; a draft of the DSpark kind is loaded as family dspark, DeepSpec's dflash files too" if shaped else "")
        )
    if anchor_flag(settings):
        raise settings.refusal(
            f"{' / '.join(ANCHOR_KEYS)}=true makes the anchor's row the first draft, which a DFlash draft never reads; "
            "supported: false or absent"
        )
    if settings.section(SECTION).raw.get("shift_label"):
        raise settings.refusal("shift_label=true trains each row for the token after it; supported: false or absent")
