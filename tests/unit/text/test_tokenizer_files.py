from __future__ import annotations

import json

import pytest
import tokenizers
from tokenizers import processors

from draftco_jax.errors import UserError
from draftco_jax.text.tokenizer import Tokenizer


def table(content, **flags):
    return {"content": content, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False, **flags}


def test_bytes_have_no_unknown_text(model_folder):
    tokenizer = Tokenizer.load(model_folder())
    for text in ("", "plain", " \n\t", "日本語 🙂👩‍👩‍👧", "".join(map(chr, range(1, 256))), "\U0010ffff", "a\u0301"):
        assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text


def test_bytes_that_have_no_id_are_refused_not_dropped(model_folder):
    folder = model_folder(arguments={"alphabet": False})
    raw = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert raw.decode(raw.encode("fox @ dog").ids) == "fox  dog"  # what the library does by itself
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.decode(tokenizer.encode("fox dog")) == "fox dog"
    with pytest.raises(UserError, match="'@' is not"):
        tokenizer.encode("fox @ dog")
    with pytest.raises(UserError, match="'@' is not"):
        tokenizer.encode_marked("fox @ dog<|im_end|>")
    # One byte of two is known, so an id stands for the character.
    with pytest.raises(UserError, match="'ȩ' is not"):
        tokenizer.encode("ȩ")


def test_a_plain_vocabulary_without_unknown_token_drops_nothing(model_folder):
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({"<|im_end|>": 0, "<|endoftext|>": 1, "<s>": 2, "a": 3}, []))
    folder = model_folder()
    backend.save(str(folder / "tokenizer.json"))
    with pytest.raises(UserError, match="'b' is not"):
        Tokenizer.load(folder).encode("aba")


def test_text_of_a_user_is_never_a_control_token_and_a_template_s_is(model_folder):
    tokenizer = Tokenizer.load(model_folder("characters"))
    assert tokenizer.encode_marked("<|im_end|>a").ids == (2, 7)
    assert tokenizer.encode("<|im_end|>")[0] == tokenizer.encode("<")[0]
    assert len(tokenizer.encode("<|im_end|>")) == 10
    encoded = tokenizer.encode_marked("ab<|im_end|>c")
    assert encoded.offsets == ((0, 1), (1, 2), (2, 12), (12, 13))


@pytest.mark.parametrize("asked", [None, True, False])
@pytest.mark.parametrize("writes_bos", [True, False])
def test_the_post_processor_alone_writes_bos(model_folder, asked, writes_bos):
    folder = model_folder(changes={} if asked is None else {"add_bos_token": asked})
    raw = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    bos = raw.token_to_id("<s>")
    if writes_bos:
        raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
        raw.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.load(folder)
    bare = tokenizer.encode_continuation("fox")
    assert tokenizer.encode("fox") == ((bos,) if writes_bos else ()) + bare
    assert tokenizer.encode("") == ((bos,) if writes_bos else ())
    assert tokenizer.encode_response("fox") == (*bare, tokenizer.eos_id)
    assert tokenizer.bos_id == bos
    assert bool(tokenizer.notes) == (asked is not None and asked != writes_bos)


def test_an_end_that_the_post_processor_writes_is_no_part_of_a_prompt(model_folder):
    folder = model_folder()
    raw = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    special = [(t, raw.token_to_id(t)) for t in ("<s>", "<|im_end|>")]
    raw.post_processor = processors.TemplateProcessing(single="<s> $A <|im_end|>", special_tokens=special)
    raw.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.encode("fox") == (special[0][1], *tokenizer.encode_continuation("fox"))
    assert tokenizer.encode("") == (special[0][1],)


def test_b73_without_a_pad_token_the_end_token_fills_the_cells(model_folder):
    tokenizer = Tokenizer.load(model_folder(changes={"pad_token": None}))
    assert tokenizer.pad_id == tokenizer.eos_id
    assert "pad_token" not in tokenizer.special_tokens
    assert tokenizer.notes == ("no pad_token is named: '<|im_end|>' fills the cells",)


def test_names_come_as_text_or_table_and_from_the_map(model_folder):
    names = {"eos_token": table("<|im_end|>"), "pad_token": {"__type": "AddedToken", **table("<|endoftext|>")}}
    first = Tokenizer.load(model_folder(folder="a", changes=names))
    assert (first.eos_id, first.pad_id) == (2, 0)
    # The map is read where the config lists no added tokens, and then comes first.
    over = {"eos_token": table("<|end|>")}
    assert Tokenizer.load(model_folder(folder="b", special_tokens_map=over)).eos_id == 5
    listed = {"added_tokens_decoder": {"2": table("<|im_end|>", special=True)}}
    assert Tokenizer.load(model_folder(folder="c", special_tokens_map=over, changes=listed)).eos_id == 2
    alone = model_folder(folder="d", tokenizer_config=None, special_tokens_map={"eos_token": "<|end|>"})
    assert Tokenizer.load(alone).eos_id == 5


