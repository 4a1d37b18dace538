"""One cell of the comparison: a policy, a batch size, a way of sampling.

k is chosen on some turns and its speed measured on others: the best of several noisy figures would flatter itself. A
turn is whole generate calls one after another; settings take turns with the same prompts and keys.

    decode seconds of a turn = its seconds - median seconds of calls that stop after their first token
    speed   = tokens after the first of each request / decode seconds
    speedup = median over turns of (speed with k drafts / speed of plain decoding), 1 where plain decoding is chosen

A batch is done when its slowest request is. Rounds of a call are those of the request that needs most.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from draftco_jax.bench_decode.pairs import response_tokens
from draftco_jax.bench_decode.peer import Peer, Texts
from draftco_jax.decoding.engine import Engine, Request
from draftco_jax.decoding.stats import speculation_stats
from draftco_jax.numerics.sampling import SamplingConfig
from draftco_jax.profiling import compare, median_ratio
from draftco_jax.types import Rollouts

SAMPLINGS = {"greedy": SamplingConfig(temperature=0.0), "temperature_1": SamplingConfig()}
PLAIN = 0
_MARGIN = 1.05
"""What a drafted length must win by to be chosen: less is noise, and plain decoding is never slower than itself."""


@runtime_checkable
class Contestant(Protocol):
    """A policy with its draft, and the requests that they are measured on."""

    @property
    def name(self) -> str: ...  # noqa: D102

    @property
    def shape(self) -> Any:
        """Sizes and ids of whole responses (`EngineShape`)."""
        ...

    @property
    def published(self) -> Any:
        """Weights that engines take (`Published`)."""
        ...

    def engine(self, sampling: SamplingConfig, max_new_tokens: int | None = None) -> Engine:
        """Of whole responses, or of `max_new_tokens`; the same one each time."""
        ...

    def turns(self, batch: int, first: int, count: int, key: jax.Array) -> list[list[Request]]:
        """Requests of each call of `count` turns from turn `first` on."""
        ...


@runtime_checkable
class CellSettings(Protocol):
    """How a cell is measured."""

    @property
    def draft_lengths(self) -> tuple[int, ...]: ...  # noqa: D102
    @property
    def choosing_turns(self) -> int: ...  # noqa: D102
    @property
    def repetitions(self) -> int: ...  # noqa: D102
    @property
    def seed(self) -> int: ...  # noqa: D102


class Player:
    """One setting: called again and again, it plays turn after turn and keeps what came of it."""

    def __init__(self, play: Callable[[Any], Any], turns: Sequence[Sequence[Any]]) -> None:
        self._play, self._turns = play, turns
        self.results: list[list[Any]] = []

    def __call__(self) -> list[Any]:
        """The next turn; the first one is played twice, since it compiles."""
        turn = self._turns[max(len(self.results) - 1, 0)]
        self.results.append([self._play(request) for request in turn])
        return self.results[-1]

    @property
    def timed(self) -> list[list[Any]]:
        """Results of all turns but the one that compiled."""
        return [[jax.device_get(r) if isinstance(r, Rollouts) else r for r in turn] for turn in self.results[1:]]


def engine_player(engine: Engine, pair: Contestant, length: int, turns: Sequence[Sequence[Request]]) -> Player:
    """Plays with `length` drafts a round."""
    weights = pair.published
    draft = weights.draft if length else None
    return Player(lambda request: engine.generate(weights.policy, draft, request, length), turns)


def measure_cell(cfg: CellSettings, pair: Contestant, sampling: str, batch: int, peer: Peer | None) -> dict[str, Any]:
    """Everything about it, as plain values."""
    engine, key = pair.engine(SAMPLINGS[sampling]), jax.random.key(cfg.seed)
    choices = _try_lengths(engine, pair, cfg, pair.turns(batch, 0, cfg.choosing_turns, key))
    best = max(choices, key=lambda k: choices[k]["over_plain"])
    chosen = best if choices[best]["over_plain"] > _MARGIN else PLAIN
    turns = pair.turns(batch, cfg.choosing_turns, cfg.repetitions, key)
    players = _players(engine, pair, chosen, turns)
    if peer is not None and sampling == "greedy":
        players |= _peer_players(peer, pair, turns, batch)
    seconds = compare(players, cfg.repetitions)
    found = {name: player.timed for name, player in players.items()}
    row: dict[str, Any] = {"policy": pair.name, "batch": batch, "sampling": sampling, "draft_length": chosen}
    row |= {"choices": {str(k): choices[k] for k in choices}, "accepted_length": None, "speedup": 1.0}
    row |= {"speedup_with_prefill": 1.0, "greedy_texts_as_plain": None, "plain": _speed(found, seconds, "plain")}
    if chosen:
        row["speculative"] = _speed(found, seconds, "speculative")
        row["accepted_length"] = _pooled_length(found["speculative"])
        row["speedup"] = median_ratio(_rates(found, seconds, "speculative"), _rates(found, seconds, "plain"))
        row["speedup_with_prefill"] = median_ratio(
            _whole_rates(found, seconds, "speculative"), _whole_rates(found, seconds, "plain")
        )
        if sampling == "greedy":
            row["greedy_texts_as_plain"] = _equal_share(texts(found["speculative"]), texts(found["plain"]))
    return row | _beside_peer(found, seconds, "speculative" if chosen else "plain")


def _try_lengths(
    engine: Engine, pair: Contestant, cfg: CellSettings, turns: Sequence[Sequence[Request]]
) -> dict[int, dict[str, Any]]:
    """How whole calls with each drafted length compare to plain ones, prefill included."""
    players = {str(k): engine_player(engine, pair, k, turns) for k in (PLAIN, *cfg.draft_lengths)}
    seconds = compare(players, len(turns))
    found = {name: player.timed for name, player in players.items()}
    return {
        k: {
            "over_plain": median_ratio(_whole_rates(found, seconds, str(k)), _whole_rates(found, seconds, str(PLAIN))),
            "accepted_length": _pooled_length(found[str(k)]),
        }
        for k in cfg.draft_lengths
    }


def _players(engine: Engine, pair: Contestant, chosen: int, turns: Sequence[Sequence[Request]]) -> dict[str, Player]:
    """Plain decoding and the chosen length, each with calls that stop after the first token."""
    prefill = pair.engine(SamplingConfig(), 1)  # one for both ways of sampling: a draw costs nothing beside a prompt
    players = {"plain": engine_player(engine, pair, PLAIN, turns)}
    players["prefill_plain"] = engine_player(prefill, pair, PLAIN, turns)
    if chosen:
        players["speculative"] = engine_player(engine, pair, chosen, turns)
        players["prefill_speculative"] = engine_player(prefill, pair, chosen, turns)
    return players


def _peer_players(peer: Peer, pair: Contestant, turns: Sequence[Sequence[Request]], batch: int) -> dict[str, Player]:
    shape = pair.shape
    asked = [[_prompt_rows(request) for request in turn] for turn in turns]

    def play(assisted: bool) -> Callable[[list[list[int]]], Texts]:
        return lambda prompts: peer.generate(
            prompts, new_tokens=shape.max_new_tokens, stops=shape.stop_ids, pad=shape.pad_id, assisted=assisted
        )

    players = {"peer_plain": Player(play(False), asked)}
    if batch == 1:  # it assists one request at a time
        players["peer_assisted"] = Player(play(True), asked)
    return players


def _prompt_rows(request: Request) -> list[list[int]]:
    return response_tokens(request.prompts, np.zeros_like(request.prompt_lengths), request.prompt_lengths)


def texts(turns: Sequence[Sequence[Any]]) -> list[list[int]]:
    """Every response of every call, as token ids."""
    written: list[list[int]] = []
    for result in (result for turn in turns for result in turn):
        if isinstance(result, Rollouts):
            written += response_tokens(result.tokens, result.prompt_lengths, result.lengths)
        else:
            written += result.responses
    return written


def _tokens(turn: Sequence[Any]) -> int:
    return sum(len(text) for text in texts([turn]))


def _whole_rates(found: dict[str, list], seconds: dict[str, list[float]], name: str) -> list[float]:
    """Tokens a second of each turn, prefill included."""
    return [_tokens(turn) / s for turn, s in zip(found[name], seconds[name], strict=True)]


def _decode_seconds(seconds: dict[str, list[float]], name: str) -> list[float]:
    # A turn of prefills beside a stall would leave a turn of decoding too little: the median has no stalls.
    prefill = statistics.median(seconds[f"prefill_{name}"])
    return [max(s - prefill, 0.1 * s) for s in seconds[name]]


def _rates(found: dict[str, list], seconds: dict[str, list[float]], name: str) -> list[float]:
    """Tokens a second of each turn without prefill and the token that comes of it."""
    return [
        max(_tokens(turn) - len(texts([turn])), 1) / s
        for turn, s in zip(found[name], _decode_seconds(seconds, name), strict=True)
    ]


def _speed(found: dict[str, list], seconds: dict[str, list[float]], name: str) -> dict[str, float]:
    calls = len(found[name][0])
    steps = [sum(steps_of(rollouts) for rollouts in turn) for turn in found[name]]
    each = [s / max(n, 1) for s, n in zip(_decode_seconds(seconds, name), steps, strict=True)]
    return {
        "tokens_per_second": statistics.median(_rates(found, seconds, name)),
        "tokens_per_second_with_prefill": statistics.median(_whole_rates(found, seconds, name)),
        "step_milliseconds": 1e3 * statistics.median(each),
        "prefill_milliseconds": 1e3 * statistics.median(seconds[f"prefill_{name}"]) / calls,
    }


def steps_of(rollouts: Rollouts) -> int:
    """Rounds of the longest request; in plain decoding its tokens after the first."""
    rounds = int(np.max(rollouts.rounds))
    return rounds or int(np.max(np.asarray(rollouts.lengths) - np.asarray(rollouts.prompt_lengths))) - 1


def _pooled_length(turns: Sequence[Sequence[Rollouts]]) -> float | None:
    stats = [speculation_stats(rollouts) for turn in turns for rollouts in turn]
    rounds = sum(s.rounds for s in stats)
    return sum(s.committed for s in stats) / rounds if rounds else None


def _equal_share(some: list[list[int]], others: list[list[int]]) -> float:
    return sum(a == b for a, b in zip(some, others, strict=True)) / len(others)


def _beside_peer(found: dict[str, list], seconds: dict[str, list[float]], ours: str) -> dict[str, Any]:
    """Whole calls of both, against the faster of the peer's ways in each turn."""
    names = [name for name in found if name.startswith("peer_")]
    if not names:
        return {"over_transformers": None, "transformers": None}
    rates = {name: _whole_rates(found, seconds, name) for name in names}
    faster = [max(turn) for turn in zip(*rates.values(), strict=True)]
    return {
        "over_transformers": median_ratio(_whole_rates(found, seconds, ours), faster),
        "transformers": {
            name.removeprefix("peer_"): {
                "tokens_per_second_with_prefill": statistics.median(rates[name]),
                "texts_as_ours": _equal_share(texts(found[name]), texts(found["plain"])),
            }
            for name in names
        },
    }
