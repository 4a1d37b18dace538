"""Rollouts with packed weights: the same tokens, and log-probs to rounding, as with XLA's products."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.decoding.engine import Engine, EngineShape, Request, no_context, request_keys
from draftco_jax.drafts.eagle3.config import Eagle3Config
from draftco_jax.drafts.mtp.config import MtpConfig
from draftco_jax.models.compute import ComputeConfig
from draftco_jax.models.functional import abstract_params, graph_of
from draftco_jax.models.qwen3 import Qwen3Config
from draftco_jax.numerics.sampling import SamplingConfig
from draftco_jax.types import PolicyVersion
from draftco_jax.weight_sync import Publisher
from pallas_kernels.skinny_matmul.library import TARGET

SHAPE = EngineShape(prompt_capacity=5, max_new_tokens=12, stop_ids=(1,), pad_id=0)
PACKED = ComputeConfig(step_matmul="skinny")


def policy_config(*, tied: bool) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=37,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=12,
        tie_word_embeddings=tied,
    )


def drawn(build, seed: int):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(size=leaf.shape) * leaf.shape[0] ** -0.5 * 1.5, jnp.float32),
        abstract_params(build),
    )


def requests() -> Request:
    prompts = jnp.asarray(np.random.default_rng(3).integers(2, 37, (3, SHAPE.prompt_capacity)), jnp.int32)
    return Request(prompts, jnp.array([5, 2, 4], jnp.int32), request_keys(jax.random.key(0), 3), no_context(3))


class Arm:
    """A policy and a draft, published and made into an engine under one way to multiply."""

    def __init__(self, cfg: Qwen3Config, draft_cfg, compute: ComputeConfig) -> None:
        policy, draft = drawn(cfg.build, 0), drawn(draft_cfg.build, 1)
        publisher = Publisher(graph_of(partial(cfg.build, compute=compute)), graph_of(draft_cfg.build))
        self.engine = Engine(
            *publisher.rollout_graphs(policy, draft), shape=SHAPE, sampling=SamplingConfig(temperature=1.0)
        )
        self.published = publisher.publish(policy, draft, PolicyVersion(0))

    def generate(self, k: int):
        weights = self.published.policy, self.published.draft
        return jax.tree.map(np.asarray, self.engine.generate(*weights, requests(), k))


@pytest.mark.parametrize("tied", [False, True])
def test_tokens_are_the_same_and_logprobs_to_rounding(native_matmul, tied):
    """Both heads; a draft that has its own (EAGLE-3) and one that reads the policy's (MTP)."""
    cfg = policy_config(tied=tied)
    draft_cfg = MtpConfig.for_target(cfg) if tied else Eagle3Config.for_target(cfg, draft_vocab_size=37)
    arms = [Arm(cfg, draft_cfg, compute) for compute in (ComputeConfig(), PACKED)]
    for k in (3,) if tied else (0, 3):
        xla, skinny = (arm.generate(k) for arm in arms)
        np.testing.assert_array_equal(skinny.tokens, xla.tokens)
        np.testing.assert_array_equal(skinny.accepted, xla.accepted)
        np.testing.assert_allclose(skinny.logprobs, xla.logprobs, atol=1e-5)
        assert np.all(xla.lengths > xla.prompt_lengths + 1)
    assert arms[1].published.policy["layers"][0]["self_attn"]["o_proj"]["kernel"].ndim == 3


def test_the_kernel_is_what_a_step_multiplies_with(native_matmul):
    """Four products a layer and the head, in a step of few rows; no product of XLA's with a weight."""
    cfg = policy_config(tied=False)
    policy = drawn(cfg.build, 0)
    counts = {}
    for compute in (ComputeConfig(), PACKED):
        publisher = Publisher(graph_of(partial(cfg.build, compute=compute)), None)
        graph, _ = publisher.rollout_graphs(policy, None)
        published = publisher.publish(policy, None, PolicyVersion(0)).policy

        def step(params, graph=graph):
            module = graph.merge(params)
            tokens, start = jnp.ones((2, 3), jnp.int32), jnp.zeros(2, jnp.int32)
            return module.logits(module.step(tokens, start, module.empty_cache(2, 8, 2), tap_layers=()).hidden)

        text = jax.jit(step).lower(published).as_text()
        counts[compute.step_matmul] = text.count(f"@{TARGET}"), text.count("stablehlo.dot_general")
    (none, dots), (calls, left) = counts["xla"], counts["skinny"]
    assert (none, calls, dots - left) == (0, 5, 5)


def test_what_cannot_be_had_is_one_line(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match="step_matmul='skinny' must go with dtype=float32, not bfloat16"):
        ComputeConfig(step_matmul="skinny", dtype="bfloat16")
    cfg = policy_config(tied=False)
    policy, graph = drawn(cfg.build, 0), graph_of(partial(cfg.build, compute=PACKED))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ValueError, match="must have its kernel built.* or set step_matmul=xla"):
        Publisher(graph, None).rollout_graphs(policy, None)
    mesh = jax.make_mesh((1,), ("data",))
    with pytest.raises(ValueError, match="must have one device, not a mesh"):
        Publisher(graph, None, mesh=mesh).rollout_graphs(policy, None)