def test_tokens_that_only_the_config_lists_are_added_at_their_ids(model_folder):
    size = Tokenizer.load(model_folder(folder="a")).vocab_size
    listed = {str(size + 1): table("<y>"), str(size): table("<x>", special=True)}
    tokenizer = Tokenizer.load(model_folder(folder="b", changes={"added_tokens_decoder": listed}))
    assert tokenizer.encode_marked("<x><y>").ids == (size, size + 1)
    assert len(tokenizer.encode("<x>")) > 1 and tokenizer.encode("<y>") == (size + 1,)
    legacy = model_folder(folder="c", added_tokens={"<x>": size, "<y>": size + 1})
    assert Tokenizer.load(legacy).encode_marked("<x><y>").ids == (size, size + 1)
    wrong = model_folder(folder="d", changes={"added_tokens_decoder": {str(size + 7): table("<x>")}})
    with pytest.raises(UserError, match=f"'<x>' must have id {size + 7}"):
        Tokenizer.load(wrong)


def test_named_tokens_become_control_tokens_even_if_the_vocabulary_holds_them_as_text(model_folder):
    folder = model_folder(arguments={"control": ("<|im_end|>", "<|endoftext|>", "<s>"), "added": ("<|end|>",)})
    assert len(Tokenizer.load(folder).encode("<|end|>")) == 1
    extra = model_folder(
        folder="b",
        arguments={"control": ("<|im_end|>", "<|endoftext|>", "<s>"), "added": ("<|end|>",)},
        changes={"additional_special_tokens": ["<|end|>"]},
    )
    assert len(Tokenizer.load(extra).encode("<|end|>")) > 1
    with pytest.raises(UserError, match="additional_special_tokens='<nowhere>' must be in the vocabulary"):
        Tokenizer.load(model_folder(folder="c", changes={"additional_special_tokens": ["<nowhere>"]}))


def test_no_text_is_cut_or_filled_by_what_the_file_was_saved_with(model_folder):
    folder = model_folder()
    raw = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    raw.enable_truncation(3)
    raw.enable_padding(length=50)
    raw.save(str(folder / "tokenizer.json"))
    text = "The quick brown fox jumps over the lazy dog"
    assert Tokenizer.load(folder).decode(Tokenizer.load(folder).encode(text)) == text


def test_a_model_may_have_more_rows_than_the_tokenizer_ids_never_fewer(model_folder):
    tokenizer = Tokenizer.load(model_folder("characters"))
    size = tokenizer.vocab_size
    assert tokenizer.require_fits(size) == 0
    assert tokenizer.require_fits(size + 28) == 28
    with pytest.raises(UserError, match=f"vocab_size={size - 1} of the model must be >= {size}"):
        tokenizer.require_fits(size - 1)


def test_ids_in_a_gap_of_the_vocabulary_are_seen_in_the_text(model_folder):
    folder = model_folder("characters")
    data = json.loads((folder / "tokenizer.json").read_text())
    data["model"]["vocab"]["z2"] = 120
    (folder / "tokenizer.json").write_text(json.dumps(data))
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.vocab_size == 121  # not the number of tokens
    nine, two = tokenizer.encode("92")
    assert tokenizer.decode([nine, 115, two, 116]) == "9\ufffd2\ufffd"
    assert tokenizer.require_fits(128) > 7


def test_a_loaded_tokenizer_saves_what_it_was_loaded_from(model_folder, tmp_path):
    folder = model_folder(style="chatml", changes={"additional_special_tokens": ["<|head|>"], "note": "é"})
    Tokenizer.load(folder).save(tmp_path / "out")
    old, new = (json.loads((f / "tokenizer_config.json").read_text()) for f in (folder, tmp_path / "out"))
    assert old == new
    assert Tokenizer.load(tmp_path / "out").encode("fox <|im_end|>") == Tokenizer.load(folder).encode("fox <|im_end|>")


@pytest.mark.parametrize(
    "files, message",
    [
        ({"tokenizer_config": None}, "must be a folder with tokenizer_config.json"),
        ({"tokenizer_config": [1]}, "must hold a JSON object, not a list"),
        ({"changes": {"eos_token": None}}, "must name eos_token"),
        ({"changes": {"bos_token": "<nowhere>"}}, "bos_token='<nowhere>' must be in the vocabulary"),
        ({"changes": {"added_tokens_decoder": {"2": 7}}}, r"added_tokens_decoder\[2\]=7 must be a table"),
    ],
)
def test_bad_folders_are_refused_in_one_line(model_folder, files, message):
    with pytest.raises(UserError, match=message) as caught:
        Tokenizer.load(model_folder(**files))
    assert "\n" not in str(caught.value)


def test_a_folder_of_another_format_says_the_way_out(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(UserError, match="found tokenizer.model: load it in transformers and save it from there"):
        Tokenizer.load(tmp_path)
