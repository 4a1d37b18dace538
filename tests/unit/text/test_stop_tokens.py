from __future__ import annotations

import pytest

from draftco_jax.errors import UserError
from draftco_jax.text.chat import Chat
from draftco_jax.text.stop_strings import find_response_end
from draftco_jax.text.stop_tokens import find_stop_tokens
from draftco_jax.text.tokenizer import Tokenizer

# <|endoftext|> 0, <|im_start|> 1, <|im_end|> 2, <|head|> 3, <|/head|> 4, <|end|> 5, <s> 6


def stops(folder, **options):
    return find_stop_tokens(folder, Tokenizer.load(folder), **options)


def test_a_chat_model_stops_at_the_end_of_text_and_at_the_end_of_its_turn(model_folder):
    found = stops(model_folder(config={"eos_token_id": 0}))
    assert found.ids == (0, 2)
    assert found.sources == (("config.json", (0,)), ("eos_token of the tokenizer", (2,)))
    assert found.notes == (
        "'<|endoftext|>' (0) stops by config.json, not by eos_token of the tokenizer",
        "'<|im_end|>' (2) stops by eos_token of the tokenizer, not by config.json",
    )


def test_the_order_is_the_documented_one_and_nothing_is_lost(model_folder):
    folder = model_folder(generation_config={"eos_token_id": [5, 2, 5]}, config={"text_config": {"eos_token_id": 0}})
    assert stops(folder).ids == (5, 2, 0)
    assert stops(folder, turn_end=4).ids == (5, 2, 0, 4)
    assert stops(folder, turn_end=2).ids == (5, 2, 0)


@pytest.mark.parametrize("files", [{}, {"generation_config": {}}, {"config": {"eos_token_id": None}}])
def test_sources_that_say_nothing_are_no_sources(model_folder, files):
    found = stops(model_folder(**files))
    assert (found.ids, found.notes) == ((2,), ())


@pytest.mark.parametrize("value", [10**6, -1, "2", True, [2, None], 2.0])
def test_what_is_no_id_is_refused(model_folder, value):
    with pytest.raises(UserError, match="of generation_config.json must be ids in 0.."):
        stops(model_folder(generation_config={"eos_token_id": value}))


def test_the_turn_end_of_the_template_stops_too(model_folder):
    # The tokenizer of a base model with the template of a chat: nothing but the template names <|im_end|>.
    folder = model_folder(style="chatml", changes={"eos_token": "<|endoftext|>"})
    chat = Chat.load(folder)
    assert chat.stops.ids == (0, 2)
    assert any("turn end of the chat template" in note for note in chat.stops.notes)


def test_b72_any_listed_id_ends_the_response_and_it_is_not_cut(model_folder):
    folder = model_folder("characters", generation_config={"eos_token_id": [5, 4, 2]})
    tokenizer = Tokenizer.load(folder)
    ids = [*tokenizer.encode("ab"), 5, 0, 0]
    end = find_response_end(tokenizer, ids, stops(folder).ids)
    assert (end.length, end.finished, end.text, end.stop_id) == (3, True, "ab", 5)
    # The tokenizer's own alone: what the report was about.
    assert not find_response_end(tokenizer, ids, [tokenizer.eos_id]).finished


def test_b71_cells_that_were_not_written_end_nothing(model_folder):
    tokenizer = Tokenizer.load(model_folder("characters"))
    written = tokenizer.encode("abc")
    row = [*written, tokenizer.eos_id, tokenizer.eos_id]
    end = find_response_end(tokenizer, row[: len(written)], [tokenizer.eos_id])
    assert (end.length, end.finished, end.text) == (3, False, "abc")
