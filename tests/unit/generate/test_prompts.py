"""Files of prompts: what a line may be, and what is said of one that is not."""

from __future__ import annotations

import pytest

from draftco_jax.config import resolve_checkpoint
from draftco_jax.errors import UserError
from draftco_jax.generate.prompts import read_prompts
from draftco_jax.text.tokenizer import Tokenizer

FOLDER = resolve_checkpoint("shipped:arithmetic3/policy")
TOKENIZER = Tokenizer.load(FOLDER)


def read(*lines, form="jsonl"):
    return read_prompts(lines, "prompts", form, FOLDER, TOKENIZER)


def test_texts_objects_and_ids_are_the_same_prompt():
    text = read("12+34=\r\n", "\n", form="text")[0]
    ids = list(TOKENIZER.encode("12+34="))
    prompt, tokens = read('{"prompt": "12+34=", "id": 7}\n', f'{{"tokens": {ids}}}\n')
    assert text.ids == prompt.ids == tokens.ids == tuple(ids)
    assert text.given == {"prompt": "12+34="} and prompt.given == {"prompt": "12+34=", "id": 7}
    assert (prompt.place, tokens.place) == ("prompts line 1", "prompts line 2")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("12+34=", "line 1 is not JSON"),
        ("[1]", "line 1 must be an object"),
        ("{}", "one of prompt, messages, tokens, but has none"),
        ('{"prompt": "1", "tokens": [1]}', r"but has \['prompt', 'tokens'\]"),
        ('{"prompt": 1}', "line 1: prompt=1 must be a text"),
        ('{"prompt": "x"}', "line 1: "),
        ('{"tokens": []}', "makes no tokens"),
        ('{"tokens": [1.0]}', "must be a list of ids"),
        ('{"tokens": [true]}', "must be a list of ids"),
        ('{"tokens": [-1]}', "must be a list of ids"),
        ('{"tokens": [999]}', "must be a list of ids"),
        ('{"messages": "hello"}', "must be a list of objects"),
        ('{"messages": [{"role": "user", "content": "1"}]}', "line 1: .*chat template"),
    ],
)
def test_a_line_that_is_no_prompt_is_refused_by_its_place(line, says):
    with pytest.raises(UserError, match=says):
        read(line)


def test_a_file_of_nothing_is_refused():
    with pytest.raises(UserError, match="prompts holds no prompt"):
        read("\n", "  \n")
