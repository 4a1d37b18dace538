"""Pass rate, pass@k, majority votes and accepted length on a fixed set of held-out prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from draftco_jax.decoding.engine import Engine, EngineShape, Request, no_context, request_keys
from draftco_jax.decoding.stats import SpeculationStats, speculation_stats
from draftco_jax.drafts.base import Context
from draftco_jax.environments.base import Task
from draftco_jax.errors import UserError
from draftco_jax.metrics.intervals import wilson_interval
from draftco_jax.metrics.passes import majority_at_k, pass_at_k
from draftco_jax.models.functional import Params
from draftco_jax.rewards.scores import Score
from draftco_jax.rewards.scoring import score_all
from draftco_jax.rollout.history import RolloutHistory
from draftco_jax.types import Prompt


class Evaluation(NamedTuple):
    """What one evaluation measured."""

    pass_rate: float
    """Share of right samples: pass@1."""
    prompts: int
    speculation: SpeculationStats
    at_k: Mapping[str, float]
    """``pass_at_K`` and, where answers were read out, ``majority_at_K``, each with the ends ``..._low`` and
    ``..._high`` of its 95 % interval (Wilson's, over prompts); empty with one sample a prompt."""

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

    def __init__(self, task: Task, prompts: int, samples_per_prompt: int = 1) -> None:
        self._task, self._samples = task, samples_per_prompt
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
        """Samples of every prompt with the engine's sampling; the same number of each."""
        request = build_request(self.prompts, self._samples, engine.shape, key, history)
        rollouts = jax.device_get(engine.generate(policy, draft, request, draft_length))
        scores = score_all(self._task, self.prompts, rollouts, self._task.tokenizer, self._samples).scores
        pass_rate = float(np.mean([is_right(one) for one in scores]))
        return Evaluation(pass_rate, len(self.prompts), speculation_stats(rollouts), rates_at_k(scores, self._samples))


def is_right(score: Score) -> bool:
    """Whether a response is right: by its component "correct", and by its total where it has none."""
    return score.components.get("correct", score.total) == 1.0


def rates_at_k(scores: Sequence[Score], samples: int) -> dict[str, float]:
    """`Evaluation.at_k` of scores, `samples` a prompt one after another, for k = 2, 4, ... and all samples.

    A vote needs answers: maj@k is left out where no score has one, or a right score has none.
    """
    groups = [scores[i : i + samples] for i in range(0, len(scores), samples)]
    right = [[is_right(one) for one in group] for group in groups]
    read = any(one.answer is not None for one in scores)
    votes = read and all(one.answer is not None for one in scores if is_right(one))
    rates: dict[str, float] = {}
    for k in sorted({2**i for i in range(1, samples.bit_length())} | {samples} - {1}):
        found = {"pass_at": [pass_at_k(samples, sum(marks), k) for marks in right]}
        if votes:
            answers = [[one.answer for one in group] for group in groups]
            found["majority_at"] = [majority_at_k(*pair, k) for pair in zip(answers, right, strict=True)]
        for name, values in found.items():
            mean = float(np.mean(values))
            low, high = wilson_interval(mean, len(groups))
            rates |= {f"{name}_{k}": mean, f"{name}_{k}_low": low, f"{name}_{k}_high": high}
    return rates
