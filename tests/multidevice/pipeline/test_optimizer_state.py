"""Optimizer state split over `data`: the steps of one device, half of the bytes, each device its part of the sums.

Stages 2 x data 2 and data 2 alone; AdamW, two steps, policy and draft.
"""

from __future__ import annotations

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from draftco_jax.context_parallel import PackedRows
from draftco_jax.distributed.axes import make_mesh
from draftco_jax.models.compute import ComputeConfig
from draftco_jax.models.functional import graph_of
from draftco_jax.pipeline.layout import from_stages
from draftco_jax.training.optimizer import MasterState, OptimizerConfig, make_optimizer, optimizer_specs
from draftco_jax.training.update import (
    Optimizers,
    init_state,
    make_update,
    place_batch,
    place_policy,
    place_state,
    state_layout,
)

CLOSE = 1e-6  # of the largest entry of an array of parameters
MOMENTS_CLOSE = 1e-5  # as the gradients of test_parity


def optimizers():
    # Epsilon is of the size of a gradient's rounding: where a gradient is nothing else, Adam would make a step of it.
    cfg = OptimizerConfig(learning_rate=3e-4, epsilon=1e-5, weight_decay=0.1)
    return Optimizers(make_optimizer(cfg, 10), make_optimizer(cfg, 10))


class Case:
    """A policy and a draft on a mesh with a data axis, their update, and that of one device."""

    def __init__(self, cases, setup, sizes, **changes):
        self.setup, self.optimizers = setup, optimizers()
        self.batch = cases.batch_of_rows(4)
        if "stage" in sizes:
            run = setup.staged(sizes, microbatches=2)
            self.spec, self.mesh, policy = run.spec, run.mesh, run.policy
        else:
            self.mesh = make_mesh(sizes)
            self.spec = dataclasses.replace(setup.spec, packed=PackedRows(row_axes=("data",)))
            policy = place_policy(setup.policy, self.spec.policy_graph, self.spec.packed, self.mesh)
        self.spec = dataclasses.replace(self.spec, **changes)
        self.state = place_state(init_state(policy, setup.draft, self.optimizers), self.spec, self.mesh)
        self.placed = place_batch(
            self.batch, self.spec.packed, self.mesh, draft_cfg=setup.draft_cfg, pipeline=self.spec.pipeline
        )
        self.update = make_update(self.spec, self.optimizers, self.mesh)

    def steps(self, weight=0.7, count=2):
        state = self.state
        for _ in range(count):
            state, metrics = self.update(state, self.placed, jnp.float32(weight))
        return state, metrics

    def gathered(self, tree):
        """Trees of the policy as one device has them."""
        tree, layout = jax.device_get(tree), None if self.spec.pipeline is None else self.spec.pipeline.layout
        staged = lambda x: isinstance(x, dict) and "stages" in x  # noqa: E731
        return tree if layout is None else jax.tree.map(
            lambda x: from_stages(x, layout) if staged(x) else x, tree, is_leaf=staged
        )  # fmt: skip


@pytest.fixture(scope="module", params=["stage 2 x data 2", pytest.param("data 2", marks=pytest.mark.slow)])
def case(request, cases, setup_of):
    sizes = {"stage": 2, "data": 2} if "stage" in request.param else {"data": 2}
    return Case(cases, setup_of("eagle3", 4), sizes)


@pytest.fixture(scope="module")
def alone(cases, setup_of):
    """Two steps of one device."""
    setup, groups = setup_of("eagle3", 4), optimizers()
    state, update = init_state(setup.policy, setup.draft, groups), make_update(setup.spec, groups)
    batch = jax.tree.map(jnp.asarray, cases.batch_of_rows(4))
    for _ in range(2):
        state, metrics = update(state, batch, jnp.float32(0.7))
    return state, metrics


def assert_close(cases, case, state, wanted):
    got, wanted = case.gathered(state), jax.device_get(wanted)
    pick = lambda s: ((s.policy, s.draft), (s.policy_optimizer, s.draft_optimizer))  # noqa: E731
    for one, other, close in zip(pick(got), pick(wanted), (CLOSE, MOMENTS_CLOSE), strict=True):
        path, worst = max(cases.differences(one, other).items(), key=lambda item: item[1])
        print(path, worst)
        assert worst < close, (path, worst)


def test_two_steps_are_those_of_one_device(cases, case, alone):
    state, metrics = case.steps()
    assert_close(cases, case, state, alone[0])
    moved = cases.differences(case.gathered(state).policy, case.setup.policy)
    assert min(moved.values()) > 100 * CLOSE
    for name, value in alone[1].items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, atol=2e-6, err_msg=name)


def bytes_of_device(tree):
    return sum(
        int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)
    )


def test_a_device_holds_half_of_the_state_and_all_of_its_parameters(case):
    state, _ = case.steps(count=1)
    for made in (case.state, state):
        for optimizer, params in ((made.policy_optimizer, made.policy), (made.draft_optimizer, made.draft)):
            counters = 2 * 4  # steps taken, of Adam and of its schedule
            assert bytes_of_device(optimizer) - counters == 2 * bytes_of_device(params) / 2
    assert all("data" not in tuple(leaf.sharding.spec) for leaf in jax.tree.leaves((state.policy, state.draft)))


def test_the_next_update_is_no_other_program(case):
    case.steps(count=2)
    assert case.update._cache_size() == 1


def numbers(text):
    return [int(number) for number in re.findall(r"\d+", text)]


