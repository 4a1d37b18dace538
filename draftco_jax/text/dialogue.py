"""Conversations of several turns whose ids are those the policy read and wrote, never made anew from text.

Encoding a text again may give other ids than the policy wrote ("ab" as "a", "b"), and a template may write a turn
otherwise once it is history. Log-probabilities of such ids belong to another sequence. Here a dialogue only grows: each
turn's prompt is the ids so far, and a new message adds what the template writes after the last turn, or is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from draftco_jax.errors import UserError
from draftco_jax.text.chat import Chat, Tables, assistant_turns
from draftco_jax.text.chat_template import Message

_AROUND = 30


@dataclass(frozen=True)
class Dialogue:
    """A conversation in progress. Each method gives a new one."""

    chat: Chat
    messages: tuple[Message, ...]
    ids: tuple[int, ...]
    model_mask: tuple[bool, ...]
    """For each id, whether the policy wrote it. The rest is the template's and the environment's: no loss there."""
    text: str
    """What `ids` say: as rendered where the template wrote, as decoded where the policy did."""
    awaits_response: bool
    tools: Tables | None = None
    documents: Tables | None = None

    @classmethod
    def start(
        cls, chat: Chat, messages: Sequence[Message], *, tools: Tables | None = None, documents: Tables | None = None
    ) -> Dialogue:
        """A dialogue up to where the policy's first words belong."""
        prompt = chat.encode(messages, tools=tools, documents=documents, add_generation_prompt=True)
        mask = (False,) * len(prompt.ids)
        return cls(chat, tuple(messages), prompt.ids, mask, prompt.text, True, tools, documents)

    def with_response(self, ids: Sequence[int], message: Message | None = None) -> Dialogue:
        """Adds what the policy generated, its stop token included, exactly as it is.

        `message` is the response as a message, for a template that wants it taken apart (thinking, tool calls). Without
        it the message is the text itself.
        """
        if not self.awaits_response:
            raise UserError("a response must follow a prompt; add the next messages first (append_turn)")
        if not ids:
            raise UserError("a response must hold at least one id; leave an empty one out")
        chat = self.chat
        new = tuple(int(token_id) for token_id in ids)
        early = next((i for i, token_id in enumerate(new[:-1]) if token_id in chat.stops.ids), None)
        if early is not None:
            raise UserError(
                f"a response must end at its stop token, not go on after place {early} of {len(new)}; cut it there"
            )
        before = chat.tokenizer.decode(self.ids, skip_special=False)
        after = chat.tokenizer.decode(self.ids + new, skip_special=False)
        if not after.startswith(before):
            raise UserError(
                "the prompt must end with whole characters; use a template that ends with a token of its own"
            )
        text = after[len(before) :]
        if message is None:
            stop = chat.tokenizer.decode(new[-1:], skip_special=False) if new[-1] in chat.stops.ids else ""
            message = {"role": "assistant", "content": text[: len(text) - len(stop)]}
        return dataclasses.replace(
            self,
            messages=(*self.messages, message),
            ids=self.ids + new,
            model_mask=self.model_mask + (True,) * len(new),
            text=self.text + text,
            awaits_response=False,
        )

    def append_turn(self, new_messages: Sequence[Message]) -> Dialogue:
        """Adds messages of the user or of tools, and the beginning of the policy's next turn.

        All messages of one turn come in one call, since templates put several tool results into one wrapper. The ids
        so far stay as they are. What is added is the rendering of the whole conversation without the text so far, which
        it must begin with; raises `UserError` with the place where the template rewrites history instead.
        """
        if self.awaits_response or not new_messages:
            raise UserError("new messages must follow a response; add the policy's response first (with_response)")
        if any(message.get("role") == "assistant" for message in new_messages):
            raise UserError("new messages must not be the assistant's; what the policy wrote comes by with_response")
        chat, messages = self.chat, (*self.messages, *new_messages)
        whole = chat.encode(messages, tools=self.tools, documents=self.documents, add_generation_prompt=True)
        if not whole.text.startswith(self.text):
            raise self._rewritten(whole.text)
        glue = self._encode_after(whole.text[len(self.text) :])
        return dataclasses.replace(
            self,
            messages=messages,
            ids=self.ids + glue,
            model_mask=self.model_mask + (False,) * len(glue),
            text=whole.text,
            awaits_response=True,
        )

    def _encode_after(self, text: str) -> tuple[int, ...]:
        """Ids of a text that follows `ids`. One side of the seam is a control token, so that no token spans it."""
        tokenizer, last = self.chat.tokenizer, self.ids[-1]
        if last in self.chat.stops.ids:
            # Read with the stop token before it: alone, some tokenizers would begin it with a space.
            ids = tokenizer.encode_marked(tokenizer.decode([last], skip_special=False) + text).ids
            if ids[:1] == (last,):
                return ids[1:]
        else:
            ids = tokenizer.encode_marked(text).ids
            if ids and ids[0] in tokenizer.added_tokens:
                return ids
        raise UserError(
            f"chat template must begin or end the seam between turns with a control token, not {text[:_AROUND]!r}; "
            "use a template whose turns end with one"
        )

    def _rewritten(self, text: str) -> UserError:
        at = _first_difference(self.text, text)
        return UserError(
            f"chat template must leave the dialogue so far as it is, not write {_around(text, at)!r} for "
            f"{_around(self.text, at)!r} (character {at}); use a template that keeps history (thinking included), or "
            "start a new dialogue with these messages"
        )


