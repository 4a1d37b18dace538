"""What all draft checkpoints share: config.json under several spellings, safetensors in one file or in shards.

A layout is read into the canonical fields and tensor names of this project or refused in one line that says what to
do. Nothing that decides what a draft computes (tap convention, rope base, head width, slot layout) is guessed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from draftco_jax.config_io import from_json, to_json
from draftco_jax.drafts.base import DraftConfig
from draftco_jax.errors import UserError
from draftco_jax.models.hf_weights import WEIGHTS_FILE, read_config

CONFIG_FILE = "config.json"
INDEX_FILE = f"{WEIGHTS_FILE}.index.json"

_FLOATS = ("BF16", "F16", "F32")
_MAPS = {"d2t": ("I64", "I32"), "t2d": ("BOOL",)}
_REQUIRED = ("head_dim", "rope_theta", "rms_norm_eps", "max_position_embeddings")

SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "max_position_embeddings",
)
"""Sizes that all publishers store under the same names."""

Config = TypeVar("Config", bound=DraftConfig)


@dataclass(frozen=True)
class Settings:
    """A config.json: its values, and how to speak of them."""

    path: Path
    raw: Mapping[str, Any]

    def refusal(self, message: str) -> UserError:
        """An error that begins with the file's name."""
        return UserError(f"{self.path}: {message}")

    def section(self, key: str) -> Settings:
        """A nested object of settings; empty where it is absent or null."""
        value = self.raw.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.refusal(f"{key}={json.dumps(value)} must be an object of settings; get the file again")
        return Settings(self.path, value or {})

    def find(self, *keys: str, sections: Iterable[str] = ()) -> Any:
        """The value under any of these keys, at the top or in the sections; None where there is none.

        Two places that say different things are refused: readers differ in which of them they obey.
        """
        places = {key: self.raw[key] for key in keys if self.raw.get(key) is not None}
        for name in sections:
            inner = self.section(name).raw
            places |= {f"{name}.{key}": inner[key] for key in keys if inner.get(key) is not None}
        values = list(places.values())
        # 1 and 1.0 are the same setting, 1 and true are not.
        if any(value != values[0] or isinstance(value, bool) != isinstance(values[0], bool) for value in values[1:]):
            said = ", ".join(f"{key}={json.dumps(value)}" for key, value in places.items())
            raise self.refusal(f"{said} contradict each other; keep the one the draft was trained with")
        return values[0] if values else None

    def flag(self, *keys: str, sections: Iterable[str] = ()) -> bool | None:
        """A value of `find` that must be true or false."""
        value = self.find(*keys, sections=sections)
        if value is not None and not isinstance(value, bool):
            raise self.refusal(f"{keys[0]}={json.dumps(value)} must be true or false; get the file again")
        return value

    @property
    def architecture(self) -> str | None:
        """The one class the file is made for."""
        names = self.raw.get("architectures")
        if names is not None and not (isinstance(names, list) and len(names) == 1 and isinstance(names[0], str)):
            raise self.refusal(f"architectures={json.dumps(names)} must name one class; get the file again")
        return names[0] if names else None


def read_settings(folder: Path) -> Settings:
    """config.json of a checkpoint folder."""
    path = folder / CONFIG_FILE
    return Settings(path, read_config(path))


def check_plain(settings: Settings) -> None:
    """Refuse by name what no draft here computes: biases, other activations, quantised weights, scaled rotation."""
    for key in ("attention_bias", "mlp_bias", "bias"):
        if settings.raw.get(key):
            raise settings.refusal(f"{key}=true is not supported; supported: projections without bias")
    activation = settings.raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise settings.refusal(f"hidden_act={activation!r} is not supported; supported: silu")
    for key in ("quantization_config", "hf_quant_config"):
        if settings.raw.get(key):
            raise settings.refusal(f"{key} says that weights are packed, e.g. NVFP4; give the bf16 checkpoint")
    width, target = settings.raw.get("hidden_size"), settings.raw.get("target_hidden_size")
    if target is not None and target != width:
        raise settings.refusal(
            f"target_hidden_size={target} is not hidden_size={width}; supported: drafts as wide as their policy, "
            "because they read its embeddings"
        )


