"""The tap channel alone, on a model of a few numbers: what arrives, by every route, is what was made, bit for bit."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from draftco_jax.context_parallel.traffic import collectives
from draftco_jax.distributed.axes import make_mesh
from draftco_jax.pipeline.host_staging import MEMORY
from draftco_jax.pipeline.layout import split_layers
from draftco_jax.pipeline.schedule import make_schedule
from draftco_jax.pipeline.staged import slots_of
from draftco_jax.pipeline.stages import Chunk, Head, StageProgram, run_pipeline
from draftco_jax.pipeline.tap_channel import TAPS_SCOPE, TapPlan
from pallas_kernels.manual_axes import cast

SHAPE = (1, 3, 4)
ROUTES = [(placement, mode) for placement in ("all_stages", "last_stage") for mode in ("direct", "hold", "post")]


def layer(weight, x):
    return x + jnp.sin(x * weight[None, None]) * 0.3


def plain(weights, starts, taps):
    """[M, F, ...] the features of every micro-batch, made one layer after the other."""

    @jax.jit
    def one(x):
        found = []
        for number, weight in enumerate(weights):
            x = layer(weight, x)
            found += [x] if number in taps else []
        return jnp.stack([*found, x])

    return np.stack([one(x) for x in starts])


def program_of(plan: TapPlan, weights, starts):
    """The compiled pipeline, and its arguments."""
    layout, count = plan.layout, len(starts)
    entries = {layout.entry(k): row for k, row in enumerate(layout.table)}
    stacked = jnp.stack([weights[jnp.array(entries[e])] for e in range(layout.virtual_stages)])

    def on_device(weights, starts):
        axes, trains = frozenset({"stage"}), ("stage", *([plan.tensor_axis] if plan.tensor_axis else []))
        starts = cast(starts, axes)
        padded = jnp.pad(starts, ((0, plan.schedule.microbatches - count), *((0, 0),) * 3))

        def chunk(weights, x, m, k, *, with_taps):
            slots = slots_of(layout, k, plan.slots[0] if with_taps else None, plan.slots[1])
            kept = jnp.zeros_like(jnp.broadcast_to(x, (slots.kept + 1, *x.shape)))
            for slot in range(len(layout.kinds)):
                x = layer(weights[slot], x)
                if with_taps:
                    kept = kept.at[jnp.minimum(slots.taps[slot], slots.kept)].set(x)
            return Chunk(x, tuple(kept[:-1]), None, None)

        def draft(features, m):
            seen = jnp.zeros_like(jnp.broadcast_to(features, (plan.schedule.microbatches, *features.shape)))
            once = jnp.zeros_like(seen[:, 0, 0, 0, 0])
            return seen.at[m].set(features), once.at[m].set(1.0)

        nothing = jnp.zeros_like(padded[0, 0, 0, 0])
        program = StageProgram(
            weights=weights,
            embedding=nothing,
            head_params=nothing,
            embed=lambda m: padded[m],
            embedding_gradient=lambda total, m, dx, here: total,
            chunk=chunk,
            head=lambda params, y, m, part: (jnp.sum(y) + params, Head(jnp.sum(y) * 0, jnp.sum(y) * 0)),
            draft=draft,
        )
        result = run_pipeline(program, plan, axis="stage", axes=axes)
        return jax.lax.psum((result.draft, result.wrong_stamps), trains), result.weights

    whole, split = PartitionSpec(), PartitionSpec("stage")
    mesh = make_mesh({"stage": layout.stages} | ({} if plan.tensor_axis is None else {"tensor": plan.tensor_ranks}))
    run = jax.shard_map(on_device, mesh=mesh, in_specs=(split, whole), out_specs=(whole, split))
    return jax.jit(run).lower(stacked, starts).compile(), (stacked, starts)


def results(plan: TapPlan, weights, starts):
    """What `arrivals` gives, and the gradient [layers, ...] of the sum of all outputs."""
    run, arguments = program_of(plan, weights, starts)
    ((seen, trained), wrong), gradient = run(*jax.device_put(arguments, run.input_shardings[0]))
    layout, in_order = plan.layout, np.empty_like(weights)
    for k, row in enumerate(layout.table):
        in_order[np.array(row)] = gradient[layout.entry(k)]
    return (np.asarray(seen)[: len(starts)], np.asarray(trained), int(wrong)), in_order


def arrivals(plan: TapPlan, weights, starts):
    """[M, F, ...] what the draft was given, how often each micro-batch was trained on, and wrong stamps."""
    return results(plan, weights, starts)[0]


@functools.cache
def model(layers, count):
    rng = np.random.default_rng(4)
    weights = jnp.asarray(rng.normal(size=(layers, SHAPE[-1])), jnp.float32)
    return weights, jnp.asarray(rng.normal(size=(count, *SHAPE)), jnp.float32)


def plan_of(stages, chunks, count, taps, layers, placement, mode, **changes):
    layout = split_layers(("layer",) * layers, stages=stages, chunks=chunks)
    schedule = make_schedule("1f1b", stages=stages, chunks=chunks, microbatches=-(-count // stages) * stages)
    return TapPlan(layout, schedule, taps, placement, mode, stamps=True, **changes)


@pytest.mark.parametrize(("placement", "mode"), ROUTES)
@pytest.mark.parametrize(("stages", "chunks", "count", "taps"), [(4, 1, 8, (1, 4, 5, 6)), (2, 2, 5, (0, 3, 7))])
def test_bug_cases_b57_b58_what_arrives_is_what_was_made_of_its_own_micro_batch(
    placement, mode, stages, chunks, count, taps
):
    plan = plan_of(stages, chunks, count, taps, 8, placement, mode)
    weights, starts = model(8, count)
    seen, trained, wrong = arrivals(plan, weights, starts)
    np.testing.assert_array_equal(seen, plain(weights, starts, taps))
    assert wrong == 0
    assert (trained == 1).all(), "each micro-batch is trained on once"


@pytest.mark.parametrize("mode", ["direct", "hold", "post"])
@pytest.mark.parametrize(
    ("stages", "tensor", "chunks", "count"), [(2, 2, 1, 8), (2, 3, 1, 9), (2, 2, 2, 10), (1, 4, 1, 6), (4, 2, 1, 3)]
)
def test_features_dealt_out_over_tensor_ranks_arrive_once(mode, stages, tensor, chunks, count):
    """Whole rounds; a last one that lacks groups; chunks; one stage; fewer micro-batches than devices."""
    taps = (1, 4, 5, 6)
    plan = plan_of(stages, chunks, count, taps, 8, "all_stages", mode, tensor_axis="tensor", tensor_ranks=tensor)
    weights, starts = model(8, count)
    seen, trained, wrong = arrivals(plan, weights, starts)
    np.testing.assert_array_equal(seen, plain(weights, starts, taps))
    assert wrong == 0
    assert (trained == 1).all(), "each micro-batch is trained on once, by one device"


@pytest.mark.parametrize(
    ("placement", "mode", "stages", "tensor", "chunks", "count"),
    [
        *((placement, mode, 2, 1, 2, 5) for placement, mode in ROUTES),
        *(("all_stages", mode, 2, 2, 1, 5) for mode in ("direct", "hold", "post")),
        ("last_stage", "relay", 4, 1, 1, 5),
    ],
)
def test_what_is_computed_in_bubbles_and_slots_that_nobody_reads_may_be_nan(
    placement, mode, stages, tensor, chunks, count, nan_before_the_first_tick
):
    """All that stages hold before the first tick is NaN, so that every bubble makes NaN and sends it on."""
    dealt = {"tensor_axis": "tensor", "tensor_ranks": tensor} if tensor > 1 else {}
    taps = (0, 3, 5)
    plan = plan_of(stages, chunks, count, taps, 8, placement, mode, **dealt)
    weights, starts = model(8, count)
    (seen, trained, wrong), gradient = results(plan, weights, starts)
    np.testing.assert_array_equal(seen, plain(weights, starts, taps))
    assert wrong == 0 and (trained == 1).all()
    wanted = jax.grad(lambda w: sum(jnp.sum(functools.reduce(lambda x, one: layer(one, x), w, x)) for x in starts))
    np.testing.assert_allclose(gradient, wanted(weights), rtol=1e-5, atol=1e-5)


def test_ranks_that_take_turns_send_each_feature_once_in_all():
    plan = plan_of(2, 1, 8, (1, 4), 8, "all_stages", "direct", tensor_axis="tensor", tensor_ranks=2)
    run, _ = program_of(dataclasses.replace(plan, stamps=False), *model(8, 8))
    taps = [c for c in collectives(run.as_text()) if c.kind == "collective-permute" and TAPS_SCOPE in c.name]
    remote = 8 // 2 * plan.features  # half of the micro-batches train where a feature was made
    assert sum(c.times * c.pairs * c.result_bytes for c in taps) == remote * math.prod(SHAPE) * 4


@pytest.mark.parametrize("mode", ["relay", "host"])
@pytest.mark.parametrize(("stages", "count", "taps"), [(4, 8, (1, 4, 5, 6)), (4, 5, (3, 7)), (2, 4, ())])
def test_the_baselines_bring_the_same(mode, stages, count, taps):
    """Taps of every stage, of some, of none: the last stage's own and the final state never travel."""
    plan = plan_of(stages, 1, count, taps, 8, "last_stage", mode)
    weights, starts = model(8, count)
    MEMORY.clear()
    seen, trained, wrong = arrivals(plan, weights, starts)
    np.testing.assert_array_equal(seen, plain(weights, starts, taps))
    assert wrong == 0 and (trained == 1).all()
    feature = starts[0].nbytes + 4  # and its stamp
    remote = sum(made < stages - 1 for made in plan.made_at) * plan.schedule.microbatches
    assert MEMORY.bytes_in == MEMORY.bytes_out == (remote * feature if mode == "host" else 0)
    assert not MEMORY.letters


