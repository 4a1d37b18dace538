"""Documents of uneven length laid into rows of one fixed shape.

A fixed number of rows means that the update compiles once. Documents are told apart by segment ids, and where each ends
is known from its length, never from the value of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Float32, Int, Int16, Int64

from draftco_jax.errors import UserError
from draftco_jax.types import PackedBatch, ScoredRollouts


def pad_rows(batch: PackedBatch, rows: int, row_tokens: int) -> PackedBatch:
    """The same rows, longer and more of them; what is added holds no document."""
    there = batch.tokens.shape
    more = ((0, rows - there[0]), (0, row_tokens - there[1]))

    def longer(values: Any, empty: int = 0) -> Any:
        return np.pad(np.asarray(values), more + ((0, 0),) * (values.ndim - 2), constant_values=empty)

    padded = PackedBatch(*(longer(values) for values in batch[:-1]))
    return padded if batch.experts is None else padded._replace(experts=longer(batch.experts, empty=-1))


class _Documents(NamedTuple):
    """B documents, each at the start of its row of a padded array."""

    tokens: Int[np.ndarray, "B S"]
    prompt_lengths: Int[np.ndarray, " B"]
    lengths: Int[np.ndarray, " B"]
    logprobs: Float[np.ndarray, "B S"]
    advantages: Float[np.ndarray, " B"]
    rewards: Float[np.ndarray, " B"]
    sample_ids: Int[np.ndarray, " B"]
    experts: Int16[np.ndarray, "B S M k"] | None = None


class _Places(NamedTuple):
    """Where each document goes."""

    rows: Int64[np.ndarray, " B"]
    starts: Int64[np.ndarray, " B"]
    segments: Int64[np.ndarray, " B"]  # from 1 in each row


def pack(
    scored: ScoredRollouts,
    advantages: Float32[jax.Array | np.ndarray, "P G"],
    row_tokens: int,
    rows: int,
    *,
    kept: Float32[np.ndarray, " B"] | None = None,
) -> PackedBatch:
    """Training rows of a step: each sequence, in order, into the first row that still has room for it.

    The arrays are numpy: putting them on devices is the update's business, which knows the sharding. Tokens sampled by
    the policy (prompt_length <= index < length) carry their behaviour log-prob and their sequence's advantage; prompts
    and padding carry zeros, whatever the rollout buffers hold there. Recorded experts go with
    their tokens; -1 is padding. A sequence whose `kept` is 0 has no label: it is read and not trained on, by policy or
    draft.
    """
    rollouts = scored.rollouts
    tokens = np.asarray(rollouts.tokens)
    if advantages.shape != tuple(scored.rewards.shape) or advantages.size != tokens.shape[0]:
        raise UserError(
            f"advantages={advantages.shape} must have one value per sequence: rewards={tuple(scored.rewards.shape)}, "
            f"sequences={tokens.shape[0]}; compute them from these rewards"
        )
    prompt_lengths, lengths = np.asarray(rollouts.prompt_lengths), np.asarray(rollouts.lengths)
    documents = _Documents(
        tokens=tokens,
        prompt_lengths=prompt_lengths if kept is None else np.where(kept > 0, prompt_lengths, lengths),
        lengths=lengths,
        logprobs=np.asarray(rollouts.logprobs),
        advantages=np.asarray(advantages).reshape(-1),
        rewards=np.asarray(scored.rewards, np.float32).reshape(-1),
        sample_ids=_sample_ids(scored),
        experts=None if rollouts.experts is None else np.asarray(rollouts.experts),
    )
    return _lay_out(documents, row_tokens, rows)


def pack_supervised(examples: Sequence[tuple[Sequence[int], Sequence[int]]], row_tokens: int, rows: int) -> PackedBatch:
    """Training rows of demonstrations given as (prompt ids, response ids), the response with its end-of-sequence.

    The label mask covers the response. Nobody sampled these tokens: their log-probs, advantages and rewards are 0
    throughout. Sample ids are the places in `examples`.
    """
    prompt_lengths = np.array([len(prompt) for prompt, _ in examples], np.int32)
    lengths = np.array([len(prompt) + len(response) for prompt, response in examples], np.int32)
    tokens = np.zeros((len(examples), int(lengths.max(initial=0))), np.int32)
    for row, (prompt, response) in zip(tokens, examples, strict=True):
        row[: len(prompt) + len(response)] = (*prompt, *response)
    no_logprobs = np.zeros(tokens.shape, np.float32)
    none = np.zeros(len(examples), np.float32)
    ids = np.arange(len(examples), dtype=np.int32)
    return _lay_out(_Documents(tokens, prompt_lengths, lengths, no_logprobs, none, none, ids), row_tokens, rows)


def _lay_out(documents: _Documents, row_tokens: int, rows: int) -> PackedBatch:
    lengths = documents.lengths.astype(np.int64)
    places = _first_fit(lengths, row_tokens, rows)
    # One entry per real token: its document, its index in the document, its cell in the flattened rows.
    document = np.repeat(np.arange(lengths.size), lengths)
    index = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    cell = (places.rows * row_tokens + places.starts)[document] + index
    sampled = index >= documents.prompt_lengths[document]

    # Any: the record speaks of jax.Array, for which numpy stands in until the update places the rows.
    def scatter(values: np.ndarray, dtype: type[np.int16] | type[np.int32] | type[np.float32], empty: int = 0) -> Any:
        flat = np.full((rows * row_tokens, *values.shape[1:]), empty, dtype)
        flat[cell] = values
        return flat.reshape(rows, row_tokens, *values.shape[1:])

    # where, not a product: a prompt cell of the buffer may hold NaN.
    logprobs = np.where(sampled, documents.logprobs[document, index], 0.0)
    advantages = np.where(sampled, documents.advantages[document], 0.0)
    rewards = np.where(sampled, documents.rewards[document], 0.0)
    experts = documents.experts
    return PackedBatch(
        tokens=scatter(documents.tokens[document, index], np.int32),
        positions=scatter(index, np.int32),
        segment_ids=scatter(places.segments[document], np.int32),
        label_mask=scatter(sampled, np.float32),
        label_logprobs=scatter(logprobs, np.float32),
        label_advantages=scatter(advantages, np.float32),
        label_rewards=scatter(rewards, np.float32),
        sample_ids=scatter(documents.sample_ids[document], np.int32),
        experts=None if experts is None else scatter(experts[document, index], np.int16, empty=-1),
    )


def _sample_ids(scored: ScoredRollouts) -> Int[np.ndarray, " B"]:
    """prompt id * G + place in the group: a number that a resumed run gives again. Wraps round past 2^31."""
    group = scored.rewards.shape[1]
    prompts = np.array([prompt.prompt_id for prompt in scored.prompts], np.int64)
    ids = prompts[:, None] * group + np.arange(group)[None, :]
    return (ids.reshape(-1) & 0x7FFFFFFF).astype(np.int32)


def _first_fit(lengths: Int64[np.ndarray, " B"], row_tokens: int, rows: int) -> _Places:
    longest = int(lengths.max(initial=0))
    if longest > row_tokens:
        raise UserError(
            f"row_tokens={row_tokens} must hold the longest sequence, which has {longest} tokens; "
            "raise row_tokens or lower the response limit"
        )
    # With a row for each document all of them fit; a limit on rows is checked afterwards, so that the message can name
    # the number that is needed.
    room = np.full(max(lengths.size, 1), row_tokens, np.int64)
    documents_in_row = np.zeros_like(room)
    places = _Places(*(np.zeros_like(lengths) for _ in _Places._fields))
    for document, length in enumerate(lengths):
        row = int(np.argmax(room >= length))
        documents_in_row[row] += 1
        places.rows[document] = row
        places.starts[document] = row_tokens - room[row]
        places.segments[document] = documents_in_row[row]
        room[row] -= length
    needed = int(np.count_nonzero(documents_in_row))
    if needed > rows:
        raise UserError(
            f"rows={rows} must be at least {needed} for {lengths.size} sequences of {int(lengths.sum())} tokens at "
            f"row_tokens={row_tokens}; raise rows or row_tokens"
        )
    return places
