"""Hugging Face layout in and out: safetensors with the published tensor names beside a config.json.

On disk a projection is [out, in]; in the module it is [in, out]. Nothing else differs for the dense decoder, so the
map from tree path to tensor name is a rule, not a table.
"""

from __future__ import annotations

import json
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from draftco_jax.config_io import from_json, to_json
from draftco_jax.errors import UserError
from draftco_jax.models.functional import Params, abstract_params
from draftco_jax.models.qwen3 import Qwen3Config

WEIGHTS_FILE = "model.safetensors"

Config = TypeVar("Config")


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


def read_config(path: Path) -> dict[str, Any]:
    """A config.json as a dict, or one clear line about why it cannot be read."""
    if not path.is_file():
        raise UserError(f"checkpoint {path.parent} holds no {path.name}; give a folder in Hugging Face layout")
    try:
        raw = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}); it is damaged, get it again") from error
    if not isinstance(raw, dict):
        raise UserError(f"{path} holds a {type(raw).__name__} but must hold an object of settings; get it again")
    return raw


def config_from(cls: type[Config], values: dict[str, Any], path: Path) -> Config:
    """The config dataclass with these values, its own defaults for absent ones; every value is checked."""
    stated = fields(cast(Any, cls))
    defaults = {
        field.name: to_json(field.default) if is_dataclass(field.default) else field.default
        for field in stated
        if field.default is not MISSING
    }
    known = {field.name: values[field.name] for field in stated if field.name in values}
    try:
        return from_json(cls, {"type": cls.__name__} | defaults | known)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def save_policy(folder: Path, cfg: Qwen3Config, params: Params, metadata: dict[str, str] | None = None) -> None:
    """Write config.json and model.safetensors as transformers would."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {field.name: getattr(cfg, field.name) for field in fields(cfg)}
    config |= {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu"}
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    save_file(to_tensors(params), folder / WEIGHTS_FILE, metadata={"format": "pt"} | (metadata or {}))


def load_policy(folder: Path) -> tuple[Qwen3Config, Params]:
    """Read a Qwen3 policy in Hugging Face layout."""
    path = folder / "config.json"
    raw = read_config(path)
    if raw.get("model_type") != "qwen3":
        raise UserError(f"{path}: model_type={raw.get('model_type')!r} is not supported; supported: qwen3")
    if raw.get("use_sliding_window"):
        raise UserError(f"{path}: use_sliding_window=true is not supported; supported: full attention")
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    raw = {"rope_theta": rope["rope_theta"]} | raw if "rope_theta" in rope else raw
    if "rope_theta" not in raw:
        raise UserError(f"{path}: rope_theta is missing; add the value the policy was trained with")
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise UserError(f"{path}: rope scaling {rope} is not supported; supported: plain rotary embedding")
    cfg = config_from(Qwen3Config, raw, path)
    weights = folder / WEIGHTS_FILE
    return cfg, from_tensors(abstract_params(cfg.build), read_tensors(weights), str(weights))