def test_baselines_are_refused_where_they_do_not_go():
    with pytest.raises(ValueError, match="mode=relay must have placement=last_stage and chunks=1, not all_stages"):
        plan_of(4, 1, 8, (1,), 8, "all_stages", "relay")
    with pytest.raises(ValueError, match="mode=host must have placement=last_stage and chunks=1, not last_stage and 2"):
        plan_of(2, 2, 8, (1,), 8, "last_stage", "host")
    with pytest.raises(ValueError, match="tensor_ranks=2 must be 1 with tensor_axis=tensor and placement=last_stage"):
        plan_of(2, 1, 8, (1,), 8, "last_stage", "direct", tensor_axis="tensor", tensor_ranks=2)


@pytest.mark.parametrize(
    ("placement", "mode", "stages", "dealt"),
    [
        *((placement, mode, 4, {}) for placement, mode in ROUTES if mode != "post"),
        ("all_stages", "direct", 2, {"tensor_axis": "tensor", "tensor_ranks": 2}),
    ],
)
def test_a_ring_one_slot_too_small_is_seen_by_its_stamps(placement, mode, stages, dealt):
    plan = plan_of(stages, 1, 8, (1, 4, 5, 6), 8, placement, mode, depth_change=-1, **dealt)
    weights, starts = model(8, 8)
    seen, _, wrong = arrivals(plan, weights, starts)
    assert wrong > 0
    assert not np.array_equal(seen, plain(weights, starts, (1, 4, 5, 6)))