@dataclass(frozen=True)
class PrefixBreak:
    """The first place where a longer conversation does not begin with the ids before it."""

    message: int
    """Index of the assistant's turn."""
    position: int
    """Index of the first id that differs."""
    cause: Literal["generation prompt", "history rewritten", "encoded anew"]
    """The turn's text does not begin with its prompt's; later text differs; texts are alike and their ids are not."""
    expected: str
    """Text around the place, by the ids of the turn."""
    found: str
    """The same by the ids of the longer conversation."""

    def __str__(self) -> str:
        return f"messages[{self.message}], id {self.position}: {self.cause}, {self.expected!r} became {self.found!r}"


def find_prefix_break(
    chat: Chat,
    messages: Sequence[Message],
    *,
    generated: Sequence[Sequence[int]] | None = None,
    tools: Tables | None = None,
    documents: Tables | None = None,
) -> PrefixBreak | None:
    """Whether each turn's ids are the beginning of the next turn's prompt, by trying; None if they are.

    For each assistant's turn n: the ids of its prompt and then of the turn (``generated[n]``, or as the template writes
    it) against the ids of the next turn's prompt, or of the whole conversation after the last. Rendered only up to
    prompts and turns, never up to a lone system message, which some templates refuse.
    """
    turns = assistant_turns(messages)
    if generated is not None and len(generated) != len(turns):
        raise UserError(f"generated={len(generated)} must be one row of ids for each of {len(turns)} assistant's turns")
    arguments: dict[str, Any] = {"tools": tools, "documents": documents}
    for n, index in enumerate(turns):
        prompt, turn = chat.encode_turn(messages, index, **arguments)
        if turn.ids[: len(prompt.ids)] != prompt.ids:
            cause = "encoded anew" if turn.text.startswith(prompt.text) else "generation prompt"
            return _break(chat, index, prompt.ids, turn.ids, cause)
        own = turn.ids if generated is None else (*prompt.ids, *generated[n])
        if n + 1 < len(turns):
            longer = chat.encode(messages[: turns[n + 1]], add_generation_prompt=True, **arguments)
        else:
            longer = chat.encode(messages, **arguments)
        if longer.ids[: len(own)] != own:
            said = chat.tokenizer.decode(own, skip_special=False)
            same = chat.tokenizer.decode(longer.ids, skip_special=False).startswith(said)
            return _break(chat, index, own, longer.ids, "encoded anew" if same else "history rewritten")
    return None


def _break(chat: Chat, message: int, own: Sequence[int], longer: Sequence[int], cause: Any) -> PrefixBreak:
    at = _first_difference(own, longer)
    texts = [
        chat.tokenizer.decode(ids[max(0, at - 4) : at + 4], skip_special=False) for ids in (tuple(own), tuple(longer))
    ]
    return PrefixBreak(message, at, cause, *texts)


def _first_difference(left: Sequence[Any], right: Sequence[Any]) -> int:
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def _around(text: str, at: int) -> str:
    return text[max(0, at - _AROUND) : at + _AROUND]
