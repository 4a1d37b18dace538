"""Records that cross rooms.

One step moves data through these records, in this order:

    Prompt -> Rollouts (generate) -> ScoredRollouts (score) -> PackedBatch (pack) -> StepReport (update, publish)

Letters: P prompts in a step, G samples per prompt, B = P * G sequences, S padded sequence length,
K drafted tokens per verify round, R packed rows, T tokens per packed row, M layers with experts, k experts a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Prompt:
    """One task instance as the data source gives it.

    Example: ``Prompt(prompt_id=7, text="347+585=", answer="932", token_ids=(2, 6, 7, 10, 13, 8, 11, 8, 14))``.
    """

    prompt_id: int
    """Stable id: the index of the prompt in its source; equal after a resume."""
    text: str
    answer: str
    """What the verifier compares with."""
    token_ids: tuple[int, ...]
    """Ids the policy sees, begin-of-sequence included."""


@dataclass(frozen=True, slots=True)
class PolicyVersion:
    """Which weights made a rollout. Policy and draft are published together, so they share one number."""

    step: int
    """Optimizer steps taken before this publish; 0 is the initial policy."""


class Rollouts(NamedTuple):
    """What one generate call returns, for B requests. Device arrays or numpy arrays.

    Example row (plain decode, prompt of 3 ids, answer of 2 ids and a stop):
    ``tokens=[2, 5, 6, 9, 8, 1, 0, 0] prompt_lengths=3 lengths=6 logprobs=[0, 0, 0, -.1, -.3, -.02, 0, 0]``.
    """

    tokens: jax.Array  # i32[B, S] prompt, response, then pad
    prompt_lengths: jax.Array  # i32[B]
    lengths: jax.Array  # i32[B] prompt + response, the stop token included
    logprobs: jax.Array  # f32[B, S] behaviour log-prob of the token AT each index; 0 on prompt and padding
    finished: jax.Array  # bool[B] True: ended by a stop id; False: cut at max_new_tokens
    rounds: jax.Array  # i32[B] verify rounds; 0 in plain decode
    committed: jax.Array  # i32[B] tokens committed by verify rounds (the one sampled at prefill is not in it)
    accepted: jax.Array  # i32[B, K] rounds in which draft 1..K was accepted; K = 0 in plain decode
    proposed: jax.Array  # i32[B] drafts verified in all rounds: K a round, fewer where a draft had less to say
    experts: jax.Array | None = None  # i16[B, S, M, k] experts (M layers with such, k a token) that the token AT each
    # index was read with; -1 for the last token, which never was, and padding. None: not recorded
    experts_touched: jax.Array | None = None  # f32[B] the same for all: different experts that a decoding forward read
    # weights of for the requests still running, mean over forwards and layers; 0 without any forward. None: no experts
    end_reasons: jax.Array | None = None  # i32[B] why each response ended (`decoding.stopping`), where requests have
    # options of their own; `finished` is then: by a stop id or a stop string. None: they have none


@dataclass(frozen=True, slots=True)
class ScoredRollouts:
    """A step's rollouts with their rewards. Sequence b belongs to prompt b // G."""

    rollouts: Rollouts
    prompts: tuple[Prompt, ...]  # P
    rewards: jax.Array | NDArray[Any]  # f32[P, G]
    version: PolicyVersion
    reward_metrics: Mapping[str, float] = field(default_factory=dict)  # means of the parts of rewards


class PackedBatch(NamedTuple):
    """Training rows: documents laid one after another, told apart by segment ids.

    Arrays named ``label_*`` speak of the token AT that index as something to be predicted, so the logits that
    predict it stand one index earlier in the same document. Nothing here is shifted.
    """

    tokens: jax.Array  # i32[R, T]
    positions: jax.Array  # i32[R, T] restart at 0 in each document
    segment_ids: jax.Array  # i32[R, T] 0 = padding, documents are numbered from 1 in each row
    label_mask: jax.Array  # f32[R, T] 1 where this token was sampled by the policy and is trained on
    label_logprobs: jax.Array  # f32[R, T] behaviour log-prob of this token, 0 where label_mask is 0
    label_advantages: jax.Array  # f32[R, T] advantage of the token's sequence, 0 where label_mask is 0
    label_rewards: jax.Array  # f32[R, T] reward of the token's sequence, 0 where label_mask is 0
    sample_ids: jax.Array  # i32[R, T] number of the token's sequence, the same after a resume; 0 on padding
    experts: jax.Array | None = None  # i16[R, T, M, k] routing to be replayed; -1: the router chooses. None: no replay


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step reports: scalars by metric name (``group/name``, units in the name)."""

    step: int
    metrics: dict[str, float] = field(default_factory=dict[str, float])
