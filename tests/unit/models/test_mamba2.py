"""The Mamba-2 layer: packed rows, prompts, steps and their rollback are one function of the tokens."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from draftco_jax.context_parallel import WHOLE_ROWS
from draftco_jax.models.calls import CachedCall, Mixer, PackedCall
from draftco_jax.models.functional import ModelGraph, abstract_params, graph_of
from draftco_jax.models.mamba2 import Mamba2, Mamba2Sizes

SIZES = {"hidden_size": 10, "heads": 4, "head_dim": 3, "state": 5, "groups": 2, "chunk": 8}
LENGTH, LOOKAHEAD, BATCH = 40, 3, 4
# float32 sums in another order, of outputs up to 3; measured 6e-7 after eight rollbacks.
ATOL = 1e-5


class Layer(NamedTuple):
    """The layer with lively weights, and its calls compiled once."""

    graph: ModelGraph
    params: dict
    packed: object  # x, segment_ids, positions -> y
    prefill: object  # x, state, start, lengths -> y, state
    step: object  # x, state, start -> y, state


def build(**changes):
    return lambda rngs: Mamba2(Mamba2Sizes(**SIZES | changes), rngs=rngs)


def lively(params):
    """Norms that are not 1, biases that are not 0, steps around 0.3 and around the clamp."""
    rng = np.random.default_rng(1)

    def draw(path, leaf):
        noise = rng.normal(size=leaf.shape)
        name = jax.tree_util.keystr(path)
        if "weight" in name and leaf.ndim == 1 or "'D'" in name:
            noise = 1 + 0.3 * noise
        if "dt_bias" in name:
            noise = -1.0 + noise
        return jnp.asarray(noise * (leaf.shape[0] ** -0.5 if leaf.ndim == 2 else 1.0), leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, params)


# Clamped packed rows, prompts and steps are held to transformers every day, by test_mamba2_golden.py.
@pytest.fixture(
    scope="module",
    params=[
        pytest.param((0.0, math.inf), id="free"),
        pytest.param((0.3, 0.9), id="clamped", marks=pytest.mark.slow),
    ],
)
def layer(request) -> Layer:
    make = build(time_step_limit=request.param)
    graph, params = graph_of(make), lively(abstract_params(make))
    module = lambda: graph.merge(params)  # noqa: E731
    call = lambda x, start, lengths: CachedCall(start, None, jnp.ones((*x.shape[:2], 1), bool), lengths)  # noqa: E731
    return Layer(
        graph,
        params,
        packed=jax.jit(lambda x, segments, positions: module()(x, PackedCall(positions, segments, None, WHOLE_ROWS))),
        prefill=jax.jit(lambda x, state, start, lengths: module().step(x, state, call(x, start, lengths))),
        step=jax.jit(lambda x, state, start: module().step(x, state, call(x, start, None))),
    )


def inputs(seed, *shape):
    return np.random.default_rng(seed).normal(size=(*shape, SIZES["hidden_size"])).astype(np.float32)


def empty(layer, batch, lookahead=LOOKAHEAD):
    return layer.graph.merge(layer.params).empty_state(batch, 64, lookahead, jnp.float32)


def whole(layer, rows: list[np.ndarray]) -> np.ndarray:
    """Each history [t, D] as a row of its own, filled up to LENGTH: outputs [rows, LENGTH, D]."""
    x = np.zeros((len(rows), LENGTH, SIZES["hidden_size"]), np.float32)
    for row, history in enumerate(rows):
        x[row, : len(history)] = history
    segments = np.arange(LENGTH)[None] < np.array([[len(r)] for r in rows])
    positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), segments.shape)
    return np.asarray(layer.packed(jnp.asarray(x), jnp.asarray(segments, jnp.int32), jnp.asarray(positions)))


def i32(*values):
    return jnp.asarray(values, jnp.int32)


# ---- packed rows ----


def test_bug_case_b51_packed_documents_are_as_if_alone(layer):
    """Documents of 3, 1, 20, 1 and 9 tokens, padding between two of them and at the end."""
    lengths, at = (3, 1, 20, 1, 9), (0, 3, 4, 26, 27)
    x = inputs(0, BATCH, LENGTH)
    segments, positions = np.zeros((2, BATCH, LENGTH), np.int32)
    for number, (start, length) in enumerate(zip(at, lengths, strict=True), 1):
        segments[:, start : start + length] = number
        positions[:, start : start + length] = np.arange(length)
    y = np.asarray(layer.packed(jnp.asarray(x), jnp.asarray(segments), jnp.asarray(positions)))
    assert np.isfinite(y).all()
    for start, length in zip(at, lengths, strict=True):
        alone = whole(layer, list(x[:, start : start + length]))
        np.testing.assert_allclose(y[:, start : start + length], alone[:, :length], rtol=0, atol=ATOL)


def test_no_token_sees_a_later_one(layer):
    x = inputs(1, BATCH, LENGTH)
    changed = x.copy()
    changed[:, 17:] += 1.0
    before, after = whole(layer, list(x)), whole(layer, list(changed))
    np.testing.assert_array_equal(before[:, :17], after[:, :17])
    assert np.abs(before[:, 17] - after[:, 17]).min() > 1e-3


def test_every_parameter_counts(layer):
    def loss(params):
        call = PackedCall(jnp.arange(LENGTH, dtype=jnp.int32)[None], jnp.ones((1, LENGTH), jnp.int32), None, WHOLE_ROWS)
        return jnp.sum(layer.graph.merge(params)(jnp.asarray(inputs(2, 1, LENGTH)), call) ** 2)

    for path, gradient in jax.tree_util.tree_leaves_with_path(jax.jit(jax.grad(loss))(layer.params)):
        assert np.isfinite(gradient).all() and np.abs(gradient).max() > 1e-3, path


# ---- prompts and steps ----


def test_prompts_filled_up_are_as_if_alone_and_go_on_as_whole_rows(layer):
    """Prompts of 1, 2, 7 and 16 tokens of 16, then two tokens of each; train = prefill = decode, clamped or not."""
    x, lengths = inputs(3, BATCH, 16 + 2), (1, 2, 7, 16)
    histories = [x[row, :length] for row, length in enumerate(lengths)]
    alone = whole(layer, histories)
    y, state = layer.prefill(jnp.asarray(x[:, :16]), empty(layer, BATCH, 0), i32(0, 0, 0, 0), i32(*lengths))
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(y[row, :length], alone[row, :length], rtol=0, atol=ATOL)
    for _ in range(2):
        new, start = inputs(len(histories[0]), BATCH, 1), i32(*map(len, histories))
        y, state = layer.step(jnp.asarray(new), state, start)
        histories = [np.concatenate([h, n]) for h, n in zip(histories, new, strict=True)]
        wanted = whole(layer, histories)
        for row, history in enumerate(histories):
            np.testing.assert_allclose(y[row, 0], wanted[row, len(history) - 1], rtol=0, atol=ATOL)


def test_what_fills_a_prompt_up_changes_no_bit(layer):
    x = inputs(4, BATCH, 16)
    spoiled = np.where(np.arange(16)[None, :, None] < 7, x, np.float32(9.0))
    call = (empty(layer, BATCH), i32(0, 0, 0, 0), i32(7, 7, 7, 7))
    (_, clean), (_, dirty) = (layer.prefill(jnp.asarray(rows), *call) for rows in (x, spoiled))
    for one, other in zip(jax.tree.leaves(clean), jax.tree.leaves(dirty), strict=True):
        np.testing.assert_array_equal(one, other)


def test_one_token_at_a_time_is_the_whole_row(layer):
    x = inputs(5, BATCH, 12)
    wanted, state = whole(layer, list(x)), empty(layer, BATCH, 0)
    for t in range(12):
        y, state = layer.step(jnp.asarray(x[:, t : t + 1]), state, i32(t, t, t, t))
        np.testing.assert_allclose(y[:, 0], wanted[:, t], rtol=0, atol=ATOL)


# Tokens kept of each call of 4, by request: all of 0..4, in all orders that matter (none after all, all after none,
# none twice), and every request has another history.
KEPT = ((1, 4, 0, 2), (4, 0, 0, 3), (0, 4, 4, 1), (2, 1, 1, 0), (4, 4, 3, 4), (3, 0, 2, 4), (1, 2, 4, 0), (1, 1, 1, 1))


def test_bug_case_b39_after_any_rollback_the_state_is_that_of_the_kept_tokens(layer):
    """Every call equals whole rows made of the kept tokens and that call's, whatever was rejected before."""
    lengths = (5, 1, 8, 3)
    histories = [row[:length] for row, length in zip(inputs(6, BATCH, 8), lengths, strict=True)]
    prompt = np.stack([np.pad(h, ((0, 8 - len(h)), (0, 0))) for h in histories])
    state = layer.prefill(jnp.asarray(prompt), empty(layer, BATCH), i32(0, 0, 0, 0), i32(*lengths))[1]
    for number, kept in enumerate(KEPT):
        new = inputs(100 + number, BATCH, LOOKAHEAD + 1)
        y, state = layer.step(jnp.asarray(new), state, i32(*map(len, histories)))
        wanted = whole(layer, [np.concatenate([h, n]) for h, n in zip(histories, new, strict=True)])
        for row, history in enumerate(histories):
            here = slice(len(history), len(history) + LOOKAHEAD + 1)
            np.testing.assert_allclose(y[row], wanted[row, here], rtol=0, atol=ATOL)
        histories = [np.concatenate([h, n[:k]]) for h, n, k in zip(histories, new, kept, strict=True)]
    assert {k for row in KEPT for k in row} == set(range(LOOKAHEAD + 2))


