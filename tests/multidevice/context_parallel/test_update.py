"""The joint loss under context parallelism equals that of one device: loss, metrics, every gradient of both models.

Policy and all trained draft families, packed ragged rows, temperature 0.8, labels and blocks that cross ranks.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

from draftco_jax.context_parallel import PackedRows
from draftco_jax.drafts.base import sizes_from
from draftco_jax.drafts.dflash.config import DFlashConfig
from draftco_jax.drafts.dspark.config import DSparkConfig
from draftco_jax.drafts.eagle3.config import Eagle3Config
from draftco_jax.drafts.mtp.config import MtpConfig
from draftco_jax.errors import UserError
from draftco_jax.losses.draft import DraftLossConfig
from draftco_jax.models.functional import initialise
from draftco_jax.models.gpt_oss import GptOssConfig
from draftco_jax.models.qwen3 import Qwen3Config
from draftco_jax.numerics.sampling import SamplingConfig
from draftco_jax.training.objective import GrpoConfig, ObjectiveSpec
from draftco_jax.training.update import Optimizers, joint_loss, make_update, place_batch
from draftco_jax.types import PackedBatch

ROWS, TOKENS, VOCABULARY = 2, 64, 17
# Documents: 4-token pieces at C = 8, so every one but the shortest crosses ranks, the first of row 1 all of them.
LENGTHS = ((7, 1, 13, 2, 22, 5, 9), (50, 3, 4))
POLICY = dataclasses.replace(
    Qwen3Config.tiny(vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32), num_attention_heads=4, head_dim=8
)
BY_DOCUMENT = DraftLossConfig(hard_cross_entropy=1.0, total_variation=1.0, normaliser="per_sequence")
BLOCK = {"mask_token_id": 16, "num_hidden_layers": 2, "block_size": 4, "num_anchors": 3, "loss_decay_gamma": None}
DRAFTS = {
    "eagle3": Eagle3Config.for_target(POLICY, passes=3),
    "dflash": DFlashConfig.for_target(
        POLICY, **BLOCK, layer_types=("full_attention", "sliding_attention"), sliding_window=6
    ),
    "dspark": DSparkConfig.for_target(POLICY, **BLOCK, markov_rank=4),
    "mtp": MtpConfig.for_target(POLICY, steps=3, loss=BY_DOCUMENT),
    "mtp of sinks and experts": MtpConfig.for_target(
        POLICY,
        steps=3,
        loss=BY_DOCUMENT,
        layer=dataclasses.replace(
            GptOssConfig.tiny(), **sizes_from(POLICY), num_hidden_layers=1, layer_types=("full_attention",)
        ),
    ),
}
# Blocks over context ranks are held every day by test_parity.py of the pipeline, in which dflash and dspark have two.
LONG = ("dflash", "dspark", "mtp")
# float32 sums in another order, relative to the largest entry of a gradient; measured 2e-7 to 1e-6.
CLOSE = 4e-6


def batch_of_rows() -> PackedBatch:
    rng = np.random.default_rng(0)
    arrays = {name: np.zeros((ROWS, TOKENS), np.int32) for name in ("tokens", "positions", "segment_ids", "sample_ids")}
    mask = np.zeros((ROWS, TOKENS), np.float32)
    for row, lengths in enumerate(LENGTHS):
        start = 0
        for segment, length in enumerate(lengths, 1):
            span = slice(start, start + length)
            arrays["positions"][row, span], arrays["segment_ids"][row, span] = np.arange(length), segment
            arrays["sample_ids"][row, span] = 100 * row + segment
            mask[row, start + min(length - 1, int(rng.integers(1, 4))) : start + length] = length > 1
            start += length
    arrays["tokens"] = rng.integers(0, VOCABULARY, (ROWS, TOKENS)).astype(np.int32)
    logprobs = (rng.normal(-2.8, 0.2, mask.shape) * mask).astype(np.float32)
    advantages = (rng.normal(0, 1, mask.shape) * mask).astype(np.float32)
    labels = {"label_mask": mask, "label_logprobs": logprobs, "label_advantages": advantages, "label_rewards": mask}
    return PackedBatch(**arrays, **labels)


def cut(batch, tokens):
    return jax.tree.map(lambda x: x[:, :tokens], batch)


def packed_rows(ranks, stripe=None, **options):
    return PackedRows(ranks=ranks, context_axis="context", row_axes=("data",), stripe=stripe, tile=16, **options)


def mesh_of(ranks, data=1):
    return Mesh(np.array(jax.devices()[: ranks * data]).reshape(data, ranks), ("data", "context"))


class Setup:
    """One family: models, batch, and its loss and gradients on one device."""

    def __init__(self, family):
        self.cfg = DRAFTS[family]
        self.policy_graph, policy = initialise(POLICY.build, jax.random.key(1))
        self.draft_graph, draft = initialise(self.cfg.build, jax.random.key(2))
        # Weights of 0.02 make laws that are all but uniform; these are far from it.
        policy, draft = jax.tree.map(lambda leaf: leaf * 4 if leaf.ndim == 2 else leaf, (policy, draft))
        self.params, self.batch = {"policy": policy, "draft": draft}, batch_of_rows()
        self.others = jax.tree.map(lambda leaf: leaf * 0.9, (policy, draft))  # reference policy, frozen draft
        self.alone = self.on(PackedRows(tile=16))()

    def spec(self, packed):
        return ObjectiveSpec(
            policy_graph=self.policy_graph,
            draft_graph=self.draft_graph,
            draft_cfg=self.cfg,
            algorithm=GrpoConfig(kl_coefficient=0.1),
            sampling=SamplingConfig(temperature=0.8),
            chunk_tokens=24,
            draft_length=3,
            packed=packed,
            vocabulary_tile=8,  # of 17 columns: the loop over tiles runs inside shard_map, as with every real head
        )

    def on(self, packed, mesh=None):
        """Compiled: lambda -> loss, metrics and gradients."""
        spec = self.spec(packed)
        run = jax.jit(jax.value_and_grad(joint_loss(spec, mesh), has_aux=True))
        batch = self.batch if mesh is None else place_batch(self.batch, packed, mesh, draft_cfg=self.cfg)
        rest = *self.others, spec.draft_key(jnp.int32(3))
        return lambda weight=1.0: jax.device_get(run(self.params, batch, jnp.float32(weight), *rest))


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.slow) if name in LONG else name for name in DRAFTS],
)
def setup(request):
    return Setup(request.param)


def check(setup, found):
    ((loss, metrics), gradients), ((one, expected_metrics), expected) = found, setup.alone
    np.testing.assert_allclose(loss, one, rtol=1e-6)
    assert metrics.keys() == expected_metrics.keys()
    for name, value in expected_metrics.items():
        np.testing.assert_allclose(metrics[name], value, rtol=2e-6, atol=1e-7, err_msg=name)
    for (path, one), many in zip(jax.tree.leaves_with_path(expected), jax.tree.leaves(gradients), strict=True):
        largest = np.abs(one).max()
        assert largest > 0, f"{path}: nothing to compare with"
        np.testing.assert_allclose(many, one, rtol=0, atol=CLOSE * largest, err_msg=jax.tree_util.keystr(path))


def test_eight_ranks_equal_one_and_the_drafts_weight_does_not_reach_the_policy(setup):
    run = setup.on(packed_rows(8), mesh_of(8))
    together = run()
    check(setup, together)
    _, silent = run(0.0)
    jax.tree.map(np.testing.assert_array_equal, silent["policy"], together[1]["policy"])
    assert not any(leaf.any() for leaf in jax.tree.leaves(silent["draft"]))


@pytest.mark.slow
def test_striped_ranks_beside_a_data_axis_equal_one_device(setup):
    check(setup, setup.on(packed_rows(4, stripe=8, trunk_mode="gathered"), mesh_of(4, data=2))())


def test_what_would_not_equal_one_device_is_refused_before_anything_is_compiled(setup):
    optimizers = Optimizers(optax.sgd(1.0), None)
    with pytest.raises(ValueError, match=r"mesh=None must be the mesh with axes \('data', 'context'\)"):
        make_update(setup.spec(packed_rows(2)), optimizers)
    with pytest.raises(ValueError, match=r"ranks=4 must be 2, the size of axis 'context'"):
        make_update(setup.spec(packed_rows(4)), optimizers, mesh_of(2))
    for packed in (PackedRows(), PackedRows(row_axes=("rows",))):
        with pytest.raises(ValueError, match=r"axes=.* must name at least one axis of the mesh"):
            make_update(setup.spec(packed), optimizers, mesh_of(2))
    three = jax.tree.map(lambda x: np.concatenate([x, x[:1]]), setup.batch)
    with pytest.raises(ValueError, match=r"rows=3 must be a multiple of 2, the devices of \('data',\)"):
        place_batch(three, packed_rows(2), mesh_of(2, data=2), draft_cfg=setup.cfg)
    with pytest.raises(ValueError, match=r"label_reach=\d of .* must be <= 1, the tokens of a piece of a row of 16"):
        place_batch(cut(setup.batch, 16), packed_rows(8), mesh_of(8), draft_cfg=setup.cfg)
    tight = dataclasses.replace(DRAFTS["dflash"], row_anchors=2)
    with pytest.raises(UserError, match=r"row_anchors=2 must be >= \d+, the anchors that a device may have"):
        place_batch(setup.batch, packed_rows(2), mesh_of(2), draft_cfg=tight)
    torn = setup.batch._replace(positions=setup.batch.positions + 1)
    with pytest.raises(ValueError, match=r"positions\[0, 0\]=1 must be 0"):
        place_batch(torn, packed_rows(2), mesh_of(2), draft_cfg=None)
