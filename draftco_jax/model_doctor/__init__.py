"""Says whether a folder loads here as a policy or a draft, and if not, everything that is in the way.

Of a policy only headers are read, whatever its size. A draft, and the prediction head that a policy brings along, are
small and are loaded, by their own family.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from draftco_jax.config_io import to_json
from draftco_jax.drafts.base import DraftFamily
from draftco_jax.drafts.mtp.checkpoint import load_mtp
from draftco_jax.drafts.recognise import draft_family_in
from draftco_jax.errors import UserError
from draftco_jax.model_doctor.tokens import Tokens, describe_tokens
from draftco_jax.model_doctor.weights import Headers, compare, read_headers
from draftco_jax.models.checkpoint_files import shown
from draftco_jax.models.hf_weights import load_config, read_config
from draftco_jax.models.transformer import count_parameters

__all__ = ["ModelReport", "describe_model", "lines_of"]

_RUNS = ("RunConfig", "PretrainConfig")
_MTP_COUNTS = ("mtp_num_hidden_layers", "num_nextn_predict_layers")


@dataclass(kw_only=True)
class ModelReport:
    """What a folder holds. It loads if there are no `reasons`."""

    folder: str
    kind: str | None = None
    """policy or draft; None where config.json cannot be read."""
    family: str | None = None
    model_type: str | None = None
    architectures: list[str] = field(default_factory=list)
    sizes: dict[str, Any] = field(default_factory=dict)
    """Fields of the config as it is read here."""
    parameters: int | None = None
    dtypes: dict[str, dict[str, int]] = field(default_factory=dict)
    """Tensors and bytes by dtype in the files."""
    files: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)
    left_aside: list[str] = field(default_factory=list)
    prediction_head: str | None = None
    """Whether the head that a policy brings along loads as an mtp draft, or why not."""
    tokens: dict[str, Any] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)
    """Why it does not load, one sentence each."""
    warnings: list[str] = field(default_factory=list)

    @property
    def loads(self) -> bool:
        """Whether it can be used."""
        return not self.reasons

    @property
    def bytes(self) -> int:
        """Of all tensors in the files."""
        return sum(entry["bytes"] for entry in self.dtypes.values())

    def as_json(self) -> dict[str, Any]:
        """All of it."""
        return asdict(self) | {"loads": self.loads, "bytes": self.bytes}


def describe_model(folder: Path) -> ModelReport:
    """Read what the files of a folder say of themselves.

    Raises:
        UserError: there is no such folder.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; give one with config.json and safetensors weights")
    report = ModelReport(folder=str(folder))
    try:
        raw = read_config(folder / "config.json")
        if raw.get("type") in _RUNS:
            raise UserError(
                f"{folder} holds a run, not a model; `draftco convert {folder} OUT` writes its policy and draft"
            )
        family = draft_family_in(folder)
    except UserError as error:
        report.reasons.append(str(error))
        return report
    classes = raw.get("architectures")
    report.architectures = [str(name) for name in classes] if isinstance(classes, list) else []
    report.model_type = str(raw["model_type"]) if "model_type" in raw else None
    headers = read_headers(folder)
    report.dtypes, report.files = headers.sizes, headers.files
    if family is None:
        _describe_policy(report, folder, raw, headers)
    else:
        _describe_draft(report, folder, family)
    return report


def _describe_policy(report: ModelReport, folder: Path, raw: dict[str, Any], headers: Headers) -> None:
    report.kind = "policy"
    report.reasons += headers.problems
    vocab_size = None
    try:
        cfg = load_config(folder)
    except (UserError, ValueError) as error:
        report.reasons.append(str(error))
    else:
        report.family, report.sizes, vocab_size = type(cfg).__name__, _fields(cfg), cfg.vocab_size
        if headers.tensors:
            _compare(report, compare(cfg, headers), cfg.tie_word_embeddings)
        _describe_head(report, folder, raw, headers)
    tokens: Tokens = describe_tokens(folder, raw, vocab_size)
    report.tokens = asdict(tokens)
    report.reasons += tokens.problems
    report.warnings += tokens.warnings
    if not tokens.chat_template:
        report.warnings.append("no chat template: conversations cannot be laid out as the model was trained on them")
    if len([name for name in report.dtypes if name.startswith(("float", "bfloat"))]) > 1:
        report.warnings.append(f"weights of several dtypes: {', '.join(report.dtypes)}; all are loaded as one")


