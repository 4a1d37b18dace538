"""What taps and the draft cost an update: waiting for taps against bandwidth, and the draft on the critical path.

A tap of source s arrives tau later; the draft of microbatch m, on the last stage, starts Delta after the forward that
made it. What a tap delays the draft by, alone, is the positive part of tau - Delta (2609.07108, Eq. 6), and the largest
of the sources counts. `exposed` is the sum over microbatches, from a timeline without taps; `wait` is how much longer
the update takes when the draft really waits, which later slack makes up for in part.

Delta of tap stage s < S - 1 for f, b and d of a stage's forward, backward and the draft, V = 1 and no hops:

    gpipe      (S - 1 - s) f + m d
    1f1b       (S - 1 - s) f + m (b + d) for m <= S - 1 - s, then (S - 1 - s) (f + d)
    lockstep   (S - 1 - s) f + (b + d) min(S - 1 - s, m)

The slack that a compiled program can use is smaller, since a send must be done in the iteration that starts it:
`lockstep_direct` leaves b + d of a tick with a backward and nothing of one without, `lockstep_hold` f more where the
taps were made at least a tick before (`timeline.Sends`). Ingress is not shared in this model: sends of several sources
do not slow each other down.

Letters: S stages, V chunks, K virtual stages, M microbatches, n bandwidths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from jaxtyping import Float

from draftco_jax.pipeline.mailbox import Placement
from draftco_jax.pipeline.orders import textbook_orders
from draftco_jax.pipeline.schedule import Schedule, ScheduleName, make_schedule
from draftco_jax.pipeline.timeline import Sends, Timeline, Times, play_in_step, play_waiting

Form = Literal["gpipe", "1f1b", "lockstep", "lockstep_direct", "lockstep_hold", "lockstep_hold_window"]
"""gpipe and 1f1b: stages that wait only for what they need. lockstep: 1f1b in ticks, with an ideal channel or with
sends as compiled (`timeline.Sends`)."""

_SENDS: dict[str, Sends] = {
    "lockstep": "ideal",
    "lockstep_direct": "direct",
    "lockstep_hold": "hold",
    "lockstep_hold_window": "hold_window",
}


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Times of one microbatch, in any one unit."""

    forward: float = 1.0
    """Of a whole stage, all chunks."""
    backward: float = 2.0
    """Of a whole stage, what it recomputes included."""
    draft: float = 0.0
    """Forward and backward of the draft."""
    hop: float = 0.0
    """Of an activation to the next stage; in ticks it is part of the tick."""

    def __post_init__(self) -> None:
        for name in ("forward", "backward", "draft", "hop"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)} must be >= 0; 0 leaves it out")

    def times(self, microbatches: int, stages: int, chunks: int, tap: Mapping[int, Float[np.ndarray, " n"]]) -> Times:
        """The same for every microbatch; `tap` is how long the taps of a virtual stage take."""
        cases = len(next(iter(tap.values()))) if tap else 1
        full = lambda value: np.full((microbatches, stages * chunks, cases), float(value))  # noqa: E731
        taps = full(0.0)
        for k, takes in tap.items():
            taps[:, k] = takes
        return Times(
            forward=full(self.forward / chunks),
            backward=full(self.backward / chunks),
            draft=np.full((microbatches, cases), float(self.draft)),
            hop=full(self.hop),
            tap=taps,
        )


class TapWait(NamedTuple):
    """What taps cost an update at each bandwidth."""

    exposed: Float[np.ndarray, " n"]
    """Sum over microbatches of Eq. 6, from the timeline without taps; not for the forms with compiled sends, where it
    is what their ticks are longer."""
    wait: Float[np.ndarray, " n"]
    """How much longer the update takes."""
    share: Float[np.ndarray, " n"]
    """`wait` over the time of the update with it."""


