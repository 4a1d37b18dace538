"""The gated delta net: packed rows against documents alone, steps against reading the kept tokens anew."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from draftco_jax.context_parallel import WHOLE_ROWS
from draftco_jax.models.calls import CachedCall, Mixer, PackedCall
from draftco_jax.models.functional import graph_of
from draftco_jax.models.gated_delta import GatedDeltaNet

WIDTH, LOOKAHEAD, CHUNK = 12, 3, 8
NEW = LOOKAHEAD + 1
# Outputs of size 1, float32 sums of some 20 products a layer in another order; measured 3e-7.
CLOSE = 1e-5


def build(rngs):
    return GatedDeltaNet(WIDTH, key_heads=2, value_heads=4, key_dim=4, value_dim=6, eps=1e-6, rngs=rngs, chunk=CHUNK)


@pytest.fixture(scope="module")
def graph():
    return graph_of(build)


@pytest.fixture(scope="module")
def params(make_params):
    params = make_params(type("Build", (), {"build": staticmethod(build)}), seed=3)
    # Decays near 0.9 a token, so that what was read long ago is still felt.
    return params | {"A_log": params["A_log"] - 4.0}


def packed_call(segments):
    zeros = jnp.zeros(segments.shape, jnp.int32)
    return PackedCall(zeros, jnp.asarray(segments, jnp.int32), None, WHOLE_ROWS)


@pytest.fixture(scope="module")
def forward(graph, params):
    """(x, segment ids) -> outputs and, of their sum with weights, the gradients of x and of the parameters."""

    def loss(params, x, segments, weights):
        y = graph.merge(params)(x, packed_call(segments))
        return jnp.sum(y * weights), y

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))

    def call(x, segments, weights=None):
        weights = np.zeros_like(x) if weights is None else weights
        gradients, y = compiled(params, jnp.asarray(x), jnp.asarray(segments, jnp.int32), jnp.asarray(weights))
        return np.asarray(y), gradients

    return call


@pytest.fixture(scope="module")
def step(graph, params):
    """(x, state, start, lengths or None) -> outputs, state."""

    @jax.jit
    def run(x, state, start, lengths):
        visible = jnp.ones((x.shape[0], x.shape[1], 1), bool)
        return graph.merge(params).step(x, state, CachedCall(start, None, visible, lengths))

    def call(x, state, start, lengths=None):
        start, lengths = (None if a is None else jnp.asarray(a, jnp.int32) for a in (start, lengths))
        return run(jnp.asarray(x), state, start, lengths)

    return call


def read_anew(forward, texts, tokens=40):
    """Outputs of each text [t, D] read at once, as rows of one compiled program."""
    rows, segments = np.zeros((3, tokens, WIDTH), np.float32), np.zeros((3, tokens), np.int32)
    for row, text in enumerate(texts):
        rows[row, : len(text)], segments[row, : len(text)] = text, 1
    y = forward(rows, segments)[0]
    return [y[row, : len(text)] for row, text in enumerate(texts)]


def test_it_is_a_mixer_and_its_arrays_have_the_published_names(graph, params):
    module = graph.merge(params)
    assert isinstance(module, Mixer)
    shapes = {"/".join(map(str, path)): leaf[...].shape for path, leaf in nnx.to_flat_state(nnx.state(module))}
    assert shapes == {
        "A_log": (4,),
        "conv1d/k/weight": (8, 4),
        "conv1d/q/weight": (8, 4),
        "conv1d/v/weight": (24, 4),
        "dt_bias": (4,),
        "in_proj_a/kernel": (WIDTH, 4),
        "in_proj_b/kernel": (WIDTH, 4),
        "in_proj_qkv/k/kernel": (WIDTH, 8),
        "in_proj_qkv/q/kernel": (WIDTH, 8),
        "in_proj_qkv/v/kernel": (WIDTH, 24),
        "in_proj_z/kernel": (WIDTH, 24),
        "norm/weight": (6,),
        "out_proj/kernel": (24, WIDTH),
    }


def by_the_formula(params, x):
    """The whole layer on one document [T, D], in float64 numpy, head by head and token by token."""
    p = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
    silu = lambda y: y / (1 + np.exp(-y))  # noqa: E731
    kernel = np.concatenate([p["in_proj_qkv"][part]["kernel"] for part in "qkv"], axis=1)
    weight = np.concatenate([p["conv1d"][part]["weight"] for part in "qkv"])
    before = np.pad(x @ kernel, ((3, 0), (0, 0)))
    taps = [before[i : i + len(x)] * weight[:, i] for i in range(4)]
    q, k, v = np.split(silu(sum(taps)), [8, 16], axis=-1)
    beta = 1 / (1 + np.exp(-x @ p["in_proj_b"]["kernel"]))
    g = -np.exp(p["A_log"]) * np.log1p(np.exp(x @ p["in_proj_a"]["kernel"] + p["dt_bias"]))
    gate = silu(x @ p["in_proj_z"]["kernel"]).reshape(len(x), 4, 6)
    out = np.zeros((len(x), 4, 6))
    for head in range(4):
        mine = slice(4 * (head // 2), 4 * (head // 2) + 4)  # key heads 0 0 1 1
        unit_q, unit_k = (y[:, mine] / np.sqrt((y[:, mine] ** 2).sum(-1, keepdims=True) + 1e-6) for y in (q, k))
        memory = np.zeros((4, 6))
        for t in range(len(x)):
            memory = memory * np.exp(g[t, head])
            found = memory.T @ unit_k[t]
            memory += np.outer(unit_k[t], beta[t, head] * (v[t, 6 * head : 6 * head + 6] - found))
            o = memory.T @ unit_q[t] / 2  # dk^-1/2
            out[t, head] = p["norm"]["weight"] * o / np.sqrt((o**2).mean() + 1e-6) * gate[t, head]
    return out.reshape(len(x), -1) @ p["out_proj"]["kernel"]


def test_outputs_are_those_of_the_formula(params, forward):
    x = np.random.default_rng(5).normal(size=(30, WIDTH)).astype(np.float32)
    np.testing.assert_allclose(read_anew(forward, [x])[0], by_the_formula(params, x), rtol=0, atol=CLOSE)


def test_bug_case_b51_packed_documents_equal_each_alone_in_values_and_gradients(forward):
    """Documents of 3, 1, 17 and 6 tokens in one row with padding, against a row each."""
    rng, lengths = np.random.default_rng(0), (3, 1, 17, 6)
    x, weights = rng.normal(size=(2, 3, 40, WIDTH)).astype(np.float32)
    segments, alone = np.zeros((2, 4, 40), np.int32)
    rows, alone_weights = np.zeros((2, 4, 40, WIDTH), np.float32)
    start = 0
    for number, length in enumerate(lengths):
        span = slice(start, start + length)
        segments[0, span], alone[number, :length] = number + 1, 1
        rows[number, :length], alone_weights[number, :length] = x[0, span], weights[0, span]
        start += length + 2 * (number == 1)
    segments, weights = segments[:3], weights * (segments[:3, :, None] > 0)
    y, (of_params, of_x) = forward(x, segments, weights.astype(np.float32))
    y_alone, (of_params_alone, of_x_alone) = forward(rows, alone, alone_weights)
    for number in range(4):
        here = segments[0] == number + 1
        np.testing.assert_allclose(y[0, here], y_alone[number][: here.sum()], rtol=0, atol=CLOSE)
        np.testing.assert_allclose(
            np.asarray(of_x)[0, here], np.asarray(of_x_alone)[number][: here.sum()], rtol=0, atol=CLOSE * 10
        )
    for a, b in zip(*map(jax.tree.leaves, (of_params, of_params_alone)), strict=True):
        assert np.abs(np.asarray(b)).max() > 0
        np.testing.assert_allclose(a, b, rtol=0, atol=CLOSE * np.abs(np.asarray(b)).max())
    np.testing.assert_array_equal(y[segments == 0], 0.0)


def test_any_counts_of_kept_tokens_equal_reading_the_kept_text_anew(graph, params, forward, step):
    """Nine rounds, rows with different counts, all of 0..k+1 met in each row; also right after a prompt."""
    rng = np.random.default_rng(1)
    rounds = np.array([[0, 4, 1, 2, 3, 0, 0, 4, 1], [4, 3, 2, 1, 0, 4, 1, 0, 2], [1, 0, 0, 3, 4, 2, 2, 1, 4]])
    assert all(set(row) == set(range(NEW + 1)) for row in rounds)
    lengths = [2, 7, 5]
    prompts = rng.normal(size=(3, 7, WIDTH)).astype(np.float32)
    state = graph.merge(params).empty_state(3, 64, LOOKAHEAD, jnp.float32)
    y, state = step(prompts, state, np.zeros(3), lengths)
    texts = [prompt[:n] for prompt, n in zip(prompts, lengths, strict=True)]
    for row, wanted in enumerate(read_anew(forward, texts)):
        np.testing.assert_allclose(y[row, : lengths[row]], wanted, rtol=0, atol=CLOSE)
    for counts in rounds.T:
        new = rng.normal(size=(3, NEW, WIDTH)).astype(np.float32)
        y, state = step(new, state, [len(text) for text in texts])
        whole = read_anew(forward, [np.concatenate(pair) for pair in zip(texts, new, strict=True)])
        for row in range(3):
            np.testing.assert_allclose(y[row], whole[row][-NEW:], rtol=0, atol=CLOSE, err_msg=f"{row=} {counts=}")
        texts = [np.concatenate([text, n[:c]]) for text, n, c in zip(texts, new, counts, strict=True)]


def test_a_rejected_token_would_show(graph, params, step):
    """The same call with one token more or less kept answers differently: the test above can fail."""
    rng = np.random.default_rng(2)
    prompt, first, second = (rng.normal(size=(3, n, WIDTH)).astype(np.float32) for n in (7, NEW, NEW))
    state = graph.merge(params).empty_state(3, 64, LOOKAHEAD, jnp.float32)
    _, state = step(prompt, state, np.zeros(3), [7, 7, 7])
    _, state = step(first, state, [7] * 3)
    answers = [np.asarray(step(second, state, [7 + kept] * 3)[0]) for kept in range(NEW + 1)]
    for fewer, more in zip(answers[:-1], answers[1:], strict=True):
        assert (np.abs(fewer - more).max(axis=(1, 2)) > 100 * CLOSE).all()


def test_a_call_of_fewer_tokens_is_read_on_from_any_of_them(graph, params, forward, step):
    rng = np.random.default_rng(5)
    x = rng.normal(size=(3, 2 + NEW, WIDTH)).astype(np.float32)
    state = graph.merge(params).empty_state(3, 64, LOOKAHEAD, jnp.float32)
    _, state = step(x[:, :2], state, [0, 0, 0])
    y, _ = step(x[:, 2:], state, [0, 1, 2])
    whole = read_anew(forward, [np.concatenate([x[kept, :kept], x[kept, 2:]]) for kept in range(3)])
    for kept in range(3):
        np.testing.assert_allclose(y[kept], whole[kept][kept:], rtol=0, atol=CLOSE)


def test_a_prompt_may_be_read_in_parts_and_padding_is_not_read(graph, params, forward, step):
    """Prompts of 7, 1 and 4 tokens, then more of each: what stands behind a prompt has no effect at all."""
    rng = np.random.default_rng(3)
    x, more = rng.normal(size=(2, 3, 7, WIDTH)).astype(np.float32)
    lengths, second = [7, 1, 4], [3, 7, 5]
    spoiled = np.where(np.arange(7)[None, :, None] < np.array(lengths)[:, None, None], x, np.float32(1e3))
    states, results = [], []
    for prompt in (x, spoiled):
        state = graph.merge(params).empty_state(3, 64, LOOKAHEAD, jnp.float32)
        _, state = step(prompt, state, np.zeros(3), lengths)
        y, state = step(more, state, lengths, second)
        states.append(state)
        results.append(np.asarray(y))
    jax.tree.map(np.testing.assert_array_equal, *states)
    np.testing.assert_array_equal(states[0].position, np.add(lengths, second))
    texts = [np.concatenate([x[r, : lengths[r]], more[r, : second[r]]]) for r in range(3)]
    for row, wanted in enumerate(read_anew(forward, texts)):
        np.testing.assert_allclose(results[0][row, : second[row]], wanted[lengths[row] :], rtol=0, atol=CLOSE)


def test_low_precision_agrees_between_packed_and_cached(graph, params, step):
    """bfloat16 in and out, the memory float32: the two ways differ by roundings of outputs, not of a state."""
    rng = np.random.default_rng(4)
    x = jnp.asarray(rng.normal(size=(3, 7, WIDTH)), jnp.bfloat16)
    state = graph.merge(params).empty_state(3, 64, LOOKAHEAD, jnp.bfloat16)
    y, state = step(x, state, np.zeros(3), [7, 7, 7])
    assert (y.dtype, state.inputs.dtype, state.memory.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    packed = jax.jit(lambda x: graph.merge(params)(x, packed_call(jnp.ones((3, 7), jnp.int32))))(x)
    assert packed.dtype == jnp.bfloat16
    ulp = 2.0**-8 * np.abs(np.asarray(packed, np.float32)).max()
    np.testing.assert_allclose(np.asarray(y, np.float32), np.asarray(packed, np.float32), rtol=0, atol=ulp)


def test_wrong_sizes_are_refused(graph, params, step):
    state = graph.merge(params).empty_state(3, 64, LOOKAHEAD, jnp.float32)
    with pytest.raises(ValueError, match="must hold <= 4 tokens a request"):
        step(np.zeros((3, 5, WIDTH), np.float32), state, np.zeros(3))
    with pytest.raises(ValueError, match="value_heads=3 must be a multiple of key_heads=2"):
        GatedDeltaNet(WIDTH, key_heads=2, value_heads=3, key_dim=4, value_dim=6, eps=1e-6, rngs=nnx.Rngs(0))
