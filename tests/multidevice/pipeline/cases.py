"""Policies, drafts and batches of the pipeline tests, and the update of one device that all of them are held to."""

from __future__ import annotations

import dataclasses
from functools import cached_property, partial

import jax
import jax.numpy as jnp
import numpy as np

from draftco_jax.context_parallel import PackedRows
from draftco_jax.distributed.axes import make_mesh
from draftco_jax.drafts.dflash.config import DFlashConfig
from draftco_jax.drafts.dspark.config import DSparkConfig
from draftco_jax.drafts.eagle3.config import Eagle3Config
from draftco_jax.drafts.mtp.config import MtpConfig
from draftco_jax.models.compute import FLOAT32
from draftco_jax.models.functional import graph_of, initialise
from draftco_jax.models.qwen3 import Qwen3Config
from draftco_jax.numerics.sampling import SamplingConfig
from draftco_jax.pipeline.layout import from_stages, split_layers, to_stages
from draftco_jax.pipeline.spec import PipelineSpec
from draftco_jax.pipeline.staged import StagedDecoder
from draftco_jax.training.objective import GrpoConfig, ObjectiveSpec
from draftco_jax.training.update import joint_gradients, place_batch, place_policy
from draftco_jax.types import PackedBatch

TOKENS, VOCABULARY = 32, 24
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
LENGTHS = ((7, 1, 13, 2, 5), (26, 3), (4, 9, 9, 9), (32,), (2, 2, 21), (31,), (3, 16, 7), (10, 14, 8))


def dense(layers: int = 8) -> Qwen3Config:
    return Qwen3Config(num_hidden_layers=layers, **SIZES)


def draft_configs(policy) -> dict:
    middle = policy.num_hidden_layers // 2
    taps = (1, middle, max(policy.num_hidden_layers - 2, middle + 1))
    blocks = {"mask_token_id": 23, "num_hidden_layers": 1, "block_size": 4, "row_anchors": 12, "num_anchors": 3}
    return {
        "eagle3": dataclasses.replace(Eagle3Config.for_target(policy, passes=2), tap_layers=taps),
        "dflash": dataclasses.replace(DFlashConfig.for_target(policy, **blocks), tap_layers=taps),
        "dspark": dataclasses.replace(DSparkConfig.for_target(policy, **blocks), tap_layers=taps),
        "mtp": MtpConfig.for_target(policy, steps=2),
    }


def batch_of_rows(rows: int) -> PackedBatch:
    """Ragged documents; a mask that begins inside each; advantages and log-probs as a rollout leaves them."""
    rng = np.random.default_rng(0)
    arrays = {name: np.zeros((rows, TOKENS), np.int32) for name in ("positions", "segment_ids", "sample_ids")}
    mask = np.zeros((rows, TOKENS), np.float32)
    for row in range(rows):
        start = 0
        for segment, length in enumerate(LENGTHS[row % len(LENGTHS)], 1):
            span = slice(start, start + length)
            arrays["positions"][row, span], arrays["segment_ids"][row, span] = np.arange(length), segment
            arrays["sample_ids"][row, span] = 100 * row + segment
            mask[row, start + min(length - 1, int(rng.integers(1, 4))) : start + length] = length > 1
            start += length
    tokens = rng.integers(0, VOCABULARY, (rows, TOKENS)).astype(np.int32)
    logprobs = (rng.normal(-3.0, 0.2, mask.shape) * mask).astype(np.float32)
    advantages = (rng.normal(0, 1, mask.shape) * mask).astype(np.float32)
    labels = {"label_mask": mask, "label_logprobs": logprobs, "label_advantages": advantages, "label_rewards": mask}
    return PackedBatch(tokens=tokens, **arrays, **labels)


def lively(params, factor):
    """Matrices some times their usual size, so that every layer matters to the result."""
    return jax.tree.map(lambda x: x * factor if x.ndim > 1 else x, params)


