r"""How many drafts a round proposes: rules that choose one of a few draft lengths for the whole batch, causally.

A rule has a state, which begins as `init` says, `choose`s from what is known before a round, and `observe`s what came
of it. All of it is arrays in, arrays out, so that it runs inside a compiled loop as well as on the host; the choice is
an index into the static `lengths`, of which 0 is plain decoding.

    FixedLength   the same length always
    CostModel     most expected tokens per second, from acceptance so far and measured costs (`cost_table`)
    Budget        the drafts that are verified for next to nothing, shared by the rows in flight (Fast-GRPO, 2509.21792)
    Bandit        what has paid best at such a batch size, and at times another one (TLT, 2511.16665)

Why the output law stays the policy's: a length is chosen before anything of the round is drawn, from finished rounds.
Given these the drafts are fresh, and verification is lossless whatever their number. Past rounds may be those of other
requests; texts of a batch then depend on each other by way of lengths, their law does not. How many drafts a round
accepted hangs on random numbers of committed positions alone under the token rule, so positions that are drafted again
may meet theirs again; under the block rule rounds have their own anyway.

With acceptance rates a_1 .. a_K by position (of draft i where those before it were accepted) a round of k commits

    E(k) = 1 + sum_{i <= k} prod_{j <= i} a_j     tokens in expectation

Letters: B requests, K the longest draft length, n lengths to choose from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int, Int32


class Situation(NamedTuple):
    """What a rule may look at beside its own state."""

    active: jax.Array  # i32[] requests in flight
    seconds: jax.Array  # f32[n] of a round of each length with so many in flight, by the cost table
    key: jax.Array  # key[] for a rule that explores; used up


class Outcome(NamedTuple):
    """What came of a round."""

    choice: jax.Array  # i32[] index of the length
    active: jax.Array  # i32[] requests in flight, as the choice was told
    live: jax.Array  # bool[B] requests that took part
    proposed: jax.Array  # i32[B] drafts verified
    accepted: jax.Array  # i32[B] drafts accepted
    seconds: jax.Array  # f32[] of the round BY THE COST TABLE; a clock here would decide tokens


@runtime_checkable
class Rule(Protocol):
    """What all rules are: frozen settings, and three functions of arrays that the loop calls each round."""

    needs_costs: ClassVar[bool]
    """Whether it says nothing without a cost table."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Draft lengths to choose from, rising."""
        ...

    def init(self) -> Any:
        """Its state before any round."""
        ...

    def choose(self, state: Any, situation: Situation) -> Int32[Array, ""]:
        """Index of the length of the next round."""
        ...

    def observe(self, state: Any, outcome: Outcome) -> Any:
        """Its state after a round."""
        ...


class Acceptance(NamedTuple):
    """Pooled counts by position."""

    reached: jax.Array  # f32[K] drafts verified of which those before were accepted
    accepted: jax.Array  # f32[K]


def _require_lengths(lengths: tuple[int, ...]) -> None:
    if not lengths or lengths[0] < 0 or list(lengths) != sorted(set(lengths)):
        raise ValueError(f"lengths={list(lengths)} must rise from 0 or more; name each draft length once")