def test_bug_case_b39_rejected_tokens_leave_no_trace(layer):
    """Two calls that differ in their rejected tokens alone are followed by the same outputs, bit for bit."""
    first, second = inputs(7, BATCH, LOOKAHEAD + 1), inputs(8, BATCH, LOOKAHEAD + 1)
    other = first.copy()
    other[:, 2:] += 3.0
    outputs = []
    for rows in (first, other):
        state = layer.step(jnp.asarray(rows), empty(layer, BATCH), i32(0, 0, 0, 0))[1]
        outputs.append(layer.step(jnp.asarray(second), state, i32(2, 1, 0, 2))[0])
    np.testing.assert_array_equal(*outputs)


def test_a_prompt_may_follow_kept_tokens(layer):
    """A turn of a conversation: a call with lengths reads what was kept of the call before it."""
    x = inputs(9, BATCH, 12)
    state = layer.step(jnp.asarray(x[:, :4]), empty(layer, BATCH), i32(0, 0, 0, 0))[1]
    y, state = layer.prefill(jnp.asarray(x[:, 4:]), state, i32(1, 2, 3, 4), i32(8, 7, 6, 5))
    for row, (kept, length) in enumerate(((1, 8), (2, 7), (3, 6), (4, 5))):
        wanted = whole(layer, [np.concatenate([x[row, :kept], x[row, 4 : 4 + length]])])
        np.testing.assert_allclose(y[row, :length], wanted[0, kept : kept + length], rtol=0, atol=ATOL)
    assert np.asarray(state.position).tolist() == [9, 9, 9, 9]


