"""The update with weights split over tensor and expert axes equals that of one device: loss, metrics, every gradient.

All kinds of layers, packed ragged rows, temperature 0.8; on up to eight virtual devices.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from draftco_jax.context_parallel import PackedRows
from draftco_jax.distributed.axes import make_mesh
from draftco_jax.drafts.eagle3.config import Eagle3Config
from draftco_jax.models import full_attention, layers, moe
from draftco_jax.models.compute import FLOAT32, ComputeConfig
from draftco_jax.models.functional import graph_of, initialise
from draftco_jax.models.gpt_oss import GptOssConfig
from draftco_jax.models.layer_runs import stack_layers
from draftco_jax.models.nemotron_h import NemotronHConfig
from draftco_jax.models.qwen3 import Qwen3Config
from draftco_jax.models.qwen3_5_moe import Qwen35MoeConfig
from draftco_jax.models.qwen3_moe import Qwen3MoeConfig
from draftco_jax.numerics.sampling import SamplingConfig
from draftco_jax.training.objective import GrpoConfig, ObjectiveSpec
from draftco_jax.training.update import (
    Optimizers,
    init_state,
    joint_loss,
    make_update,
    place_batch,
    place_policy,
    policy_specs,
    state_layout,
)
from draftco_jax.types import PackedBatch

ROWS, TOKENS, VOCABULARY = 4, 32, 24
LENGTHS = ((7, 1, 13, 2, 5), (26, 3), (4, 9, 9, 9), (32,))
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
DENSE = Qwen3Config(num_hidden_layers=2, tie_word_embeddings=True, **SIZES)
MIXTURE = Qwen3MoeConfig(
    num_hidden_layers=1, moe_intermediate_size=12, num_experts=4, num_experts_per_tok=2, norm_topk_prob=False, **SIZES
)
DELTA = Qwen35MoeConfig(
    num_hidden_layers=2,
    layer_types=("linear_attention", "full_attention"),
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,  # short keys may be all but 0, and their normalisation then magnifies any rounding
    linear_value_head_dim=6,
    moe_intermediate_size=12,
    shared_expert_intermediate_size=8,
    num_experts=4,
    num_experts_per_tok=2,
    partial_rotary_factor=0.5,
    **SIZES,
)
MAMBA = NemotronHConfig(
    num_hidden_layers=4,
    block_types=("mamba", "attention", "moe", "mlp"),
    mamba_num_heads=4,
    mamba_head_dim=4,
    ssm_state_size=8,
    n_groups=2,
    moe_intermediate_size=12,
    moe_shared_expert_intermediate_size=8,
    n_routed_experts=4,
    num_experts_per_tok=2,
    chunk_size=8,
    **SIZES,
)
SINKS = GptOssConfig(
    num_hidden_layers=2,
    layer_types=("sliding_attention", "full_attention"),
    num_experts=4,
    num_experts_per_tok=2,
    sliding_window=5,
    swiglu_limit=1.0,
    **SIZES,
)
# Of a gradient, relative to its largest entry: float32 sums in another order; measured 7e-7 to 2.4e-6 by case.
CLOSE = 1e-5
WITH_GRADIENTS = partial(jax.value_and_grad, has_aux=True)


def batch_of_rows() -> PackedBatch:
    rng = np.random.default_rng(0)
    arrays = {name: np.zeros((ROWS, TOKENS), np.int32) for name in ("positions", "segment_ids", "sample_ids")}
    mask = np.zeros((ROWS, TOKENS), np.float32)
    for row, lengths in enumerate(LENGTHS):
        start = 0
        for segment, length in enumerate(lengths, 1):
            span = slice(start, start + length)
            arrays["positions"][row, span], arrays["segment_ids"][row, span] = np.arange(length), segment
            arrays["sample_ids"][row, span] = 100 * row + segment
            mask[row, start + min(length - 1, int(rng.integers(1, 4))) : start + length] = length > 1
            start += length
    tokens = rng.integers(0, VOCABULARY, (ROWS, TOKENS)).astype(np.int32)
    logprobs = (rng.normal(-3.0, 0.2, mask.shape) * mask).astype(np.float32)
    advantages = (rng.normal(0, 1, mask.shape) * mask).astype(np.float32)
    labels = {"label_mask": mask, "label_logprobs": logprobs, "label_advantages": advantages, "label_rewards": mask}
    return PackedBatch(tokens=tokens, **arrays, **labels)


def with_routing(batch, cfg):
    """The batch with a record of where its tokens went; a third of them are routed anew."""
    if cfg.mixture is None:
        return batch
    rng, router = np.random.default_rng(6), cfg.mixture.router
    layers = cfg.block_types.count("moe") if isinstance(cfg, NemotronHConfig) else cfg.num_hidden_layers
    ids = np.argsort(rng.random((ROWS, TOKENS, layers, router.num_experts)))[..., : router.num_experts_per_tok]
    ids[rng.random(ids.shape[:-1]) < 1 / 3] = -1
    return batch._replace(experts=ids.astype(np.int16))


BATCH = batch_of_rows()


class Setup:
    """A policy, with a draft or without, and its loss and gradients on one device."""

    def __init__(self, cfg, draft_cfg=None, compute=FLOAT32):
        self.draft_cfg = draft_cfg
        self.graph = graph_of(partial(cfg.build, compute=compute))
        policy = lively(initialise(cfg.build, jax.random.key(1))[1])
        policy = stack_layers(policy, cfg.runs) if compute.scan_layers else policy
        self.draft_graph, self.params, self.batch = None, {"policy": policy}, with_routing(BATCH, cfg)
        if draft_cfg is not None:
            self.draft_graph, draft = initialise(draft_cfg.build, jax.random.key(2))
            self.params["draft"] = lively(draft)
        self.reference = jax.tree.map(lambda leaf: leaf * 0.9, self.params["policy"]) if draft_cfg else None
        self.alone = self.run(PackedRows(tile=16))

    def spec(self, packed):
        return ObjectiveSpec(
            policy_graph=self.graph,
            draft_graph=self.draft_graph,
            draft_cfg=self.draft_cfg,
            algorithm=GrpoConfig(kl_coefficient=0.1, router_balance_coefficient=0.05),
            sampling=SamplingConfig(temperature=0.8),
            chunk_tokens=24,
            draft_length=3,
            packed=packed,
            vocabulary_tile=8,
        )

    def run(self, packed, mesh=None, differentiate=WITH_GRADIENTS):
        """((loss, metrics), gradients)."""
        spec, params, reference, batch = self.spec(packed), self.params, self.reference, self.batch
        if mesh is not None:
            batch = place_batch(batch, packed, mesh, draft_cfg=self.draft_cfg)
            place = lambda policy: place_policy(policy, self.graph, packed, mesh)  # noqa: E731
            params = params | {"policy": place(params["policy"])}
            reference = None if reference is None else place(reference)
        run = jax.jit(differentiate(joint_loss(spec, mesh)))
        return run(params, batch, jnp.float32(1.0), reference, None, spec.draft_key(jnp.int32(3)))


def lively(params):
    """Matrices of 0.02 make laws that are all but uniform; biases and norms of 0 and 1 would hide a great deal."""
    rng = np.random.default_rng(5)

    def moved(leaf):
        drawn = leaf.ndim > 1 and leaf.any()
        return leaf * 5 if drawn else leaf + rng.normal(0, 0.2, leaf.shape).astype(np.float32)

    return jax.tree.map(moved, params)


def difference(found, expected):
    """The largest of all gradients' largest differences, relative to the gradient's largest entry; and whose it is."""
    worst = {}
    for (path, one), many in zip(jax.tree.leaves_with_path(expected), jax.tree.leaves(found), strict=True):
        largest = np.abs(one).max()
        name = jax.tree_util.keystr(path)
        assert largest > 0 or "correction" in name, f"{name}: nothing to compare with"
        worst[name] = float(np.abs(np.asarray(many) - np.asarray(one)).max() / max(largest, 1e-30))
    name = max(worst, key=worst.__getitem__)
    return worst[name], name


def check(setup, found):
    ((loss, metrics), gradients), ((one, expected_metrics), expected) = found, setup.alone
    np.testing.assert_allclose(loss, one, rtol=2e-6)
    assert metrics.keys() == expected_metrics.keys()
    for name, value in expected_metrics.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    worst, name = difference(gradients, expected)
    assert worst < CLOSE, f"{name}: {worst}"


def rows(**options):
    """Rows over a data axis."""
    return PackedRows(row_axes=("data",), tile=16, **options)


CONTEXT = {"ranks": 2, "context_axis": "context"}
CASES = {
    "dense, tensor 4 with key-value heads shared, draft and reference": (
        (DENSE, Eagle3Config.for_target(DENSE, passes=2)), {"data": 2, "tensor": 4}, rows(tensor_axis="tensor"),
    ),
    "dense, data 2 x context 2 x tensor 2, draft and reference": (
        (DENSE, Eagle3Config.for_target(DENSE, passes=2)),
        {"data": 2, "context": 2, "tensor": 2},
        rows(tensor_axis="tensor", **CONTEXT),
    ),
    "mixture, layers in a loop and made again, data 2 x tensor 2": (
        (dataclasses.replace(MIXTURE, num_hidden_layers=3), None, ComputeConfig(scan_layers=True, remat="block")),
        {"data": 2, "tensor": 2},
        rows(tensor_axis="tensor"),
    ),
    "mixture, experts over tensor": (
        (MIXTURE,), {"data": 2, "tensor": 2}, rows(tensor_axis="tensor", expert_axis="tensor"),
    ),
    "delta net, experts over an axis of rows x tensor 2": (
        (DELTA,),
        {"data": 2, "expert": 2, "tensor": 2},
        PackedRows(row_axes=("data", "expert"), tile=16, tensor_axis="tensor", expert_axis="expert"),
    ),
    "Mamba-2, context 2 x tensor 2": (
        (MAMBA,), {"data": 2, "context": 2, "tensor": 2}, rows(tensor_axis="tensor", **CONTEXT),
    ),
    "sinks and biases, experts over context and tensor": (
        (SINKS,),
        {"data": 2, "context": 2, "tensor": 2},
        rows(tensor_axis="tensor", expert_axis=("context", "tensor"), **CONTEXT),
    ),
    "sinks and biases, hidden widths over tensor 4": (
        (SINKS,), {"tensor": 4}, PackedRows(tile=16, tensor_axis="tensor"),
    ),
}  # fmt: skip
LONG = (
    "dense, tensor 4 with key-value heads shared, draft and reference",
    "mixture, layers in a loop and made again, data 2 x tensor 2",
    "mixture, experts over tensor",
    "sinks and biases, hidden widths over tensor 4",
)
_SETUPS = {}


def setup_of(*models):
    """Made once for each policy and draft."""
    if models not in _SETUPS:
        _SETUPS[models] = Setup(*models)
    return _SETUPS[models]


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow) if case in LONG else case for case in CASES]
)
def test_many_devices_equal_one(case):
    models, sizes, packed = CASES[case]
    setup, mesh = setup_of(*models), make_mesh(sizes)
    found = setup.run(packed, mesh)
    check(setup, found)
    same_where_not_split(found, policy_specs(setup.graph, setup.params["policy"], packed, mesh))


def same_where_not_split(found, specs):
    """Loss, metrics and gradients are what out_specs say, bit for bit: copies on several devices are equal."""
    (loss, metrics), gradients = found
    for array in (loss, *metrics.values(), *jax.tree.leaves(gradients)):
        copies = {}
        for shard in array.addressable_shards:
            copies.setdefault(str(shard.index), []).append(np.asarray(shard.data))
        for first, *others in copies.values():
            for other in others:
                np.testing.assert_array_equal(other, first)
    stated = jax.tree.leaves(specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))
    for gradient, spec in zip(jax.tree.leaves(gradients["policy"]), stated, strict=True):
        assert gradient.sharding.is_equivalent_to(jax.NamedSharding(gradient.sharding.mesh, spec), gradient.ndim)


# ---- planted faults: each must show in the loss, or be refused ----


def biased_on_every_rank(linear, x, reduce=None):
    y = x @ linear.kernel[...].astype(x.dtype)
    if linear.biased:
        y = y + jnp.expand_dims(linear.bias[...].astype(x.dtype), range(x.ndim - 1))
    return layers.summed(y, reduce)


def first_head(y, queries, spec, axis):
    del queries, spec
    return jax.lax.dynamic_slice_in_dim(y, 0 * jax.lax.axis_index(axis), 1, axis=2)


def always_here(experts, x, ids, weights, first=0, hidden_axis=None, *, mix=moe.mix):
    del hidden_axis
    return mix(experts, x, ids, weights, first)


FAULTS = {
    "the bias of o_proj is added by every rank": (layers.Linear, "__call__", biased_on_every_rank, SINKS),
    "the bias of an expert is added by every rank": (moe, "mix", always_here, SINKS),
    "all ranks read the first key-value head": (full_attention, "read_heads", first_head, SINKS),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_show_in_the_loss(fault, monkeypatch):
    owner, name, wrong, cfg = FAULTS[fault]
    setup, mesh = setup_of(cfg), make_mesh({"tensor": 4})
    monkeypatch.setattr(owner, name, wrong)
    loss, _ = setup.run(PackedRows(tile=16, tensor_axis="tensor"), mesh, differentiate=lambda loss: loss)
    right = float(setup.alone[0][0])
    assert abs(float(loss) - right) > 1e-4 * abs(right)


def test_a_sum_that_is_left_out_is_refused(monkeypatch):
    monkeypatch.setattr(layers, "summed", lambda y, axis: y)
    setup, mesh = setup_of(DENSE, Eagle3Config.for_target(DENSE, passes=2)), make_mesh({"data": 2, "tensor": 4})
    with pytest.raises(ValueError, match=r"out_specs|varying|replicat"):
        setup.run(rows(tensor_axis="tensor"), mesh, differentiate=lambda loss: loss)


def test_weights_that_were_not_split_are_refused():
    setup, mesh = setup_of(DENSE, Eagle3Config.for_target(DENSE, passes=2)), make_mesh({"tensor": 4})
    block = setup.graph.merge(setup.params["policy"]).layers[0].mlp
    run = jax.shard_map(
        lambda x: block(x, PackedRows(tensor_axis="tensor")),
        mesh=mesh,
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(),
    )
    with pytest.raises(ValueError, match=r"axis='tensor' must be one that the weights behind \(3, 16\) are split over"):
        run(jnp.ones((3, 16)))


def test_optimizer_state_is_split_over_tensor_and_data_and_the_step_is_that_of_one_device():
    cfg = dataclasses.replace(DENSE, num_hidden_layers=1)
    setup = Setup.__new__(Setup)
    setup.draft_cfg, setup.draft_graph, setup.reference = None, None, None
    setup.graph, policy = initialise(cfg.build, jax.random.key(1))
    policy, mesh, packed = lively(policy), make_mesh({"data": 2, "tensor": 2}), rows(tensor_axis="tensor")
    optimizers = Optimizers(optax.sgd(0.5, momentum=0.9), None)

    def step(packed, mesh, policy, batch):
        state = init_state(policy, None, optimizers)
        return state, make_update(setup.spec(packed), optimizers, mesh)(state, batch, jnp.float32(1.0))

    _, (one, metrics) = step(PackedRows(tile=16), None, policy, BATCH)
    placed = place_policy(policy, setup.graph, packed, mesh)
    batch = place_batch(BATCH, packed, mesh, draft_cfg=None)
    before, (many, many_metrics) = step(packed, mesh, placed, batch)
    layout = state_layout(before, setup.spec(packed), mesh)
    for name, value in metrics.items():
        np.testing.assert_allclose(many_metrics[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    for sharding, new, expected in zip(
        jax.tree.leaves((layout.policy, layout.policy_optimizer)),
        jax.tree.leaves((many.policy, many.policy_optimizer)),
        jax.tree.leaves((one.policy, one.policy_optimizer)),
        strict=True,
    ):
        np.testing.assert_allclose(new, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
        assert new.sharding.is_equivalent_to(sharding, new.ndim)
    pick = lambda tree: tree["layers"][0]["mlp"]["down_proj"]["kernel"].addressable_shards[0].data.shape  # noqa: E731
    assert (pick(many.policy), pick(many.policy_optimizer[0].trace)) == ((12, 16), (12, 8))
