"""Options in the lines of a file: what is read, what is refused, and what text a stop string leaves."""

from __future__ import annotations

import pytest
import tokenizers
from tokenizers import decoders, models

from draftco_jax.config import resolve_checkpoint
from draftco_jax.errors import UserError
from draftco_jax.generate.line_options import LineOptions, read_line_options
from draftco_jax.generate.prompts import read_prompts
from draftco_jax.generate.responses import before_stop_string
from draftco_jax.text.tokenizer import Tokenizer

FOLDER = resolve_checkpoint("shipped:arithmetic3/policy")


def test_a_line_says_what_it_names_and_leaves_the_rest_to_the_file():
    line = read_line_options(
        {"prompt": "1", "temperature": 1, "top_k": None, "stop": "x", "stop_token_ids": [3, 4], "seed": 0, "id": "a"}
    )
    assert line == LineOptions(temperature=1.0, stop=("x",), stop_token_ids=(3, 4), seed=0)
    assert line.sampling == {"temperature": 1.0}
    assert read_line_options({"stop": [], "min_p": 0.5}) == LineOptions(stop=(), min_p=0.5)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ('"temperature": "1"', "temperature='1' must be a number"),
        ('"top_p": true', "top_p=True must be a number"),
        ('"top_k": 2.0', "top_k=2.0 must be a whole number"),
        ('"seed": 4294967296', "seed=4294967296 must be in 0..4294967295"),
        ('"seed": -1', "seed=-1 must be in 0..4294967295"),
        ('"temperature": 1' + "0" * 400, "temperature must be a finite number"),
        ('"max_tokens": -99999999999', "max_tokens=-99999999999 must be >= 1"),
        ('"min_tokens": -1', "min_tokens=-1 must be >= 0"),
        ('"stop": ["a", "b\ufffd"]', "stop string='b\ufffd' must be a text that is not empty and holds no U.FFFD"),
        ('"stop": [""]', r"stop=\[''\] must be a text that is not empty"),
        ('"stop": {"a": 1}', "must be a text that is not empty"),
        ('"stop_token_ids": 3', "stop_token_ids=3 must be a list of ids"),
        ('"stop_token_ids": [true]', "must be a list of ids"),
    ],
)
def test_an_option_of_another_kind_is_refused_by_its_line(given, says):
    with pytest.raises(UserError, match=f"prompts line 2: {says}" if says[0] != "m" else says):
        read_prompts(["\n", f'{{"prompt": "1", {given}}}'], "prompts", "jsonl", FOLDER, Tokenizer.load(FOLDER))


def test_the_text_before_a_stop_string_behind_min_tokens_keeps_earlier_ones():
    """Within the first two tokens "ab" ends nothing; in "ab|a|b" it does, and the cut falls within a token of "abc"."""
    letters = ["[end]", "ab", "a", "b", "bc"]
    backend = tokenizers.Tokenizer(models.WordLevel({name: i for i, name in enumerate(letters)}))
    backend.decoder = decoders.Fuse()
    tokenizer = Tokenizer(backend, eos_token="[end]")
    assert before_stop_string(tokenizer, [1, 3, 2, 4], ("x", "ab"), 2) == ("ab", "abb")
    assert before_stop_string(tokenizer, [2, 2, 4], ("ab",), 0) == ("ab", "a")
    # An id that the tokenizer has not, of a policy with more rows, is text too.
    assert before_stop_string(tokenizer, [9, 2, 4], ("ab",), 0) == ("ab", "\ufffd")
