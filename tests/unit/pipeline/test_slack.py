"""Slack of the tap channel: closed forms, worked figures, and what the draft adds."""

from __future__ import annotations

import numpy as np
import pytest

from draftco_jax.pipeline.schedule import make_schedule
from draftco_jax.pipeline.slack import Costs, draft_critical_path, tap_wait, tap_wait_share, timeline

FEATURES = {0: 1, 1: 2, 2: 1}
FEATURE_TIMES = [0.25, 1.0, 1.5, 2.0, 3.0]


def slack(form, costs, stages=4, microbatches=8, chunks=1):
    """[K M]"""
    line = timeline(form, stages=stages, microbatches=microbatches, chunks=chunks, costs=costs)
    return line.slack[..., 0]


def waits(form, costs=None, **changed):
    arguments = {
        "stages": 4,
        "microbatches": 8,
        "costs": costs or Costs(draft=0.5),
        "features": FEATURES,
        "feature_times": FEATURE_TIMES,
    }
    return tap_wait(form, **(arguments | changed))


@pytest.mark.parametrize(
    ("form", "rows"),
    [
        ("gpipe", [[3, 3, 3, 3, 3, 3, 3, 3], [2, 2, 2, 2, 2, 2, 2, 2], [1, 1, 1, 1, 1, 1, 1, 1]]),
        ("1f1b", [[3, 5, 7, 9, 3, 3, 3, 3], [2, 4, 6, 2, 2, 2, 2, 2], [1, 3, 1, 1, 1, 1, 1, 1]]),
        ("lockstep", [[3, 5, 7, 9, 9, 9, 9, 9], [2, 4, 6, 6, 6, 6, 6, 6], [1, 3, 3, 3, 3, 3, 3, 3]]),
    ],
)
def test_worked_table(form, rows):
    """Four stages, eight microbatches, forward 1, backward 2; 33 of it altogether."""
    assert slack(form, Costs())[:3].tolist() == rows
    assert timeline(form, stages=4, microbatches=8, costs=Costs()).makespan == 33


def index(stages, microbatches):
    return np.arange(stages)[:, None], np.arange(microbatches)[None]


@pytest.mark.parametrize("draft", [0.0, 0.5, 1.5])
@pytest.mark.parametrize("hop", [0.0, 0.1])
def test_closed_form_of_gpipe(draft, hop):
    s, m = index(3, 8)  # the last stage's own features are there at once
    expected = (3 - s) * (1.0 + hop) + m * draft
    np.testing.assert_allclose(slack("gpipe", Costs(draft=draft, hop=hop))[:3], expected, atol=1e-12)


@pytest.mark.parametrize(("draft", "hop"), [(0.0, 0.0), (0.5, 0.0), (1.5, 0.0), (0.5, 0.1)])
@pytest.mark.parametrize(("stages", "microbatches"), [(4, 8), (2, 5), (6, 16)])
def test_closed_form_of_1f1b(draft, hop, stages, microbatches):
    s, m = index(stages, microbatches)
    left = stages - 1 - s
    warm_up = left * (1.0 + hop) + m * (2.0 + draft)
    expected = np.where(m <= left, warm_up, left * max(1.0 + hop, 1.0 + draft - hop))
    found = slack("1f1b", Costs(draft=draft, hop=hop), stages, microbatches)
    np.testing.assert_allclose(found, expected, atol=1e-9)


@pytest.mark.parametrize(("draft", "hop"), [(0.0, 0.1), (0.05, 0.1)])
def test_with_hops_and_an_idle_last_stage_the_warm_up_of_1f1b_has_at_least_that_slack(draft, hop):
    s, m = index(4, 8)
    found = slack("1f1b", Costs(draft=draft, hop=hop))
    bound = (3 - s) * (1.0 + hop) + m * (2.0 + draft)
    assert (found - bound >= -1e-9)[m <= 3 - s].all()


@pytest.mark.parametrize("draft", [0.0, 0.5])
@pytest.mark.parametrize(("stages", "microbatches"), [(4, 8), (1, 3), (3, 2), (6, 16)])
def test_closed_form_in_step(draft, stages, microbatches):
    s, m = index(stages, microbatches)
    left = stages - 1 - s
    expected = left * 1.0 + (2.0 + draft) * np.minimum(left, m)
    np.testing.assert_allclose(slack("lockstep", Costs(draft=draft), stages, microbatches), expected, atol=1e-12)


@pytest.mark.parametrize(("stages", "microbatches", "chunks"), [(4, 8, 2), (4, 16, 3), (8, 32, 2)])
def test_closed_form_in_step_with_chunks(stages, microbatches, chunks):
    costs = Costs(draft=0.5)
    last = stages * chunks - 1
    k, m = np.arange(last + 1)[:, None], np.arange(microbatches)[None]
    made = k + m // stages * stages * chunks + m % stages  # tick of the forward
    backwards, drafts = np.zeros(made.shape), np.zeros(made.shape)
    for later in range(last):
        tick = made + later
        counts = (later < last - k) & (tick >= last)
        backwards += counts
        drafts += counts & ((tick - last) % (stages * chunks) < stages)
    expected = (last - k) / chunks + backwards * 2.0 / chunks + drafts * costs.draft
    np.testing.assert_allclose(slack("lockstep", costs, stages, microbatches, chunks), expected, atol=1e-9)
    made_of = timeline("lockstep", stages=stages, microbatches=microbatches, chunks=chunks, costs=costs)
    whole = (microbatches * chunks + stages - 1) * 3.0 / chunks + microbatches * costs.draft
    assert made_of.makespan == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize(
    ("form", "exposed"),
    [
        ("gpipe", [0, 0, 1.5, 5, 18]),
        ("1f1b", [0, 0, 1, 7.5, 22]),
        ("lockstep", [0, 0, 1, 2, 5.5]),
        ("lockstep_hold_window", [0.25, 1, 2, 6.5, 22.5]),
    ],
)
def test_worked_waits(form, exposed):
    found = waits(form)
    np.testing.assert_allclose(found.exposed, exposed, atol=1e-12)
    # Later slack makes up for a part: a draft that waited once finds its next taps there.
    assert (found.wait <= found.exposed + 1e-12).all()
    np.testing.assert_allclose(found.share, found.wait / (37 + found.wait), atol=1e-12)


