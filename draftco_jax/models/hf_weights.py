"""Hugging Face layout in and out: safetensors with the published tensor names beside a config.json.

On disk a projection is [out, in]; in the module it is [in, out]. Nothing else differs for the dense decoder, so the
map from tree path to tensor name is a rule, not a table.
"""

from __future__ import annotations

import json
from dataclasses import MISSING, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from draftco_jax.config_io import from_json, to_json
from draftco_jax.errors import UserError
from draftco_jax.models.checkpoint_files import SHARD_BYTES, SafetensorsReader, write_sharded
from draftco_jax.models.checkpoint_trees import TensorSpec, load_tree
from draftco_jax.models.compute import FLOAT32, ComputeConfig
from draftco_jax.models.families import family_named, family_of, prefix_of, source, tensors_of
from draftco_jax.models.functional import Params, abstract_params
from draftco_jax.models.layer_runs import unstack_layers
from draftco_jax.models.transformer import DecoderConfig

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


def save_policy(
    folder: Path | str,
    cfg: DecoderConfig,
    params: Params,
    metadata: dict[str, str] | None = None,
    *,
    max_shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write config.json and the weights as transformers would, in shards where they are large."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    family = family_of(cfg)
    # The scaling of rotary is written in `rope_parameters`; in the form of our own field transformers refuses it.
    own = {name: value for name, value in to_json(cfg).items() if name not in ("type", "rope_scaling")}
    config = own | family.to_hf(cfg) | {"dtype": str(params["embed_tokens"].dtype)}
    config |= {"architectures": [family.architecture], "model_type": family.model_types[0]}
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    write_sharded(folder, tensors_of(leaves, cfg), max_shard_bytes, metadata={"format": "pt"} | (metadata or {}))


def load_config(folder: Path | str) -> DecoderConfig:
    """The config of a policy in Hugging Face layout."""
    path = Path(folder) / "config.json"
    raw = read_config(path)
    family = family_named(raw.get("model_type"), path)
    known = {name: value for name, value in family.from_hf(raw, path).items() if value is not None}
    return config_from(family.config, {name: _as_json(value) for name, value in known.items()}, path)


def load_policy(
    folder: Path | str,
    *,
    dtype: Any = None,
    cut_padding: bool = False,
    shardings: Params | None = None,
    compute: ComputeConfig = FLOAT32,
) -> tuple[DecoderConfig, Params]:
    """Read a policy in Hugging Face layout, array by array, straight into `shardings` where they are given.

    Args:
        folder: config.json and safetensors, in one file or in shards with their index.
        dtype: of all arrays; None: as `compute` says.
        cut_padding: drop rows of embedding and head beyond vocab_size instead of refusing them.
        shardings: a sharding for each leaf of the parameter tree.
        compute: how the policy is to be held: dtype of the parameters, layers one by one or stacked.
    """
    folder = Path(folder)
    cfg = load_config(folder)
    family, reader = family_of(cfg), SafetensorsReader(folder)
    prefix, abstract = prefix_of(family, reader), abstract_policy(cfg, compute)
    leaves, treedef = jax.tree_util.tree_flatten_with_path(abstract)
    wanted = {
        path: TensorSpec(
            source=source(path, leaf.shape, cfg, reader, prefix, cut_padding=cut_padding),
            shape=leaf.shape,
            dtype=leaf.dtype if dtype is None else dtype,
        )
        for path, leaf in leaves
    }
    placed = None if shardings is None else dict(jax.tree_util.tree_flatten_with_path(shardings)[0])
    ignored = (*family.ignored, "lm_head.weight") if cfg.tie_word_embeddings else family.ignored
    arrays = load_tree(reader, wanted, placed, ignored)
    return cfg, jax.tree.unflatten(treedef, [arrays[path] for path, _ in leaves])


def abstract_policy(cfg: DecoderConfig, compute: ComputeConfig = FLOAT32) -> Params:
    """Shapes and dtypes of a policy's parameters: one block of each kind is traced, however many layers there are."""
    stacked = abstract_params(partial(cfg.build, compute=replace(compute, scan_layers=True)))
    if compute.scan_layers:
        return stacked
    return jax.eval_shape(lambda params: unstack_layers(params, cfg.runs), stacked)


def _as_json(value: Any) -> Any:
    """Dataclasses (rotary scaling) and tuples as a config file holds them."""
    if is_dataclass(value) and not isinstance(value, type):
        return to_json(value)
    return [_as_json(item) for item in value] if isinstance(value, tuple) else value
