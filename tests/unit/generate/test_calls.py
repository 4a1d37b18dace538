"""How a file goes in calls: every response once and in order, and sizes in which each call has room."""

from __future__ import annotations

import pytest

from draftco_jax.decoding.options import RequestOptions, prepare_options
from draftco_jax.errors import UserError
from draftco_jax.generate import calls
from draftco_jax.generate.calls import parted, sizes_of
from draftco_jax.numerics.request_sampling import FiltersInUse
from draftco_jax.numerics.sampling import SamplingConfig
from draftco_jax.text.tokenizer import arithmetic_tokenizer

TOKENIZER = arithmetic_tokenizer()
ROWS = TOKENIZER.vocab_size


def options(*strings, **more):
    return RequestOptions(stop_strings=strings, max_tokens=9, **more)


def test_calls_hold_every_response_once_and_in_order():
    assert parted(3, 2, 4) == [[(0, 0), (0, 1), (1, 0), (1, 1)], [(2, 0), (2, 1)]]
    assert parted(1, 1, 1024) == [[(0, 0)]]


def test_the_sizes_are_those_of_the_largest_call():
    """States: the empty response, any text, each beginning of a string, each string; one where there is no string."""
    asked = [
        options("12", "3"),  # empty, any, "1", "12", "3"
        options("12", "3", stop_ids=(1, 1, 5)),
        options(sampling=SamplingConfig(top_k=3)),
        options("4"),  # empty, any, "4", and the one of none
    ]
    sizes = sizes_of(parted(4, 1, 2), asked, "abcd", TOKENIZER, ROWS)
    assert sizes == (2, 5, FiltersInUse(True, False, False))
    for call in parted(4, 1, 2):
        rows = [asked[prompt] for prompt, _ in call]
        ready = prepare_options(rows, ROWS, TOKENIZER, stop_ids=sizes.stop_ids, stop_states=sizes.stop_states)
        assert ready.rows.stop_ids.shape == (2, 2) and ready.stop_table.following.shape == (5, ROWS)
    assert sizes_of(parted(1, 1, 2), [options()], "a", TOKENIZER, ROWS).stop_states is None


def test_a_call_whose_stop_strings_fill_the_memory_is_refused_by_the_line(monkeypatch):
    monkeypatch.setattr(calls, "MOST_TABLE_CELLS", 6 * ROWS)
    asked, places = [options("12"), options("345"), options("345")], ["f line 1", "f line 2", "f line 3"]
    assert sizes_of(parted(3, 1, 1), asked, places, TOKENIZER, ROWS).stop_states == 5
    with pytest.raises(
        UserError, match=f"f line 2: .* 2 kinds .* 9 states x {ROWS} ids, which must hold <= {6 * ROWS}"
    ):
        sizes_of(parted(3, 1, 2), asked, places, TOKENIZER, ROWS)
