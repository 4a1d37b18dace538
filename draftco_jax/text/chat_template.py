"""Chat templates: the text that a model folder's own Jinja program makes of a conversation."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2

from draftco_jax.errors import UserError
from draftco_jax.text import template_sandbox
from draftco_jax.text.tokenizer import Tokenizer
from draftco_jax.text.tokenizer_files import read_json

Message = Mapping[str, Any]
"""One message: "role", "content", and whatever the template knows ("tool_calls", "reasoning_content", ...)."""

_REASONING = ("reasoning_content", "thinking", "reasoning")
_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class RenderedChat:
    """Text of a conversation."""

    text: str
    generation_spans: tuple[tuple[int, int], ...] | None
    """Characters ``start <= i < end`` that the template marks as written by the model; None if it has no such marks."""


@dataclass(frozen=True)
class ChatTemplate:
    """A model's chat templates, with the switches they are called with.

    The switches belong to the policy as much as its weights do: text of another setting is text the policy, and a draft
    that learned from its rollouts, does not know. `settings` is what to store with a run, `require_settings` what to
    ask of a stored one.
    """

    templates: Mapping[str, str]
    """Name to Jinja source. "default" is used, and "tool_use", where there is one, for conversations with tools."""
    special_tokens: Mapping[str, str]
    """Variables ``bos_token``, ``eos_token``, ... of the template."""
    switches: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the template, such as ``enable_thinking``."""
    name: str | None = None
    """Use this one of `templates` always."""
    now: datetime | None = None
    """What ``strftime_now`` reads. Without it the clock is read, and a conversation that crosses midnight changes."""

    def __post_init__(self) -> None:
        taken = {"messages", "tools", "documents", "add_generation_prompt"} & set(self.switches)
        if taken:
            raise UserError(f"switches={sorted(taken)} must not be arguments of the rendering itself; leave them out")
        if self.name is not None and self.name not in self.templates:
            raise UserError(f"template={self.name!r} must be one of {sorted(self.templates)}; choose one of them")
        _plain(dict(self.switches), "switches")

    @classmethod
    def load(
        cls,
        folder: str | Path,
        tokenizer: Tokenizer,
        *,
        switches: Mapping[str, Any] | None = None,
        name: str | None = None,
        now: datetime | None = None,
    ) -> ChatTemplate:
        """Templates of a model folder.

        ``chat_template.jinja`` and ``additional_chat_templates/NAME.jinja`` come before ``chat_template`` of
        ``tokenizer_config.json`` (a text, or a list of named ones). Raises `UserError` where there is none: a guessed
        format would train the policy on turns it never saw.
        """
        templates = _read_templates(Path(folder))
        if not templates:
            raise UserError(
                f"chat template of {folder} is missing; put chat_template.jinja of the model's chat version there, or "
                "use a task that asks for plain text"
            )
        return cls(templates, tokenizer.special_tokens, dict(switches or {}), name, now)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
    ) -> RenderedChat:
        """Text of a conversation, as transformers' ``apply_chat_template`` renders it.

        `tools` are JSON schemas. With `add_generation_prompt` the text ends where the assistant's next words belong.
        Raises `UserError` for arguments that are not plain data, and for whatever the template raises.
        """
        if not messages:
            raise UserError("messages=[] must hold at least one message; give the conversation")
        chosen = self._choose(tools is not None)
        variables = {
            **self.special_tokens,
            **self.switches,
            "messages": [_message(message, i) for i, message in enumerate(messages)],
            "tools": _plain(None if tools is None else list(tools), "tools"),
            "documents": _plain(None if documents is None else list(documents), "documents"),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            state = template_sandbox.render(self._compiled[chosen], variables, self._read_clock)
            spans = tuple(state.spans()) if _GENERATION_TAG.search(self.templates[chosen]) else None
        except Exception as error:  # a template is a program: anything may come out of it
            roles = ", ".join(str(message.get("role")) for message in messages[:20])
            raise UserError(
                f"chat template={chosen!r} must be able to write this conversation ({_one_line(error)}); "
                f"change the conversation (roles: {roles}) or the template"
            ) from error
        return RenderedChat("".join(state.blocks), spans)

    def settings(self) -> dict[str, Any]:
        """What decides the text of a conversation, as JSON data: a digest of each template, switches, name, date."""
        digests = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in sorted(self.templates.items())}
        now = None if self.now is None else self.now.isoformat()
        return {"templates": digests, "switches": dict(self.switches), "name": self.name, "now": now}

    def require_settings(self, stored: Mapping[str, Any], owner: str) -> None:
        """Raises `UserError` if `owner` (a draft, a checkpoint, rollouts) was made with other settings."""
        mine = self.settings()
        for key in mine:
            if mine[key] != stored.get(key):
                raise UserError(
                    f"chat template {key}={mine[key]!r} must be those of {owner}, {stored.get(key)!r}; "
                    "set them alike, or make it anew with these"
                )

    def save(self, folder: str | Path) -> None:
        """Writes the templates as ``chat_template.jinja`` and ``additional_chat_templates/NAME.jinja``."""
        folder = Path(folder)
        for name, text in self.templates.items():
            file = folder / ("chat_template.jinja" if name == "default" else f"additional_chat_templates/{name}.jinja")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")

    def _choose(self, with_tools: bool) -> str:
        if self.name is not None:
            return self.name
        for name in ("tool_use", "default") if with_tools else ("default",):
            if name in self.templates:
                return name
        raise UserError(f"template=None must be one of {sorted(self.templates)}, none of which is 'default'; name one")

    def _read_clock(self) -> datetime:
        return datetime.now() if self.now is None else self.now

    @functools.cached_property
    def _compiled(self) -> dict[str, jinja2.Template]:
        env = template_sandbox.environment()
        compiled = {}
        for name, text in self.templates.items():
            try:
                compiled[name] = env.from_string(text)
            except (jinja2.TemplateError, RecursionError) as error:
                line = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
                raise UserError(
                    f"chat template={name!r} must be a Jinja template ({_one_line(error)}{line}); correct it"
                ) from error
        return compiled


