"""Files of prompts: what a line may be, and what is said of one that is not."""

from __future__ import annotations

import io
import json
import re
import string

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from draftco_jax.config import resolve_checkpoint
from draftco_jax.errors import UserError
from draftco_jax.generate.command import _lines
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
        ('{"prompt": "1", "id": NaN}', "line 1 is not JSON .NaN is no number in JSON"),
        ('{"prompt": "1", "id": [-Infinity]}', "line 1 is not JSON .-Infinity is no number"),
        ('{"prompt": "1", "id": 1e999}', "line 1 holds a number beyond all finite ones"),
        (r'{"prompt": "1", "\ud83d": 1}', r"line 1 holds '.ud83d', half of a surrogate pair"),
        (r'{"messages": [{"role": "user", "content": "\udc00"}]}', "line 1 holds .*half of a surrogate pair"),
        (r'{"prompt": "1", "stop": "\ud83d"}', "line 1 holds .*half of a surrogate pair"),
        ('{"prompt": "1", "id": ' + "[" * 64 + "]" * 64 + "}", "line 1 must have at most 64 lists and objects"),
        ('{"prompt": "1", "id": ' + "[" * 10**5 + "]" * 10**5 + "}", "line 1 must have at most 64 lists and objects"),
        ('{"messages": [{"role": "user", "content": "1"}]}', "line 1: .*chat template"),
    ],
)
def test_a_line_that_is_no_prompt_is_refused_by_its_place(line, says):
    with pytest.raises(UserError, match=says):
        read(line)


def test_a_line_ends_at_a_line_feed_and_keeps_every_other_character(tmp_path, monkeypatch):
    """U+2028, U+2029, U+0085, form feed and a lone carriage return part lines for `str.splitlines`."""
    inside = "a\u2028b\u2029c\x85d\x0ce\rf"
    file = tmp_path / "prompts.txt"
    file.write_bytes(f"{inside}\r\n\r\n{inside}".encode())
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(file.read_bytes()), encoding="ascii"))
    for name, found in ((str(file), _lines(str(file), None)), ("standard input", _lines("-", None))):
        assert found == ([f"{inside}\r", "\r", inside], name, "text")
    tokenizer = tokenizer_of(inside)
    given = read_prompts([f"{inside}\r", inside], "prompts", "text", FOLDER, tokenizer)
    assert [line.given for line in given] == [{"prompt": inside}] * 2


def tokenizer_of(characters, **settings):
    """An id for each character, after "[end]", "[turn]" and the letters."""
    names = dict.fromkeys(["[end]", "[turn]", *string.ascii_letters, *characters])
    backend = tokenizers.Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}))
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([tokenizers.AddedToken(name, special=True) for name in ("[end]", "[turn]")])
    return Tokenizer(backend, eos_token="[end]", settings=settings)


def test_prompts_that_are_not_utf8_are_refused(tmp_path, monkeypatch):
    file = tmp_path / "prompts.txt"
    file.write_bytes("é".encode("latin-1"))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(file.read_bytes()), encoding="latin-1"))
    for name in (str(file), "-"):
        with pytest.raises(UserError, match=f"--prompts {re.escape(name)} cannot be read .*utf-8.*; give a text file"):
            _lines(name, None)


def test_a_conversation_brings_the_ends_of_the_assistants_turn(tmp_path):
    """The template ends turns with an id that neither config nor tokenizer names as an end."""
    tokenizer = tokenizer_of("", chat_template="{% for m in messages %}{{ m.content }}[turn]{% endfor %}")
    tokenizer.save(tmp_path)
    lines = [{"messages": [{"role": "user", "content": "hi"}]}, {"prompt": "hi"}]
    chat, text = read_prompts(map(json.dumps, lines), "prompts", "jsonl", tmp_path, tokenizer)
    assert chat.turn_ends == (tokenizer.eos_id, tokenizer.backend.token_to_id("[turn]")) == (0, 1)
    assert text.turn_ends == ()


def test_a_file_of_nothing_is_refused():
    with pytest.raises(UserError, match="prompts holds no prompt"):
        read("\n", "  \n")