class Setup:
    """A policy and a draft, with gradients and metrics on one device."""

    def __init__(self, policy_cfg, draft_cfg, *, algorithm=None, compute=FLOAT32, factor=10.0):
        self.cfg, self.draft_cfg, self.compute = policy_cfg, draft_cfg, compute
        self.policy = lively(initialise(policy_cfg.build, jax.random.key(1))[1], factor)
        self.draft = None if draft_cfg is None else initialise(draft_cfg.build, jax.random.key(2))[1]
        self.spec = ObjectiveSpec(
            policy_graph=graph_of(partial(policy_cfg.build, compute=compute)),
            draft_graph=None if draft_cfg is None else graph_of(draft_cfg.build),
            draft_cfg=draft_cfg,
            algorithm=algorithm or GrpoConfig(),
            sampling=SamplingConfig(temperature=0.8),
            chunk_tokens=32,
            draft_length=2,
        )
        self.key = self.spec.draft_key(jnp.int32(3))
        self.weight = jnp.float32(0.7)

    def params(self, policy):
        return {"policy": policy} | ({} if self.draft is None else {"draft": self.draft})

    @cached_property
    def _alone(self):
        return jax.jit(joint_gradients(self.spec, None))

    def alone(self, batch, *, reference=None, frozen=None):
        """Gradients and metrics on one device; `reference`: the policy of the penalty."""
        batch = jax.tree.map(jnp.asarray, batch)
        return self._alone(self.params(self.policy), batch, self.weight, reference, frozen, self.key)

    def rounding(self, batch, moves=4) -> dict[str, float]:
        """What half a unit in the last place of the weights does to each gradient on one device, by path."""
        wanted, batch, worst = self.alone(batch)[0], jax.tree.map(jnp.asarray, batch), {}
        for seed in range(moves):
            rng = np.random.default_rng(seed)
            up = lambda x, rng=rng: x * (1 + rng.choice([-1, 1], x.shape) * 2.0**-24).astype(np.float32)  # noqa: E731
            moved = self.params(jax.tree.map(up, jax.device_get(self.policy)))
            got = self._alone(moved, batch, self.weight, None, None, self.key)[0]
            worst = {path: max(value, worst.get(path, 0.0)) for path, value in differences(got, wanted).items()}
        return worst

    def staged(self, sizes, *, chunks=1, microbatches, counts=None, packed=None, **changes):
        """Gradients (in the tree of one device) and metrics over a mesh of these sizes; a function of the batch."""
        mesh = make_mesh(sizes)
        layout = split_layers(self.cfg.layer_kinds, stages=sizes["stage"], chunks=chunks, counts=counts)
        build = lambda rngs: StagedDecoder(self.cfg, layout, self.compute, rngs=rngs)  # noqa: E731
        packed = packed or PackedRows(
            ranks=sizes.get("context", 1),
            context_axis="context" if "context" in sizes else None,
            row_axes=("data",) if "data" in sizes else (),
            tensor_axis="tensor" if "tensor" in sizes else None,
        )
        spec = dataclasses.replace(
            self.spec,
            policy_graph=graph_of(build),
            packed=packed,
            pipeline=PipelineSpec(layout=layout, microbatches=microbatches, **changes),
        )
        policy = place_policy(to_stages(self.policy, layout), spec.policy_graph, packed, mesh, spec.pipeline)
        run = jax.jit(joint_gradients(spec, mesh))

        def apply(batch, weight=self.weight, *, reference=None, frozen=None):
            """`reference`: log-probs of labels by the policy of the penalty."""
            placed = place_batch(batch, packed, mesh, draft_cfg=self.draft_cfg, pipeline=spec.pipeline)
            gradients, metrics = run(self.params(policy), placed, weight, reference, frozen, self.key)
            gradients = jax.device_get(gradients)
            return gradients | {"policy": from_stages(gradients["policy"], layout)}, jax.device_get(metrics)

        apply.spec, apply.mesh, apply.policy, apply.run = spec, mesh, policy, run
        return apply


def differences(got, wanted) -> dict[str, float]:
    """Largest difference of each array over its largest entry, by path."""
    found = {}
    for (path, a), (_, b) in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree_util.tree_leaves_with_path(wanted), strict=True
    ):
        a, b = np.asarray(a), np.asarray(b)
        assert a.shape == b.shape, path
        found[jax.tree_util.keystr(path)] = float(np.max(np.abs(a - b)) / max(float(np.max(np.abs(b))), 1e-12))
    return found