def _read_templates(folder: Path) -> dict[str, str]:
    files = {"default": folder / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    # Not read_text: a template's line ends are its own.
    found = {name: file.read_bytes().decode("utf-8") for name, file in files.items() if file.is_file()}
    if found:
        return found
    entry = read_json(folder / "tokenizer_config.json").get("chat_template")
    if entry is None:
        return {}
    if isinstance(entry, str):
        return {"default": entry}
    if isinstance(entry, list) and all(isinstance(e, dict) and {"name", "template"} <= set(e) for e in entry):
        return {str(e["name"]): str(e["template"]) for e in entry}
    raise UserError(
        f"chat_template of {folder / 'tokenizer_config.json'} must be a text or a list of tables with name and "
        "template; copy the file again"
    )


def _message(message: Message, index: int) -> dict[str, Any]:
    """A message as the template sees it: nothing in place of None, and reasoning under every name in use."""
    if not isinstance(message, Mapping) or "role" not in message:
        raise UserError(f"messages[{index}]={message!r} must be a table with a role; correct the conversation")
    plain = _plain({key: value for key, value in message.items() if value is not None}, f"messages[{index}]")
    reasoning = next((plain[key] for key in _REASONING if key in plain), None)
    return plain if reasoning is None else {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def _plain(value: Any, where: str) -> Any:
    """A copy made of JSON types alone, so that a template gets hold of no object of ours."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        wrong = [key for key in value if type(key) is not str]
        if wrong:
            raise UserError(f"{where} must have texts as keys, not {wrong[0]!r}; correct the conversation")
        return {key: _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
    raise UserError(f"{where}={value!r} must be text, number, list or table; give plain data")


def _one_line(error: Exception) -> str:
    message = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {message[:300]}"
