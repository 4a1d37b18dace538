"""Tiny model folders: tokenizers whose ids can be written by hand or are trained here, and templates of four styles."""

from __future__ import annotations

import json
import string
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|head|>", "<|/head|>", "<|end|>", "<s>")
THINKING = ("<think>", "</think>")
CHARACTERS = string.ascii_letters + string.digits + string.punctuation + " \n"
SENTENCES = [
    "The quick brown fox jumps over the lazy dog; naïve café, 12 x 34 = 408.",
    "<result>\nHello, hello! How are you today?\n</result> I am fine, thank you.\n\n",
    "日本語の文、Ελληνικά, русский текст, emoji 🙂🙂 and 👩‍👩‍👧.",
]


# Line breaks stay together whatever follows, as in Qwen and Llama 3; GPT-2's own pattern splits them before a word.
PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def byte_backend(control=CONTROL, added=THINKING, alphabet=True, gpt2=False):
    """Byte-pair encoding over bytes, trained on `SENTENCES`; control tokens first, added ordinary ones last."""
    backend = tokenizers.Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=gpt2)
    split = pre_tokenizers.Split(tokenizers.Regex(PATTERN), "isolated")
    backend.pre_tokenizer = byte_level if gpt2 else pre_tokenizers.Sequence([split, byte_level])
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=list(control),
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()) if alphabet else [],
    )
    backend.train_from_iterator(SENTENCES, trainer)
    backend.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in added])
    return backend


def character_backend():
    """One id a character: control tokens from 0, then `CHARACTERS`, then the two thinking marks."""
    vocab = {token: i for i, token in enumerate([*CONTROL, *CHARACTERS])}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab))
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in CONTROL])
    backend.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in THINKING])
    return backend


def metaspace_backend():
    """The SentencePiece style of Llama 2: "▁" for spaces, one before a text, byte tokens for what has no piece."""
    bytes_ = [f"<0x{b:02X}>" for b in range(256)]
    pieces = ["<unk>", *CONTROL, *bytes_, "▁", *string.ascii_letters, "▁he", "llo", "he", "lo"]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    merges = [("h", "e"), ("▁", "he"), ("l", "o"), ("l", "lo")]
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", vocab["<s>"])])
    backend.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in CONTROL])
    return backend


BACKENDS = {"bytes": byte_backend, "characters": character_backend, "metaspace": metaspace_backend}


@pytest.fixture
def backend():
    """Name ("bytes", "characters", "metaspace"), and arguments -> the library's own tokenizer."""
    return lambda name, **arguments: BACKENDS[name](**arguments)


@pytest.fixture
def template():
    """Name -> Jinja source of tests/unit/text/templates."""
    folder = Path(__file__).parent / "templates"
    return lambda name: (folder / f"{name}.jinja").read_text()


@pytest.fixture
def model_folder(tmp_path, template):
    """(backend name, template name, files by name) -> a model folder. A file given as None is left out."""

    def make(name="bytes", style=None, folder="model", arguments=None, **files):
        out = tmp_path / folder
        out.mkdir(parents=True, exist_ok=True)
        BACKENDS[name](**(arguments or {})).save(str(out / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "bos_token": "<s>"}
        settings |= {"pad_token": "<|endoftext|>", "clean_up_tokenization_spaces": False}
        if style is not None:
            settings["chat_template"] = template(style)
        written = {"tokenizer_config": settings, **files}
        if "changes" in written:
            written["tokenizer_config"] = settings | written.pop("changes")
        for file, value in written.items():
            if value is not None:
                (out / f"{file}.json").write_text(json.dumps(value))
        return out

    return make
