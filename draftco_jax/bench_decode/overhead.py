"""How much of a round is neither the policy's forward nor the draft's.

    share = 1 - (verify forward of k + 1 tokens + k draft steps + the draft's reading of them) / round

The parts are loops of their own (`round_profile`), a round is a generate call without its prefill over its rounds; all
take turns. What is left is rejection, the law of the verified tokens, bookkeeping and dispatch of the call. Draws of
the draft are in its part.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

import jax

from draftco_jax.bench_decode.cells import PLAIN, SAMPLINGS, Player, engine_player, steps_of
from draftco_jax.bench_decode.pairs import Pair
from draftco_jax.profiling import compare
from draftco_jax.round_profile import STEPS_PER_CALL, RoundParts

if TYPE_CHECKING:
    from draftco_jax.bench_decode import BenchDecodeConfig

SAMPLING = "temperature_1"


def measure_overhead(cfg: BenchDecodeConfig, pair: Pair, cells: list[dict[str, Any]]) -> dict[str, Any]:
    """At the smallest batch and temperature 1, with the drafted length chosen there, or the longest one."""
    batch = min(cfg.batches)
    chosen = next(c["draft_length"] for c in cells if (c["batch"], c["sampling"]) == (batch, SAMPLING))
    length = chosen or max(cfg.draft_lengths)
    sampling, shape, key = SAMPLINGS[SAMPLING], pair.shape, jax.random.key(cfg.seed + 1)
    turns = pair.turns(batch, 0, cfg.repetitions, key)
    whole, prefill = pair.engine(sampling), pair.engine(sampling, 1)
    players = {
        "round": engine_player(whole, pair, length, turns),
        "prefill": engine_player(prefill, pair, length, turns),
        "plain_step": engine_player(whole, pair, PLAIN, turns),
        "plain_prefill": engine_player(prefill, pair, PLAIN, turns),
    }
    parts = RoundParts(
        pair.graphs,
        pair.published,
        sampling,
        batch=batch,
        draft_length=length,
        prompt_tokens=shape.prompt_capacity,
        new_tokens=shape.max_new_tokens,
    ).programs(key)
    seconds = compare(players | parts, cfg.repetitions)
    milliseconds = {name: 1e3 * statistics.median(seconds[name]) / STEPS_PER_CALL for name in parts}
    milliseconds |= {
        "round": _each(players["round"], seconds["round"], seconds["prefill"]),
        "plain_step": _each(players["plain_step"], seconds["plain_step"], seconds["plain_prefill"]),
    }
    inside = sum(milliseconds[name] for name in ("policy_block", "draft_propose", "draft_absorb"))
    return {
        "policy": pair.name,
        "batch": batch,
        "draft_length": length,
        "milliseconds": milliseconds,
        "share": 1 - inside / milliseconds["round"],
        "plain_share": 1 - milliseconds["policy_1_token"] / milliseconds["plain_step"],
        "draft_share": (milliseconds["draft_propose"] + milliseconds["draft_absorb"]) / milliseconds["round"],
        "verify_over_step": milliseconds["policy_block"] / milliseconds["policy_1_token"],
    }


def _each(player: Player, seconds: list[float], prefill: list[float]) -> float:
    """Milliseconds of a round, or of a step of plain decoding."""
    start = statistics.median(prefill)
    each = [(s - start) / sum(steps_of(r) for r in turn) for s, turn in zip(seconds, player.timed, strict=True)]
    return 1e3 * statistics.median(each)
