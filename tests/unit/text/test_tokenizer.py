from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import tokenizers

from draftco_jax.errors import UserError
from draftco_jax.text.tokenizer import ARITHMETIC_CHARACTERS, Tokenizer, arithmetic_tokenizer


def test_ids_are_the_documented_ones():
    tokenizer = arithmetic_tokenizer()
    assert (tokenizer.pad_id, tokenizer.eos_id, tokenizer.bos_id, tokenizer.vocab_size) == (0, 1, 2, 32)
    assert tokenizer.encode(ARITHMETIC_CHARACTERS) == (2, *range(3, 17))
    assert tokenizer.encode("347+585=") == (2, 6, 7, 10, 13, 8, 11, 8, 14)
    assert tokenizer.encode("") == (2,)
    assert tokenizer.encode_response("932") == (12, 6, 5, 1)


@pytest.mark.parametrize("seed", range(20))
def test_decode_inverts_encode(seed: int):
    rng = random.Random(seed)
    text = "".join(rng.choices(ARITHMETIC_CHARACTERS, k=rng.randrange(60)))
    tokenizer = arithmetic_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode_response(text)) == text
    assert len(tokenizer.encode(text)) == len(text) + 1


@pytest.mark.parametrize("text", ["3 4", "3\n4", "a", "[eos]", "[unused a]", "１", "é"])
def test_text_outside_the_vocabulary_is_refused(text: str):
    with pytest.raises(UserError, match="must be made of characters in the vocabulary"):
        arithmetic_tokenizer().encode(text)


def test_refusal_names_the_characters():
    with pytest.raises(UserError, match="'b x' is not|' bx' is not"):
        arithmetic_tokenizer().encode("1x b")


@pytest.mark.parametrize("token_id", [-1, 32, 10**12])
def test_ids_out_of_range_are_refused(token_id: int):
    with pytest.raises(UserError, match=rf"token id={token_id} must be in 0..31"):
        arithmetic_tokenizer().decode([3, token_id])


def test_special_tokens_are_skipped_or_written_out():
    tokenizer = arithmetic_tokenizer()
    ids = [12, tokenizer.pad_id, 6, 17, 5]
    assert tokenizer.decode(ids) == "932"
    assert tokenizer.decode(ids, skip_special=False) == "9[pad]3[unused a]2"


def test_written_out_special_tokens_hold_no_character_of_the_task():
    tokenizer = arithmetic_tokenizer()
    written = tokenizer.decode([0, 1, 2, *range(17, 32)], skip_special=False)
    assert not set(written) & set(ARITHMETIC_CHARACTERS)


def test_a_saved_tokenizer_loads_as_the_same(tmp_path: Path):
    tokenizer = arithmetic_tokenizer()
    tokenizer.save(tmp_path / "deep" / "folder")
    loaded = Tokenizer.load(tmp_path / "deep" / "folder")
    assert loaded.encode("12+34=") == tokenizer.encode("12+34=")
    assert loaded.decode(range(32), skip_special=False) == tokenizer.decode(range(32), skip_special=False)
    assert (loaded.pad_id, loaded.eos_id, loaded.bos_id, loaded.vocab_size) == (0, 1, 2, 32)
    with pytest.raises(UserError):
        loaded.encode("[eos]")


def test_the_file_adds_bos_for_other_readers_too(tmp_path: Path):
    arithmetic_tokenizer().save(tmp_path)
    raw = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tuple(raw.encode("347+585=").ids) == arithmetic_tokenizer().encode("347+585=")


def test_saving_is_reproducible(tmp_path: Path):
    for name in ("first", "second"):
        arithmetic_tokenizer().save(tmp_path / name)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "first" / file).read_bytes() == (tmp_path / "second" / file).read_bytes()


def _byte_tokenizer(folder: Path, unknown: str | None = None) -> None:
    vocab = {"<|end|>": 0, "<|pad|>": 1, "a": 2, "b": 3} | ({unknown: 4} if unknown else {})
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, **({"unk_token": unknown} if unknown else {})))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    backend.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": {"content": "<|end|>", "lstrip": False}, "pad_token": "<|pad|>", "bos_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def test_a_foreign_tokenizer_without_bos_loads(tmp_path: Path):
    _byte_tokenizer(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.bos_id is None
    assert tokenizer.encode("ab") == (2, 3)
    assert tokenizer.encode_response("ab") == (2, 3, 0)


def test_an_unknown_token_is_never_produced_silently(tmp_path: Path):
    _byte_tokenizer(tmp_path, unknown="?")
    with pytest.raises(UserError, match="'z' is not"):
        Tokenizer.load(tmp_path).encode("az")


def test_bad_folders_are_refused_in_one_line(tmp_path: Path):
    with pytest.raises(UserError, match="must be a folder with tokenizer.json"):
        Tokenizer.load(tmp_path / "absent")
    arithmetic_tokenizer().save(tmp_path)
    whole = (tmp_path / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(whole[:100])
    with pytest.raises(UserError, match="must be readable"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text(whole)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(UserError, match="must name eos_token"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<nowhere>", "pad_token": "[pad]"}')
    with pytest.raises(UserError, match="eos_token='<nowhere>' must be in the vocabulary"):
        Tokenizer.load(tmp_path)
