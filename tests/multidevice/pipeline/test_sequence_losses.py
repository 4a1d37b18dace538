"""Losses that look at whole sequences, over devices that each hold a part of them, equal those of one device."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.context_parallel import PackedRows
from draftco_jax.distributed.axes import make_mesh
from draftco_jax.training.algorithm import GrpoConfig
from draftco_jax.training.update import joint_gradients, place_batch, place_policy

GSPO = GrpoConfig(
    policy_loss="gspo", clip_low=0.1, clip_high=0.1, aggregation="sequence", sequence_error_limit=1.4,
    kl_coefficient=0.1,
)  # fmt: skip
MASKED = GrpoConfig(
    aggregation="fixed_length", fixed_length=9, correction="sequence_mask", correction_low=0.5, correction_high=1.3,
    batch_normalise=True, kl_coefficient=0.1, kl_estimator="k1", kl_in="reward", entropy_coefficient=0.1,
)  # fmt: skip
CLOSE = 4e-6  # float32 sums in another order, relative to the largest entry of a gradient


def own_logprobs(setup, batch):
    """Of each token, by the policy, at temperature 0.8."""
    policy = setup.spec.policy_graph.merge(setup.policy)
    logits = policy.logits(jax.jit(policy)(batch.tokens, batch.positions, batch.segment_ids).hidden)
    laws = jax.nn.log_softmax(logits / 0.8, axis=-1)
    ahead = jnp.take_along_axis(laws[:, :-1], batch.tokens[:, 1:, None], axis=2)[..., 0]
    return np.asarray(jnp.pad(ahead, ((0, 0), (1, 0))))


@pytest.fixture(scope="module")
def setup_for(cases):
    """Algorithm -> a policy without a draft; its `rows` were sampled a little off the policy's laws, so
    that some sequences pass a filter and some do not."""

    def make(algorithm, layers=2):
        setup = cases.Setup(cases.dense(layers), None, algorithm=algorithm, factor=4.0)
        batch = cases.batch_of_rows(4)
        gap = np.random.default_rng(1).normal(0, 0.4, batch.label_mask.shape).astype(np.float32)
        own = own_logprobs(setup, jax.tree.map(jnp.asarray, batch))
        setup.rows = batch._replace(label_logprobs=(own + gap) * batch.label_mask)
        setup.reference = jax.tree.map(lambda x: x * 1.05, setup.policy)
        return setup

    return make


def spread(setup, sizes):
    """Gradients and metrics over a mesh of data, context and tensor."""
    mesh = make_mesh(sizes)
    packed = PackedRows(
        ranks=sizes["context"],
        context_axis="context",
        row_axes=("data",),
        tensor_axis="tensor" if "tensor" in sizes else None,
        tile=16,
    )
    spec = dataclasses.replace(setup.spec, packed=packed)
    policy, reference = (place_policy(p, spec.policy_graph, packed, mesh) for p in (setup.policy, setup.reference))
    batch = place_batch(setup.rows, packed, mesh, draft_cfg=None)
    run = jax.jit(joint_gradients(spec, mesh))
    return jax.device_get(run({"policy": policy}, batch, setup.weight, reference, None, setup.key))


def check(cases, got, wanted):
    (gradients, metrics), (expected, logged) = got, wanted
    assert metrics.keys() == logged.keys()
    for name, value in logged.items():
        np.testing.assert_allclose(metrics[name], value, rtol=4e-6, atol=1e-7, err_msg=name)
    worst = cases.differences(gradients, expected)
    assert max(worst.values()) < CLOSE, worst


def test_sequences_over_data_and_context_ranks_equal_one_device(cases, setup_for):
    setup = setup_for(GSPO, layers=1)
    wanted = setup.alone(setup.rows, reference=setup.reference)
    assert 0 < wanted[1]["correction/filtered_fraction"] < 1
    check(cases, spread(setup, {"data": 2, "context": 2}), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [GSPO, MASKED], ids=["gspo", "masked"])
def test_sequences_over_data_context_and_tensor_ranks_equal_one_device(cases, setup_for, algorithm):
    setup = setup_for(algorithm)
    wanted = setup.alone(setup.rows, reference=setup.reference)
    share = wanted[1]["correction/filtered_fraction" if algorithm is GSPO else "correction/masked_fraction"]
    assert 0 < share < 1
    check(cases, spread(setup, {"data": 2, "context": 2, "tensor": 2}), wanted)


@pytest.mark.slow
def test_sequences_of_micro_batches_over_stages_equal_one_device_and_parts_of_rows_are_refused(cases, setup_for):
    setup = setup_for(dataclasses.replace(GSPO, kl_coefficient=0.0))
    got = setup.staged({"stage": 2}, microbatches=2, head_placement="last_stage")(setup.rows)
    check(cases, got, setup.alone(setup.rows))
    with pytest.raises(ValueError, match="head_placement=all_stages must be last_stage with a loss that looks at"):
        setup.staged({"stage": 2}, microbatches=2)(setup.rows)


@pytest.mark.slow
def test_means_over_sequences_go_through_stages_whose_heads_see_parts_of_rows(cases, setup_for):
    setup = setup_for(GrpoConfig(aggregation="sequence", correction="tis", correction_high=1.2, batch_normalise=True))
    got = setup.staged({"stage": 2, "context": 2, "data": 2}, microbatches=2)(setup.rows)
    check(cases, got, setup.alone(setup.rows))
