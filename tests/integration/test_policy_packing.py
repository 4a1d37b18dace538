"""Packed rows of every policy family against each document alone: states, taps of every layer, gradients.

Documents of one and two tokens, of more than the taps of a convolution and of more than the chunk of a recurrence; rows
with padding at the end, and one of nothing else. "Alone" is a row that holds one document and padding behind it, which
the last test shows to be inert.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.models.functional import initialise
from draftco_jax.models.gpt_oss import GptOssConfig
from draftco_jax.models.llama import LlamaConfig
from draftco_jax.models.nemotron_h import NemotronHConfig
from draftco_jax.models.qwen3 import Qwen3Config
from draftco_jax.models.qwen3_5_moe import Qwen35MoeConfig
from draftco_jax.models.qwen3_moe import Qwen3MoeConfig
from draftco_jax.models.rotary import Llama3Scaling, YarnScaling

VOCAB = 29
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
LLAMA31 = Llama3Scaling(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
POLICIES = {
    "llama": LlamaConfig(**SIZES, rope_scaling=LLAMA31),
    "qwen3": Qwen3Config(**SIZES, tie_word_embeddings=True),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **EXPERTS, moe_intermediate_size=8),
    "qwen3_5_moe": Qwen35MoeConfig(  # its recurrence goes by 64 tokens
        **SIZES,
        **EXPERTS,
        layer_types=("linear_attention", "full_attention"),
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        moe_intermediate_size=8,
        shared_expert_intermediate_size=8,
    ),
    "nemotron_h": NemotronHConfig(
        **SIZES | {"num_hidden_layers": 4},
        block_types=("mamba", "moe", "attention", "mlp"),
        mamba_num_heads=2,
        mamba_head_dim=8,
        ssm_state_size=8,
        n_groups=1,
        moe_intermediate_size=8,
        moe_shared_expert_intermediate_size=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        chunk_size=16,
    ),
    "gpt_oss": GptOssConfig(
        **SIZES,
        **EXPERTS,
        layer_types=("sliding_attention", "full_attention"),
        sliding_window=4,
        rope_scaling=YarnScaling(factor=8.0, original_max_position_embeddings=16, truncate=False),
    ),
}
LENGTHS = ((1, 70, 2, 9, 1), (2, 9, 1, 70), ())  # of the documents of each row
WIDTH = 88


class Rows(NamedTuple):
    """Arrays [R, T]."""

    tokens: jax.Array
    positions: jax.Array
    segment_ids: jax.Array
    weights: jax.Array  # f32 of each token's cross-entropy; 0 where nothing predicts it


def packed_rows(seed: int) -> tuple[Rows, list[tuple[int, slice]]]:
    """The rows, and where each document lies in them. Padding holds tokens and positions like any others."""
    rng = np.random.default_rng(seed)
    shape = (len(LENGTHS), WIDTH)
    tokens, weights = rng.integers(0, VOCAB, shape), rng.uniform(0.5, 1.5, shape)
    positions, segments, places = np.zeros(shape, np.int32), np.zeros(shape, np.int32), []
    for row, lengths in enumerate(LENGTHS):
        start = 0
        for number, length in enumerate(lengths):
            place = slice(start, start + length)
            positions[row, place], segments[row, place] = np.arange(length), number + 1
            places.append((row, place))
            start += length
    weights = np.where((segments > 0) & (positions > 0), weights, 0.0)
    int32 = lambda x: jnp.asarray(x, jnp.int32)  # noqa: E731
    return Rows(int32(tokens), int32(positions), int32(segments), jnp.asarray(weights, jnp.float32)), places


def lively(params: Any, seed: int) -> Any:
    """Fresh parameters made so large that every part counts; norms, biases and sinks not all the same."""
    rng = np.random.default_rng(seed)

    def change(leaf: jax.Array) -> jax.Array:
        value = np.asarray(leaf)
        if value.std() == 0:
            return jnp.asarray(value + 0.3 * rng.normal(size=value.shape), leaf.dtype)
        return leaf * jnp.float32(0.25 / value.std()) if value.std() < 0.1 else leaf

    return jax.tree.map(change, params)


@pytest.fixture(scope="module", params=POLICIES)
def policy(request):
    """Config, parameters and (params, rows) -> gradients of the summed weighted cross-entropy, states, taps."""
    cfg = POLICIES[request.param]
    graph, params = initialise(cfg.build, jax.random.key(0))

    def loss(params, rows):
        module = graph.merge(params)
        layers = tuple(range(cfg.num_hidden_layers))
        found = module(rows.tokens, rows.positions, rows.segment_ids, tap_layers=layers)
        logprobs = jax.nn.log_softmax(module.logits(found[0]))[:, :-1]
        chosen = jnp.take_along_axis(logprobs, rows.tokens[:, 1:, None], axis=-1)[..., 0]
        return -jnp.sum(rows.weights[:, 1:] * chosen), (found[0], found[1])

    return cfg, lively(params, seed=1), jax.jit(jax.grad(loss, has_aux=True))


def alone(rows: Rows, places: list[tuple[int, slice]]) -> Rows:
    """Rows as many and as long, each of them one document and then padding: one program does for both."""
    put = lambda x: np.zeros((len(LENGTHS), WIDTH), np.asarray(x).dtype)  # noqa: E731
    fresh = Rows(*(put(x) for x in rows))
    for number, (row, place) in enumerate(places):
        for target, given in zip(fresh, rows, strict=True):
            target[number, : place.stop - place.start] = given[row, place]
        fresh.segment_ids[number, : place.stop - place.start] = 1
    return Rows(*(jnp.asarray(x) for x in fresh))


def test_packed_documents_are_those_alone(policy):
    cfg, params, gradients_and_states = policy
    rows, places = packed_rows(seed=2)
    packed_gradients, (hidden, taps) = gradients_and_states(params, rows)
    assert taps.shape[-1] == cfg.num_hidden_layers * cfg.hidden_size
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((packed_gradients, hidden, taps)))
    total = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float64), params)
    for some in (places[i : i + len(LENGTHS)] for i in range(0, len(places), len(LENGTHS))):
        gradients, states = gradients_and_states(params, alone(rows, some))
        total = jax.tree.map(lambda sum_, leaf: sum_ + np.asarray(leaf, np.float64), total, gradients)
        for name, packed, single in zip(("hidden", "taps"), (hidden, taps), states, strict=True):
            for number, (row, place) in enumerate(some):
                expected = single[number, : place.stop - place.start]
                bound = 1e-5 * float(jnp.abs(expected).max())
                message = f"{name} at {place} of row {row}"
                np.testing.assert_allclose(packed[row, place], expected, rtol=0, atol=bound, err_msg=message)
    leaves = jax.tree_util.tree_leaves_with_path(packed_gradients)
    for (path, found), expected in zip(leaves, jax.tree.leaves(total), strict=True):
        name, size = jax.tree_util.keystr(path), np.abs(expected).max()
        # The router's correction chooses and is not differentiated.
        assert size > 0 or "e_score_correction_bias" in name, f"{name}: nothing to compare with"
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * size, err_msg=name)


def test_padding_is_not_seen(policy):
    """Other tokens in the padding change no state, bit for bit, and no gradient.

    Mixtures let padding through their experts, whose gradients are then summed in another order.
    """
    _, params, gradients_and_states = policy
    rows, _ = packed_rows(seed=2)
    padding = rows.segment_ids == 0
    other = rows._replace(tokens=jnp.where(padding, (rows.tokens + 7) % VOCAB, rows.tokens))
    first, states = gradients_and_states(params, rows)
    second, other_states = gradients_and_states(params, other)
    for state, changed in zip(states, other_states, strict=True):
        np.testing.assert_array_equal(state[~padding], changed[~padding])
        assert (state[padding] != changed[padding]).any()
    for leaf, changed in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_allclose(leaf, changed, rtol=0, atol=2e-6 * float(jnp.abs(leaf).max()))
