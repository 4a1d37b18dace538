"""EAGLE-3 checkpoints in the official flat layout: model.safetensors beside a config.json.

Names are those of EAGLE and SpecForge (`fc.weight`, `midlayer.*`, `norm.weight`, `lm_head.weight`, and `d2t`, `t2d` for
a reduced vocabulary; d2t holds OFFSETS: target id = draft id + d2t[draft id]). Tap layers are stored in OUTPUT
convention under `eagle_config.eagle_aux_hidden_state_layer_ids`, as SpecForge does.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from draftco_jax.drafts.eagle3.config import Eagle3Config
from draftco_jax.drafts.eagle3.module import Eagle3
from draftco_jax.errors import UserError
from draftco_jax.models.functional import ModelGraph, Params, abstract_params, split
from draftco_jax.models.hf_weights import (
    WEIGHTS_FILE,
    config_from,
    from_tensors,
    read_config,
    read_tensors,
    to_tensors,
)

_TAPS_KEY = "eagle_aux_hidden_state_layer_ids"
_TRAINING_FIELDS = ("passes", "pass_decay", "tap_layers")


def save_draft(folder: Path, cfg: Eagle3Config, graph: ModelGraph, params: Params) -> None:
    """Write a draft that serving engines can read."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {f.name: getattr(cfg, f.name) for f in fields(cfg) if f.name not in _TRAINING_FIELDS}
    config |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
        "eagle_config": {_TAPS_KEY: list(cfg.tap_layers), "use_aux_hidden_state": True},
        "ttt_length": cfg.passes,
        "step_loss_decay": cfg.pass_decay,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    tensors = to_tensors(params, prefix="")
    if "draft_to_target" in graph.constants:
        kept = np.asarray(graph.constants["draft_to_target"])
        tensors["d2t"] = kept.astype(np.int64) - np.arange(kept.size)
        tensors["t2d"] = np.isin(np.arange(cfg.vocab_size), kept)
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})


def load_draft(folder: Path, training: Eagle3Config | None = None) -> tuple[Eagle3Config, ModelGraph, Params]:
    """Read a draft in the official flat layout; `training` overrides passes and pass_decay of the file."""
    cfg = _read_config(folder / "config.json", training)
    tensors = dict(read_tensors(folder / WEIGHTS_FILE))
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    tensors.pop("embed_tokens.weight", None)  # the policy's live table is used
    params = from_tensors(abstract_params(cfg.build), tensors, str(folder / WEIGHTS_FILE), prefix="")
    return cfg, graph_with_map(cfg, vocabulary_map(cfg, d2t, t2d, str(folder))), params


def vocabulary_map(cfg: Eagle3Config, d2t: np.ndarray | None, t2d: np.ndarray | None, source: str) -> np.ndarray | None:
    """Target id of each draft id from offsets, checked; None for a full vocabulary."""
    if cfg.draft_vocab_size == cfg.vocab_size:
        if d2t is not None and np.any(d2t):
            raise UserError(
                f"{source}: d2t moves ids although draft_vocab_size={cfg.draft_vocab_size} is vocab_size, where draft "
                "and target ids are the same; set draft_vocab_size to the rows of lm_head"
            )
        return None
    if d2t is None:
        raise UserError(
            f"{source}: draft_vocab_size={cfg.draft_vocab_size} is below vocab_size={cfg.vocab_size} but there is no "
            "map from draft ids to target ids; give a checkpoint with d2t, or set draft_vocab_size to vocab_size"
        )
    ids = np.arange(d2t.size) + d2t.astype(np.int64)
    fits = ids.size == cfg.draft_vocab_size and ids.min() >= 0 and ids.max() < cfg.vocab_size
    if not fits or np.unique(ids).size != ids.size:
        raise UserError(
            f"{source}: d2t must map {cfg.draft_vocab_size} draft ids to different target ids below "
            f"{cfg.vocab_size}; it holds offsets, target id = draft id + d2t[draft id]"
        )
    if t2d is not None and not np.array_equal(np.flatnonzero(t2d), np.sort(ids)):
        raise UserError(f"{source}: d2t and t2d name different target ids; take both from one checkpoint")
    return ids.astype(np.int32)


def graph_with_map(cfg: Eagle3Config, ids: np.ndarray | None) -> ModelGraph:
    """Structure of a draft with its vocabulary map."""
    graph, _ = split(_abstract_with_constants(cfg))
    return ModelGraph(graph.graphdef, {} if ids is None else {"draft_to_target": ids})


def _abstract_with_constants(cfg: Eagle3Config) -> Eagle3:
    return nnx.eval_shape(lambda: cfg.build(nnx.Rngs(0)))


def _read_config(path: Path, training: Eagle3Config | None) -> Eagle3Config:
    raw = read_config(path)
    taps = (raw.get("eagle_config") or {}).get(_TAPS_KEY)
    if taps is None:
        raise UserError(f"{path}: eagle_config.{_TAPS_KEY} is missing; add the 0-based target layers the draft reads")
    missing = [name for name in ("head_dim", "rope_theta", "draft_vocab_size") if name not in raw]
    if missing:
        raise UserError(f"{path}: {missing} missing; add the values the draft was trained with")
    passes = training.passes if training else raw.get("ttt_length", 3)
    decay = training.pass_decay if training else raw.get("step_loss_decay", 0.8)
    return config_from(Eagle3Config, raw | {"tap_layers": taps, "passes": passes, "pass_decay": decay}, path)