def timeline(
    form: Form,
    *,
    stages: int,
    microbatches: int,
    chunks: int = 1,
    costs: Costs,
    taps: Mapping[int, Float[np.ndarray, " n"]] | None = None,
) -> Timeline:
    """When everything happens.

    Args:
        form: of the pipeline.
        stages: S.
        microbatches: M.
        chunks: V; more than one only in lockstep.
        costs: of a microbatch.
        taps: virtual stages with taps, and how long these take to the last stage, for n bandwidths.
    """
    taps = taps or {}
    times = costs.times(microbatches, stages, chunks, taps)
    if form in _SENDS:
        schedule = make_schedule("1f1b", stages=stages, chunks=chunks, microbatches=microbatches)
        return play_in_step(schedule, times, sorted(taps), _SENDS[form])
    if chunks > 1:
        raise ValueError(f"chunks={chunks} must be 1 for {form}; take a lockstep form")
    name: ScheduleName = "gpipe" if form == "gpipe" else "1f1b"
    return play_waiting(textbook_orders(name, stages=stages, microbatches=microbatches), times, sorted(taps))


def tap_wait(
    form: Form,
    *,
    stages: int,
    microbatches: int,
    chunks: int = 1,
    costs: Costs,
    features: Mapping[int, int],
    feature_times: Sequence[float],
    latency: float = 0.0,
) -> TapWait:
    """What taps cost, for each of several bandwidths.

    Args:
        form: of the pipeline.
        stages: S.
        microbatches: M.
        chunks: V.
        costs: of a microbatch, in the unit of `feature_times`.
        features: virtual stage -> features it makes; those of the last stage move nowhere.
        feature_times: bytes of a feature over bandwidth, [n].
        latency: of each send, tau = latency + features * feature time.
    """
    if form not in get_args(Form):
        raise ValueError(f"form={form} must be one of {', '.join(get_args(Form))}; take one of them")
    last = stages * chunks - 1
    if outside := sorted(k for k in features if not 0 <= k < last):
        raise ValueError(f"features[{outside[0]}] must be of a virtual stage in 0..{last - 1}; leave others out")
    each = np.asarray(feature_times, np.float64)
    taps = {k: latency + count * each for k, count in features.items()}
    free, line = (
        timeline(form, stages=stages, microbatches=microbatches, chunks=chunks, costs=costs, taps=made)
        for made in ({}, taps)
    )
    wait = line.makespan - free.makespan
    if _SENDS.get(form, "ideal") == "ideal":
        remote = [k for k in taps if k % stages != stages - 1]
        late = [np.maximum(taps[k] - free.slack[k], 0) for k in remote]
        exposed = np.maximum.reduce(late).sum(axis=0) if late else np.zeros_like(each)
    else:
        exposed = wait
    return TapWait(exposed=exposed, wait=wait, share=wait / line.makespan)


def tap_wait_share(form: Form, **arguments: Any) -> Float[np.ndarray, " n"]:
    """Share of the update spent waiting for taps at each bandwidth; arguments of `tap_wait`."""
    return tap_wait(form, **arguments).share


class DraftPath(NamedTuple):
    """Time of an update without and with its draft."""

    without: float
    with_draft: float

    @property
    def added(self) -> float:
        """What the draft adds to the critical path."""
        return self.with_draft - self.without


def draft_critical_path(
    schedule: Schedule, draft_cost: float, placement: Placement, *, costs: Costs | None = None, tensor_ranks: int = 1
) -> DraftPath:
    """What the draft adds to an update in ticks, in the unit of the costs: by default a stage's forward.

    With last_stage each microbatch costs all stages d, since they wait for the last one. With all_stages a round of S T
    microbatches costs d once, all its drafts at the same time; a last round that is not full costs as much. So
    all_stages adds ceil(M / S T) / M of what last_stage does: 1 / S T for whole rounds.

    Args:
        schedule: of the update.
        draft_cost: d, forward and backward of the draft on one microbatch.
        placement: where drafts train.
        costs: of the policy; their draft is not used.
        tensor_ranks: T, over which all_stages deals the draft out.
    """
    costs = costs or Costs()
    shape = (schedule.microbatches, schedule.stages, schedule.chunks)
    play = lambda draft: play_in_step(  # noqa: E731
        schedule, Costs(forward=costs.forward, backward=costs.backward, draft=draft).times(*shape, {})
    )
    without = float(play(0.0).makespan[0])
    if placement == "last_stage":
        return DraftPath(without, float(play(draft_cost).makespan[0]))
    passed = schedule.forward_ticks[:, -1]
    rounds = np.arange(schedule.microbatches) // (schedule.stages * tensor_ranks)
    ends = {int(passed[rounds == n].max()) for n in np.unique(rounds)}
    return DraftPath(without, without + draft_cost * len(ends))
