"""EAGLE-3 checkpoints in and out.

Read, told apart by `architectures`:

| class | publisher | layer prefix | tap ids |
|---|---|---|---|
| LlamaForCausalLMEagle3 | SpecForge, NVIDIA | midlayer. | eagle_config: OUTPUT (norm_before_fc: BOUNDARY) |
| LlamaForCausalLM, none | EAGLE | midlayer. | not in the file |
| LlamaEagle3DraftModel | NeMo Automodel | model.layers.0. | not in the file |
| Eagle3Speculator, Eagle3DraftModel, Eagle3LlamaForCausalLM | speculators, vLLM | layers.0. | top level: BOUNDARY |
| Qwen3Eagle3Model | DeepSpec | layers.0. | target_layer_ids: OUTPUT |

OUTPUT i is the residual stream after layer i, BOUNDARY i the one before it, i.e. output i - 1. In memory it is always
OUTPUT. `tap_convention: "output" | "boundary"` in config.json settles a file that does not say.

Written: SpecForge's flat layout, with the taps under both keys, each in the meaning of those who read that key; drafts
with query and key norms in DeepSpec's layout, the only one that has them. d2t holds OFFSETS.

An embedding table in a file is left aside: the policy's live one is used. The head is the draft's own and is kept.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from draftco_jax.drafts.base import Shared
from draftco_jax.drafts.eagle3.config import Eagle3Config
from draftco_jax.drafts.files import (
    SIZES,
    Settings,
    build_config,
    check_plain,
    complete,
    live_tables,
    read_draft_tensors,
    read_settings,
    renamed,
    rope_theta_of,
    sizes_of,
    write_draft,
)
from draftco_jax.drafts.vocabulary import CONSTANT, graph_with_map, map_tensors, vocabulary_map
from draftco_jax.errors import UserError
from draftco_jax.models.functional import ModelGraph, Params, abstract_params
from draftco_jax.models.hf_weights import from_tensors, to_tensors

__all__ = ["check_layout", "graph_with_map", "load_draft", "save_draft", "vocabulary_map"]

_TAPS = "eagle_aux_hidden_state_layer_ids"
_SPECFORGE, _DEEPSPEC, _AUTOMODEL = "LlamaForCausalLMEagle3", "Qwen3Eagle3Model", "LlamaEagle3DraftModel"
_SPECULATORS = ("Eagle3Speculator", "Eagle3DraftModel", "Eagle3LlamaForCausalLM")
_CLASSES = (_SPECFORGE, "LlamaForCausalLM", _AUTOMODEL, *_SPECULATORS, _DEEPSPEC)
_MODELOPT_KEYS = ("use_input_layernorm_in_first_layer", "use_last_layernorm", "use_mtp_layernorm", "next_layer_regular")
_FLAGS = ("norm_before_fc", "norm_before_residual")


def save_draft(
    folder: Path, cfg: Eagle3Config, graph: ModelGraph, params: Params, shared: Shared | None = None
) -> None:
    """Write a draft that serving engines can read.

    `shared` adds a copy of the policy's embeddings, which SpecForge's and DeepSpec's own classes ask for when they load
    strictly; serving engines share the policy's table and need none.
    """
    check_layout(cfg)
    tensors = to_tensors(params, prefix="") | live_tables(shared, head=False)
    common = sizes_of(cfg, "tap_layers", "draft_vocab_size", "norm_output", "fc_norm", "qk_norm", *_FLAGS) | {
        "hidden_act": "silu",
        "attention_bias": False,
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
        "ttt_length": cfg.passes,
        "step_loss_decay": cfg.pass_decay,
    }
    if cfg.qk_norm:
        tensors = renamed(tensors, {"midlayer.": "layers.0."}, str(folder))
        config = {"architectures": [_DEEPSPEC], "model_type": "qwen3", "target_layer_ids": list(cfg.tap_layers)}
        write_draft(folder, common | config | {"draft_num_hidden_layers": 1}, tensors)
        return
    config = {
        "architectures": [_SPECFORGE],
        "model_type": "llama",
        "draft_vocab_size": cfg.draft_vocab_size,
        "eagle_config": {_TAPS: list(cfg.tap_layers), "use_aux_hidden_state": True},
        _TAPS: [tap + 1 for tap in cfg.tap_layers],
    }
    config |= {flag: True for flag in (*_FLAGS, "fc_norm", "norm_output") if getattr(cfg, flag)}
    if cfg.norm_output:
        config["norm_output_meaning"] = "feedback"
    write_draft(folder, common | config, tensors | map_tensors(cfg, graph.constants.get(CONSTANT)))


def check_layout(cfg: Eagle3Config) -> None:
    """Query and key norms exist in DeepSpec's files only, and those know no other variant."""
    if not cfg.qk_norm:
        return
    others = [flag for flag in (*_FLAGS, "fc_norm", "norm_output") if getattr(cfg, flag)]
    if cfg.draft_vocab_size < cfg.vocab_size:
        others.append(f"draft_vocab_size={cfg.draft_vocab_size}")
    if others:
        raise UserError(
            f"qk_norm=true with {', '.join(others)} has no published layout; train the draft with one or the other"
        )


