"""No collective of a pipelined update stands under a condition that devices which join it disagree on."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from draftco_jax.distributed.axes import make_mesh
from draftco_jax.pipeline.lint import permutes_under_conditions
from draftco_jax.training.update import place_batch

SIZES = {"stage": 2, "context": 2, "tensor": 2}
CASES = [
    ("eagle3", {}),
    pytest.param("dflash", {}, marks=pytest.mark.slow),  # dspark's blocks and less
    ("dspark", {}),
    ("mtp", {}),
    ("eagle3", {"draft_placement": "last_stage"}),
    ("eagle3", {"tap_mode": "hold"}),
]


@pytest.mark.parametrize(("draft", "changes"), CASES)
def test_no_update_has_a_fault(cases, setup_of, draft, changes):
    setup = setup_of(draft, 4)
    staged = setup.staged(SIZES, microbatches=4, **changes)
    pipeline = staged.spec.pipeline
    batch = place_batch(
        cases.batch_of_rows(4), staged.spec.packed, staged.mesh, draft_cfg=setup.draft_cfg, pipeline=pipeline
    )
    traced = jax.make_jaxpr(staged.run)(setup.params(staged.policy), batch, setup.weight, None, None, setup.key)
    assert str(traced).count("ppermute") > 10 and " cond[" in str(traced), "there is something to find"
    assert permutes_under_conditions(traced) == []


def traced(function):
    """`function` of one number on each device of a mesh of stage and context."""
    spec = PartitionSpec(("stage", "context"))
    mesh = make_mesh({"stage": 4, "context": 2})
    run = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=True))
    return jax.make_jaxpr(run)(jnp.arange(8.0))


def hop(x, axis):
    return lax.ppermute(x, axis, [(0, 1), (1, 0)])


def if_last(then, otherwise=lambda x: x):
    """Something that the last stage alone does, inside a loop."""

    def run(x):
        step = lambda _, x: lax.cond(lax.axis_index("stage") == 3, then, otherwise, x)  # noqa: E731
        return lax.fori_loop(0, 3, step, x)

    return run


def summed(x, axis):
    return lax.pcast(lax.psum(x, axis), axis, to="varying")


def rounds_of_stage(x):
    def step(state):
        i, x = state
        return i + 1, hop(x, "context")

    start = lax.pcast(jnp.int32(0), ("stage",), to="varying")
    return lax.while_loop(lambda state: state[0] < lax.axis_index("stage"), step, (start, x))[1]


def unless_everywhere_nothing(x):
    """The same branch on all devices: any collective may stand there."""
    return lax.cond(lax.psum(jnp.sum(x), ("stage", "context")) > 0, lambda x: hop(x, "context"), lambda x: x, x)


@pytest.mark.parametrize(
    ("function", "fault"),
    [
        (if_last(lambda x: hop(x, "context")), "ppermute over ['context']"),
        (if_last(lambda x: hop(x, "context"), lambda x: hop(x, "context")), "ppermute over ['context']"),
        (if_last(lambda x: hop(x, "stage")), "ppermute over ['stage']"),
        (if_last(lambda x: summed(x, "stage")), "psum"),
        (rounds_of_stage, "ppermute over ['context']"),
    ],
    ids=["context", "both branches", "stage", "a sum over the stages", "a loop"],
)
def test_what_is_planted_is_found(function, fault):
    found = permutes_under_conditions(traced(function))
    assert found
    assert all(fault in line and line.endswith("a condition that differs over ['stage']") for line in found), found


@pytest.mark.parametrize(
    "function",
    [if_last(lambda x: summed(x, "context")), unless_everywhere_nothing, lambda x: hop(x, "context")],
    ids=["a sum over the context", "a condition alike everywhere", "no condition"],
)
def test_what_is_safe_is_not(function):
    assert permutes_under_conditions(traced(function)) == []
