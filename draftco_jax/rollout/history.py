"""Texts of earlier rollouts, for drafts that copy from them.

A request is given, newest first, the texts that answered its own prompt, then one text of each other prompt, as many as
fit its room: the answers of one group are much alike, and more of them would leave no room for others. The oldest texts
are forgotten first.

A text answers a prompt if it has its id and begins with its tokens: the problems of every split are numbered from 0,
and a held-out one is not given the answers to the training problem of its number as its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from draftco_jax.types import Prompt, Rollouts

NO_TOKEN = -1
"""Stands between two texts and fills what is left."""


class RolloutHistory:
    """The last rollouts, prompt and response, up to a number of tokens in all."""

    def __init__(self, request_tokens: int, total_tokens: int) -> None:
        """Room of a request and of the whole memory, in tokens."""
        self._room, self._total = request_tokens, total_tokens
        self._texts: deque[tuple[int, tuple[int, ...]]] = deque()  # (prompt id, tokens), oldest first
        self._of_prompt: dict[int, deque[tuple[int, ...]]] = {}  # the same texts, by prompt
        self._held = 0

    def add(self, prompts: Sequence[Prompt], rollouts: Rollouts) -> None:
        """Remember a step's rollouts; sequence b answers prompt b // G."""
        tokens, lengths = np.asarray(rollouts.tokens), np.asarray(rollouts.lengths)
        group = len(lengths) // len(prompts)
        self._extend(
            (prompts[row // group].prompt_id, tuple(map(int, tokens[row, :length])))
            for row, length in enumerate(lengths)
        )

    def rows(self, prompts: Sequence[Prompt], samples_per_prompt: int) -> Int[np.ndarray, "B H"]:
        """What each request is given, i32; requests of one prompt get the same."""
        newest = self._newest_of_each()
        own = np.full((len(prompts), self._room), NO_TOKEN, np.int32)
        for row, prompt in zip(own, prompts, strict=True):
            numbered = reversed(self._of_prompt.get(prompt.prompt_id, ()))
            texts = [text for text in numbered if _begins(text, prompt)]
            others = (text for prompt_id, text in newest if prompt_id != prompt.prompt_id or not _begins(text, prompt))
            _fill(row, texts, others)
        return np.repeat(own, samples_per_prompt, axis=0)

    def get_state(self) -> list[Any]:
        """All texts, to be kept with a checkpoint: a resumed run proposes what the stopped one would have."""
        return [[prompt_id, list(text)] for prompt_id, text in self._texts]

    def set_state(self, state: list[Any]) -> None:
        """Remember these texts and no others."""
        self._texts.clear()
        self._of_prompt.clear()
        self._held = 0
        self._extend((int(prompt_id), tuple(text)) for prompt_id, text in state)

    def _newest_of_each(self) -> list[tuple[int, tuple[int, ...]]]:
        """The newest text of each prompt, newest first, no more than can be of use to a request."""
        found: dict[int, tuple[int, ...]] = {}
        held = 0
        for prompt_id, text in reversed(self._texts):
            if prompt_id not in found:
                found[prompt_id] = text
                held += len(text) + 1
            if held > 2 * self._room:
                break
        return list(found.items())

    def _extend(self, texts: Iterable[tuple[int, tuple[int, ...]]]) -> None:
        for prompt_id, text in texts:
            self._texts.append((prompt_id, text))
            self._of_prompt.setdefault(prompt_id, deque()).append(text)
            self._held += len(text)
        while self._held > self._total:
            prompt_id, text = self._texts.popleft()
            self._held -= len(text)
            self._of_prompt[prompt_id].popleft()  # texts of a prompt are forgotten in the order they came
            if not self._of_prompt[prompt_id]:
                del self._of_prompt[prompt_id]


def _begins(text: tuple[int, ...], prompt: Prompt) -> bool:
    return text[: len(prompt.token_ids)] == prompt.token_ids


def _fill(row: Int[np.ndarray, " H"], own: Iterable[Sequence[int]], others: Iterable[Sequence[int]]) -> None:
    """Lay texts into a row, NO_TOKEN between them; one that does not fit ends its kind, none is cut."""
    at = 0
    for texts in (own, others):
        for text in texts:
            if at + len(text) > len(row):
                break
            row[at : at + len(text)] = text
            at += len(text) + 1