@dataclass(frozen=True, kw_only=True)
class AcceptanceEstimate:
    """Acceptance rates by position, from counts that fade and a prior that stands for as many drafts as it weighs."""

    prior: float = 0.7
    """Rate before anything is known."""
    weight: float = 20.0
    """Drafts at each position that the prior counts as."""
    keep: float = 0.99
    """What a round leaves of the counts before it; 1 forgets nothing."""

    def __post_init__(self) -> None:
        """Refuse what estimates no rate."""
        if not 0.0 <= self.prior <= 1.0:
            raise ValueError(f"prior={self.prior} must be in [0, 1]; it is a rate of acceptance")
        if not self.weight > 0.0:
            raise ValueError(f"weight={self.weight} must be > 0; a small one soon gives way to what is seen")
        if not 0.0 < self.keep <= 1.0:
            raise ValueError(f"keep={self.keep} must be in (0, 1]; use 1 to forget nothing")

    def init(self, longest: int) -> Acceptance:
        """No rounds yet."""
        return Acceptance(jnp.zeros(longest, jnp.float32), jnp.zeros(longest, jnp.float32))

    def rates(self, state: Acceptance) -> Float32[Array, " K"]:
        """a_1 .. a_K."""
        return (state.accepted + self.weight * self.prior) / (state.reached + self.weight)

    def observe(self, state: Acceptance, outcome: Outcome) -> Acceptance:
        """Count a round."""
        place = jnp.arange(state.reached.shape[0])[None, :]
        live, accepted = outcome.live[:, None], outcome.accepted[:, None]
        reached = live & (place < outcome.proposed[:, None]) & (place <= accepted)
        passed = reached & (place < accepted)
        counts = (jnp.sum(mask, axis=0, dtype=jnp.float32) for mask in (reached, passed))
        reached, passed = counts
        return Acceptance(self.keep * state.reached + reached, self.keep * state.accepted + passed)


def expected_tokens(rates: Float32[Array, " K"]) -> Float32[Array, "K+1"]:
    """E(0) .. E(K)."""
    return 1.0 + jnp.concatenate([jnp.zeros(1, jnp.float32), jnp.cumsum(jnp.cumprod(rates))])


@dataclass(frozen=True, kw_only=True)
class FixedLength:
    """The same length always."""

    lengths: tuple[int, ...]
    length: int
    needs_costs: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Refuse a length that is not to be had."""
        _require_lengths(self.lengths)
        if self.length not in self.lengths:
            raise ValueError(
                f"length={self.length} must be one of lengths={list(self.lengths)}; add it or choose another"
            )

    def init(self) -> None:
        """Nothing to know."""

    def choose(self, state: None, situation: Situation) -> Int32[Array, ""]:
        """The index of the length."""
        return jnp.asarray(self.lengths.index(self.length), jnp.int32)

    def observe(self, state: None, outcome: Outcome) -> None:
        """Nothing to learn."""


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """The length of most expected tokens per second, E(k) / seconds(k); of equals the shortest.

    A length other than the shortest one is only chosen where it promises `gain` times what that one does (2606.18967
    takes 1.05): estimates err, and a program that is not needed costs a switch. With 0 among the lengths this switches
    speculation off where it loses; what is known of the draft then fades towards the prior (`keep`), so that it is
    tried again in time.
    """

    lengths: tuple[int, ...]
    estimate: AcceptanceEstimate = AcceptanceEstimate()
    gain: float = 1.05
    needs_costs: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse what names no choice."""
        _require_lengths(self.lengths)
        if not self.gain >= 1.0:
            raise ValueError(f"gain={self.gain} must be >= 1; use 1 to take any promise")

    def init(self) -> Acceptance:
        """No rounds yet."""
        return self.estimate.init(self.lengths[-1])

    def choose(self, state: Acceptance, situation: Situation) -> Int32[Array, ""]:
        """The index of the best length."""
        speed = expected_tokens(self.estimate.rates(state))[jnp.asarray(self.lengths)] / situation.seconds
        best = jnp.argmax(speed).astype(jnp.int32)  # the first of equals
        return jnp.where(speed[best] >= self.gain * speed[0], best, 0)

    def observe(self, state: Acceptance, outcome: Outcome) -> Acceptance:
        """Count a round."""
        return self.estimate.observe(state, outcome)


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The longest length that is at most floor(peak / active): fewer rows draft further."""

    lengths: tuple[int, ...]
    peak: int
    """Drafts in flight that cost about as much as none: where a forward turns from memory-bound to compute-bound."""
    needs_costs: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Refuse a budget for nothing."""
        _require_lengths(self.lengths)
        if self.peak < 1:
            raise ValueError(f"peak={self.peak} must be >= 1; use FixedLength to draft nothing")

    def init(self) -> None:
        """Nothing to know."""

    def choose(self, state: None, situation: Situation) -> Int32[Array, ""]:
        """The index of the length; the shortest one where none fits."""
        each = jnp.asarray(self.peak, jnp.int32) // jnp.maximum(situation.active.astype(jnp.int32), 1)
        fits = jnp.sum(jnp.asarray(self.lengths, jnp.int32) <= each, dtype=jnp.int32)
        return jnp.maximum(fits - 1, 0)

    def observe(self, state: None, outcome: Outcome) -> None:
        """Nothing to learn."""


