"""Heads whose body is blocks of a policy family, in and out of checkpoints.

Which family: `model_type` of config.json, that of the policy or one written here (`mtp_layer: policy`). The tensors of
the blocks have the family's own names below `mtp.`, experts one by one or all in one tensor as the family allows; those
around them are Qwen3.5's (`checkpoint`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from draftco_jax.config_io import to_json
from draftco_jax.drafts.base import sizes_from
from draftco_jax.drafts.files import Settings, read_draft_tensors
from draftco_jax.drafts.mtp.config import MtpConfig, one_layer_of
from draftco_jax.errors import UserError
from draftco_jax.models.checkpoint_files import Index, SafetensorsReader, Stored, all_finite
from draftco_jax.models.checkpoint_trees import Source, Tensor, TensorSpec, Transposed, load_tree
from draftco_jax.models.families import family_of, names_of, source, tensors_of
from draftco_jax.models.functional import ModelGraph, Params, abstract_params, graph_of
from draftco_jax.models.hf_weights import load_config, tensor_name, to_tensors
from draftco_jax.models.transformer import DecoderConfig

PREFIX = "mtp."
POLICY = "policy"
"""Value of `mtp_layer` in files of a head of policy blocks; without the key the layer is dense, or a policy's own."""
_QWEN_MOE = ("qwen3_5_moe_text", "qwen3_5_moe")
_EXPERTS = ("mtp.layers.0.mlp.experts.", "mtp.layers.0.mlp.gate.")
_TABLES = ("mtp.embed_tokens.weight", "mtp.lm_head.weight", "mtp.shared_head.head.weight")


def has_policy_layer(settings: Settings, names: Iterable[str]) -> bool:
    """Whether a folder's head is made of policy blocks: said by `mtp_layer`, or told by Qwen3.5-MoE's tensors."""
    stated = settings.raw.get("mtp_layer")
    if stated not in (None, POLICY):
        raise settings.refusal(f"mtp_layer={stated!r} must be {POLICY!r} or left out for one dense layer")
    published = settings.raw.get("model_type") in _QWEN_MOE and any(name.startswith(_EXPERTS) for name in names)
    return stated == POLICY or published


def load_with_policy_layer(
    folder: Path, settings: Settings, style: str, training: MtpConfig | None
) -> tuple[MtpConfig, ModelGraph, Params]:
    """Read such a head: its blocks by the rules of the family, all checked as a policy's are."""
    stated = load_config(folder)
    layer = stated if settings.raw.get("mtp_layer") == POLICY else one_layer_of(stated)
    values: dict[str, Any] = sizes_from(layer) | {"style": style, "layer": layer}
    try:
        cfg = MtpConfig(**values).with_training_of(training)
    except ValueError as error:
        raise settings.refusal(str(error)) from error
    reader = HeldTensors(folder, read_draft_tensors(folder, lambda name: name.startswith(PREFIX)))
    leaves, treedef = jax.tree_util.tree_flatten_with_path(abstract_params(cfg.build))
    wanted = {
        path: TensorSpec(source=_source(path, leaf.shape, layer, reader), shape=leaf.shape, dtype=leaf.dtype)
        for path, leaf in leaves
    }
    arrays = load_tree(reader, wanted, ignored=_TABLES)
    return cfg, graph_of(cfg.build), jax.tree.unflatten(treedef, [arrays[path] for path, _ in leaves])


def _source(path: tuple[Any, ...], shape: tuple[int, ...], layer: DecoderConfig, reader: SafetensorsReader) -> Source:
    if names_of(path)[0] == "layers":
        return source(path, shape, layer, reader, PREFIX)
    tensor = Tensor(tensor_name(path, PREFIX))
    return Transposed(tensor) if names_of(path)[-1] == "kernel" else tensor


def written_settings(cfg: MtpConfig, layer: DecoderConfig) -> dict[str, Any]:
    """config.json of a head of policy blocks: the settings of a policy that has these blocks alone."""
    family = family_of(layer)
    own = {name: value for name, value in to_json(layer).items() if name not in ("type", "rope_scaling")}
    name = family.architecture.removesuffix("ForCausalLM") + "MTP"
    return own | family.to_hf(layer) | {
        "architectures": [name],
        "model_type": family.model_types[0],
        "mtp_num_hidden_layers": 1,
        "mtp_style": cfg.style,
        "mtp_layer": POLICY,
    }  # fmt: skip


def written_tensors(layer: DecoderConfig, params: Params) -> dict[str, np.ndarray]:
    """All tensors under `mtp.`, those of the blocks as the family's policies are written."""
    around = {name: part for name, part in params.items() if name != "layers"}
    blocks = jax.tree_util.tree_flatten_with_path({"layers": params["layers"]})[0]
    own = family_of(layer).prefixes[0]
    found = {PREFIX + name.removeprefix(own): tensor for name, tensor in tensors_of(blocks, layer)}
    return to_tensors(around, prefix=PREFIX) | found


class HeldTensors(SafetensorsReader):
    """Tensors in memory as a reader has them, for files of which only the shards with a head are there."""

    def __init__(self, folder: Path, tensors: Mapping[str, np.ndarray]) -> None:
        self.source, self.held = folder, tensors
        self.tensors = {name: Stored(folder, tensor.dtype, tensor.shape, 0) for name, tensor in tensors.items()}

    def read(self, name: str, index: Index | None = None) -> np.ndarray:
        """A tensor, or slices of it; what is not finite is refused."""
        values = self.held[name] if index is None else self.held[name][index]
        if not all_finite(values):
            raise UserError(
                f"{self.source}: {name} holds a value that is not finite; the file is damaged, get it again"
            )
        return values
