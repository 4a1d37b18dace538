"""Policy families: how a published config.json and its tensors become a config and parameters here.

    config    model_type -> family; its fields by name, with the renames and checks of `from_hf`
    tensors   tree path -> the published tensors that make the array (`sources`)

A name follows from the tree path by a rule (`published`), with the family's renames. Kernels are [out, in] on disk and
[in, out] here; experts are one tensor each on disk, or one for all (Qwen3.5, GPT-OSS), and one array for all here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from draftco_jax.errors import UserError
from draftco_jax.models.checkpoint_files import SafetensorsReader
from draftco_jax.models.checkpoint_trees import Computed, Part, Source, Stacked, Tensor, Transposed, vocabulary_rows
from draftco_jax.models.gpt_oss import GptOssConfig
from draftco_jax.models.llama import LlamaConfig
from draftco_jax.models.mxfp4 import unpack_expert
from draftco_jax.models.nemotron_h import PATTERN, SPELLINGS, NemotronHConfig
from draftco_jax.models.qwen3 import Qwen3Config
from draftco_jax.models.qwen3_5_moe import Qwen35MoeConfig
from draftco_jax.models.qwen3_moe import Qwen3MoeConfig
from draftco_jax.models.rotary import LinearScaling, Llama3Scaling, Scaling, YarnScaling
from draftco_jax.models.transformer import DecoderConfig

Raw = dict[str, Any]
MODULE_ONLY = ("qkv", "gate_up")
"""Tree levels that published names do not have."""
IN_PARTS = ("in_proj", "in_proj_qkv", "conv1d")
"""Published tensors that are stated in parts here; the tree level after such a name is that of a part."""


@dataclass(frozen=True, kw_only=True)
class PolicyFamily:
    """One family."""

    config: type[DecoderConfig]
    model_types: tuple[str, ...]
    """Spellings of model_type that are read; the first is written."""
    architecture: str
    prefixes: tuple[str, ...] = ("model.",)
    """What may stand before the names of all tensors but lm_head; the first is written."""
    renames: Mapping[str, str] = field(default_factory=dict)
    """Published part of a name by the part of the tree path."""
    from_hf: Callable[[Raw, Path], Raw] = lambda raw, path: raw
    """Published settings to the fields of the config, refusing what is not supported."""
    to_hf: Callable[[Any], Raw] = lambda cfg: {}
    """Settings to be written beside the config's own fields."""
    parts: Callable[[Any], dict[str, dict[str, int]]] = lambda cfg: {}
    """Of each of `IN_PARTS` that the family has, its parts in their published order and the outputs of each."""
    ignored: tuple[str, ...] = ()
    """Patterns of tensors that may be in the files and are not part of the policy."""


def rope_of(raw: Raw, path: Path, *, needed: bool = True) -> tuple[float | None, Scaling | None]:
    """theta and scaling, in the newer spelling (rope_parameters) and the older (rope_theta, rope_scaling)."""
    rope = _object(raw, "rope_parameters", path) or _object(raw, "rope_scaling", path)
    theta = rope.get("rope_theta", raw.get("rope_theta"))
    if theta is None and needed:
        raise UserError(f"{path}: rope_theta is missing; add the value the policy was trained with")
    kind = rope.get("rope_type", rope.get("type", "default"))
    kinds = {"linear": LinearScaling, "llama3": Llama3Scaling, "yarn": YarnScaling}
    if kind == "default":
        return theta, None
    if not isinstance(kind, str) or kind not in kinds:
        raise UserError(f"{path}: rope_type={kind!r} is not supported; supported: default, {', '.join(kinds)}")
    _refuse(rope, path, mscale=None, mscale_all_dim=None)  # another attention factor
    names = {f.name for f in fields(kinds[kind])}
    given = {name: value for name, value in rope.items() if name in names}
    if kind == "yarn" and rope.get("attention_factor") is not None:
        given["attention_factor_override"] = rope["attention_factor"]
    try:
        return theta, kinds[kind](**given)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{path}: rope scaling {rope} cannot be read ({error}); use the published config.json"
        ) from error


def _object(raw: Raw, name: str, path: Path) -> Raw:
    """A setting that holds settings; empty where it is absent or null."""
    found = raw.get(name)
    if not isinstance(found, dict | None):
        raise UserError(f"{path}: {name}={found!r} must be an object of settings; use the published config.json")
    return found or {}