class BanditState(NamedTuple):
    """Rewards seen."""

    rewards: jax.Array  # f32[buckets, n, window], NaN where there was none yet
    tries: jax.Array  # i32[buckets, n]


@dataclass(frozen=True, kw_only=True)
class Bandit:
    """In each bucket of batch sizes the length of the largest median reward, and with chance epsilon any length.

    A reward is committed tokens per second, by the cost table. Lengths without a try come first, shortest first. What
    counts is the median of the latest rewards, not the mean of all: the worth of a length drifts with the policy, and
    one round says little.
    """

    lengths: tuple[int, ...]
    thresholds: tuple[int, ...] = (1, 2, 5, 21)
    """Rows in flight at which buckets begin, the first at 1."""
    epsilon: float = 0.1
    window: int = 16
    needs_costs: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse what learns nothing."""
        _require_lengths(self.lengths)
        if not self.thresholds or self.thresholds[0] != 1 or list(self.thresholds) != sorted(set(self.thresholds)):
            raise ValueError(f"thresholds={list(self.thresholds)} must rise from 1; the first bucket begins there")
        if not 0.0 <= self.epsilon <= 1.0:
            raise ValueError(f"epsilon={self.epsilon} must be in [0, 1]; it is a chance")
        if self.window < 1:
            raise ValueError(f"window={self.window} must be >= 1; it is a number of rewards")

    def init(self) -> BanditState:
        """No rounds yet."""
        shape = (len(self.thresholds), len(self.lengths))
        return BanditState(jnp.full((*shape, self.window), jnp.nan, jnp.float32), jnp.zeros(shape, jnp.int32))

    def choose(self, state: BanditState, situation: Situation) -> Int32[Array, ""]:
        """The index of a length."""
        bucket = self._bucket(situation.active)
        rewards = state.rewards[bucket]
        known = ~jnp.isnan(rewards)
        # Sorting puts NaN last, so the middle of the known ones is counted from the front.
        ordered, count = jnp.sort(rewards, axis=-1), jnp.sum(known, axis=-1, dtype=jnp.int32)
        upper = jnp.take_along_axis(ordered, (count // 2)[:, None], axis=-1, mode="clip")[:, 0]
        lower = jnp.take_along_axis(ordered, (jnp.maximum(count - 1, 0) // 2)[:, None], axis=-1)[:, 0]
        worth = jnp.where(count > 0, 0.5 * (lower + upper), jnp.inf)
        explore, which = jax.random.split(situation.key)
        other = jax.random.randint(which, (), 0, len(self.lengths), jnp.int32)
        return jnp.where(jax.random.uniform(explore) < self.epsilon, other, jnp.argmax(worth).astype(jnp.int32))

    def observe(self, state: BanditState, outcome: Outcome) -> BanditState:
        """Keep the round's reward in place of the oldest; a round of no requests has none."""
        tokens = jnp.sum(jnp.where(outcome.live, outcome.accepted + 1, 0), dtype=jnp.float32)
        bucket, arm = self._bucket(outcome.active), outcome.choice
        slot = state.tries[bucket, arm] % self.window
        seen = BanditState(
            state.rewards.at[bucket, arm, slot].set(tokens / outcome.seconds), state.tries.at[bucket, arm].add(1)
        )
        return jax.tree.map(lambda new, old: jnp.where(jnp.any(outcome.live), new, old), seen, state)

    def _bucket(self, active: Int[Array, ""]) -> Int32[Array, ""]:
        return jnp.sum(jnp.asarray(self.thresholds[1:], jnp.int32) <= active, dtype=jnp.int32)
