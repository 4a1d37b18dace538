"""Ids and texts against transformers' own reading of the same folders, where it is installed."""

from __future__ import annotations

import importlib
import warnings

import pytest

from draftco_jax.text.chat import Chat
from draftco_jax.text.chat_template import ChatTemplate
from draftco_jax.text.tokenizer import Tokenizer

pytest.importorskip("transformers", reason="needs transformers 5 (pip install -e '.[interop]')")

TEXTS = ["", "The quick brown fox", " two  spaces\n\n", "naïve 日本語 🙂", "<|im_end|>x<think> y", "a <|end|> b"]
MARKED = {"__type": "AddedToken", "content": "<|end|>", "lstrip": False, "rstrip": True, "normalized": False}
CONVERSATIONS = {
    "one": [{"role": "user", "content": "fox & <dog>\n"}],
    "four": [
        {"role": "user", "content": "a", "name": None},
        {"role": "assistant", "content": "b", "thinking": "hm"},
        {"role": "user", "content": "12 x 34"},
        {"role": "assistant", "content": "naïve", "tool_calls": None},
    ],
}
TOOLS = [{"name": "f", "description": "<é> & more", "parameters": {"x": [1, 2.5, None, True]}}]


@pytest.fixture
def theirs():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        backend = importlib.import_module("transformers").PreTrainedTokenizerFast
    return lambda folder: backend.from_pretrained(str(folder))


@pytest.mark.parametrize("name", ["bytes", "metaspace"])
@pytest.mark.parametrize(
    "files",
    [
        {},
        {"changes": {"add_bos_token": True, "add_eos_token": True}},
        {"changes": {"pad_token": None, "additional_special_tokens": ["<|head|>", MARKED]}},
        {"special_tokens_map": {"eos_token": {"content": "<|end|>", "lstrip": False, "rstrip": True}}},
    ],
)
def test_ids_of_texts(model_folder, theirs, name, files):
    folder = model_folder(name, **files)
    mine, other = Tokenizer.load(folder), theirs(folder)
    assert (mine.eos_id, mine.bos_id) == (other.eos_token_id, other.bos_token_id)
    assert mine.vocab_size == len(other)
    for text in TEXTS:
        if "<" not in text:  # there, control tokens are read in any text
            assert list(mine.encode(text)) == other(text)["input_ids"]
        assert list(mine.encode_marked(text).ids) == other(text, add_special_tokens=False)["input_ids"]
        ids = mine.encode_marked(text).ids
        assert mine.decode(ids, skip_special=False) == other.decode(ids)
        assert mine.decode(ids) == other.decode(ids, skip_special_tokens=True)


def test_tokens_added_by_the_config(model_folder, theirs):
    size = Tokenizer.load(model_folder(folder="a")).vocab_size
    flags = {"lstrip": True, "rstrip": False, "normalized": False, "single_word": False}
    listed = {str(size): {"content": "<x>", "special": False, **flags}, "2": {"content": "<|im_end|>", "special": True}}
    folder = model_folder(folder="b", changes={"added_tokens_decoder": listed})
    mine, other = Tokenizer.load(folder), theirs(folder)
    for text in ("a <x> b", "a <|im_end|> b", "<x><|end|>"):
        assert list(mine.encode_marked(text).ids) == other(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("style", ["chatml", "thinking", "headers", "channels"])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("options", [{}, {"add_generation_prompt": True}, {"tools": TOOLS}])
def test_conversations(model_folder, theirs, style, conversation, options):
    folder = model_folder("bytes", style)
    chat, other, messages = Chat.load(folder), theirs(folder), CONVERSATIONS[conversation]
    mine = chat.encode(messages, **options)
    assert mine.text == other.apply_chat_template(messages, tokenize=False, **options)
    assert list(mine.ids) == other.apply_chat_template(messages, return_dict=False, **options)


def test_switches(model_folder, theirs):
    folder = model_folder("bytes", "thinking")
    chat = Chat.load(folder, switches={"enable_thinking": False})
    messages = CONVERSATIONS["one"]
    text = theirs(folder).apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    assert text.endswith("</think>\n\n") and chat.encode(messages, add_generation_prompt=True).text == text


def test_masks_of_generation_marks(model_folder, theirs):
    folder = model_folder("bytes", "headers")
    found = Chat.load(folder).training_ids(CONVERSATIONS["four"])
    other = theirs(folder).apply_chat_template(
        CONVERSATIONS["four"], return_dict=True, return_assistant_tokens_mask=True
    )
    assert list(found.ids) == other["input_ids"]
    assert [int(m) for m in found.assistant_mask] == other["assistant_masks"]
    assert 0 < sum(other["assistant_masks"]) < len(found.ids)


def test_templates_in_files_come_first_there_too(model_folder, theirs):
    folder = model_folder("bytes", "chatml")
    (folder / "chat_template.jinja").write_bytes(b"file {{ messages[0].content }}\r\n\n")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    template = ChatTemplate.load(folder, Tokenizer.load(folder))
    for options in ({}, {"tools": TOOLS}):
        text = theirs(folder).apply_chat_template(CONVERSATIONS["one"], tokenize=False, **options)
        assert template.render(CONVERSATIONS["one"], **options).text == text