def plain_rope(raw: Raw, path: Path) -> Raw:
    """Settings of a family without scaled rotary."""
    theta, scaling = rope_of(raw, path)
    if scaling is not None:
        raise UserError(f"{path}: rope scaling {scaling} is not supported here; supported: plain rotary embedding")
    return raw | {"rope_theta": theta}


def _refuse(raw: Raw, path: Path, **wanted: Any) -> None:
    for name, value in wanted.items():
        if raw.get(name, value) not in (value, None):
            raise UserError(f"{path}: {name}={raw[name]!r} is not supported; supported: {value!r}")


def _qwen3(raw: Raw, path: Path) -> Raw:
    _refuse(raw, path, use_sliding_window=False, attention_bias=False, hidden_act="silu")
    return plain_rope(raw, path)


def _llama(raw: Raw, path: Path) -> Raw:
    _refuse(raw, path, attention_bias=False, mlp_bias=False, hidden_act="silu")
    theta, scaling = rope_of(raw, path, needed=False)
    heads = raw.get("num_attention_heads", 1)
    head_dim = raw.get("head_dim") or raw.get("hidden_size", 0) // heads
    kv_heads = raw.get("num_key_value_heads") or heads
    changed = {"rope_theta": 1e4 if theta is None else theta, "rope_scaling": scaling}
    return {"rms_norm_eps": 1e-6} | raw | changed | {"head_dim": head_dim, "num_key_value_heads": kv_heads}


def _qwen3_moe(raw: Raw, path: Path) -> Raw:
    _refuse(raw, path, decoder_sparse_step=1, mlp_only_layers=[])
    experts = raw.get("num_experts", raw.get("num_local_experts"))
    # A file that does not say so leaves the weights as they are, in transformers; all published sizes do say so.
    return {"norm_topk_prob": False} | _qwen3(raw, path) | {"num_experts": experts}


def _qwen3_5_moe(raw: Raw, path: Path) -> Raw:
    raw = raw | _object(raw, "text_config", path)
    _refuse(raw, path, attention_bias=False, hidden_act="silu", attn_output_gate=True)
    rope = _object(raw, "rope_parameters", path)
    partial = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 0.25))
    hidden = raw.get("hidden_size")
    width = raw.get("intermediate_size") or (4 * hidden if isinstance(hidden, int) else None)
    return plain_rope(raw, path) | {"partial_rotary_factor": partial, "intermediate_size": width}


def _gpt_oss(raw: Raw, path: Path) -> Raw:
    _refuse(raw, path, attention_bias=True, hidden_act="silu")
    if not (raw.get("rope_parameters") or raw.get("rope_scaling")):
        raise UserError(
            f"{path}: rope_parameters is missing; give the published YaRN, or {{'rope_type': 'default'}} for none"
        )
    theta, scaling = rope_of(raw, path)
    experts = raw.get("num_local_experts", raw.get("num_experts"))
    per_token = raw.get("num_experts_per_tok", raw.get("experts_per_token"))
    return raw | {
        "rope_theta": theta,
        "rope_scaling": scaling,
        "num_experts": experts,
        "num_experts_per_tok": per_token,
    }


def _nemotron_h(raw: Raw, path: Path) -> Raw:
    _refuse(raw, path, n_group=1, topk_group=1, mlp_hidden_act="relu2", moe_latent_size=None, use_conv_bias=True)
    _refuse(raw, path, attention_bias=False, mlp_bias=False, mamba_proj_bias=False, use_bias=False)
    pattern = raw.get("layers_block_type") or raw.get("hybrid_override_pattern")
    if not pattern or not isinstance(pattern, str | list) or not all(isinstance(kind, str) for kind in pattern):
        raise UserError(
            f"{path}: layers_block_type={pattern!r} must name the kind of each layer; use the published config.json"
        )
    kinds = tuple(PATTERN.get(kind) or SPELLINGS.get(kind, kind) for kind in pattern)
    try:
        limit = [_number(value) for value in raw.get("time_step_limit") or (0.0, math.inf)]
    except (TypeError, ValueError, KeyError) as error:
        raise UserError(
            f"{path}: time_step_limit={raw['time_step_limit']!r} must be two numbers; use the published config.json"
        ) from error
    return raw | {
        "block_types": kinds,
        "num_hidden_layers": len(kinds),
        "rms_norm_eps": raw.get("layer_norm_epsilon", raw.get("norm_eps", 1e-5)),
        "time_step_limit": tuple(None if value == math.inf else value for value in limit),
    }


