from __future__ import annotations

import random

import pytest

from draftco_jax.errors import UserError
from draftco_jax.text.stop_strings import StringMatch, StringMatcher, find_response_end
from draftco_jax.text.tokenizer import Tokenizer


def earliest(text, strings):
    """By trying every beginning of the text: the first one that ends with a stop string; the longest of those."""
    for end in range(1, len(text) + 1):
        ending = [s for s in strings if text[:end].endswith(s)]
        if ending:
            string = max(ending, key=len)
            return StringMatch(string, end - len(string), end)
    return None


def test_a_match_does_not_depend_on_how_the_text_is_cut():
    rng = random.Random(0)
    matches = 0
    for _ in range(500):
        text = "".join(rng.choices("abc", k=rng.randrange(30)))
        strings = ["".join(rng.choices("abc", k=rng.randrange(1, 6))) for _ in range(rng.randrange(1, 4))]
        matcher, found, at = StringMatcher(strings), None, 0
        while found is None and at < len(text):
            step = rng.randrange(1, 5)
            found = matcher.push(text[at : at + step])
            at += step
        assert found == earliest(text, strings)
        matches += found is not None
    assert 100 < matches < 490


def test_what_may_be_the_beginning_of_a_stop_string_is_held():
    matcher = StringMatcher(["\n\nUser", "END"])
    held = []
    for piece in ("Hi", "\n", "\n", "U", "x E", "N", "e"):
        assert matcher.push(piece) is None
        held.append(matcher.undecided)
    assert held == [0, 1, 2, 3, 1, 2, 0]


@pytest.mark.parametrize("strings", [[], [""], ["a", ""]])
def test_empty_stop_strings_are_refused(strings):
    with pytest.raises(UserError, match="must be one or more texts that are not empty"):
        StringMatcher(strings)


def end_of(tokenizer, text, strings):
    return find_response_end(tokenizer, tokenizer.encode(text), [tokenizer.eos_id], strings)


def test_a_stop_string_over_several_tokens_ends_at_the_token_that_completes_it(model_folder):
    tokenizer = Tokenizer.load(model_folder("characters"))
    end = end_of(tokenizer, "one END two END", ["END"])
    assert (end.length, end.finished, end.text, end.stop_string) == (7, True, "one ", "END")
    assert not end.splits_token
    none = end_of(tokenizer, "one EN", ["END"])
    assert (none.length, none.finished, none.text) == (6, False, "one EN")


def test_a_stop_string_within_a_token_keeps_the_token_and_cuts_the_text(model_folder):
    tokenizer = Tokenizer.load(model_folder())
    ids = tokenizer.encode("The quick brown fox")
    whole = next(i for i, t in enumerate(ids) if "qu" in tokenizer.decode([t]))
    end = find_response_end(tokenizer, ids, [tokenizer.eos_id], ["u"])
    assert (end.length, end.text, end.splits_token) == (whole + 1, "The q", True)


@pytest.mark.parametrize("string", ["ſ", "🦊", "ſ🦊"])
def test_a_stop_string_of_several_bytes_ends_with_its_last(model_folder, string):
    tokenizer = Tokenizer.load(model_folder())
    before = tokenizer.encode("fox")
    inside = tokenizer.encode(string)
    assert len(inside) > 1
    ids = [*before, *inside, *tokenizer.encode("fox")]
    end = find_response_end(tokenizer, ids, [tokenizer.eos_id], [string])
    assert (end.length, end.text, end.splits_token) == (len(before) + len(inside), "fox", False)
    cut = find_response_end(tokenizer, ids[: len(before) + len(inside) - 1], [tokenizer.eos_id], [string])
    assert not cut.finished


def test_whichever_comes_first_ends_the_response(model_folder):
    tokenizer = Tokenizer.load(model_folder("characters"))
    ids = [*tokenizer.encode("ab"), tokenizer.eos_id, *tokenizer.encode("END")]
    first = find_response_end(tokenizer, ids, [tokenizer.eos_id], ["END"])
    assert (first.length, first.stop_id, first.stop_string, first.text) == (3, 2, None, "ab")
    second = find_response_end(tokenizer, [*tokenizer.encode("END"), 2], [2], ["END"])
    assert (second.length, second.stop_id, second.stop_string) == (3, None, "END")


def test_a_control_token_between_the_letters_is_part_of_the_text(model_folder):
    tokenizer = Tokenizer.load(model_folder("characters"))
    ids = [*tokenizer.encode("EN"), 5, *tokenizer.encode("D")]
    assert not find_response_end(tokenizer, ids, [2], ["END"]).finished
    assert find_response_end(tokenizer, ids, [2], ["<|end|>"]).text == "EN"


@pytest.mark.parametrize("after", ["lo", "<|im_end|>", "🦊", ""])
def test_bytes_that_are_read_as_a_run_end_where_the_string_does(model_folder, after):
    tokenizer = Tokenizer.load(model_folder("metaspace"))
    before, inside = tokenizer.encode_continuation("he"), tokenizer.encode_marked("<|end|>🦊").ids[1:]
    assert len(inside) == 4  # "<0xF0>" and so on
    ids = [*before, *inside, *tokenizer.encode_marked("<|end|>" + after).ids[1:]]
    end = find_response_end(tokenizer, ids, [tokenizer.eos_id], ["🦊"])
    assert (end.length, end.text, end.stop_string, end.splits_token) == (len(before) + 4, "he", "🦊", False)
    cut = find_response_end(tokenizer, ids[: len(before) + 3], [tokenizer.eos_id], ["🦊"])
    assert (cut.finished, cut.length, cut.text) == (False, len(before) + 3, "he\ufffd\ufffd\ufffd")
