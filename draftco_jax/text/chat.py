"""Conversations as ids: a tokenizer and its chat template together, and which ids the assistant wrote."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from draftco_jax.errors import UserError
from draftco_jax.text.chat_template import ChatTemplate, Message
from draftco_jax.text.stop_tokens import StopTokens, find_stop_tokens
from draftco_jax.text.tokenizer import Tokenizer

Tables = Sequence[Mapping[str, Any]]

# A word that no template writes by itself.
_ANSWER = "Zqxanswer"


@dataclass(frozen=True)
class ChatIds:
    """A conversation as text and ids."""

    text: str
    ids: tuple[int, ...]
    offsets: tuple[tuple[int, int], ...]
    """For each id the characters ``start <= i < end`` of `text`."""
    generation_spans: tuple[tuple[int, int], ...] | None


@dataclass(frozen=True)
class TrainingIds:
    """A conversation to learn from."""

    ids: tuple[int, ...]
    assistant_mask: tuple[bool, ...]
    """For each id, whether the assistant writes it; its end of turn is among them."""
    source: Literal["generation tags", "differences"]


@dataclass(frozen=True)
class Chat:
    """Everything that turns a conversation into ids and ends a response."""

    tokenizer: Tokenizer
    template: ChatTemplate
    stops: StopTokens
    allow_control_tokens: bool = False
    """Let texts of users and tools hold control tokens, such as one that ends their own turn."""

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        switches: Mapping[str, Any] | None = None,
        template_name: str | None = None,
        now: datetime | None = None,
    ) -> Chat:
        """Reads tokenizer, chat template and stop tokens of a model folder."""
        tokenizer = Tokenizer.load(folder)
        template = ChatTemplate.load(folder, tokenizer, switches=switches, name=template_name, now=now)
        return cls(tokenizer, template, find_stop_tokens(folder, tokenizer, turn_end_id(tokenizer, template)))

    def encode(
        self,
        messages: Sequence[Message],
        *,
        tools: Tables | None = None,
        documents: Tables | None = None,
        add_generation_prompt: bool = False,
    ) -> ChatIds:
        """Ids of a conversation, those of transformers' ``apply_chat_template``.

        The template writes begin-of-sequence itself; nothing is added. Raises `UserError` where a message that the
        assistant did not write holds a control token, since its writer would then speak in other roles.
        """
        if not self.allow_control_tokens:
            self._require_plain(messages, tools, documents)
        rendered = self.template.render(
            messages, tools=tools, documents=documents, add_generation_prompt=add_generation_prompt
        )
        encoded = self.tokenizer.encode_marked(rendered.text)
        return ChatIds(rendered.text, encoded.ids, encoded.offsets, rendered.generation_spans)

    def encode_turn(
        self, messages: Sequence[Message], index: int, *, tools: Tables | None = None, documents: Tables | None = None
    ) -> tuple[ChatIds, ChatIds]:
        """(prompt of the assistant's turn ``messages[index]``, the same with the turn up to its stop token).

        What the template writes after the stop token, often a line break, is left away: the policy never writes it.
        """
        prompt = self.encode(messages[:index], tools=tools, documents=documents, add_generation_prompt=True)
        turn = self.encode(messages[: index + 1], tools=tools, documents=documents)
        stops = [i for i, token_id in enumerate(turn.ids) if token_id in self.stops.ids]
        if not stops or turn.offsets[stops[-1]][0] < len(prompt.text):
            raise UserError(
                f"chat template must end messages[{index}] with a stop token {list(self.stops.ids)}; "
                "add the token it ends a turn with to eos_token_id of generation_config.json"
            )
        end = stops[-1] + 1
        text = turn.text[: turn.offsets[end - 1][1]]
        return prompt, dataclasses.replace(turn, text=text, ids=turn.ids[:end], offsets=turn.offsets[:end])

    def training_ids(
        self, messages: Sequence[Message], *, tools: Tables | None = None, documents: Tables | None = None
    ) -> TrainingIds:
        """Ids of a whole conversation and which of them the assistant writes.

        By the template's ``{% generation %}`` marks where it has them (an id that shares a character with a mark
        counts, as in transformers). Else by differences: turn n is what its own rendering adds to its prompt, and must
        stand at that place of the whole conversation. Positions decide, never the likeness of texts. Raises `UserError`
        where it does not, because the template writes history in another way than a turn just spoken.
        """
        whole = self.encode(messages, tools=tools, documents=documents)
        if whole.generation_spans is not None:
            spans = [span for span in whole.generation_spans if span[0] < span[1]]
            mask = tuple(any(start < b and end > a for a, b in spans) for start, end in whole.offsets)
            return TrainingIds(whole.ids, mask, "generation tags")
        inside = [False] * len(whole.ids)
        for index in assistant_turns(messages):
            prompt, turn = self.encode_turn(messages, index, tools=tools, documents=documents)
            start, end = len(prompt.ids), len(turn.ids)
            if turn.ids[:start] != prompt.ids or whole.ids[:end] != turn.ids:
                raise UserError(
                    f"chat template must write messages[{index}] with the same ids after its prompt, as the last "
                    "turn and as history, to tell the assistant's ids by differences (see find_prefix_break); "
                    "learn from each turn by itself, or give a template with {% generation %} marks"
                )
            inside[start:end] = [True] * (end - start)
        return TrainingIds(whole.ids, tuple(inside), "differences")

    def _require_plain(self, messages: Sequence[Message], tools: Tables | None, documents: Tables | None) -> None:
        control = [token.content for token in self.tokenizer.added_tokens.values() if token.special]
        others = [(f"messages[{i}]", m) for i, m in enumerate(messages) if m.get("role") != "assistant"]
        for where, value in [*others, ("tools", tools), ("documents", documents)]:
            for text in _texts(value):
                found = next((token for token in control if token in text), None)
                if found is not None:
                    raise UserError(
                        f"{where} must not hold the control token {found!r}, which would be read as one; take it out, "
                        "or set allow_control_tokens for texts you trust"
                    )


def assistant_turns(messages: Sequence[Message]) -> list[int]:
    """Indices of the assistant's turns. A first message is never one: it has no prompt, so nobody generated it."""
    return [i for i, message in enumerate(messages) if i and message.get("role") == "assistant"]


def turn_end_id(tokenizer: Tokenizer, template: ChatTemplate) -> int | None:
    """The token that the template writes after an assistant's message; None if that is ordinary text."""
    text = template.render([{"role": "user", "content": "Hello"}, {"role": "assistant", "content": _ANSWER}]).text
    if _ANSWER not in text:
        return None
    end = text.rindex(_ANSWER) + len(_ANSWER)
    encoded = tokenizer.encode_marked(text)
    after = [i for i, (start, _) in zip(encoded.ids, encoded.offsets, strict=True) if start >= end]
    return after[0] if after and after[0] in tokenizer.added_tokens else None


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for item in (*value.keys(), *value.values()) for text in _texts(item)]
    return [text for item in value for text in _texts(item)] if isinstance(value, (list, tuple)) else []
