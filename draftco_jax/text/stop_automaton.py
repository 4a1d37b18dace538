r"""Stop strings as a table over tokens: which state a text is in after each id, and when a string is complete.

An automaton of Aho and Corasick (CACM 18, 1975) reads the UTF-8 bytes of a text; a state is the longest beginning of a
stop string that the text ends with. A token is a walk over its bytes, so the table

    table[state, token] -> state

needs no text when it is used, and no host. A state in which a string is complete is never left. The first token that
enters one is the token that `stop_strings.find_response_end` ends a response with, and the string is the one it names:
the one whose last character comes first, of several that end there the longest.

Bytes may stand for characters because UTF-8 marks where a character begins: the bytes of a string occur in a text
exactly where its characters do, also in a text with broken parts. The replacement character U+FFFD is the exception, as
what is broken is written so; strings that hold it are refused.

Decoders with byte tokens ("<0xF0>") write a run of such tokens as text only if the whole run is UTF-8, and with one
replacement character a token otherwise. States then also hold how far the run has come. Here a response ends with the
id that completes the string; `find_response_end`, given ids that go on behind it by bytes that spoil the run, no longer
sees the string. For the response as it was generated, which ends there, the two agree.

Letters: Q states, V ids of the model.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32

from draftco_jax.errors import UserError
from draftco_jax.text.detokenizer import BYTE_TOKEN, Detokenizer, byte_level_bytes, decoder_stages
from draftco_jax.text.tokenizer import Tokenizer

# Where a text stands in a run of byte tokens: before the first token of all, outside any run, in a run whose bytes so
# far are whole characters, in one that has broken, or after a beginning of a character, for which stands the first byte
# of characters that may go on alike.
_FIRST, _OUTSIDE, _WHOLE, _BROKEN = "first", "outside", "whole", "broken"
_Run = str | bytes


@dataclass(frozen=True)
class StopAutomaton:
    """The table of one set of stop strings. State 0 is that of an empty response."""

    table: Int32[np.ndarray, "Q V"]
    strings: tuple[str, ...]
    """The last states, in this order, are those in which a string is complete."""

    @property
    def hits_from(self) -> int:
        """The first of the states in which a string is complete."""
        return self.table.shape[0] - len(self.strings)

    def string_at(self, state: int) -> str | None:
        """The stop string that is complete in a state."""
        return self.strings[state - self.hits_from] if state >= self.hits_from else None


def build_stop_automaton(tokenizer: Tokenizer, strings: Sequence[str], vocab_size: int | None = None) -> StopAutomaton:
    """The automaton of some stop strings; of none, it has the one state that a text never leaves.

    Args:
        tokenizer: what makes text of ids.
        strings: texts that end a response; repetitions count once.
        vocab_size: rows of the model's vocabulary, at least those of the tokenizer, which is the default. Ids that the
            tokenizer does not know complete no string.

    Raises `UserError` for strings that `require_stop_strings` refuses, and for decoders that `Detokenizer` refuses.
    """
    strings = tuple(dict.fromkeys(strings))
    require_stop_strings(strings)
    size = tokenizer.vocab_size if vocab_size is None else vocab_size
    tokenizer.require_fits(size)
    Detokenizer(tokenizer)  # refuses decoders whose text cannot be read token by token
    if not strings:
        return StopAutomaton(np.zeros((1, size), np.int32), ())
    delta = byte_automaton(strings)
    stages = decoder_stages(tokenizer)
    if stages == ["ByteLevel"]:
        pieces = [byte_level_bytes(tokenizer, token) if token < tokenizer.vocab_size else b"" for token in range(size)]
        table = _walk(delta, pieces)
        table[:, tokenizer.vocab_size :] = 0
        return StopAutomaton(table, strings)
    return StopAutomaton(
        _table_of_runs(delta, len(strings), _Pieces(tokenizer, size, "ByteFallback" in stages)), strings
    )


def require_stop_strings(strings: Sequence[str]) -> None:
    """Refuse, with `UserError`, strings that are empty, that hold U+FFFD, or that no UTF-8 can be."""
    for string in strings:
        if not string or "\ufffd" in string:
            raise UserError(
                f"stop string={string!r} must be a text that is not empty and holds no U+FFFD, which stands for any "
                "broken bytes; correct the list"
            )
        if any("\ud800" <= char <= "\udfff" for char in string):
            raise UserError(
                f"stop string={string!r} must be made of whole characters, not of half a surrogate pair; write the pair"
            )


def automaton_states(tokenizer: Tokenizer, strings: Sequence[str], vocab_size: int | None = None) -> int:
    """Q of `build_stop_automaton` with these arguments; the table is not made where bytes alone tell."""
    strings = tuple(dict.fromkeys(strings))
    if strings and decoder_stages(tokenizer) == ["ByteLevel"]:
        require_stop_strings(strings)
        return len(byte_automaton(strings))
    return len(build_stop_automaton(tokenizer, strings, vocab_size).table)


def byte_automaton(strings: Sequence[str]) -> Int32[np.ndarray, "N 256"]:
    """Transitions over bytes. The last ``len(strings)`` states are those of complete strings and lead to themselves."""
    children: list[dict[int, int]] = [{}]
    ends: dict[int, int] = {}
    for number, string in enumerate(strings):
        node = 0
        for byte in string.encode():
            if byte not in children[node]:
                children[node][byte] = len(children)
                children.append({})
            node = children[node][byte]
        ends[node] = number
    goto = np.zeros((len(children), 256), np.int32)
    back = [0] * len(children)  # the longest proper ending of a node's text that is a beginning of a string
    queue = collections.deque([0])
    while queue:
        node = queue.popleft()
        goto[node] = goto[back[node]] if node else 0
        if back[node] in ends:
            ends.setdefault(node, ends[back[node]])
        for byte, child in children[node].items():
            back[child] = int(goto[back[node], byte]) if node else 0
            goto[node, byte] = child
            queue.append(child)
    # Nodes at which a string ends become its state; the others keep their order.
    kept = [node for node in range(len(children)) if node not in ends]
    place = {node: number for number, node in enumerate(kept)} | {n: len(kept) + s for n, s in ends.items()}
    renumber = np.array([place[node] for node in range(len(children))], np.int32)
    complete = len(kept) + np.arange(len(strings), dtype=np.int32)
    return np.concatenate([renumber[goto[kept]], np.repeat(complete[:, None], 256, axis=1)])


def _walk(delta: Int32[np.ndarray, "N 256"], pieces: Sequence[bytes]) -> Int32[np.ndarray, "N V"]:
    """State after each piece from each state."""
    lengths = np.array([len(piece) for piece in pieces])
    starts = np.cumsum(lengths) - lengths
    flat = np.frombuffer(b"".join(pieces), np.uint8)
    states = np.repeat(np.arange(len(delta), dtype=np.int32)[:, None], len(pieces), axis=1)
    for i in range(int(lengths.max(initial=0))):
        longer = np.flatnonzero(lengths > i)
        states[:, longer] = delta[states[:, longer], flat[starts[longer] + i][None, :]]
    return states


class _Pieces:
    """What the ids of a decoder that is not ByteLevel add to a text."""

    def __init__(self, tokenizer: Tokenizer, size: int, fallback: bool) -> None:
        names = [tokenizer.backend.id_to_token(token) for token in range(tokenizer.vocab_size)]
        byte_of = {i: int(n[3:5], 16) for i, n in enumerate(names) if fallback and n and BYTE_TOKEN.fullmatch(n)}
        known = [token for token, name in enumerate(names) if name is not None]
        self.bytes = byte_of
        self.nameless = sorted(set(range(size)) - set(known))
        self.first = [b""] * size
        self.inner = [b""] * size
        before = next(
            (t for t in known if t not in byte_of and _plain(tokenizer.decode([t], skip_special=False))), None
        )
        for token in known:
            alone = tokenizer.decode([token], skip_special=False)
            self.first[token] = alone.encode()
            # Which token stands before makes no difference, only that one does (a leading space).
            pair = alone if before is None else tokenizer.decode([before, token], skip_special=False)
            said = "" if before is None else tokenizer.decode([before], skip_special=False)
            self.inner[token] = pair[len(said) :].encode()


def _plain(text: str) -> bool:
    return bool(text) and " " not in text


def _table_of_runs(delta: Int32[np.ndarray, "N 256"], hits: int, pieces: _Pieces) -> Int32[np.ndarray, "Q V"]:
    """States are pairs (state of the bytes, run of byte tokens); those that can be reached are numbered as met."""
    hit_from, size = len(delta) - hits, len(pieces.inner)
    inner, first = _walk(delta, pieces.inner), _walk(delta, pieces.first)[0]
    quiet = np.flatnonzero([not first and not inner for first, inner in zip(pieces.first, pieces.inner, strict=True)])
    number: dict[tuple[int, _Run], int] = {(0, _FIRST): 0}
    rows: list[np.ndarray] = []
    queue = collections.deque(number)

    def state(node: int, run: _Run) -> int:
        """Number of a pair; complete strings are told apart by negative numbers until all pairs are known."""
        if node >= hit_from:
            return node - len(delta)
        if (node, run) not in number:
            number[node, run] = len(number)
            queue.append((node, run))
        return number[node, run]

    while queue:
        node, run = queue.popleft()
        # A run that does not end with a whole character is written as replacement characters.
        spoiled = isinstance(run, bytes) or run == _BROKEN
        nodes = first if run == _FIRST else inner[0 if spoiled else node]
        found, places = np.unique(nodes, return_inverse=True)
        row = np.array([state(int(n), _OUTSIDE) for n in found], np.int32)[places.reshape(-1)]
        if run == _FIRST:
            row[quiet] = 0  # a text that is still empty
        for token, byte in pieces.bytes.items():
            row[token] = state(*_after_byte(delta, node, run, byte, stripped=not pieces.first[token]))
        # What has no text is written as U+FFFD, and a text begins anew behind it.
        row[pieces.nameless] = 0
        rows.append(row)
    complete = len(number) + np.arange(hits)
    table = np.concatenate([np.stack(rows), np.repeat(complete[:, None], size, axis=1)])
    return np.where(table < 0, len(table) + table, table).astype(np.int32)


def _after_byte(
    delta: Int32[np.ndarray, "N 256"], node: int, run: _Run, byte: int, *, stripped: bool
) -> tuple[int, _Run]:
    """The pair after a byte token. `stripped`: the byte would add nothing to an empty text (a leading space)."""
    if run == _BROKEN:
        return 0, _BROKEN
    begun = (run if isinstance(run, bytes) else b"") + bytes([byte])
    whole = _whole(begun)
    if whole is None:
        return 0, _BROKEN
    after = 0 if run == _FIRST and stripped else int(delta[node, byte])
    return after, _WHOLE if whole else _alike(begun)


def _alike(begun: bytes) -> bytes:
    """A first byte after which a character may go on as after these bytes."""
    lead = begun[0]
    if len(begun) == 2:
        return b"\xc2" if lead < 0xF0 else b"\xe1"
    if lead in (0xE0, 0xED, 0xF0, 0xF4):  # what may follow these is less than what may follow their neighbours
        return begun
    return b"\xc2" if lead < 0xE0 else b"\xe1" if lead < 0xF0 else b"\xf1"


def _whole(begun: bytes) -> bool | None:
    """Whether these bytes are a character; None if they are not even the beginning of one."""
    try:
        begun.decode()
        return True
    except UnicodeDecodeError as error:
        return False if error.reason == "unexpected end of data" else None