def _number(value: Any) -> float:
    """A float, also where JSON holds infinity as transformers writes it."""
    return float(value["__float__"]) if isinstance(value, dict) else float(value)


def _written_number(value: float | None) -> Any:
    """As transformers writes numbers that JSON does not have."""
    return {"__float__": "Infinity"} if value is None else value


def _delta_parts(cfg: Qwen35MoeConfig) -> dict[str, dict[str, int]]:
    keys, values = (
        cfg.linear_num_key_heads * cfg.linear_key_head_dim,
        cfg.linear_num_value_heads * cfg.linear_value_head_dim,
    )
    parts = {"q": keys, "k": keys, "v": values}
    return {"in_proj_qkv": parts, "conv1d": parts}


def _mamba_parts(cfg: NemotronHConfig) -> dict[str, dict[str, int]]:
    inner, states = cfg.mamba_num_heads * cfg.mamba_head_dim, cfg.n_groups * cfg.ssm_state_size
    mixed = {"x": inner, "B": states, "C": states}
    return {"in_proj": {"z": inner} | mixed | {"dt": cfg.mamba_num_heads}, "conv1d": mixed}


FAMILIES: tuple[PolicyFamily, ...] = (
    PolicyFamily(
        config=Qwen3Config, model_types=("qwen3",), architecture="Qwen3ForCausalLM", from_hf=_qwen3,
        to_hf=lambda cfg: {"hidden_act": "silu"},
    ),
    PolicyFamily(
        config=LlamaConfig, model_types=("llama",), architecture="LlamaForCausalLM", from_hf=_llama,
        to_hf=lambda cfg: {"hidden_act": "silu", "rope_parameters": written_rope(cfg.rope_theta, cfg.rope_scaling)},
    ),
    PolicyFamily(
        config=Qwen3MoeConfig, model_types=("qwen3_moe",), architecture="Qwen3MoeForCausalLM", from_hf=_qwen3_moe,
        to_hf=lambda cfg: {"hidden_act": "silu"},
    ),
    PolicyFamily(
        config=Qwen35MoeConfig,
        model_types=("qwen3_5_moe_text", "qwen3_5_moe"),
        architecture="Qwen3_5MoeForCausalLM",
        prefixes=("model.", "model.language_model."),
        from_hf=_qwen3_5_moe,
        to_hf=lambda cfg: {
            "hidden_act": "silu",
            "rope_parameters": written_rope(cfg.rope_theta, None)
            | {"partial_rotary_factor": cfg.partial_rotary_factor},
        },
        parts=_delta_parts,
        ignored=("mtp.*", "model.visual.*"),
    ),
    PolicyFamily(
        config=NemotronHConfig,
        model_types=("nemotron_h",),
        architecture="NemotronHForCausalLM",
        prefixes=("backbone.", "model."),
        renames={"embed_tokens": "embeddings", "final_norm": "norm_f", "shared_expert": "shared_experts"},
        from_hf=_nemotron_h,
        to_hf=lambda cfg: {
            "layers_block_type": [_WRITTEN_KINDS[kind] for kind in cfg.block_types],
            "layer_norm_epsilon": cfg.rms_norm_eps,
            "mlp_hidden_act": "relu2",
            "time_step_limit": [_written_number(value) for value in cfg.time_step_limit],
        },
        parts=_mamba_parts,
        ignored=("mtp.*",),
    ),
    PolicyFamily(
        config=GptOssConfig, model_types=("gpt_oss",), architecture="GptOssForCausalLM",
        renames={"gate": "router"}, from_hf=_gpt_oss,
        to_hf=lambda cfg: {
            "hidden_act": "silu", "attention_bias": True, "num_local_experts": cfg.num_experts,
            "rope_parameters": written_rope(cfg.rope_theta, cfg.rope_scaling),
        },
    ),
)  # fmt: skip
_WRITTEN_KINDS = {"mamba": "linear_attention", "attention": "full_attention", "moe": "moe", "mlp": "mlp"}


