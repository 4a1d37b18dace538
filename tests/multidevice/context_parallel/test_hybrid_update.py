"""The joint loss of hybrid policies on a context x data mesh equals that of one device: loss, metrics, all gradients.

Documents of packed ragged rows cross ranks, and so do the windows of the short convolutions: state and inputs before a
piece come from other ranks in the forward, and their gradients go back there. Experts route as on one device.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from draftco_jax.context_parallel import PackedRows
from draftco_jax.drafts.eagle3.config import Eagle3Config
from draftco_jax.models.compute import FLOAT32, ComputeConfig
from draftco_jax.models.functional import graph_of, initialise
from draftco_jax.models.layer_runs import stack_layers, unstack_layers
from draftco_jax.models.nemotron_h import NemotronHConfig
from draftco_jax.models.qwen3_5_moe import Qwen35MoeConfig
from draftco_jax.numerics.sampling import SamplingConfig
from draftco_jax.training.objective import GrpoConfig, ObjectiveSpec
from draftco_jax.training.update import joint_loss, place_batch
from draftco_jax.types import PackedBatch

RANKS, ROWS, TOKENS = 4, 2, 64
# A piece is 8 tokens. Documents begin three and one before the border of a piece, at one, and two and three after one:
# what a window of four taps reaches is cut by the border, by the document, or by both. Two cross several ranks.
LENGTHS = ((7, 1, 13, 2, 22, 5, 9), (50, 3, 4))
POLICIES = {"qwen3_5_moe": Qwen35MoeConfig.tiny(), "nemotron_h": NemotronHConfig.tiny()}
STACKED = ComputeConfig(scan_layers=True, remat="attention")
# float32 sums in another order, relative to the largest entry of a gradient; measured 1.1e-6 and 2.3e-6.
CLOSE = 5e-6


def batch_of_rows(vocabulary) -> PackedBatch:
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
    tokens = rng.integers(0, vocabulary, (ROWS, TOKENS)).astype(np.int32)
    logprobs = (rng.normal(-3.4, 0.2, mask.shape) * mask).astype(np.float32)
    advantages = (rng.normal(0, 1, mask.shape) * mask).astype(np.float32)
    labels = {"label_mask": mask, "label_logprobs": logprobs, "label_advantages": advantages, "label_rewards": mask}
    return PackedBatch(tokens=tokens, **arrays, **labels)


def spread(**options):
    return PackedRows(ranks=RANKS, context_axis="context", row_axes=("data",), tile=16, **options)


class Setup:
    """One policy with an EAGLE-3 draft, a batch, and loss and gradients on one device, layers one by one."""

    def __init__(self, family):
        self.cfg = POLICIES[family]
        self.draft_cfg = Eagle3Config.for_target(self.cfg, passes=2)
        self.draft_graph = graph_of(self.draft_cfg.build)
        policy, draft = jax.jit(self.fresh)(jax.random.key(4))
        # Weights of 0.02 make laws that are all but uniform; twice that is as far from it as float32 goes: a change of
        # all weights by one unit in the last place moves these gradients by 5e-6, at four times it would be 4e-5.
        policy, draft = jax.tree.map(lambda leaf: leaf * 2 if leaf.ndim >= 2 else leaf, (policy, draft))
        self.params, self.batch = {"policy": policy, "draft": draft}, batch_of_rows(self.cfg.vocab_size)
        self.alone = self.run(PackedRows(tile=16))

    def fresh(self, key):
        """Weights of policy and draft."""
        keys = zip((self.cfg, self.draft_cfg), jax.random.split(key), strict=True)
        return tuple(initialise(cfg.build, key)[1] for cfg, key in keys)

    def run(self, packed, *, compute=FLOAT32):
        """(loss, metrics), gradients; those of stacked layers are unstacked."""
        spec = ObjectiveSpec(
            policy_graph=graph_of(partial(self.cfg.build, compute=compute)),
            draft_graph=self.draft_graph,
            draft_cfg=self.draft_cfg,
            algorithm=GrpoConfig(),
            sampling=SamplingConfig(temperature=0.8),
            chunk_tokens=24,
            draft_length=2,
            packed=packed,
        )
        mesh, batch, params = None, self.batch, self.params
        if packed.axes:
            mesh = Mesh(np.array(jax.devices()).reshape(-1, RANKS), ("data", "context"))
            batch = place_batch(batch, packed, mesh, draft_cfg=self.draft_cfg)
        if compute.scan_layers:
            params = params | {"policy": stack_layers(params["policy"], self.cfg.runs)}
        loss = jax.jit(jax.value_and_grad(joint_loss(spec, mesh), has_aux=True))
        value, gradients = jax.device_get(
            loss(params, batch, jnp.float32(1.0), None, None, spec.draft_key(jnp.int32(3)))
        )
        if compute.scan_layers:
            gradients["policy"] = unstack_layers(gradients["policy"], self.cfg.runs)
        return value, gradients


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.slow) if name == "qwen3_5_moe" else name for name in POLICIES],
)
def setup(request):
    return Setup(request.param)


def check(setup, found):
    ((loss, metrics), gradients), ((one, expected_metrics), expected) = found, setup.alone
    np.testing.assert_allclose(loss, one, rtol=1e-6)
    assert metrics.keys() == expected_metrics.keys()
    for name, value in expected_metrics.items():
        np.testing.assert_allclose(metrics[name], value, rtol=2e-6, atol=2e-7, err_msg=name)
    for (path, one), many in zip(jax.tree.leaves_with_path(expected), jax.tree.leaves(gradients), strict=True):
        largest = np.abs(one).max()
        name = jax.tree_util.keystr(path)
        assert largest > 0 or "e_score_correction_bias" in name, f"{name}: nothing to compare with"
        np.testing.assert_allclose(many, one, rtol=0, atol=CLOSE * largest, err_msg=name)


def test_layers_in_loops_made_again_in_the_backward_equal_one_device(setup):
    """Zigzag, stacked layers, attention kept: what a large policy is trained with, held to layers one by one."""
    check(setup, setup.run(spread(), compute=STACKED))


@pytest.mark.slow
def test_layers_one_by_one_equal_one_device(setup):
    check(setup, setup.run(spread()))


@pytest.mark.slow
def test_striped_ranks_equal_one_device(setup):
    check(setup, setup.run(spread(stripe=8, trunk_mode="gathered")))
