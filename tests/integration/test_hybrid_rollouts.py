"""Speculative rollouts of every policy family, the recurrent ones included: greedy text is that of plain decoding.

Recurrent layers cannot overwrite a rejected token as a cache does; that no rejected draft leaves a trace is seen by the
text, and by a second reading of it from scratch.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.decoding.engine import Engine, EngineShape, Request, no_context, request_keys
from draftco_jax.drafts.ngram.config import NGramConfig
from draftco_jax.models.functional import initialise
from draftco_jax.models.gpt_oss import GptOssConfig
from draftco_jax.models.llama import LlamaConfig
from draftco_jax.models.nemotron_h import NemotronHConfig
from draftco_jax.models.qwen3_5_moe import Qwen35MoeConfig
from draftco_jax.models.qwen3_moe import Qwen3MoeConfig
from draftco_jax.models.rotary import Llama3Scaling
from draftco_jax.numerics.sampling import SamplingConfig
from draftco_jax.types import PolicyVersion
from draftco_jax.weight_sync import Publisher

SIZES = {
    "vocab_size": 13,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
EXPERTS = {"moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2}
POLICIES = {
    "llama": LlamaConfig(
        **SIZES,
        num_hidden_layers=2,
        rope_scaling=Llama3Scaling(
            factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16
        ),
    ),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **EXPERTS, num_hidden_layers=2),
    "qwen3_5_moe": Qwen35MoeConfig(
        **SIZES,
        **EXPERTS,
        num_hidden_layers=2,
        layer_types=("linear_attention", "full_attention"),
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        shared_expert_intermediate_size=8,
    ),
    "nemotron_h": NemotronHConfig(
        **SIZES,
        num_hidden_layers=4,
        block_types=("mamba", "moe", "attention", "mlp"),
        mamba_num_heads=2,
        mamba_head_dim=8,
        ssm_state_size=8,
        n_groups=1,
        moe_intermediate_size=8,
        moe_shared_expert_intermediate_size=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        chunk_size=8,
    ),
    "gpt_oss": GptOssConfig(
        **SIZES | {"intermediate_size": 8},
        num_hidden_layers=2,
        num_experts=4,
        num_experts_per_tok=2,
        layer_types=("sliding_attention", "full_attention"),
        sliding_window=4,
    ),
}
LENGTHS = np.array([5, 3, 1, 4], np.int32)


@pytest.mark.parametrize("family", POLICIES)
def test_greedy_speculation_is_plain_decoding_and_a_second_reading_agrees(family):
    cfg = POLICIES[family]
    graph, params = initialise(cfg.build, jax.random.key(1))
    # Weights of 0.02 say nearly the same everywhere; these have a mind of their own, and repeat themselves.
    params = jax.tree.map(lambda leaf: leaf * 6 if leaf.ndim >= 2 else leaf, params)
    draft_graph, draft = initialise(NGramConfig(min_match=1, max_match=2).build, jax.random.key(2))
    publisher = Publisher(graph, draft_graph)
    weights = publisher.publish(params, draft, PolicyVersion(0))
    shape = EngineShape(prompt_capacity=5, max_new_tokens=24, stop_ids=(), pad_id=0)
    engine = Engine(*publisher.rollout_graphs(params, draft), shape=shape, sampling=SamplingConfig(temperature=0.0))
    prompts = np.random.default_rng(3).integers(2, 13, (4, 5)).astype(np.int32)
    prompts[np.arange(5)[None] >= LENGTHS[:, None]] = 0
    request = Request(jnp.asarray(prompts), jnp.asarray(LENGTHS), request_keys(jax.random.key(5), 4), no_context(4))

    plain = engine.generate(weights.policy, weights.draft, request, 0)
    for k in (1, 3):
        found = engine.generate(weights.policy, weights.draft, request, k)
        np.testing.assert_array_equal(found.tokens, plain.tokens, err_msg=f"k={k}")
        accepted, proposed = int(np.asarray(found.accepted).sum()), int(np.asarray(found.proposed).sum())
        assert 0 < accepted < proposed, "only kept and rejected drafts together show anything"

    tokens = np.asarray(plain.tokens)
    places = np.arange(tokens.shape[1])[None]
    inside = jnp.asarray(places < np.asarray(plain.lengths)[:, None], jnp.int32)
    hidden, *_ = graph.merge(params)(jnp.asarray(tokens), jnp.asarray(places + 0 * tokens), inside)
    best = np.asarray(jnp.argmax(graph.merge(params).logits(hidden), axis=-1))
    for row, (start, end) in enumerate(zip(LENGTHS, np.asarray(plain.lengths), strict=True)):
        np.testing.assert_array_equal(best[row, start - 1 : end - 1], tokens[row, start:end])
