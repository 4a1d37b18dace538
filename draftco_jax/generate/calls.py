"""How the responses of a file are parted into calls of one program, and the sizes that hold for all of them.

A call has `ROWS_OF_A_CALL` responses at most, and what its prompts ask for is prepared for it alone: the table of stop
strings has a row of the whole vocabulary for each state, so that of all lines of a long file would fill the memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from draftco_jax.decoding.options import RequestOptions
from draftco_jax.errors import UserError
from draftco_jax.numerics.request_sampling import FiltersInUse, filters_in_use
from draftco_jax.text.stop_automaton import automaton_states
from draftco_jax.text.tokenizer import Tokenizer

ROWS_OF_A_CALL = 1024
MOST_TABLE_CELLS = 2**28
"""Of the stop strings of a call, i32: 1 GiB."""


class CallSizes(NamedTuple):
    """What every call is prepared with, so that all go through one program."""

    stop_ids: int
    """Columns for stop ids."""
    stop_states: int | None
    """Rows of the table of stop strings; None where no line of the file names any."""
    filters: FiltersInUse


def parted(prompts: int, samples: int, rows: int) -> list[list[tuple[int, int]]]:
    """(prompt, sample) of all responses in their order, in calls of so many."""
    wanted = [(prompt, sample) for prompt in range(prompts) for sample in range(samples)]
    return [wanted[start : start + rows] for start in range(0, len(wanted), rows)]


def sizes_of(
    calls: Sequence[Sequence[tuple[int, int]]],
    options: Sequence[RequestOptions],
    places: Sequence[str],
    tokenizer: Tokenizer,
    vocab_size: int,
) -> CallSizes:
    """Sizes in which every call has room.

    Args:
        calls: of `parted`.
        options: of each prompt.
        places: where each prompt stands, for messages.
        tokenizer: what makes text of ids.
        vocab_size: rows of the model's vocabulary.

    Raises:
        UserError: the stop strings of a call make a table of more than `MOST_TABLE_CELLS` numbers.
    """
    return CallSizes(
        stop_ids=max(1, *(len(set(each.stop_ids)) for each in options)),
        stop_states=_stop_states(calls, options, places, tokenizer, vocab_size),
        filters=filters_in_use([each.sampling for each in options]),
    )


def _stop_states(
    calls: Sequence[Sequence[tuple[int, int]]],
    options: Sequence[RequestOptions],
    places: Sequence[str],
    tokenizer: Tokenizer,
    vocab_size: int,
) -> int | None:
    """States of the call that has the most."""
    if not any(each.stop_strings for each in options):
        return None
    states: dict[tuple[str, ...], int] = {}
    most = 0
    for call in calls:
        total, met = 0, set[tuple[str, ...]]()
        for prompt in dict.fromkeys(prompt for prompt, _ in call):
            strings = options[prompt].stop_strings
            if strings in met:
                continue
            if strings not in states:
                states[strings] = automaton_states(tokenizer, strings, vocab_size)
            met.add(strings)
            total += states[strings]
            if total * vocab_size > MOST_TABLE_CELLS:
                raise UserError(
                    f"{places[prompt]}: with its stop strings the {len(met)} kinds of them in one call make a table of "
                    f"{total} states x {vocab_size} ids, which must hold <= {MOST_TABLE_CELLS} numbers; name fewer or "
                    "shorter ones, or put the lines into files of their own"
                )
        most = max(most, total)
    return most