def written_rope(theta: float, scaling: Scaling | None) -> Raw:
    """rope_parameters as transformers writes them."""
    if scaling is None:
        return {"rope_theta": theta, "rope_type": "default"}
    kind = {LinearScaling: "linear", Llama3Scaling: "llama3", YarnScaling: "yarn"}[type(scaling)]
    values = {f.name: getattr(scaling, f.name) for f in fields(scaling)}
    override = values.pop("attention_factor_override", None)
    return (
        {"rope_theta": theta, "rope_type": kind} | values | ({} if override is None else {"attention_factor": override})
    )


def policy_configs() -> tuple[type[DecoderConfig], ...]:
    """Config classes of all families: what may stand where a config file names a policy."""
    return tuple(family.config for family in FAMILIES)


def family_of(cfg: DecoderConfig) -> PolicyFamily:
    """The family of a config."""
    return next(family for family in FAMILIES if family.config is type(cfg))


def family_named(model_type: Any, path: Path) -> PolicyFamily:
    """The family of a published model_type."""
    for family in FAMILIES:
        if model_type in family.model_types:
            return family
    known = sorted(name for family in FAMILIES for name in family.model_types)
    raise UserError(f"{path}: model_type={model_type!r} is not supported; supported: {', '.join(known)}")


def published(path: tuple[Any, ...], family: PolicyFamily, prefix: str) -> str:
    """Published name of the array at a tree path, e.g. ('layers', 0, 'self_attn', 'qkv', 'q_proj', 'kernel')."""
    parts = [str(getattr(key, "key", key)) for key in path]
    parts = [part for part in parts if part not in MODULE_ONLY]
    if len(parts) > 2 and parts[-3] in IN_PARTS:
        del parts[-2]
    if parts[0] == "lm_head":
        return "lm_head.weight"
    if parts[0] == "norm":
        parts[0] = family.renames.get("final_norm", "norm")
    parts = [family.renames.get(part, part) for part in parts]
    if path_end(path) == "embed_tokens":
        parts.append("weight")
    if parts[-1] == "kernel":
        parts[-1] = "weight"
    return prefix + ".".join(parts)


def part_of(path: tuple[Any, ...], cfg: DecoderConfig) -> tuple[str, dict[str, int]] | None:
    """Name of the part of a published tensor that the array at a tree path is, and all parts; None: it is all of it."""
    whole, part = (str(getattr(key, "key", key)) for key in path[-3:-1]) if len(path) > 2 else ("", "")
    return (part, family_of(cfg).parts(cfg)[whole]) if whole in IN_PARTS else None


def names_of(path: tuple[Any, ...]) -> list[Any]:
    """Plain names and numbers of a tree path."""
    return [getattr(key, "key", key) for key in path]


def stacked_paths(path: tuple[Any, ...], cfg: DecoderConfig) -> list[tuple[Any, ...]]:
    """Paths of the arrays, layers one by one, that are stacked in the one at ('runs', run, place, ...)."""
    _, run, place, *rest = names_of(path)
    return [("layers", layer, *rest) for layer in cfg.runs[run].layers_at(place)]


def path_end(path: tuple[Any, ...]) -> str:
    """Last name of a tree path."""
    return str(getattr(path[-1], "key", path[-1]))


def source(
    path: tuple[Any, ...],
    shape: tuple[int, ...],
    cfg: DecoderConfig,
    reader: SafetensorsReader,
    prefix: str,
    *,
    cut_padding: bool = False,
) -> Source:
    """What makes the array at a tree path, by the tensors that are there."""
    if names_of(path)[0] == "runs":
        each = [
            source(one, shape[1:], cfg, reader, prefix, cut_padding=cut_padding) for one in stacked_paths(path, cfg)
        ]
        return Stacked(tuple(each))
    family, end = family_of(cfg), path_end(path)
    name = published(path, family, prefix)
    if ".experts." in name:
        make = _gpt_oss_experts if isinstance(cfg, GptOssConfig) else _experts
        return make(name, shape, reader)
    tensor: Source = Tensor(name)
    if (part := part_of(path, cfg)) is not None:
        own, widths = part
        before = sum(list(widths.values())[: list(widths).index(own)])
        # The last part is what is left, so that a tensor which holds more is refused for its shape.
        tensor = Part(tensor, 0, slice(before, None if own == list(widths)[-1] else before + widths[own]))
    if end == "kernel":
        if name == "lm_head.weight":
            return Transposed(vocabulary_rows(reader, name, cfg.vocab_size, cut_padding))
        return Transposed(tensor)
    if end == "embed_tokens":
        return vocabulary_rows(reader, name, cfg.vocab_size, cut_padding)
    if name.endswith("conv1d.weight"):
        return Computed((tensor,), lambda x: x[:, 0], shape, by_entry=True)
    return tensor