def test_a_call_of_fewer_tokens_is_read_on_from_any_of_them(layer):
    x = inputs(9, BATCH, 6)
    state = layer.step(jnp.asarray(x[:, :2]), empty(layer, BATCH), i32(0, 0, 0, 0))[1]
    y = layer.step(jnp.asarray(x[:, 2:]), state, i32(0, 1, 2, 1))[0]
    for row, kept in enumerate((0, 1, 2, 1)):
        wanted = whole(layer, [np.concatenate([x[row, :kept], x[row, 2:]])])
        np.testing.assert_allclose(y[row], wanted[0, kept : kept + 4], rtol=0, atol=ATOL)


def test_a_call_of_more_tokens_than_there_is_room_for_is_refused(layer):
    with pytest.raises(ValueError, match=r"T=5 must be <= lookahead \+ 1 = 4"):
        layer.step(jnp.asarray(inputs(0, BATCH, 5)), empty(layer, BATCH), i32(0, 0, 0, 0))


# ---- parameters and dtypes ----


def test_the_clamp_is_felt():
    """Else the tests of the clamped layer would be those of the free one."""
    x, outputs = inputs(10, 1, LENGTH), []
    for limit in ((0.0, math.inf), (0.3, math.inf), (0.0, 0.3)):
        make = build(time_step_limit=limit)
        call = PackedCall(jnp.arange(LENGTH, dtype=jnp.int32)[None], jnp.ones((1, LENGTH), jnp.int32), None, WHOLE_ROWS)
        module = graph_of(make).merge(lively(abstract_params(make)))
        outputs.append(np.asarray(jax.jit(lambda x, module=module, call=call: module(x, call))(jnp.asarray(x))))
    assert all(np.abs(outputs[i] - outputs[j]).max() > 0.1 for i, j in ((0, 1), (0, 2), (1, 2)))


