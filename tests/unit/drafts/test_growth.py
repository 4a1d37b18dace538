"""EAGLE-3 drafts of grown policies: the laws of every variant, and the very proposals on the demo's task."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.config import resolve_checkpoint
from draftco_jax.decoding.engine import Engine, EngineShape
from draftco_jax.decoding.stats import speculation_stats
from draftco_jax.drafts.catalog import FAMILIES
from draftco_jax.drafts.eagle3.config import Eagle3Config
from draftco_jax.drafts.eagle3.growth import grow_draft
from draftco_jax.environments.arithmetic import ArithmeticConfig, ArithmeticTask
from draftco_jax.evaluation import build_request
from draftco_jax.models.functional import abstract_params, graph_of
from draftco_jax.models.growth import grow, layer_places, scale
from draftco_jax.models.hf_weights import load_policy
from draftco_jax.models.qwen3 import Qwen3Config
from draftco_jax.numerics.sampling import SamplingConfig

POLICY = Qwen3Config.tiny(vocab_size=19, hidden_size=16, intermediate_size=24)
GROWN = dataclasses.replace(POLICY, hidden_size=40, num_hidden_layers=5, max_position_embeddings=600)
VARIANTS = {
    "classic": {},
    "fusion_norm_and_residual": {"norm_before_fc": True, "norm_before_residual": True},
    "tap_norms_and_feedback": {"fc_norm": True, "norm_output": True, "qk_norm": True},
}


def lively(params):
    rng = np.random.default_rng(5)
    noise = lambda leaf: rng.normal(size=leaf.shape)  # noqa: E731
    return jax.tree.map(
        lambda leaf: np.float32(1 + 0.3 * noise(leaf) if leaf.ndim == 1 else noise(leaf) * leaf.shape[0] ** -0.5),
        params,
    )


def wider(x, width):
    """The stream of the grown policy: s times as large, then zeros."""
    s = (width / x.shape[-1]) ** 0.5
    return jnp.pad(s * x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_pass_of_every_variant_says_the_same(variant):
    cfg = Eagle3Config.for_target(POLICY, intermediate_size=20, num_attention_heads=2, **VARIANTS[variant])
    params = lively(abstract_params(cfg.build))
    new, grown = grow_draft((cfg, params), POLICY, GROWN, jax.random.key(4))
    assert new.tap_layers == layer_places(POLICY, GROWN) == (2, 4)
    assert new.num_attention_heads == 2 and new.intermediate_size == 20, "a pass stays cheap"
    new.check_target(GROWN)
    places, ones = jnp.arange(7, dtype=jnp.int32)[None], jnp.ones((1, 7), jnp.int32)

    @jax.jit
    def both(params, grown, taps, embeds):
        small, large = graph_of(cfg.build).merge(params), graph_of(new.build).merge(grown)
        wide_taps = jnp.concatenate([wider(tap, GROWN.hidden_size) for tap in jnp.split(taps, 2, axis=-1)], axis=-1)
        wide_embeds = [wider(e, GROWN.hidden_size) for e in embeds]
        few = small.passes(embeds, taps, places, ones)
        many = large.passes(wide_embeds, wide_taps, places, ones)
        return jnp.stack([small.logits(x) for x in few]), jnp.stack([large.logits(x) for x in many])

    keys = jax.random.split(jax.random.key(6), 4)
    embeds = [0.02 * jax.random.normal(key, (1, 7, POLICY.hidden_size)) for key in keys[1:]]
    want, got = both(params, grown, jax.random.normal(keys[0], (1, 7, 2 * POLICY.hidden_size)), embeds)
    assert np.abs(want).max() > 1.0
    assert np.abs(got - want).max() < 1e-5 * np.abs(want).max()
    norm = grown["midlayer"]["hidden_norm"]
    norm["weight"] = norm["weight"] * scale(POLICY, GROWN)
    off = both(params, grown, jax.random.normal(keys[0], (1, 7, 2 * POLICY.hidden_size)), embeds)[1]
    assert np.abs(off - want).max() > 1e-2, "s matters"


def generate(policy, draft, task, sampling):
    graphs = [graph_of(cfg.build) for cfg, _ in (policy, draft)]
    shape = EngineShape(
        prompt_capacity=task.max_prompt_tokens,
        max_new_tokens=task.max_response_tokens,
        stop_ids=(task.tokenizer.eos_id,),
        pad_id=task.tokenizer.pad_id,
    )
    request = build_request([task.problem(i) for i in range(64)], 1, shape, jax.random.key(9))
    engine = Engine(*graphs, shape=shape, sampling=sampling)
    weights = [jax.tree.map(jnp.asarray, params) for _, params in (policy, draft)]
    return jax.device_get(engine.generate(*weights, request, 4))


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.0], ids=["temperature_1", "greedy"])
def test_on_the_demo_every_token_and_every_acceptance_is_that_of_the_small_pair(temperature):
    folder, task = resolve_checkpoint("shipped:arithmetic3"), ArithmeticTask(ArithmeticConfig(digits=3), 0, "held_out")
    policy = load_policy(folder / "policy")
    family = FAMILIES["eagle3"]
    assert family.load is not None
    cfg, _, params = family.load(folder / "draft", None)
    larger = dataclasses.replace(policy[0], hidden_size=192, num_attention_heads=6, num_hidden_layers=3)
    grown = grow(policy, larger, jax.random.key(1)), grow_draft((cfg, params), policy[0], larger, jax.random.key(2))
    sampling = SamplingConfig(temperature=temperature)
    want, got = generate(policy, (cfg, params), task, sampling), generate(*grown, task, sampling)
    length = speculation_stats(want).accepted_length
    assert length is not None and length > 4.0
    for name in ("tokens", "lengths", "rounds", "accepted"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name), err_msg=name)


def test_a_draft_of_another_policy_is_refused():
    cfg = Eagle3Config.for_target(POLICY, hidden_size=24)
    with pytest.raises(ValueError, match="draft hidden_size=24 must equal the policy's 16"):
        grow_draft((cfg, {}), POLICY, GROWN, jax.random.key(0))