def rotary_fraction_of(settings: Settings) -> float | None:
    """Share of each head that is rotated; None where the file does not say."""
    return settings.find("partial_rotary_factor", sections=("rope_parameters", "rope_scaling"))


def rope_theta_of(settings: Settings, *, partial: bool = False) -> float | None:
    """Base of the plain rotation, as transformers 4 or 5 writes it; None where the file does not say. Scaling refused.

    The file's own rotation is obeyed, never the policy's: two drafts of one policy may differ in it.
    """
    places = {key: settings.section(key).raw for key in ("rope_parameters", "rope_scaling")}
    for key, rope in places.items():
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise settings.refusal(f"{key} of type {kind!r} is not supported; supported: plain rotary embedding")
    if not partial and rotary_fraction_of(settings) not in (None, 1.0):
        raise settings.refusal("partial_rotary_factor below 1 is not supported; supported: whole heads are rotated")
    return settings.find("rope_theta", sections=places)


def complete(
    settings: Settings, values: dict[str, Any], expected: DraftConfig | None, hints: Mapping[str, str], *extra: str
) -> dict[str, Any]:
    """`values` without the absent ones.

    Sizes, rope base and the `extra` fields change a draft's output and are never filled in from a default: `expected`,
    an explicit config of this draft, may supply them, or they are named with what their publisher uses. An absent
    setting of any other kind (a variant flag) is off, whatever `expected` says.
    """
    known = {name: value for name, value in values.items() if value is not None}
    if expected is not None:
        stated = {name: getattr(expected, name) for name in (*SIZES, "rope_theta", *extra)}
        return stated | known
    missing = [name for name in (*_REQUIRED, *extra) if name not in known]
    if missing:
        told = "; ".join(f"{name}: {hints[name]}" for name in missing if name in hints)
        raise settings.refusal(
            f"{missing} missing; add the values the draft was trained with{f' ({told})' if told else ''}, "
            "or state them in the draft's config"
        )
    return known


def build_config(cls: type[Config], values: Mapping[str, Any], settings: Settings, expected: Config | None) -> Config:
    """The config of these values, trained as `expected` says; every value is checked."""
    tree: dict[str, Any] = {"type": cls.__name__}
    for field in fields(cast(Any, cls)):
        value = values.get(field.name)
        if value is None and field.default is not MISSING:
            value = field.default
        elif value is None and field.default_factory is not MISSING:
            value = field.default_factory()
        elif field.name not in values:
            continue
        tree[field.name] = to_json(value) if hasattr(value, "__dataclass_fields__") else value
    try:
        return from_json(cls, tree).with_training_of(expected)
    except (UserError, ValueError) as error:
        raise settings.refusal(str(error)) from error


def read_draft_tensors(folder: Path, keep: Callable[[str], bool] = lambda name: True) -> dict[str, np.ndarray]:
    """Tensors whose names pass `keep`, from one file or from the shards of an index, each in its own dtype.

    Weights are bf16, fp16 or f32; d2t and t2d are integers and booleans. Anything else (packed or quantised weights) is
    refused by name.
    """
    tensors: dict[str, np.ndarray] = {}
    for path, names in _shards(folder).items():
        if names is not None and not any(map(keep, names)):
            continue
        found = _read_file(path, keep)
        if names is not None and {n for n in names if keep(n)} != found.keys():
            wrong = sorted({n for n in names if keep(n)} ^ found.keys())[:4]
            raise UserError(
                f"{folder / INDEX_FILE} and {path.name} disagree about the tensors {wrong}; "
                "the checkpoint is damaged or incomplete, get it again"
            )
        tensors |= found
    return tensors


def tensor_names(folder: Path) -> set[str]:
    """Names of all tensors of a checkpoint, without reading them; of a sharded one, what its index promises."""
    names: set[str] = set()
    for path, promised in _shards(folder).items():
        if promised is not None:
            names |= promised
            continue
        try:
            with safe_open(_existing(path), framework="np") as file:
                names |= set(file.keys())
        except (SafetensorError, OSError) as error:
            raise UserError(f"weights file {path} cannot be read ({error}); it is damaged or cut short") from error
    return names


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise UserError(f"weights file {path} does not exist; give a folder that holds {path.name}")
    return path


