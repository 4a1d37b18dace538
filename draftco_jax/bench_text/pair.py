"""A trained draft with its policy, as the cells of `bench decode` measure it, on held-out prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from draftco_jax.decoding.engine import Engine, EngineShape, Request
from draftco_jax.evaluation import build_request
from draftco_jax.generate import Model
from draftco_jax.numerics.sampling import SamplingConfig
from draftco_jax.types import Prompt


@dataclass(frozen=True)
class TextPair:
    """A policy and a draft that learnt its texts."""

    name: str
    """Family of the draft."""
    model: Model
    prompts: Sequence[Prompt]
    shape: EngineShape
    """Of whole timed responses."""
    calls_at_batch_1: int
    _engines: dict[tuple[SamplingConfig, int], Engine] = field(default_factory=dict, repr=False)

    @property
    def published(self) -> Any:
        """Weights that engines take."""
        return self.model.weights

    def engine(self, sampling: SamplingConfig, max_new_tokens: int | None = None) -> Engine:
        """A whole response, or `max_new_tokens` of it; the same one each time, since compiling takes longest."""
        asked = sampling, max_new_tokens or self.shape.max_new_tokens
        if asked not in self._engines:
            shape = replace(self.shape, max_new_tokens=asked[1])
            self._engines[asked] = Engine(*self.model.graphs, shape=shape, sampling=sampling)
        return self._engines[asked]

    def turns(self, batch: int, first: int, count: int, key: jax.Array) -> list[list[Request]]:
        """Requests of each call of `count` turns from turn `first` on; every call has prompts and keys of its own."""
        calls = max(1, self.calls_at_batch_1 // batch)

        def request(number: int) -> Request:
            chosen = [self.prompts[(number * batch + i) % len(self.prompts)] for i in range(batch)]
            return build_request(chosen, 1, self.shape, jax.random.fold_in(key, number))

        return [[request(turn * calls + c) for c in range(calls)] for turn in range(first, first + count)]