def groups_of(line, devices):
    """Sets of devices of a collective: all, written out, as shape<=dims (transposed or not), or as axes of a mesh."""
    if "replica_groups={}" in line:
        return {frozenset(range(devices))}
    if listed := re.search(r"replica_groups=\{(\{.*?\})\}", line):
        return {frozenset(numbers(group)) for group in listed[1].split("},{")}
    if named := re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\},", line):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
        inner = re.findall(r"'(\w+)'", named[2])
        ids = np.arange(np.prod(list(sizes.values()))).reshape(list(sizes.values()))
        names = list(sizes)
        ids = ids.transpose([names.index(name) for name in [*(n for n in names if n not in inner), *inner]])
        return {frozenset(row) for row in ids.reshape(-1, int(np.prod([sizes[n] for n in inner]))).tolist()}
    shape, dims, _, order = re.search(r"replica_groups=\[(.*?)\]<=\[(.*?)\](T\((.*?)\))?", line).groups()
    ids = np.arange(np.prod(numbers(dims))).reshape(numbers(dims))
    ids = ids if order is None else ids.transpose(numbers(order))
    return {frozenset(row) for row in ids.reshape(numbers(shape)).tolist()}


def test_each_gradient_is_scattered_once_and_nothing_over_data_is_in_a_loop(case):
    text = case.update.lower(case.state, case.placed, jnp.float32(0.7)).compile().as_text()
    ids = np.array([device.id for device in case.mesh.devices.flat]).reshape(case.mesh.devices.shape)
    over_data = {frozenset(column) for column in ids.reshape(2, -1).T.tolist()}  # data is the slowest axis
    lines = [line for line in text.splitlines() if re.search(r"= \S+ (reduce-scatter|all-gather|all-reduce)\(", line)]
    groups = {line: groups_of(line, ids.size) for line in lines}
    ops = [
        re.search(r" (reduce-scatter|all-gather|all-reduce)\(", line)[1] for line in lines if groups[line] == over_data
    ]
    leaves = len(jax.tree.leaves((case.state.policy, case.state.draft)))
    assert ops.count("reduce-scatter") == ops.count("all-gather") == leaves
    inside = [line for line in lines if "/while/" in line and any(g >= d for g in groups[line] for d in over_data)]
    assert not inside, inside


def test_the_policy_does_not_depend_on_lambda(case):
    without, one = case.steps(0.0)[0], case.steps(1.0)[0]
    jax.tree.map(np.testing.assert_array_equal, without.policy, one.policy)
    jax.tree.map(np.testing.assert_array_equal, without.policy_optimizer, one.policy_optimizer)
    assert any(np.any(a != b) for a, b in zip(*map(jax.tree.leaves, (without.draft, one.draft)), strict=True))


def test_the_switch_leaves_the_state_as_its_parameters(cases, setup_of, alone):
    case = Case(cases, setup_of("eagle3", 4), {"data": 2}, shard_optimizer_state=False)
    assert bytes_of_device(case.state.policy_optimizer) - 8 == 2 * bytes_of_device(case.state.policy)
    state, _ = case.steps()
    assert_close(cases, case, state, alone[0])


def test_a_state_is_made_where_it_lies(case):
    make = partial(init_state, optimizers=case.optimizers)
    layout = state_layout(jax.eval_shape(make, case.state.policy, case.state.draft), case.spec, case.mesh)
    made = jax.jit(make, out_shardings=layout)(case.state.policy, case.state.draft)
    jax.tree.map(np.testing.assert_array_equal, made, case.state)
    same = jax.tree.map(lambda a, b: a.sharding.is_equivalent_to(b.sharding, a.ndim), made, case.state)
    assert all(jax.tree.leaves(same))


def test_float32_copies_of_bfloat16_parameters_are_split_too(cases, setup_of):
    setup = setup_of(None, 4)
    low = ComputeConfig(dtype="bfloat16", parameter_dtype="bfloat16")
    graph = graph_of(partial(setup.cfg.build, compute=low))
    policy = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), setup.policy)
    spec = dataclasses.replace(setup.spec, policy_graph=graph, packed=PackedRows(row_axes=("data",)))
    mesh, groups = make_mesh({"data": 2}), Optimizers(optimizers().policy, None)
    batch = place_batch(cases.batch_of_rows(4), spec.packed, mesh, draft_cfg=None)
    state = place_state(init_state(policy, None, groups), spec, mesh)
    assert isinstance(state.policy_optimizer, MasterState)
    state, _ = make_update(spec, groups, mesh)(state, batch, jnp.float32(0.0))
    optimizer = state.policy_optimizer
    assert bytes_of_device(optimizer) - 8 == 3 * 2 * bytes_of_device(state.policy) / 2
    rounded = jax.tree.map(lambda leaf: np.asarray(leaf.astype(jnp.bfloat16)), optimizer.master)
    jax.tree.map(np.testing.assert_array_equal, state.policy, rounded)
    moved = jax.tree.map(lambda exact, before: np.any(exact != before.astype(jnp.float32)), optimizer.master, policy)
    assert all(jax.tree.leaves(moved))


def test_optimizer_specs_take_the_first_dim_that_is_whole_and_divides():
    mesh, of = make_mesh({"data": 4, "tensor": 2}), PartitionSpec
    shapes = {"a": (8, 6), "b": (8, 12), "c": (6, 3), "d": (3, 4, 8), "e": (16, 4), "f": (), "g": (2, 8)}
    specs = {
        "a": of(), "b": of("tensor"), "c": of(), "d": of(None, None, "tensor"), "e": of(("data", "tensor")), "f": of(),
        "g": of(None, "tensor"),
    }  # fmt: skip
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    assert optimizer_specs(specs, params, mesh) == {
        "a": of("data"), "b": of("tensor", "data"), "c": of(), "d": of(None, "data", "tensor"),
        "e": of(("data", "tensor")), "f": of(), "g": of(None, "tensor"),
    }  # fmt: skip
    assert optimizer_specs(specs, params, make_mesh({"tensor": 2})) == specs
