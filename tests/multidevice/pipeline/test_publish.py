"""Publish from a mesh: every copy of every array is that of training bit for bit, of one version, in little memory."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.context_parallel import PackedRows
from draftco_jax.distributed.axes import make_mesh
from draftco_jax.models.functional import graph_of, initialise
from draftco_jax.models.qwen3_moe import Qwen3MoeConfig
from draftco_jax.pipeline.layout import from_stages, split_layers, to_stages
from draftco_jax.pipeline.spec import PipelineSpec
from draftco_jax.pipeline.staged import StagedDecoder
from draftco_jax.training.optimizer import OptimizerConfig, make_optimizer
from draftco_jax.training.update import Optimizers, init_state, make_update, place_batch, place_policy, place_state
from draftco_jax.types import PolicyVersion
from draftco_jax.weight_sync import Published, Publisher

CASES = {
    "8x1x1x1": ({"stage": 8}, 1, None),
    "4x2x1x1": ({"stage": 4, "context": 2}, 1, None),
    "4x2x1x1 uneven": ({"stage": 4, "context": 2}, 1, (3, 2, 2, 1)),
    "2x2x2x1": ({"stage": 2, "context": 2, "tensor": 2}, 1, None),
    "2x2x2x1 two chunks": ({"stage": 2, "context": 2, "tensor": 2}, 2, None),
    "2x2x1x2": ({"stage": 2, "context": 2, "data": 2}, 1, None),
    "1x4x2x1": ({"stage": 1, "context": 4, "tensor": 2}, 1, None),
    "4x1x2x1": ({"stage": 4, "tensor": 2}, 1, None),
}


def rows_over(sizes) -> PackedRows:
    return PackedRows(
        ranks=sizes.get("context", 1),
        context_axis="context" if "context" in sizes else None,
        row_axes=("data",) if "data" in sizes else (),
        tensor_axis="tensor" if "tensor" in sizes else None,
    )


class Training:
    """A policy in stages and a draft, placed as an update has them, and their publisher."""

    def __init__(self, cases, sizes, chunks=1, counts=None):
        policy_cfg = cases.dense(8)
        draft_cfg = cases.draft_configs(policy_cfg)["eagle3"]
        self.mesh, packed = make_mesh(sizes), rows_over(sizes)
        self.layout = split_layers(policy_cfg.layer_kinds, stages=sizes["stage"], chunks=chunks, counts=counts)
        self.plain = graph_of(policy_cfg.build)
        graph = graph_of(lambda rngs: StagedDecoder(policy_cfg, self.layout, rngs=rngs))
        draft_graph, draft = initialise(draft_cfg.build, jax.random.key(2))
        policy = to_stages(initialise(policy_cfg.build, jax.random.key(1))[1], self.layout)
        pipeline = PipelineSpec(layout=self.layout, microbatches=1)
        self.policy = place_policy(policy, graph, packed, self.mesh, pipeline)
        self.draft = jax.device_put(draft, jax.NamedSharding(self.mesh, jax.P()))
        self.publisher = Publisher(graph, draft_graph, mesh=self.mesh, packed=packed)
        self.alone = Publisher(self.plain, draft_graph)

    def gathered(self, policy=None):
        """The trees of training as one device would have them."""
        policy, draft = jax.device_get((self.policy if policy is None else policy, self.draft))
        return from_stages(policy, self.layout), draft


@pytest.fixture(scope="module")
def small(cases):
    """Stages and tensor, without more devices than that takes."""
    return Training(cases, {"stage": 2, "tensor": 2})


def assert_copies_are(got, wanted):
    """Every piece on every device, bit for bit."""
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for (path, leaf), known in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(wanted), strict=True):
        known = np.asarray(known)
        assert leaf.shape == known.shape and leaf.dtype == known.dtype, path
        for shard in leaf.addressable_shards:
            bits = [np.ascontiguousarray(x).view(np.uint32) for x in (np.asarray(shard.data), known[shard.index])]
            np.testing.assert_array_equal(*bits, err_msg=f"{jax.tree_util.keystr(path)} on {shard.device}")


def total_bytes(*trees):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(trees))


def pointers(tree):
    return {shard.data.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards}


# Stages alone, stages of other lengths beside context, chunks beside tensor, data: what the others join.
FAST = ("8x1x1x1", "4x2x1x1 uneven", "2x2x2x1 two chunks", "2x2x1x2")


@pytest.mark.parametrize(
    "case", [case if case in FAST else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_rollouts_get_what_was_trained_and_little_memory_is_taken(cases, case):
    sizes, chunks, counts = CASES[case]
    training = Training(cases, sizes, chunks, counts)
    published = training.publisher.publish(training.policy, training.draft, PolicyVersion(4))
    # One device fuses the gathered trees; that this computes the same is held in test_weight_sync.
    wanted = training.alone.publish(*training.gathered(), PolicyVersion(4))
    assert_copies_are(published.policy, wanted.policy)
    assert_copies_are(published.draft, wanted.draft)
    assert published.version == PolicyVersion(4)

    split = {str(leaf.sharding.spec) for leaf in jax.tree.leaves(published.policy)}
    assert all("stage" not in spec and "data" not in spec and "context" not in spec for spec in split), split
    assert any("tensor" in spec for spec in split) == ("tensor" in sizes), split

    of_program = training.publisher.lower(training.policy, training.draft).compile().memory_analysis()
    whole = total_bytes(*training.gathered())
    peak = of_program.argument_size_in_bytes + of_program.output_size_in_bytes + of_program.temp_size_in_bytes
    ratio = (peak - of_program.alias_size_in_bytes) / whole
    print(f"{case}: a publish takes {ratio:.2f} of the bytes of policy and draft")
    assert ratio < 2.0, (case, of_program)


def test_what_updates_leave_is_published_from_every_copy(cases, setup_of):
    """Two updates with the draft dealt out: all devices hold the same bits, and those are published."""
    setup, batch, sizes = setup_of("eagle3", 4), cases.batch_of_rows(4), {"stage": 2, "tensor": 2}
    run = setup.staged(sizes, microbatches=4)
    spec, optimizers = run.spec, Optimizers(*[make_optimizer(OptimizerConfig(learning_rate=1e-2), 10)] * 2)
    update = make_update(spec, optimizers, run.mesh)
    placed = place_batch(batch, spec.packed, run.mesh, draft_cfg=setup.draft_cfg, pipeline=spec.pipeline)
    state = place_state(init_state(run.policy, setup.draft, optimizers), spec, run.mesh)
    for _ in range(2):
        state, _ = update(state, placed, jnp.float32(1.0), None, None)
    policy, draft = jax.device_get((state.policy, state.draft))
    assert_copies_are((state.policy, state.draft), (policy, draft))
    moved = jax.tree.map(lambda a, b: np.any(a != np.asarray(b)), (policy, draft), (run.policy, setup.draft))
    assert all(jax.tree.leaves(moved))

    publisher = Publisher(spec.policy_graph, spec.draft_graph, mesh=run.mesh, packed=spec.packed)
    published = publisher.publish(state.policy, state.draft, PolicyVersion(2))
    alone = Publisher(setup.spec.policy_graph, spec.draft_graph)
    wanted = alone.publish(from_stages(policy, spec.pipeline.layout), draft, PolicyVersion(2))
    assert_copies_are(published.policy, wanted.policy)
    assert_copies_are(published.draft, wanted.draft)


def test_published_graphs_are_those_of_one_device(small):
    graphs = small.publisher.rollout_graphs(small.policy, small.draft)
    policy, draft = small.gathered()
    assert graphs == small.alone.rollout_graphs(policy, draft)


def test_a_pair_of_two_versions_is_refused(small):
    first = small.publisher.publish(small.policy, small.draft, PolicyVersion(1))
    second = small.publisher.publish(small.policy, small.draft, PolicyVersion(2))
    with pytest.raises(ValueError, match=r"^draft version=1 must be 2, that of the policy; publish both in one call$"):
        Published(second.stamped_policy, first.stamped_draft)
    with pytest.raises(ValueError, match="draft version=2 must be 1"):
        dataclasses.replace(second, stamped_policy=first.stamped_policy)
    again = Published(first.stamped_policy, first.stamped_draft)
    assert again.version == PolicyVersion(1) and again.draft is first.draft
    assert Published(second.stamped_policy, None).draft is None


def test_nothing_of_the_publish_before_survives(small):
    first = small.publisher.publish(small.policy, small.draft, PolicyVersion(0))
    moved = jax.tree.map(lambda leaf: leaf + jnp.float32(1), (small.policy, small.draft))
    second = small.publisher.publish(*moved, PolicyVersion(1))
    training = pointers((small.policy, small.draft, *moved))
    assert not pointers((second.policy, second.draft)) & (pointers((first.policy, first.draft)) | training)
    for leaf in jax.tree.leaves((first.policy, first.draft)):
        leaf.delete()
    policy = from_stages(jax.device_get(moved[0]), small.layout)
    wanted = small.alone.publish(policy, jax.device_get(moved[1]), PolicyVersion(1))
    assert_copies_are(second.policy, wanted.policy)
    assert_copies_are(second.draft, wanted.draft)


@pytest.mark.parametrize("expert_axis", ["context", ("context", "tensor")])
def test_experts_stay_split_over_tensor_alone(cases, expert_axis):
    cfg = Qwen3MoeConfig(
        **cases.SIZES, num_hidden_layers=2, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8
    )
    sizes = {"context": 2, "tensor": 2}
    packed, mesh = dataclasses.replace(rows_over(sizes), expert_axis=expert_axis), make_mesh(sizes)
    graph, policy = initialise(cfg.build, jax.random.key(1))
    placed = place_policy(policy, graph, packed, mesh)
    published = Publisher(graph, None, mesh=mesh, packed=packed).publish(placed, None, PolicyVersion(0))
    assert_copies_are(published.policy, Publisher(graph, None).publish(policy, None, PolicyVersion(0)).policy)
    specs = {
        jax.tree_util.keystr(path): leaf.sharding.spec for path, leaf in jax.tree.leaves_with_path(published.policy)
    }
    of_experts = [tuple(spec) for path, spec in specs.items() if "experts" in path]
    assert of_experts, specs.keys()
    axes = [axis for spec in of_experts for axis in spec if axis is not None]
    assert set(axes) == {"tensor"}, of_experts
    if expert_axis != "context":
        assert all(spec[0] == "tensor" for spec in of_experts), of_experts
