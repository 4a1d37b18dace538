"""A response as it is written to a file: its tokens, its text without what ended it, and why it ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from draftco_jax.decoding.options import RequestOptions
from draftco_jax.decoding.stopping import BY_STOP_ID, BY_STOP_STRING
from draftco_jax.text.stop_strings import find_response_end
from draftco_jax.text.tokenizer import Tokenizer
from draftco_jax.types import Rollouts

Reason = Literal["stop_token", "stop_string", "length"]


class Response(NamedTuple):
    """One response, and which it is."""

    index: int
    """Number of the prompt in the file, from 0."""
    sample: int
    tokens: list[int]
    """What the policy wrote, its stop token and the tokens of a stop string included."""
    logprobs: list[float]
    """Of each token, by the law it was drawn from, in nats."""
    text: str
    """Without what ended it. Ids that the policy has and its tokenizer has not are U+FFFD."""
    stop_reason: Reason
    stop: int | str | None
    """The id or the string."""


def read_response(
    rollouts: Rollouts, row: int, which: tuple[int, int], options: RequestOptions, tokenizer: Tokenizer
) -> Response:
    """The response in a row of numpy arrays; `which` is the number of its prompt and its own."""
    assert rollouts.end_reasons is not None
    written = slice(int(rollouts.prompt_lengths[row]), int(rollouts.lengths[row]))
    ids = [int(token) for token in rollouts.tokens[row, written]]
    reason, stop, text = _end(int(rollouts.end_reasons[row]), ids, options, tokenizer)
    logprobs = [float(value) for value in rollouts.logprobs[row, written]]
    return Response(*which, tokens=ids, logprobs=logprobs, text=text, stop_reason=reason, stop=stop)


def _end(
    reason: int, ids: list[int], options: RequestOptions, tokenizer: Tokenizer
) -> tuple[Reason, int | str | None, str]:
    """Why, by what, and the text before that."""
    if reason == BY_STOP_ID:
        return "stop_token", ids[-1], find_response_end(tokenizer, ids[:-1], ()).text
    if reason == BY_STOP_STRING:
        string, text = before_stop_string(tokenizer, ids, options.stop_strings, options.min_tokens)
        return "stop_string", string, text
    return "length", None, find_response_end(tokenizer, ids, ()).text


def before_stop_string(
    tokenizer: Tokenizer, ids: Sequence[int], strings: Sequence[str], min_tokens: int
) -> tuple[str, str]:
    """The string that the last of the ids completes, and the text before it.

    A string begins behind `min_tokens` tokens, as in the engine (`decoding.stopping`), which has found one there.
    """
    whole, behind = (find_response_end(tokenizer, part, ()).text for part in (ids, ids[min_tokens:]))
    end = find_response_end(tokenizer, ids[min_tokens:], (), strings)
    if end.stop_string is None:
        raise AssertionError(f"none of {list(strings)!r} is in {behind!r}, though the response was ended there")
    return end.stop_string, whole[: len(whole) - (len(behind) - len(end.text))]