def _compare(report: ModelReport, found: Any, tied: bool) -> None:
    """Into the report: tensors by name, and a sentence for each kind of fault."""
    report.parameters = found.parameters
    report.missing, report.unexpected, report.misshapen = found.missing, found.unexpected, found.misshapen
    report.left_aside = found.left_aside
    if found.missing:
        way = "; if the head is the embedding, set tie_word_embeddings to true"
        told = way if found.missing == ["lm_head.weight"] else "; get the files again, or the config.json of these"
        report.reasons.append(f"missing tensors: {shown(found.missing)}{told}")
    if found.unexpected:
        report.reasons.append(f"unexpected tensors: {shown(found.unexpected)}; config.json describes another model")
    report.reasons += [f"misshapen: {sentence}" for sentence in found.misshapen]
    if tied and "lm_head.weight" in found.left_aside:
        report.warnings.append(
            "lm_head.weight is stored although tie_word_embeddings is true: the embedding is used as the head"
        )


def _describe_head(report: ModelReport, folder: Path, raw: dict[str, Any], headers: Headers) -> None:
    """The prediction head that the policy brings along, if it says or shows one."""
    inner = raw.get("text_config")
    counted = any(place.get(key) for place in (raw, inner) if isinstance(place, dict) for key in _MTP_COUNTS)
    if not counted and not any(name.startswith("mtp.") for name in headers.tensors):
        return
    try:
        load_mtp(folder)  # reads nothing of the policy itself
    except (UserError, ValueError) as error:
        report.prediction_head = f"not usable as a draft: {error}"
    else:
        report.prediction_head = "loads as an mtp draft"


def _describe_draft(report: ModelReport, folder: Path, family: DraftFamily) -> None:
    report.kind, report.family = "draft", family.name
    assert family.load is not None, "families without weights are in no file"
    try:
        cfg, _, params = family.load(folder, None)
    except (UserError, ValueError) as error:
        report.reasons.append(str(error))
        return
    report.sizes, report.parameters = _fields(cfg), count_parameters(params)


def _fields(cfg: Any) -> dict[str, Any]:
    return {name: value for name, value in to_json(cfg).items() if name != "type"}


def lines_of(report: ModelReport) -> list[str]:
    """The report as text, one fact a line."""
    rows = [
        ("folder", report.folder),
        ("kind", " ".join(part for part in (report.kind, report.family) if part) or "not known"),
        ("model_type", report.model_type),
        ("class", ", ".join(report.architectures)),
        ("sizes", _sizes_text(report)),
        ("parameters", f"{report.parameters:,}" if report.parameters is not None else None),
        ("weights", _weights_text(report)),
        ("left aside", _counted(report.left_aside)),
        ("own head", report.prediction_head),
        *_token_rows(report.tokens),
    ]
    if report.kind == "draft" and report.loads:
        rows.append(("for a policy of", _target_text(report.sizes)))
    lines = [f"{name:<16} {value}" for name, value in rows if value]
    lines += [f"warning: {warning}" for warning in report.warnings]
    return lines + [f"reason: {reason}" for reason in report.reasons]


def _counted(names: list[str]) -> str:
    return f"{len(names)} tensors: {shown(names)}" if names else ""


def _sizes_text(report: ModelReport) -> str:
    names = ("num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    return ", ".join(f"{name}={report.sizes[name]}" for name in names if name in report.sizes)


def _weights_text(report: ModelReport) -> str:
    by_dtype = ", ".join(f"{entry['tensors']} {name}" for name, entry in report.dtypes.items())
    return f"{report.bytes / 1e9:.3g} GB in {len(report.files)} files ({by_dtype})" if report.files else "none found"


def _token_rows(tokens: dict[str, Any]) -> list[tuple[str, str | None]]:
    if not tokens:
        return []
    return [
        ("tokenizer", f"{tokens['ids']} tokens, ids up to {tokens['largest_id']}" if tokens["tokenizer"] else "none"),
        ("stop tokens", "; ".join(f"{ids} in {name}" for name, ids in tokens["stop_ids"].items()) or "none stated"),
        ("chat template", ", ".join(tokens["chat_template"]) or "none"),
    ]


def _target_text(sizes: dict[str, Any]) -> str:
    taps = sizes.get("tap_layers")
    depth = f", {taps[-1] + 1} layers or more (reads the outputs of {', '.join(map(str, taps))})" if taps else ""
    return f"hidden_size={sizes['hidden_size']}, vocab_size={sizes['vocab_size']}{depth}"