def _shards(folder: Path) -> dict[Path, set[str] | None]:
    """Weight files, with the names that the index promises in each."""
    if (folder / WEIGHTS_FILE).is_file():
        return {folder / WEIGHTS_FILE: None}
    index = folder / INDEX_FILE
    if not index.is_file():
        legacy = sorted(path.name for path in folder.glob("*.bin"))
        if legacy:
            raise UserError(
                f"{folder / legacy[0]} is a pickle, which can run code and is not read; convert it once with "
                "safetensors.torch.save_file(torch.load(PATH, weights_only=True), 'model.safetensors')"
            )
        raise UserError(
            f"weights file {folder / WEIGHTS_FILE} does not exist; give a folder that holds {WEIGHTS_FILE}, whole or "
            "in shards with an index"
        )
    places = read_config(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(v, str) and Path(v).name == v for v in places.values()):
        raise UserError(f"{index} must map tensor names to files beside it; it is damaged, get it again")
    shards: dict[Path, set[str] | None] = {}
    for file in sorted(set(places.values())):
        shards[folder / file] = {name for name, place in places.items() if place == file}
    return shards


def _read_file(path: Path, keep: Callable[[str], bool]) -> dict[str, np.ndarray]:
    found = {}
    try:
        with safe_open(_existing(path), framework="np") as file:
            for name in filter(keep, file.keys()):
                kind = file.get_slice(name).get_dtype()
                wanted = _MAPS.get(name, _FLOATS)
                if kind not in wanted:
                    raise UserError(
                        f"{path}: {name} is stored as {kind}, supported: {', '.join(wanted)}; "
                        "give the checkpoint that is not packed or quantised"
                    )
                found[name] = file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise UserError(f"weights file {path} cannot be read ({error}); it is damaged or cut short") from error
    return found


def renamed(tensors: Mapping[str, np.ndarray], rules: Mapping[str, str], source: str) -> dict[str, np.ndarray]:
    """Tensors with the first prefix that fits replaced; two names that become one are refused."""
    result: dict[str, np.ndarray] = {}
    for name, tensor in tensors.items():
        old = next((prefix for prefix in rules if name.startswith(prefix)), "")
        new = rules[old] + name[len(old) :] if old else name
        if new in result:
            raise UserError(f"{source}: {new} is there under two names; the file mixes two layouts, get it again")
        result[new] = tensor
    return result


def write_draft(folder: Path, config: Mapping[str, Any], tensors: dict[str, np.ndarray]) -> None:
    """config.json and model.safetensors as published; every tensor in the dtype it is kept in.

    Both are written under other names and then put in place: a stop while writing leaves what was there. One between
    the two leaves no config.json, which every reader refuses, and never weights beside the config of others.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kinds = {str(t.dtype) for name, t in tensors.items() if name not in _MAPS}
    named = {"torch_dtype": kinds.pop()} if len(kinds) == 1 else {}
    weights, settings = folder / f"{WEIGHTS_FILE}.part", folder / f"{CONFIG_FILE}.part"
    save_file(tensors, weights, metadata={"format": "pt"})
    settings.write_text(json.dumps({**config, **named}, indent=2, sort_keys=True) + "\n")
    weights.chmod(settings.stat().st_mode)  # safetensors writes files for their owner only
    (folder / CONFIG_FILE).unlink(missing_ok=True)
    weights.replace(folder / WEIGHTS_FILE)
    settings.replace(folder / CONFIG_FILE)


def sizes_of(cfg: DraftConfig, *left_out: str) -> dict[str, Any]:
    """Fields under their own names, which are the published ones, without those of training."""
    skip = {*left_out, *cfg.training_fields}
    return {field.name: getattr(cfg, field.name) for field in fields(cfg) if field.name not in skip}


def live_tables(shared: Any | None, *, head: bool) -> dict[str, np.ndarray]:
    """The policy's live tables under their published names, for files that hold frozen copies; empty without them."""
    if shared is None:
        return {}
    tables = {"embed_tokens.weight": np.asarray(shared.embedding)}
    if head:
        tables["lm_head.weight"] = np.ascontiguousarray(np.asarray(shared.head).T)
    return tables
