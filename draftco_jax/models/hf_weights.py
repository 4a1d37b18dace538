"""Hugging Face layout in and out: safetensors with the published tensor names beside a config.json.

On disk a projection is [out, in]; in the module it is [in, out]. Nothing else differs for the dense decoder, so the
map from tree path to tensor name is a rule, not a table.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from draftco_jax.errors import UserError
from draftco_jax.models.functional import Params, abstract_params
from draftco_jax.models.qwen3 import Qwen3Config

WEIGHTS_FILE = "model.safetensors"


def tensor_name(path: tuple[Any, ...], prefix: str = "model.") -> str:
    """Published name of the array at a tree path, e.g. ('layers', 0, 'self_attn', 'qkv', 'q_proj', 'kernel')."""
    parts = [str(getattr(key, "key", key)) for key in path]
    parts = [part for part in parts if part not in ("qkv", "gate_up")]
    if parts == ["embed_tokens"]:
        return f"{prefix}embed_tokens.weight"
    if parts[-1] == "kernel":
        parts[-1] = "weight"
    name = ".".join(parts)
    return name if name.startswith("lm_head") else prefix + name


def to_tensors(params: Params, prefix: str = "model.") -> dict[str, np.ndarray]:
    """Tree to tensors by published name, projections transposed to [out, in]."""
    tensors = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        array = np.asarray(leaf)
        is_kernel = str(getattr(path[-1], "key", path[-1])) == "kernel"
        tensors[tensor_name(path, prefix)] = np.ascontiguousarray(array.T if is_kernel else array)
    return tensors


def from_tensors(abstract: Params, tensors: dict[str, np.ndarray], source: str, prefix: str = "model.") -> Params:
    """Tensors by published name to the tree of `abstract`; missing, unexpected and misshapen ones are named."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(abstract)
    wanted = {tensor_name(path, prefix): (path, leaf) for path, leaf in leaves}
    missing, unexpected = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys())
    if missing or unexpected:
        raise UserError(
            f"{source}: missing tensors {missing[:4]}, unexpected tensors {unexpected[:4]}; "
            "the file must hold exactly the model that its config.json describes"
        )
    arrays = []
    for name, (path, leaf) in wanted.items():
        is_kernel = str(getattr(path[-1], "key", path[-1])) == "kernel"
        array = tensors[name].T if is_kernel else tensors[name]
        if array.shape != leaf.shape:
            raise UserError(
                f"{source}: {name} has shape {tensors[name].shape}, config.json asks for "
                f"{leaf.shape[::-1] if is_kernel else leaf.shape}; use the config.json that came with the weights"
            )
        if not np.isfinite(array.astype(np.float32)).all():
            raise UserError(f"{source}: {name} holds a value that is not finite; the file is damaged, get it again")
        arrays.append(jnp.asarray(array, leaf.dtype))
    return jax.tree.unflatten(treedef, arrays)


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """All tensors of a safetensors file, or one clear line about why they cannot be read."""
    if not path.is_file():
        raise UserError(f"weights file {path} does not exist; give a folder that holds {path.name}")
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"weights file {path} cannot be read ({error}); it is damaged or cut short") from error


def save_policy(folder: Path, cfg: Qwen3Config, params: Params, metadata: dict[str, str] | None = None) -> None:
    """Write config.json and model.safetensors as transformers would."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {field.name: getattr(cfg, field.name) for field in fields(cfg)}
    config |= {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu"}
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    save_file(to_tensors(params), folder / WEIGHTS_FILE, metadata={"format": "pt"} | (metadata or {}))


def load_policy(folder: Path) -> tuple[Qwen3Config, Params]:
    """Read a Qwen3 policy in Hugging Face layout."""
    config_path = folder / "config.json"
    if not config_path.is_file():
        raise UserError(f"policy checkpoint {folder} holds no config.json; give a folder in Hugging Face layout")
    raw = json.loads(config_path.read_text())
    if raw.get("model_type") != "qwen3":
        raise UserError(f"{config_path}: model_type={raw.get('model_type')!r} is not supported; supported: qwen3")
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if "rope_theta" not in raw and "rope_theta" in rope:
        raw["rope_theta"] = rope["rope_theta"]
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise UserError(f"{config_path}: rope scaling {rope} is not supported; supported: plain rotary embedding")
    known = {field.name for field in fields(Qwen3Config)}
    cfg = Qwen3Config(**{key: value for key, value in raw.items() if key in known})
    return cfg, from_tensors(abstract_params(cfg.build), read_tensors(folder / WEIGHTS_FILE), str(folder / WEIGHTS_FILE))