def load_draft(folder: Path, training: Eagle3Config | None = None) -> tuple[Eagle3Config, ModelGraph, Params]:
    """Read a draft of any publisher above.

    `training` says how the draft is to be trained, and supplies what the file does not say (EAGLE's own files have no
    taps, rope base or head width); what the file does say is kept.
    """
    settings = read_settings(folder)
    cfg = _read_config(settings, training)
    tensors = _canonical_tensors(read_draft_tensors(folder), str(folder))
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    graph = graph_with_map(cfg, vocabulary_map(cfg, d2t, t2d, str(folder)))
    return cfg, graph, from_tensors(abstract_params(cfg.build), tensors, str(folder), prefix="")


def _canonical_tensors(tensors: dict[str, Any], source: str) -> dict[str, Any]:
    """Flat names; deeper drafts and parallel ones are refused."""
    tensors = renamed(tensors, {"model.": ""}, source)
    tensors.pop("embed_tokens.weight", None)  # the policy's live table is used
    deeper = sorted(name for name in tensors if name.startswith("layers.") and not name.startswith("layers.0."))
    if deeper:
        raise UserError(f"{source}: {deeper[0]} belongs to a draft of several layers; supported: EAGLE-3 of one layer")
    if "mask_hidden" in tensors:
        raise UserError(f"{source}: mask_hidden belongs to P-EAGLE, which drafts in parallel; supported: EAGLE-3")
    return renamed(tensors, {"layers.0.": "midlayer."}, source)


def _read_config(settings: Settings, training: Eagle3Config | None) -> Eagle3Config:
    name = settings.architecture
    speculators = name in _SPECULATORS[:2] or settings.raw.get("speculators_model_type") == "eagle3"
    if name is not None and name not in _CLASSES:
        raise settings.refusal(
            f"architectures={name} is not an EAGLE-3 draft known here; supported: {', '.join(_CLASSES)}"
        )
    layer = settings.section("transformer_layer_config") if speculators else settings
    check_plain(layer)
    _refuse_others(settings)
    sizes = {key: layer.raw.get(key) for key in SIZES}
    values = sizes | {
        "rope_theta": rope_theta_of(layer),
        "draft_vocab_size": settings.raw.get("draft_vocab_size", sizes["vocab_size"] if name == _DEEPSPEC else None),
        "tap_layers": _tap_layers(settings, name),
        "passes": settings.raw.get("ttt_length"),
        "pass_decay": settings.raw.get("step_loss_decay"),
        "qk_norm": True if name == _DEEPSPEC else None,
    }
    values |= _variant_flags(settings, name, speculators)
    if values["tap_layers"] is None and training is None:
        raise settings.refusal(
            f"{_TAPS} is missing, so which target layers the draft reads is not known; add it to eagle_config (outputs "
            "of 0-based layers; EAGLE, SpecForge and Automodel use 1, N//2 - 1 and N - 4 of a target of N layers), or "
            "state tap_layers in the draft's config"
        )
    return build_config(
        Eagle3Config,
        complete(settings, values, training, _hints(values), "draft_vocab_size", "tap_layers"),
        settings,
        training,
    )


def _hints(values: dict[str, Any]) -> dict[str, str]:
    """What the publishers' code takes where a file does not say."""
    width, heads = values["hidden_size"], values["num_attention_heads"]
    implied = f" = {width // heads}" if isinstance(width, int) and isinstance(heads, int) and heads > 0 else ""
    return {
        "head_dim": f"EAGLE takes hidden_size // num_attention_heads{implied}",
        "rope_theta": "EAGLE and SpecForge take 10000.0",
        "rms_norm_eps": "EAGLE takes 1e-6",
        "max_position_embeddings": "EAGLE takes 2048; it must cover the policy's",
        "draft_vocab_size": "the rows of lm_head.weight",
    }


def _refuse_others(settings: Settings) -> None:
    """Drafts that go by the same name and compute something else."""
    eagle = settings.section("eagle_config").raw
    if eagle.get("use_aux_hidden_state") is False:
        raise settings.refusal(
            "use_aux_hidden_state=false is a draft of one final hidden state; supported: EAGLE-3, which reads taps"
        )
    if settings.find("parallel_drafting", sections=("eagle_config",)) or (eagle.get("parallel_draft_step") or 1) > 1:
        raise settings.refusal("parallel drafting (P-EAGLE) is not supported; supported: EAGLE-3, one token a pass")
    if settings.raw.get("embed_requires_grad"):
        raise settings.refusal(
            "embed_requires_grad=true gives the draft embeddings of its own; supported: drafts that read the policy's"
        )
    if settings.raw.get("use_sliding_window"):
        raise settings.refusal("use_sliding_window=true is not supported; supported: full attention")


