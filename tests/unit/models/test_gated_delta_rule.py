"""The gated delta rule: reference and chunks against the formula in float64, their gradients, packed against alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.context_parallel import WHOLE_ROWS
from draftco_jax.models.delta_rule import DeltaInputs, delta_rule_chunked, delta_rule_sequential
from draftco_jax.models.recurrent import Documents, documents

KEY_HEADS, HEADS, KEY, VALUE = 2, 4, 4, 3
CHUNK = 8
# float32 sums of up to 60 tokens in another order, over the largest entry; measured 1e-7 to 1e-6.
CLOSE = 1e-5
# Row 0: shorter than a chunk; a token alone; starts inside chunks; padding between and behind. Row 1: one document.
LENGTHS = (5, 1, 1, 14, 3)
TOKENS = 37


def draw(seed, rows, tokens, decay=0.3):
    """Unit keys and queries, decays from weak to strong."""
    rng = np.random.default_rng(seed)
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)  # noqa: E731
    arrays = (
        unit(rng.normal(size=(rows, tokens, KEY_HEADS, KEY))) * KEY**-0.5,
        unit(rng.normal(size=(rows, tokens, KEY_HEADS, KEY))),
        rng.normal(size=(rows, tokens, HEADS, VALUE)),
        -decay * rng.exponential(size=(rows, tokens, HEADS)),
        1 / (1 + np.exp(-2 * rng.normal(size=(rows, tokens, HEADS)))),
    )
    return DeltaInputs(*(jnp.asarray(a, jnp.float32) for a in arrays))


def row_ids():
    ids, start = np.zeros((2, TOKENS), np.int32), 0
    for number, length in enumerate(LENGTHS, 1):
        start += 2 if number == 4 else 0  # padding in the middle
        ids[0, start : start + length] = number
        start += length
    ids[1] = 1
    return ids


IDS = row_ids()


def whole(rows, tokens):
    """Every token real, no document starts: only the state before decides."""
    return Documents(jnp.ones((rows, tokens), bool), jnp.zeros((rows, tokens), bool))


def formula(x, row, span, state=None):
    """Float64, head by head and token by token, of one stretch of one row."""
    q, k, v, g, beta = (np.asarray(a[row, span], np.float64) for a in x)
    out = np.zeros((len(v), HEADS, VALUE))
    states = np.zeros((HEADS, KEY, VALUE)) if state is None else np.array(state, np.float64)
    for head in range(HEADS):
        s = states[head]
        for t in range(len(v)):
            key = k[t, head // (HEADS // KEY_HEADS)]
            s = np.exp(g[t, head]) * s
            s = s + np.outer(key, beta[t, head] * (v[t, head] - s.T @ key))
            out[t, head] = s.T @ q[t, head // (HEADS // KEY_HEADS)]
        states[head] = s
    return out, states


def close(got, wanted, tolerance=CLOSE):
    wanted = np.asarray(wanted)
    assert np.isfinite(np.asarray(got)).all()
    np.testing.assert_allclose(got, wanted, rtol=0, atol=tolerance * np.abs(wanted).max())


@pytest.fixture(scope="module", params=["sequential", "chunked"])
def rule(request):
    if request.param == "sequential":
        return jax.jit(delta_rule_sequential)
    return jax.jit(lambda x, d, s: delta_rule_chunked(x, d, s, chunk=CHUNK))


@pytest.fixture(scope="module")
def packed():
    return draw(0, 2, TOKENS), documents(jnp.asarray(IDS), WHOLE_ROWS)


def test_bug_case_b51_packed_documents_are_each_alone_by_the_formula(rule, packed):
    """Also where a document starts inside a chunk, is one token long or shorter than a chunk; padding answers 0."""
    x, docs = packed
    out, last = rule(x, docs, jnp.full((2, HEADS, KEY, VALUE), 7.0))  # a start forgets what was before the row
    spans = [np.flatnonzero(IDS[0] == i) for i in range(1, len(LENGTHS) + 1)]
    assert [len(s) for s in spans] == list(LENGTHS)
    for span in spans:
        wanted, state = formula(x, 0, span)
        close(out[0, span], wanted)
    close(last[0], state)  # padding behind the last document changes nothing
    wanted, state = formula(x, 1, slice(None))
    close(out[1], wanted)
    close(last[1], state)
    np.testing.assert_array_equal(np.asarray(out)[IDS == 0], 0.0)


def test_a_state_is_taken_up_and_handed_on(rule):
    x, state = draw(1, 2, TOKENS), draw(2, 2, KEY).v.transpose(0, 2, 1, 3)
    out, last = rule(x, whole(2, TOKENS), state)
    for row in range(2):
        wanted, after = formula(x, row, slice(None), state[row])
        close(out[row], wanted)
        close(last[row], after)


def test_padding_takes_no_part_even_where_it_is_nan(rule, packed):
    x, docs = packed
    blank = lambda y: jnp.where(jnp.asarray(IDS == 0).reshape(2, TOKENS, *(1,) * (y.ndim - 2)), jnp.nan, y)  # noqa: E731
    state = jnp.zeros((2, HEADS, KEY, VALUE))
    np.testing.assert_array_equal(rule(jax.tree.map(blank, x), docs, state)[0], rule(x, docs, state)[0])


def gradients(function, x, docs, state):
    """Of a sum of all answers and of the last state with weights, with respect to every input and the first state."""
    rng = np.random.default_rng(5)
    weights, of_last = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in (x.v.shape, state.shape))

    def loss(x, state):
        out, last = function(x, docs, state)
        return jnp.sum(out * weights) + jnp.sum(last * of_last)

    return jax.jit(jax.grad(loss, argnums=(0, 1)))(x, state)


@pytest.mark.parametrize("decay", [0.3, 20.0])
def test_chunks_have_the_gradients_of_the_reference(decay):
    """Of packed ragged rows in the first, of rows that go on from a state in the second; weak and strong decay."""
    x = draw(3, 4, TOKENS, decay)
    mixed = jax.tree.map(lambda *a: jnp.concatenate(a), documents(jnp.asarray(IDS), WHOLE_ROWS), whole(2, TOKENS))
    state = jnp.asarray(np.random.default_rng(4).normal(size=(4, HEADS, KEY, VALUE)), jnp.float32)
    wanted = gradients(delta_rule_sequential, x, mixed, state)
    got = gradients(lambda *a: delta_rule_chunked(*a, chunk=CHUNK), x, mixed, state)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert np.abs(np.asarray(b)).max() > 0
        close(a, b)
    for leaf in jax.tree.leaves(got[0]):
        np.testing.assert_array_equal(np.asarray(leaf)[:2][IDS == 0], 0.0)


def test_small_decays_behind_a_large_one_are_kept():
    """Sums of g are made for each pair: running sums behind a decay of 6e4 come in steps of 4e-3."""
    x = draw(6, 1, CHUNK)
    x = x._replace(log_decay=x.log_decay.at[:, 0].set(-6e4))
    wanted, _ = formula(x, 0, slice(None))
    close(delta_rule_chunked(x, whole(1, CHUNK))[0][0], wanted)


def test_alike_keys_lose_no_digits():
    """One key for 37 tokens, written in full and never forgotten: powers of the system pass 1e9, its inverse 1."""
    x = draw(8, 1, TOKENS)
    x = x._replace(k=x.k.at[:].set(x.k[:, :1]), log_decay=0 * x.log_decay, beta=jnp.ones_like(x.beta))
    wanted, state = formula(x, 0, slice(None))
    out, last = delta_rule_chunked(x, whole(1, TOKENS))
    close(out[0], wanted)
    close(last[0], state)


def test_a_row_shorter_than_the_chunk_is_one_chunk_of_its_length():
    x = draw(7, 1, 3)
    out, last = jax.eval_shape(delta_rule_chunked, x, whole(1, 3))
    assert (out.shape, last.shape) == ((1, 3, HEADS, VALUE), (1, HEADS, KEY, VALUE))
    widest = max(
        np.prod(v.aval.shape) for e in jax.make_jaxpr(delta_rule_chunked)(x, whole(1, 3)).eqns for v in e.outvars
    )
    assert widest <= HEADS * 3 * (KEY + VALUE), "filled up to 64 tokens"


def test_a_chunk_of_nothing_is_refused():
    with pytest.raises(ValueError, match="chunk=0 must be >= 1"):
        delta_rule_chunked(draw(0, 1, 2), whole(1, 2), chunk=0)
