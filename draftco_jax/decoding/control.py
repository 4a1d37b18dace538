r"""The draft length of each round, chosen inside the compiled loop, and what speculation has gained by the cost table.

    decide   before a round: the rule (`speculation_control`) looks at finished rounds, requests in flight and costs
    settle   after it: the rule learns what came of it, the ledger adds it up

No clock is read: seconds are those of the cost table, so a run that is resumed with its table and its `Control` makes
the same choices again. The table of one program has one row, since a round of a program takes as long with few requests
in flight as with many; only its tokens are fewer.

A round of length k that committed t tokens for m requests in flight would have taken t / m plain rounds, so

    gain = sum(t / m) seconds(0) / sum seconds(k)     > 1: speculation pays

Letters: S slots, n lengths to choose from.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, Int32, Key

from draftco_jax.decoding.speculation_control import Outcome, Rule, Situation


class Control(NamedTuple):
    """What passes from round to round, and from one call to the next."""

    rule: Any  # state of the rule
    seconds: jax.Array  # f32[n] of a round, by the cost table; ones without one
    key: jax.Array  # key[] of choices by chance
    rounds: jax.Array  # i32[] chosen so far, with which the key is folded


class Ledger(NamedTuple):
    """Rounds of a call."""

    rounds: jax.Array  # i32[n] of each length
    tokens: jax.Array  # i32[n] committed in them
    plain_rounds: jax.Array  # f32[] that plain decoding would have needed for the same tokens


def start(rule: Rule, key: Key[Array, ""], seconds: Float[Array, " n"] | None = None) -> Control:
    """Before any round.

    Raises:
        ValueError: the rule weighs costs and there is no cost table, or one of other lengths.
    """
    count = len(rule.lengths)
    if seconds is None and rule.needs_costs:
        raise ValueError(f"rule={type(rule).__name__} must have a cost table; measure one, or use FixedLength")
    seconds = jnp.ones((count,)) if seconds is None else jnp.asarray(seconds)
    if seconds.shape != (count,):
        raise ValueError(
            f"seconds of shape {tuple(seconds.shape)} must be of lengths={list(rule.lengths)}; measure a cost table "
            "for them"
        )
    return Control(rule.init(), seconds.astype(jnp.float32), key, jnp.int32(0))


def open_ledger(rule: Rule) -> Ledger:
    """No rounds yet."""
    zeros = jnp.zeros((len(rule.lengths),), jnp.int32)
    return Ledger(zeros, zeros, jnp.float32(0.0))


def decide(rule: Rule, control: Control, active: Int[Array, ""]) -> Int32[Array, ""]:
    """Index of the length of the next round."""
    key = jax.random.fold_in(control.key, control.rounds)
    return rule.choose(control.rule, Situation(active, control.seconds, key))


def settle(
    rule: Rule,
    control: Control,
    ledger: Ledger,
    choice: Int32[Array, ""],
    *,
    active: Int[Array, ""],
    live: Bool[Array, " S"],
    proposed: Int[Array, " S"],
    accepted: Int[Array, " S"],
    committed: Int[Array, " S"],
) -> tuple[Control, Ledger]:
    """After a round. `active` is what `decide` was told, `live` who took part in speculation; `committed` is of all."""
    outcome = Outcome(choice, active, live, proposed, accepted, control.seconds[choice])
    control = control._replace(rule=rule.observe(control.rule, outcome), rounds=control.rounds + 1)
    tokens = jnp.sum(committed, dtype=jnp.int32)
    ledger = Ledger(
        rounds=ledger.rounds.at[choice].add(1),
        tokens=ledger.tokens.at[choice].add(tokens),
        plain_rounds=ledger.plain_rounds + tokens / jnp.maximum(active, 1),
    )
    return control, ledger


def gain(rule: Rule, control: Control, ledger: Ledger) -> Float32[Array, ""] | None:
    """By how much the call was faster than plain decoding, by the cost table; None where it has no plain round."""
    if 0 not in rule.lengths:
        return None
    spent = jnp.sum(ledger.rounds.astype(jnp.float32) * control.seconds)
    return ledger.plain_rounds * control.seconds[rule.lengths.index(0)] / jnp.maximum(spent, 1e-30)
