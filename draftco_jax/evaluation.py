"""Pass rate and accepted length on a fixed set of held-out prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from draftco_jax.decoding.engine import Engine, EngineShape, Request, no_context, request_keys
from draftco_jax.decoding.stats import SpeculationStats, speculation_stats
from draftco_jax.drafts.base import Context
from draftco_jax.environments.base import Task
from draftco_jax.errors import UserError
from draftco_jax.models.functional import Params
from draftco_jax.rewards.scoring import score
from draftco_jax.rollout.history import RolloutHistory
from draftco_jax.types import Prompt


class Evaluation(NamedTuple):
    """What one evaluation measured."""

    pass_rate: float
    prompts: int
    speculation: SpeculationStats

    @property
    def accepted_length(self) -> float | None:
        """Pooled accepted length; None in plain decoding."""
        return self.speculation.accepted_length


def build_request(
    prompts: Sequence[Prompt],
    samples_per_prompt: int,
    shape: EngineShape,
    key: jax.Array,
    history: RolloutHistory | None = None,
) -> Request:
    """Pad prompts to the engine's capacity, each repeated for its samples; one key per request.

    With a history each request is given earlier texts, and the rows of the batch that answer the same prompt.
    """
    tokens = np.full((len(prompts), shape.prompt_capacity), shape.pad_id, np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        if not 0 < len(prompt.token_ids) <= shape.prompt_capacity:
            raise UserError(
                f"prompt {prompt.prompt_id} has {len(prompt.token_ids)} tokens, the cache holds prompts of 1 to "
                f"{shape.prompt_capacity}; raise the prompt capacity or drop the prompt"
            )
        row[: len(prompt.token_ids)] = prompt.token_ids
    lengths = np.array([len(prompt.token_ids) for prompt in prompts], np.int32)
    return Request(
        prompts=jnp.asarray(np.repeat(tokens, samples_per_prompt, axis=0)),
        prompt_lengths=jnp.asarray(np.repeat(lengths, samples_per_prompt)),
        keys=request_keys(key, len(prompts) * samples_per_prompt),
        context=_context(prompts, samples_per_prompt, history),
    )


def _context(prompts: Sequence[Prompt], samples_per_prompt: int, history: RolloutHistory | None) -> Context:
    if history is None:
        return no_context(len(prompts) * samples_per_prompt)
    rows = np.arange(len(prompts) * samples_per_prompt, dtype=np.int32)
    siblings = np.repeat(rows.reshape(len(prompts), samples_per_prompt), samples_per_prompt, axis=0)
    return Context(jnp.asarray(history.rows(prompts, samples_per_prompt)), jnp.asarray(siblings))


class Evaluator:
    """Holds the prompts, so that every evaluation of a run asks the same questions."""

    def __init__(self, task: Task, prompts: int) -> None:
        self._task = task
        self.prompts = tuple(task.problem(i) for i in range(prompts))

    @property
    def notes(self) -> tuple[str, ...]:
        """What a run says of these problems when it starts."""
        return self._task.notes

    def run(
        self,
        engine: Engine,
        policy: Params,
        draft: Params | None,
        key: jax.Array,
        *,
        draft_length: int,
        history: RolloutHistory | None = None,
    ) -> Evaluation:
        """One sample per prompt with the engine's sampling."""
        request = build_request(self.prompts, 1, engine.shape, key, history)
        rollouts = jax.device_get(engine.generate(policy, draft, request, draft_length))
        rewards = score(self._task, self.prompts, rollouts, self._task.tokenizer, 1)
        return Evaluation(float(np.mean(rewards == 1.0)), len(self.prompts), speculation_stats(rollouts))
