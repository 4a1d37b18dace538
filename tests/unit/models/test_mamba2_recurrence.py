"""The Mamba-2 recurrence: one token at a time against float64 by hand, chunks against one token at a time."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.models.mamba2 import Tokens, ssd_chunked, ssd_sequential

HEADS, WIDTH, GROUPS, STATE = 4, 3, 2, 5
CHUNK, LENGTH = 8, 37
# Row 0: documents of 3, 1, 12 (it starts inside a chunk and runs through the next), 1, 1 and 9 tokens, with padding
# between two of them and at the end. Row 1: one document, all five chunks of it.
SEGMENTS = np.array(
    [[1] * 3 + [2] + [3] * 12 + [0] * 5 + [4] + [5] + [6] * 9 + [0] * 5, [1] * LENGTH],
    np.int32,
)
REAL = SEGMENTS > 0
STARTS = REAL & np.diff(SEGMENTS, axis=1, prepend=0).astype(bool)
STARTS[1, 0] = False  # row 1 goes on from the state it is given
# float32 sums of some hundred terms in another order, over the largest entry; measured 2e-7.
RTOL = 1e-5


class Problem(NamedTuple):
    """Arguments of the recurrence."""

    tokens: Tokens
    a: jax.Array
    state: jax.Array


def problem(largest_rate=1.0, segments=SEGMENTS, starts=STARTS) -> Problem:
    """Random arrays, padding included; -a dt up to `largest_rate` a token."""
    rng = np.random.default_rng(3)
    rows, length = segments.shape
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    dt = jnp.asarray(rng.uniform(size=(rows, length, HEADS)), jnp.float32)
    tokens = Tokens(
        u=draw(rows, length, HEADS, WIDTH),
        dt=dt,
        b=draw(rows, length, GROUPS, STATE),
        c=draw(rows, length, GROUPS, STATE),
        live=jnp.asarray(segments > 0),
        first=jnp.asarray(starts),
    )
    a = jnp.asarray(-np.linspace(largest_rate / 4, largest_rate, HEADS), jnp.float32)
    return Problem(tokens, a, draw(rows, HEADS, WIDTH, STATE))


def by_hand(p: Problem):
    """Each row in float64, token by token: outputs and final state."""
    u, dt, b, c, live, first = (np.asarray(x, np.float64 if x.dtype == np.float32 else bool) for x in p.tokens)
    a, state = np.asarray(p.a, np.float64), np.asarray(p.state, np.float64).copy()
    y = np.zeros(u.shape)
    for r, t, h in np.ndindex(u.shape[:3]):
        if not live[r, t]:
            continue
        group = h // (HEADS // GROUPS)
        before = np.zeros_like(state[r, h]) if first[r, t] else state[r, h]
        state[r, h] = np.exp(a[h] * dt[r, t, h]) * before + dt[r, t, h] * np.outer(u[r, t, h], b[r, t, group])
        y[r, t, h] = state[r, h] @ c[r, t, group]
    return y, state


def close(got, wanted):
    """Largest difference over the largest entry, which may be that of another document: see RTOL."""
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    assert got.shape == wanted.shape
    assert np.abs(got - wanted).max() <= RTOL * np.abs(wanted).max()


def chunked_by(chunk):
    return jax.jit(lambda p: ssd_chunked(p.tokens, p.a, p.state, chunk=chunk))


CHUNKED = chunked_by(CHUNK)
SEQUENTIAL = jax.jit(lambda p: ssd_sequential(p.tokens, p.a, p.state))


def test_one_token_at_a_time_is_the_formula():
    for got, wanted in zip(SEQUENTIAL(problem()), by_hand(problem()), strict=True):
        close(got, wanted)


def test_chunks_are_one_token_at_a_time():
    for got, wanted in zip(CHUNKED(problem()), SEQUENTIAL(problem()), strict=True):
        close(got, wanted)


def test_rows_shorter_than_a_chunk_are_one_chunk():
    for got, wanted in zip(chunked_by(64)(problem()), SEQUENTIAL(problem()), strict=True):
        close(got, wanted)


def test_decays_that_sum_to_thousands_lose_no_digits():
    """-a dt up to 600: weights of neighbours made as a difference of two running sums would be off by 1e-4."""
    p = problem(600.0)
    p = p._replace(tokens=p.tokens._replace(dt=p.tokens.dt.at[:, 1::3].mul(jnp.float32(1e-3))))
    for got, wanted in zip(CHUNKED(p), by_hand(p), strict=True):
        close(got, wanted)


@pytest.fixture(scope="module")
def gradients():
    """Of a weighted sum of outputs and final state, by every float argument: in chunks, and a token at a time."""
    rng = np.random.default_rng(4)
    p = problem()
    weights = [jnp.asarray(rng.normal(size=x.shape), jnp.float32) for x in (p.tokens.u, p.state)]

    def loss(floats, run):
        u, dt, b, c, a, state = floats
        y, last = run(Problem(p.tokens._replace(u=u, dt=dt, b=b, c=c), a, state))
        return jnp.sum(y * weights[0]) + jnp.sum(last * weights[1])

    floats = (*p.tokens[:4], p.a, p.state)
    return {name: jax.grad(loss)(floats, run) for name, run in (("chunked", CHUNKED), ("sequential", SEQUENTIAL))}


@pytest.mark.parametrize("place", range(6), ids=["u", "dt", "b", "c", "a", "state"])
def test_gradients_of_chunks_are_those_of_one_token_at_a_time(gradients, place):
    close(gradients["chunked"][place], gradients["sequential"][place])


def test_only_what_goes_on_from_the_state_has_a_gradient_to_it(gradients):
    """Row 0 starts with a document: the state before it is not read, and is not what is left either."""
    to_state = np.asarray(gradients["chunked"][5])
    assert not to_state[0].any() and to_state[1].all()


@pytest.mark.parametrize("run", [CHUNKED, SEQUENTIAL], ids=["chunked", "sequential"])
def test_bug_case_b51_each_document_is_as_if_alone(run):
    """Also where it starts inside a chunk, and where it is one token long."""
    p = problem()
    y = np.asarray(run(p)[0])
    for segment in range(1, 7):
        here = np.flatnonzero(SEGMENTS[0] == segment)
        shift = lambda x, here=here: jnp.roll(x[:1], -int(here[0]), axis=1)  # noqa: E731
        moved = Tokens(*(shift(x) for x in p.tokens))
        alone = moved._replace(
            live=jnp.asarray(np.arange(LENGTH) < len(here))[None], first=jnp.zeros((1, LENGTH), bool)
        )
        wanted = by_hand(Problem(alone, p.a, jnp.zeros_like(p.state[:1])))[0][0, : len(here)]
        close(y[0, here], wanted)


@pytest.mark.parametrize("run", [CHUNKED, SEQUENTIAL], ids=["chunked", "sequential"])
def test_padding_takes_no_part_even_where_it_is_nan(run):
    p = problem()
    spoil = lambda x: jnp.where(jnp.asarray(REAL).reshape(REAL.shape + (1,) * (x.ndim - 2)), x, jnp.nan)  # noqa: E731
    spoiled = p._replace(tokens=Tokens(*map(spoil, p.tokens[:4]), *p.tokens[4:]))
    wanted = run(p)
    for got, clean in zip(run(spoiled), wanted, strict=True):
        np.testing.assert_array_equal(got, clean)
    assert not np.asarray(wanted[0])[~REAL].any()
    gradient = jax.grad(lambda u: jnp.sum(run(spoiled._replace(tokens=spoiled.tokens._replace(u=u)))[0]))
    assert np.isfinite(np.asarray(gradient(spoiled.tokens.u))).all()