@pytest.mark.parametrize("draft", [0.0, 0.5])
@pytest.mark.parametrize("microbatches", [4, 8, 9])
def test_closed_form_of_sends_in_their_own_tick(draft, microbatches):
    """Nothing hides a send of a tick without backwards; backward and draft hide one of a tick with them."""
    slowest = 2 * np.array(FEATURE_TIMES)
    expected = 3 * slowest + microbatches * np.maximum(slowest - (2.0 + draft), 0)
    found = waits("lockstep_direct", Costs(draft=draft), microbatches=microbatches)
    np.testing.assert_allclose(found.wait, expected, atol=1e-9)


@pytest.mark.parametrize("draft", [0.0, 0.5])
def test_closed_form_of_sends_before_their_use(draft):
    """Taps made at least a tick before have its forward too; those of the last stage but one do not."""
    tau = np.array(FEATURE_TIMES)
    longest = lambda window: np.maximum.reduce([tau - 1 - window, 2 * tau - 1 - window, tau - window, 0 * tau])  # noqa: E731
    found = waits("lockstep_hold", Costs(draft=draft))
    np.testing.assert_allclose(found.wait, 3 * longest(0.0) + 8 * longest(2.0 + draft), atol=1e-9)
    window = waits("lockstep_hold_window", Costs(draft=draft))
    # Of the eight sends one is in a tick without backwards, and without the draft of the tick before the first.
    np.testing.assert_allclose(window.wait, longest(0.0) + 7 * longest(2.0 + draft), atol=1e-9)


def test_holding_is_never_worse_and_more_bandwidth_never_either():
    direct, hold = waits("lockstep_direct"), waits("lockstep_hold")
    assert (hold.wait < direct.wait).all()
    for form in ("gpipe", "1f1b", "lockstep", "lockstep_direct", "lockstep_hold"):
        assert (np.diff(waits(form).share) >= 0).all()


def test_taps_on_the_last_stage_cost_nothing_and_latency_counts_once_a_send():
    local = waits("lockstep_direct", stages=2, chunks=2, features={1: 5})
    assert not local.wait.any()
    late = waits("gpipe", features={2: 1}, feature_times=[0.5], latency=1.0)
    same = waits("gpipe", features={2: 3}, feature_times=[0.5])
    assert late.exposed == same.exposed == 0.5
    share = tap_wait_share(
        "gpipe", stages=4, microbatches=8, costs=Costs(draft=0.5), features={2: 3}, feature_times=[0.5]
    )
    assert share == same.share


@pytest.mark.parametrize(
    ("stages", "microbatches", "ratio"), [(4, 8, 0.25), (4, 32, 0.25), (4, 7, 2 / 7), (8, 16, 0.125)]
)
def test_a_draft_on_all_stages_adds_a_stage_th(stages, microbatches, ratio):
    schedule = make_schedule("1f1b", stages=stages, microbatches=microbatches)
    spread, last = (draft_critical_path(schedule, 0.5, place) for place in ("all_stages", "last_stage"))
    assert spread.without == last.without == (microbatches + stages - 1) * 3
    assert last.added == pytest.approx(0.5 * microbatches)
    assert spread.added / last.added == pytest.approx(ratio) and ratio <= 0.3


@pytest.mark.parametrize(("tensor", "rounds"), [(2, 2), (3, 1), (4, 1)])
def test_a_draft_dealt_out_over_tensor_ranks_adds_one_a_round(tensor, rounds):
    schedule = make_schedule("1f1b", stages=4, microbatches=12)
    assert draft_critical_path(schedule, 0.5, "all_stages", tensor_ranks=tensor).added == pytest.approx(0.5 * rounds)
    assert draft_critical_path(schedule, 0.5, "last_stage", tensor_ranks=tensor).added == pytest.approx(6.0)


@pytest.mark.parametrize(("name", "chunks"), [("gpipe", 1), ("1f1b", 3), ("gpipe", 2)])
def test_the_draft_costs_the_same_in_other_schedules(name, chunks):
    schedule = make_schedule(name, stages=4, chunks=chunks, microbatches=8)
    costs = Costs(forward=1.0, backward=3.0)
    spread, last = (draft_critical_path(schedule, 0.5, p, costs=costs) for p in ("all_stages", "last_stage"))
    assert spread.without == pytest.approx((8 * chunks + 3) * 4 / chunks)
    assert (spread.added, last.added) == pytest.approx((1.0, 4.0))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: Costs(draft=-1.0), "draft=-1.0 must be >= 0"),
        (lambda: slack("1f1b", Costs(), chunks=2), "chunks=2 must be 1 for 1f1b; take a lockstep form"),
        (lambda: waits("gpipe", features={3: 1}), r"features\[3\] must be of a virtual stage in 0..2"),
    ],
)
def test_what_makes_no_sense_is_refused(call, said):
    with pytest.raises(ValueError, match=said):
        call()