def test_shapes_names_and_axes_are_the_published_ones():
    sizes = Mamba2Sizes(hidden_size=2688, heads=64, head_dim=64, state=128, groups=8)
    module = nnx.eval_shape(lambda: Mamba2(sizes, rngs=nnx.Rngs(0)))
    assert isinstance(module, Mixer)
    leaves = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.state(module, nnx.Param)))
    found = {".".join(key.key for key in path): leaf.shape for path, leaf in leaves}
    assert found == {
        "in_proj.z.kernel": (2688, 4096),
        "in_proj.x.kernel": (2688, 4096),
        "in_proj.B.kernel": (2688, 1024),
        "in_proj.C.kernel": (2688, 1024),
        "in_proj.dt.kernel": (2688, 64),
        "conv1d.x.weight": (4096, 4),
        "conv1d.x.bias": (4096,),
        "conv1d.B.weight": (1024, 4),
        "conv1d.B.bias": (1024,),
        "conv1d.C.weight": (1024, 4),
        "conv1d.C.bias": (1024,),
        "A_log": (64,),
        "D": (64,),
        "dt_bias": (64,),
        "norm.weight": (4096,),
        "out_proj.kernel": (4096, 2688),
    }


def test_training_starts_with_the_published_rates_and_steps():
    module = Mamba2(Mamba2Sizes(**SIZES | {"heads": 64}), rngs=nnx.Rngs(0))
    np.testing.assert_allclose(np.exp(module.A_log[...]), np.arange(1, 65), rtol=1e-5)  # exp and log in float32
    steps = np.asarray(jax.nn.softplus(module.dt_bias[...]))
    assert 0.9e-3 < steps.min() < 3e-3 and 0.03 < steps.max() < 0.11
    assert len(np.unique(steps)) == 64


def test_bfloat16_stays_bfloat16_and_keeps_a_float32_state(layer):
    """Within 8 bits of the float32 layer: inputs, projections and kept inputs are rounded, the recurrence is not."""
    x = inputs(11, BATCH, LOOKAHEAD + 1)
    module = layer.graph.merge(layer.params)
    state = module.empty_state(BATCH, 64, LOOKAHEAD, jnp.bfloat16)
    y, state = layer.step(jnp.asarray(x, jnp.bfloat16), state, i32(0, 0, 0, 0))
    assert (y.dtype, state.s.dtype, state.window.dtype, state.pending.xbc.dtype, state.pending.dt.dtype) == (
        jnp.bfloat16,
        jnp.float32,
        jnp.bfloat16,
        jnp.bfloat16,
        jnp.float32,
    )
    wanted = whole(layer, list(x))[:, : LOOKAHEAD + 1]
    # Outputs up to 2.4, 2^-9 a rounding, about six of them; measured 0.016.
    assert np.abs(np.asarray(y, np.float32) - wanted).max() < 0.04


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 0}, "heads=0 must be >= 1; "),
        ({"chunk": 0}, "chunk=0 must be >= 1; "),
        ({"groups": 3}, "heads=4 must be a multiple of groups=3"),
        ({"eps": 0.0}, "eps=0.0 must be > 0; "),
        ({"time_step_limit": (0.5, 0.1)}, r"time_step_limit=\(0.5, 0.1\) must be 0 <= low < high; "),
        ({"time_step_limit": (-1.0, 1.0)}, r"time_step_limit=\(-1.0, 1.0\) must be 0 <= low < high; "),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Mamba2Sizes(**SIZES | change)