def _experts(name: str, shape: tuple[int, ...], reader: SafetensorsReader) -> Source:
    """[E, in, out] from one tensor [E, out, in] for all experts, gate and up in one or not, or from those of each."""
    if name in reader.tensors:
        return Transposed(Tensor(name))
    stem, last = name.rsplit(".", 1)
    halves = {"gate_proj": slice(0, shape[-1]), "up_proj": slice(shape[-1], None)}
    if last in halves and f"{stem}.gate_up_proj" in reader.tensors:
        return Transposed(Part(Tensor(f"{stem}.gate_up_proj"), 1, halves[last]))
    return Stacked(tuple(Transposed(Tensor(f"{stem}.{e}.{last}.weight")) for e in range(shape[0])))


def _gpt_oss_experts(name: str, shape: tuple[int, ...], reader: SafetensorsReader) -> Source:
    """As stored, or unpacked from MXFP4 blocks and scales."""
    if f"{name}_blocks" not in reader.tensors:
        return Tensor(name)

    def unpack(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
        return np.stack([unpack_expert(b, s) for b, s in zip(blocks, scales, strict=True)])

    return Computed((Tensor(f"{name}_blocks"), Tensor(f"{name}_scales")), unpack, shape, by_entry=True)


def prefix_of(family: PolicyFamily, reader: SafetensorsReader) -> str:
    """Which of the family's prefixes these files use; the first one if none."""
    embed = family.renames.get("embed_tokens", "embed_tokens")
    return next((p for p in family.prefixes if f"{p}{embed}.weight" in reader.tensors), family.prefixes[0])


def tensors_of(
    paths_and_leaves: Iterable[tuple[tuple[Any, ...], Any]], cfg: DecoderConfig
) -> Iterable[tuple[str, np.ndarray]]:
    """Published tensors of a parameter tree, one at a time, as transformers writes them."""
    family = family_of(cfg)
    waiting: dict[str, dict[str, np.ndarray]] = {}
    for path, array in _one_layer_at_a_time(paths_and_leaves, cfg):
        name = published(path, family, family.prefixes[0])
        if ".experts." in name and not isinstance(cfg, GptOssConfig):
            yield from _written_experts(name, array)
            continue
        if path_end(path) == "kernel":
            array = np.ascontiguousarray(array.T)
        elif name.endswith("conv1d.weight"):
            array = np.ascontiguousarray(array[:, None, :])
        if (part := part_of(path, cfg)) is None:
            yield name, array
            continue
        own, widths = part
        found = waiting.setdefault(name, {})
        found[own] = array
        if found.keys() == widths.keys():
            yield name, np.concatenate([waiting[name][other] for other in widths])
            del waiting[name]


def _one_layer_at_a_time(
    paths_and_leaves: Iterable[tuple[tuple[Any, ...], Any]], cfg: DecoderConfig
) -> Iterable[tuple[tuple[Any, ...], np.ndarray]]:
    for path, leaf in paths_and_leaves:
        if names_of(path)[0] == "runs":
            yield from ((one, np.asarray(leaf[i])) for i, one in enumerate(stacked_paths(path, cfg)))
        else:
            yield path, np.asarray(leaf)


def _written_experts(name: str, array: np.ndarray) -> Iterable[tuple[str, np.ndarray]]:
    stem, last = name.rsplit(".", 1)
    for e, kernel in enumerate(array):
        yield f"{stem}.{e}.{last}.weight", np.ascontiguousarray(kernel.T)
