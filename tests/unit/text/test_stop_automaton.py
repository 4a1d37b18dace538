"""The table of stop strings, held to `find_response_end` on random ids."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

import draftco_jax
from draftco_jax.errors import UserError
from draftco_jax.text import stop_automaton
from draftco_jax.text.stop_automaton import StopAutomaton, automaton_states, build_stop_automaton, byte_automaton
from draftco_jax.text.stop_strings import find_response_end
from draftco_jax.text.tokenizer import Tokenizer

ASSETS = Path(draftco_jax.__file__).parent / "assets"


def first_hit(automaton: StopAutomaton, ids) -> tuple[int, str] | None:
    """(tokens, string) at the first complete string."""
    state = 0
    for n, token in enumerate(ids, 1):
        state = int(automaton.table[state, token])
        if (string := automaton.string_at(state)) is not None:
            return n, string
    return None


def by_text(tokenizer: Tokenizer, ids, strings) -> tuple[int, str | None] | None:
    end = find_response_end(tokenizer, ids, [], strings)
    return (end.length, end.stop_string) if end.finished else None


def as_generated(tokenizer: Tokenizer, ids, strings) -> tuple[int, str | None] | None:
    """As a response is generated: asked after each id, of the ids up to it."""
    for n in range(1, len(ids) + 1):
        if (found := by_text(tokenizer, ids[:n], strings)) is not None:
            return found
    return None


def spellings(tokenizer: Tokenizer, strings) -> list[tuple[int, ...]]:
    """Ids of the strings and of their endings, as far as a text of that kind has ids."""
    found = []
    for string in strings:
        for start in range(len(string)):
            try:
                found.append(tokenizer.encode_marked(string[start:]).ids)
            except Exception:  # as the tokenizers package says it
                break
    return found


def bordering(tokenizer: Tokenizer, strings) -> list[tuple[int, ...]]:
    """Ids whose text may hold the beginning or the end of a string, and more."""
    texts = [tokenizer.decode([token], skip_special=False) for token in range(tokenizer.vocab_size)]
    return [(i,) for i, text in enumerate(texts) for s in strings if text and (text[-1] == s[0] or text[0] == s[-1])]


def sequences(tokenizer: Tokenizer, strings, count: int):
    """Random ids, mostly such as spell parts of the strings, so that many hold one."""
    rng = random.Random(repr(strings))
    spelled, borders = spellings(tokenizer, strings), bordering(tokenizer, strings)
    for _ in range(count):
        rare, length, ids = rng.choice([0.05, 0.4]), rng.randrange(1, 20), []
        while len(ids) < length:
            part = rng.choice(borders if borders and rng.random() < 0.3 else spelled or borders)
            if rng.random() < rare:
                part = (rng.randrange(tokenizer.vocab_size),)
            ids += part if rng.random() < 0.5 else part[: rng.randrange(1, len(part) + 1)]
        yield ids


SETS = {
    "bytes": [["fox"], ["\n\nUser", "END"], ["ſ🦊"], ["🦊", "é"], ["aab", "ab", "b a"], ["u", "q"], ["aXaa", "aa"],
              ["<|im_end|>x", " the"], ["he", "she", "hers"]],
    "characters": [["END"], ["aab", "ab"], ["<|end|>"], ["b<|im_end|>"], ["aba", "bab", "a b"]],
    "metaspace": [["he"], [" he", "lo"], ["🦊"], ["e🦊", "ſ"], [" "], ["lo", "llo h"], ["<|end|>🦊"], ["éé", "\n"],
                  ["  he"]],
}  # fmt: skip
CASES = [(name, strings) for name, sets in SETS.items() for strings in sets]


@pytest.mark.parametrize("name, strings", CASES, ids=[f"{name}-{'|'.join(s)!a}" for name, s in CASES])
def test_the_first_hit_is_where_the_text_ends(model_folder, name, strings):
    tokenizer = Tokenizer.load(model_folder(name))
    automaton = build_stop_automaton(tokenizer, strings)
    # Runs of byte tokens may be spoiled by what comes behind the hit, which a response that ends there never holds.
    oracle = as_generated if name == "metaspace" else by_text
    found = 0
    for ids in sequences(tokenizer, strings, 40):
        hit = first_hit(automaton, ids)
        assert hit == oracle(tokenizer, ids, strings), [tokenizer.backend.id_to_token(i) for i in ids]
        found += hit is not None
    assert found >= 4


@pytest.mark.parametrize(
    "name, strings", [("bytes", ["🦊", "fox"]), ("characters", ["END"]), ("metaspace", ["he", "🦊"])]
)
def test_ids_beyond_the_tokenizer_part_a_string_and_never_complete_one(model_folder, name, strings):
    """A policy with more rows may write them; table and text agree about what comes behind."""
    tokenizer = Tokenizer.load(model_folder(name))
    beyond = tokenizer.vocab_size
    automaton = build_stop_automaton(tokenizer, strings, beyond + 2)
    assert automaton_states(tokenizer, strings, beyond + 2) == len(automaton.table)
    rng, found = random.Random(2), 0
    for ids in sequences(tokenizer, strings, 40):
        mixed = [token for each in ids for token in ([each, beyond + 1] if rng.random() < 0.1 else [each])]
        hit = first_hit(automaton, mixed)
        assert hit == as_generated(tokenizer, mixed, strings)
        found += hit is not None
    assert found >= 4


@pytest.mark.parametrize("asset", ["arithmetic2", "arithmetic3"])
@pytest.mark.parametrize("strings", [["="], ["12", "2+"], ["+1", "1+1="], ["[eos]"], ["]1"]], ids=repr)
def test_the_first_hit_with_shipped_tokenizers(asset, strings):
    tokenizer = Tokenizer.load(ASSETS / asset / "policy")
    automaton = build_stop_automaton(tokenizer, strings)
    found = 0
    for ids in sequences(tokenizer, strings, 100):
        hit = first_hit(automaton, ids)
        assert hit == by_text(tokenizer, ids, strings)
        found += hit is not None
    assert found > 20


def test_every_short_sequence_of_byte_tokens(model_folder):
    """All runs of up to three of some bytes: whole characters, broken ones, beginnings; and text between."""
    tokenizer = Tokenizer.load(model_folder("metaspace"))
    strings = ["é", "\u0800", "aé", " é"]
    automaton = build_stop_automaton(tokenizer, strings)
    spelled = ["<0xC3>", "<0xA9>", "<0xE0>", "<0xA0>", "<0x80>", "<0x20>", "a"]
    some = [tokenizer.backend.token_to_id(token) for token in spelled]
    found = 0
    stack: list[list[int]] = [[]]
    while stack:
        ids = stack.pop()
        if ids:
            hit = first_hit(automaton, ids)
            assert hit == by_text(tokenizer, ids, strings), [tokenizer.backend.id_to_token(i) for i in ids]
            found += hit is not None
            if hit is not None:
                continue
        stack += [[*ids, token] for token in some] if len(ids) < 3 else []
    assert found == 4  # é alone, behind a letter and behind a space; U+0800


def test_bytes_behind_the_hit_may_spoil_the_run_for_the_text_but_not_for_the_response(model_folder):
    tokenizer = Tokenizer.load(model_folder("metaspace"))
    spell = [tokenizer.backend.token_to_id(f"<0x{byte:02X}>") for byte in "🦊".encode() + b"\xff"]
    automaton = build_stop_automaton(tokenizer, ["🦊"])
    assert first_hit(automaton, spell) == (4, "🦊") == by_text(tokenizer, spell[:4], ["🦊"])
    assert by_text(tokenizer, spell, ["🦊"]) is None
    assert first_hit(automaton, spell[4:] + spell) is None  # spoiled before: neither sees it
    assert by_text(tokenizer, spell[4:] + spell[:4], ["🦊"]) is None


def test_a_hit_is_never_left_and_names_the_string(model_folder):
    automaton = build_stop_automaton(Tokenizer.load(model_folder("characters")), ["ab", "b", "xab"])
    for state in range(automaton.hits_from, len(automaton.table)):
        assert (automaton.table[state] == state).all()
    assert [automaton.string_at(automaton.hits_from + i) for i in range(3)] == ["ab", "b", "xab"]
    assert automaton.string_at(0) is None
    assert automaton.table.dtype == np.int32 and automaton.table.min() >= 0


def test_of_strings_that_end_together_the_longest_is_named():
    delta = byte_automaton(["b", "ab", "cab"])
    state = 0
    for byte in b"xcab":
        state = delta[state, byte]
    assert state == len(delta) - 1
    state = 0
    for byte in b"cb":
        state = delta[state, byte]
    assert state == len(delta) - 3


def test_ids_that_only_the_model_has_complete_nothing(model_folder):
    tokenizer = Tokenizer.load(model_folder())
    automaton = build_stop_automaton(tokenizer, ["fox"], vocab_size=tokenizer.vocab_size + 3)
    f, o, x = (tokenizer.encode_continuation(c)[0] for c in "fox")
    assert first_hit(automaton, [f, o, x]) == (3, "fox")
    assert first_hit(automaton, [f, o, tokenizer.vocab_size + 1, x]) is None
    with pytest.raises(UserError, match=f"vocab_size={tokenizer.vocab_size - 1} of the model must be"):
        build_stop_automaton(tokenizer, ["fox"], vocab_size=tokenizer.vocab_size - 1)


def test_no_strings_are_one_state(model_folder):
    automaton = build_stop_automaton(Tokenizer.load(model_folder()), [])
    assert automaton.hits_from == 1 and not automaton.table.any()


@pytest.mark.parametrize("strings", [[""], ["a", "\ufffd"]], ids=repr)
def test_strings_that_bytes_cannot_tell_are_refused(model_folder, strings):
    with pytest.raises(UserError, match="must be a text that is not empty and holds no U"):
        build_stop_automaton(Tokenizer.load(model_folder()), strings)


def test_a_run_that_is_taken_for_whole_is_noticed(model_folder, monkeypatch):
    """The same comparison with an automaton that forgets that a run of bytes may be broken."""
    tokenizer = Tokenizer.load(model_folder("metaspace"))
    monkeypatch.setattr(stop_automaton, "_whole", lambda begun: True)
    automaton = build_stop_automaton(tokenizer, ["🦊"])
    spell = [tokenizer.backend.token_to_id(f"<0x{byte:02X}>") for byte in b"\xff" + "🦊".encode()]
    assert first_hit(automaton, spell) != as_generated(tokenizer, spell, ["🦊"])
