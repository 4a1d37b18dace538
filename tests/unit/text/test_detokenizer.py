from __future__ import annotations

import random

import pytest
import tokenizers

from draftco_jax.errors import UserError
from draftco_jax.text.detokenizer import Detokenizer
from draftco_jax.text.tokenizer import Tokenizer, arithmetic_tokenizer

TEXT = "Hello naïve 日本語 🙂 👩‍👩‍👧  two  spaces\n\nend "


def pieces(tokenizer, ids, **options):
    stream = Detokenizer(tokenizer, **options)
    return [*(stream.push(i) for i in ids), stream.finish()]


def test_a_character_is_given_out_with_its_last_byte(model_folder):
    tokenizer = Tokenizer.load(model_folder(arguments={"alphabet": True}))
    # "ſ" is C5 BF in UTF-8 and nowhere in the training text: two ids.
    assert pieces(tokenizer, tokenizer.encode("aſb")) == ["a", "", "ſ", "b", ""]
    first, second = tokenizer.encode("ſ")
    assert pieces(tokenizer, [first]) == ["", "\ufffd"]
    assert pieces(tokenizer, [first, first, second]) == ["", "\ufffd", "ſ", ""]
    assert pieces(tokenizer, [second, *tokenizer.encode("a")]) == ["\ufffd", "a", ""]


@pytest.mark.parametrize("name", ["bytes", "metaspace"])
@pytest.mark.parametrize("skip_special", [True, False])
def test_pieces_are_the_whole_and_hold_no_half_characters(model_folder, name, skip_special):
    tokenizer = Tokenizer.load(model_folder(name))
    ids = [*tokenizer.encode(TEXT), tokenizer.eos_id, *tokenizer.encode_continuation(" more 🙂")]
    found = pieces(tokenizer, ids, skip_special=skip_special)
    assert "".join(found) == tokenizer.decode(ids, skip_special=skip_special)
    assert "\ufffd" not in "".join(found)


@pytest.mark.parametrize("name", ["bytes", "metaspace", "characters"])
@pytest.mark.parametrize("skip_special", [True, False])
def test_any_ids_whatever_give_the_text_of_all_at_once(model_folder, name, skip_special):
    tokenizer = Tokenizer.load(model_folder(name))
    rng = random.Random(0)
    # Mostly single bytes, so that broken UTF-8 of every kind turns up.
    for _ in range(300):
        ids = [rng.randrange(tokenizer.vocab_size if rng.random() < 0.3 else 260) for _ in range(rng.randrange(1, 25))]
        ids = [i % tokenizer.vocab_size for i in ids]
        assert "".join(pieces(tokenizer, ids, skip_special=skip_special)) == tokenizer.decode(
            ids, skip_special=skip_special
        )


@pytest.mark.parametrize("name", ["bytes", "metaspace", "characters"])
def test_ids_beyond_the_vocabulary_are_replacement_characters_where_asked_for(model_folder, name):
    tokenizer = Tokenizer.load(model_folder(name))
    fox, beyond = tokenizer.encode_continuation("ab"), tokenizer.vocab_size
    assert tokenizer.decode([*fox, beyond, *fox, beyond + 7], foreign=True) == "ab\ufffdab\ufffd"
    rng = random.Random(1)
    for _ in range(100):
        ids = [rng.choice([rng.randrange(beyond), beyond, beyond + 1]) for _ in range(rng.randrange(1, 12))]
        whole = tokenizer.decode(ids, skip_special=False, foreign=True)
        assert "".join(pieces(tokenizer, ids, foreign=True)) == whole
    for wrong in ([beyond], [beyond, -1]):
        with pytest.raises(UserError, match=f"token id={wrong[-1]} must be in 0"):
            tokenizer.decode(wrong, foreign=len(wrong) == 2)


def test_the_arithmetic_tokenizer_reads_token_by_token():
    assert pieces(arithmetic_tokenizer(), [3, 0, 4]) == ["0", "[pad]", "1", ""]


def test_what_cannot_be_read_token_by_token_is_refused(model_folder):
    folder = model_folder("characters")
    raw = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    raw.decoder = tokenizers.decoders.WordPiece()
    raw.save(str(folder / "tokenizer.json"))
    with pytest.raises(UserError, match="decoder=WordPiece must be ByteLevel"):
        Detokenizer(Tokenizer.load(folder))
    with pytest.raises(UserError, match="token id=32 must be in 0..31"):
        Detokenizer(arithmetic_tokenizer()).push(32)
