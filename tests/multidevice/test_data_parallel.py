"""Plain jit with the batch sharded over devices: the same update and the same tokens as on one device.

No program of the step knows about the devices; XLA partitions it by the sharding of its inputs. That holds because
every sum over tokens is divided by a global count, and because a request's random numbers depend on its own key only.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from draftco_jax.decoding.engine import Engine, EngineShape, Request, no_context, request_keys
from draftco_jax.drafts.base import DraftConfig
from draftco_jax.drafts.dflash.config import DFlashConfig
from draftco_jax.drafts.dspark.config import DSparkConfig
from draftco_jax.drafts.eagle3.config import Eagle3Config
from draftco_jax.drafts.mtp.config import MtpConfig
from draftco_jax.losses.draft import DraftLossConfig
from draftco_jax.models.functional import initialise
from draftco_jax.models.qwen3 import Qwen3Config
from draftco_jax.numerics.sampling import SamplingConfig
from draftco_jax.training.objective import GrpoConfig, ObjectiveSpec
from draftco_jax.training.update import Optimizers, init_state, make_update
from draftco_jax.types import PackedBatch, PolicyVersion
from draftco_jax.weight_sync import Publisher

DEVICES = 4
POLICY = dataclasses.replace(
    Qwen3Config.tiny(vocab_size=17, hidden_size=16, intermediate_size=32), num_attention_heads=2, head_dim=8
)
SAMPLING = SamplingConfig(temperature=0.8)
# Few anchors, so that which of them are taken matters; a mean over documents, which must not be split over devices.
_BLOCK = {"mask_token_id": 16, "num_hidden_layers": 1, "block_size": 4, "num_anchors": 2}
_BY_DOCUMENT = DraftLossConfig(hard_cross_entropy=1.0, total_variation=1.0, normaliser="per_sequence")
DRAFTS = {
    "eagle3": Eagle3Config.for_target(POLICY, passes=2),
    "dflash": DFlashConfig.for_target(POLICY, **_BLOCK, loss=_BY_DOCUMENT),
    "dspark": DSparkConfig.for_target(POLICY, **_BLOCK, markov_rank=4),
    "mtp": MtpConfig.for_target(POLICY, steps=2, loss=_BY_DOCUMENT),
}


@pytest.fixture(scope="module")
def models():
    return models_of(DRAFTS["eagle3"])


def models_of(draft_cfg: DraftConfig):
    policy_graph, policy = initialise(POLICY.build, jax.random.key(1))
    draft_graph, draft = initialise(draft_cfg.build, jax.random.key(2))
    # Weights of 0.02 make laws that are all but uniform; these are far from it.
    policy, draft = jax.tree.map(lambda leaf: leaf * 4 if leaf.ndim == 2 else leaf, (policy, draft))
    return draft_cfg, policy_graph, policy, draft_graph, draft


def shardings():
    mesh = Mesh(np.array(jax.devices()[:DEVICES]), ("data",))
    return NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())


def ragged_batch(rows: int = 8, tokens: int = 24) -> PackedBatch:
    """Documents of lengths 3..11, several to a row, padding at the end, prompts of 1..3 tokens."""
    rng = np.random.default_rng(0)
    arrays = {name: np.zeros((rows, tokens), np.int32) for name in ("tokens", "positions", "segment_ids")}
    mask = np.zeros((rows, tokens), np.float32)
    for row in range(rows):
        start, segment = 0, 1
        while (length := int(rng.integers(3, 12))) + start <= tokens - row % 3:
            span = slice(start, start + length)
            arrays["positions"][row, span] = np.arange(length)
            arrays["segment_ids"][row, span] = segment
            mask[row, start + int(rng.integers(1, 3)) : start + length] = 1
            start, segment = start + length, segment + 1
    arrays["tokens"] = rng.integers(0, 17, (rows, tokens)).astype(np.int32)
    logprobs = (rng.normal(-2.8, 0.2, mask.shape) * mask).astype(np.float32)
    advantages = (rng.normal(0, 1, mask.shape) * mask).astype(np.float32)
    labels = {"label_mask": mask, "label_logprobs": logprobs, "label_advantages": advantages, "label_rewards": mask}
    return PackedBatch(
        **arrays, **labels, sample_ids=arrays["segment_ids"] + 100 * np.arange(rows, dtype=np.int32)[:, None]
    )


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.slow) if name != "eagle3" else name for name in DRAFTS]
)
def test_joint_update_on_four_devices_equals_one(family):
    draft_cfg, policy_graph, policy, draft_graph, draft = models_of(DRAFTS[family])
    spec = ObjectiveSpec(
        policy_graph=policy_graph,
        draft_graph=draft_graph,
        draft_cfg=draft_cfg,
        algorithm=GrpoConfig(kl_coefficient=0.1),
        sampling=SAMPLING,
        chunk_tokens=4096,
        draft_length=4,
    )
    # Plain gradient descent: the parameters after a step are the gradients, without Adam's division by their size.
    optimizers = Optimizers(optax.sgd(1.0), optax.sgd(1.0))
    update = make_update(spec, optimizers)
    state, batch = init_state(policy, draft, optimizers), ragged_batch()
    reference = jax.tree.map(lambda leaf: leaf * 0.9, policy)
    inputs = (state, batch, jnp.float32(1.0), reference, draft)
    alone, alone_metrics = update(*inputs)
    silent, _ = update(state, batch, jnp.float32(0.0), reference, draft)
    for without, one in zip(jax.tree.leaves(silent.policy), jax.tree.leaves(alone.policy), strict=True):
        np.testing.assert_array_equal(without, one, err_msg="the draft's loss must not reach the policy, bit for bit")

    over_data, everywhere = shardings()
    placed = jax.device_put(
        inputs, (jax.tree.map(lambda _: everywhere, state), over_data, everywhere, everywhere, everywhere)
    )
    together, together_metrics = update(*placed)

    for name, value in alone_metrics.items():
        # float32 sums over 200 tokens in another order: a few units in the last place of values of order 1.
        np.testing.assert_allclose(together_metrics[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    for before, one, many in zip(
        jax.tree.leaves((policy, draft)),
        jax.tree.leaves((alone.policy, alone.draft)),
        jax.tree.leaves((together.policy, together.draft)),
        strict=True,
    ):
        moved = float(np.abs(np.asarray(one) - np.asarray(before)).max())
        np.testing.assert_allclose(many, one, rtol=0, atol=2e-5 * moved + 1e-7)


@pytest.mark.parametrize("draft_length", [0, 3])
def test_bug_case_b28_rollouts_on_four_devices_are_those_of_one(models, draft_length):
    _, policy_graph, policy, draft_graph, draft = models
    publisher = Publisher(policy_graph, draft_graph)
    weights = publisher.publish(policy, draft, PolicyVersion(0))
    shape = EngineShape(prompt_capacity=5, max_new_tokens=12, stop_ids=(1,), pad_id=0)
    engine = Engine(*publisher.rollout_graphs(policy, draft), shape=shape, sampling=SAMPLING)
    lengths = np.array([5, 3, 1, 4, 2, 5, 4, 3], np.int32)
    prompts = np.random.default_rng(3).integers(2, 17, (8, 5)).astype(np.int32)
    prompts[np.arange(5)[None] >= lengths[:, None]] = 0
    request = Request(jnp.asarray(prompts), jnp.asarray(lengths), request_keys(jax.random.key(5), 8), no_context(8))
    alone = engine.generate(weights.policy, weights.draft, request, draft_length)

    over_data, everywhere = shardings()
    placed = jax.device_put((weights.policy, weights.draft, request), (everywhere, everywhere, over_data))
    together = engine.generate(*placed, draft_length)

    assert len(set(np.asarray(alone.lengths).tolist())) > 1, "rows of one length would show little"
    for name in ("tokens", "lengths", "finished", "rounds", "committed", "accepted", "proposed"):
        np.testing.assert_array_equal(getattr(together, name), getattr(alone, name), err_msg=name)
    np.testing.assert_allclose(together.logprobs, alone.logprobs, rtol=0, atol=1e-5)