def _tap_layers(settings: Settings, name: str | None) -> list[Any] | None:
    """Taps in OUTPUT convention; None where the file names none."""
    if name == _DEEPSPEC:
        return settings.raw.get("target_layer_ids")
    nested, top = settings.section("eagle_config").raw.get(_TAPS), settings.raw.get(_TAPS)
    for value in (nested, top):
        if value is not None and not (isinstance(value, list) and all(type(tap) is int for tap in value)):
            raise settings.refusal(f"{_TAPS} must give tap_layers={json.dumps(value)} as a list of layer numbers")
    ids = nested if nested is not None else top
    if ids is None:
        return None
    if nested is not None and top is not None and top == [tap + 1 for tap in nested]:
        return nested
    convention = settings.raw.get("tap_convention") or _convention(settings, name, nested, top)
    if convention not in ("output", "boundary"):
        raise settings.refusal(
            f"tap_convention={json.dumps(convention)} must be output or boundary; output ids name the layers whose "
            "output is read, boundary ids those whose input is"
        )
    if convention == "boundary" and 0 in ids:
        raise settings.refusal(f"{_TAPS}={ids} taps the embeddings (boundary 0); supported: outputs of layers")
    return ids if convention == "output" else [tap - 1 for tap in ids]


def _convention(settings: Settings, name: str | None, nested: list[int] | None, top: list[int] | None) -> str:
    """What the ids of a file mean that does not say so: by the publisher, or refused."""
    way_out = 'add "tap_convention": "output" (ids name layers whose output is read) or "boundary" (whose input is)'
    if nested is not None and top is not None:
        raise settings.refusal(f"{_TAPS} is {nested} in eagle_config and {top} at the top level; {way_out}")
    if nested is None:
        return "boundary"
    eagle = settings.section("eagle_config").raw
    if settings.flag("norm_before_fc", sections=("eagle_config",)):
        return "boundary"
    if name == _SPECFORGE and not any(key in eagle for key in _MODELOPT_KEYS):
        return "output"
    raise settings.refusal(
        f"{_TAPS}={nested} may count outputs of layers or boundaries between them, readers of such files differ; "
        f"{way_out}"
    )


def _variant_flags(settings: Settings, name: str | None, speculators: bool) -> dict[str, bool | None]:
    """The flags of the variants; absent ones are off, except where readers differ about what absence means."""
    flags = {key: settings.flag(key, sections=("eagle_config",)) for key in _FLAGS}
    if speculators and flags["norm_before_residual"] is None:
        raise settings.refusal(
            "norm_before_residual is missing; vLLM takes it as true and speculators' config class as false, add the "
            "one the draft was trained with"
        )
    each = settings.find("fc_norm", sections=("eagle_config",))
    if isinstance(each, list):
        if len({bool(one) for one in each}) > 1:
            raise settings.refusal(f"fc_norm={json.dumps(each)} must be the same for all taps; supported: all or none")
        each = bool(each and each[0])
    if each is not None and not isinstance(each, bool):
        raise settings.refusal(f"fc_norm={json.dumps(each)} must be true or false; get the file again")
    return flags | {"fc_norm": each, "norm_output": _norm_output(settings, name)}


def _norm_output(settings: Settings, name: str | None) -> bool | None:
    """Whether the state after the final norm is fed back.

    SpecForge before September 2026 wrote `norm_output` for "norm before the head" (true: the classic draft), later for
    "the normed state is fed back" (false: the classic draft), as all others always did, and its files carry no version.
    """
    value = settings.flag("norm_output", sections=("eagle_config",))
    meaning = settings.raw.get("norm_output_meaning")
    if value is None or (name not in (_SPECFORGE, None) and meaning is None):
        return value
    if meaning == "feedback":
        return value
    if meaning == "head" and value:
        return False
    if meaning == "head":
        raise settings.refusal("norm_output=false leaves out the norm before the head; supported: drafts with it")
    raise settings.refusal(
        f'norm_output={json.dumps(value)} has two meanings in files of {_SPECFORGE}; add "norm_output_meaning": '
        '"head" (older SpecForge: it only says whether the head reads normed states; true is classic EAGLE-3) or '
        '"feedback" (SpecForge since September 2026, SGLang, vLLM: whether the normed state is fed back; true is '
        "EAGLE-3.1)"
    )
