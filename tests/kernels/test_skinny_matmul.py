"""Contract of the product of few rows: right against float64, and each row on its own, bit for bit."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.skinny_matmul import IMPLEMENTATIONS, MAX_ROWS, PackedWeight, available, pack, skinny_matmul, unpack
from pallas_kernels.skinny_matmul.bench import main as bench
from pallas_kernels.skinny_matmul.build import build
from pallas_kernels.skinny_matmul.library import TARGET

NATIVE = ("native", "native_portable")
ROWS = (1, 2, 5, 8, 16)
# K and N: less than a panel; one more than panels; K odd; enough panels and weights for several threads.
SHAPES = ((3, 5), (32, 33), (67, 128), (257, 700))


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request) -> str:
    if request.param != "xla":
        request.getfixturevalue("native_matmul")
    return request.param


@pytest.fixture(params=NATIVE)
def native(request, native_matmul) -> str:
    del native_matmul
    return request.param


def draw(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def bits(array) -> np.ndarray:
    return np.asarray(array).view(np.uint32)


@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
@pytest.mark.parametrize("rows", ROWS)
def test_against_float64(implementation, rows, inputs, outputs):
    x, w = draw(rows, rows, inputs), draw(0, inputs, outputs)
    got = skinny_matmul(x, pack(w), implementation=implementation)
    x, w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    # Of a sum of K products in any order: an error of at most K roundings of the sum of magnitudes (here: sqrt(K)).
    bound = 4 * np.sqrt(inputs) * np.finfo(np.float32).eps * (np.abs(x) @ np.abs(w))
    assert np.all(np.abs(got - x @ w) <= bound)
    assert got.dtype == jnp.float32


@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_packing_loses_nothing(inputs, outputs):
    w = draw(0, inputs, outputs)
    packed = pack(w)
    assert packed.panels.shape == (-(-outputs // 16), inputs, 16)
    np.testing.assert_array_equal(packed.panels[0, :, : min(outputs, 16)], w[:, :16])
    missing = packed.panels.size - w.size
    assert missing < 16 * inputs and int(jnp.sum(packed.panels == 0.0)) == missing
    np.testing.assert_array_equal(unpack(packed), w)


@pytest.mark.parametrize("rows", [2, 3, 4, 5, 6, 7, 8, 13, 64])
def test_a_row_is_the_same_in_any_company(native, rows):
    """Other rows, their number, its own place and the number of threads change no bit of it."""
    packed, row = pack(draw(0, 257, 700)), draw(1, 1, 257)
    product = partial(skinny_matmul, implementation=native)
    alone = bits(product(row, packed, threads=1))[0]
    for threads in (1, 5, None):
        for place in (0, rows // 2, rows - 1):
            x = draw(rows, rows, 257).at[place].set(row[0])
            np.testing.assert_array_equal(bits(product(x, packed, threads=threads))[place], alone)


def test_columns_are_the_same_in_any_company(native):
    """Panels that go alone or in fours: a column does not depend on how many others there are."""
    w, x = draw(0, 257, 700), draw(1, 3, 257)
    whole = bits(skinny_matmul(x, pack(w), implementation=native))
    for count in (1, 16, 17, 50, 80):
        part = skinny_matmul(x, pack(w[:, -count:]), implementation=native)
        np.testing.assert_array_equal(bits(part), whole[:, -count:])


def test_what_is_not_a_number_goes_where_it_does_in_the_reference(implementation):
    w = draw(0, 20, 40).at[3, 7].set(jnp.nan).at[4, 8].set(jnp.inf).at[5, 9].set(0.0)
    x = draw(1, 7, 20).at[1, 0].set(jnp.nan).at[2, 5].set(-jnp.inf).at[3, 4].set(0.0).at[4, :2].set(jnp.inf)
    with np.errstate(invalid="ignore"):
        want = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    got = np.asarray(skinny_matmul(x, pack(w), implementation=implementation))
    for kind in (np.isnan, np.isposinf, np.isneginf):
        np.testing.assert_array_equal(kind(got), kind(want))
        assert kind(want).any()
    clean = np.delete(np.arange(40), [7, 8])
    np.testing.assert_allclose(got[0, clean], want[0, clean], atol=1e-5)


def test_denormals_are_those_of_xla_on_every_thread(native):
    """Whether they are flushed is a setting of each thread; the helpers must have the caller's."""
    x, packed = jnp.ones((2, 4), jnp.float32), pack(jnp.full((4, 16 * 400), 1e-41, jnp.float32))
    want = jax.jit(partial(skinny_matmul, implementation="xla"))(x, packed)
    for _ in range(20):
        got = jax.jit(partial(skinny_matmul, implementation=native, threads=4))(x, packed)
        np.testing.assert_array_equal(bits(got), bits(want))


def test_several_calls_in_flight(native):
    packed = [pack(draw(seed, 257, 700)) for seed in range(3)]
    product = jax.jit(partial(skinny_matmul, implementation=native))
    cases = [(draw(seed, 1 + seed % 7, 257), packed[seed % 3]) for seed in range(12)]
    want = [bits(product(*case)) for case in cases]
    with ThreadPoolExecutor(6) as pool:
        for _ in range(8):
            for got, expected in zip(pool.map(lambda case: bits(product(*case)), cases), want, strict=True):
                np.testing.assert_array_equal(got, expected)


def test_inside_a_loop_and_with_leading_dims(implementation):
    packed, x = pack(draw(0, 24, 24) / 5), draw(1, 2, 3, 24)

    def step(x):
        return skinny_matmul(x, packed, implementation=implementation)

    looped = jax.jit(lambda x: jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, step(c[1])), (0, x))[1])(x)
    want = np.asarray(x)
    for _ in range(3):
        want = want @ np.asarray(unpack(packed))
    assert looped.shape == x.shape
    np.testing.assert_allclose(looped, want, atol=1e-5)


def test_under_vmap(native):
    """Of x, of W, and of both: what single calls give, bit for bit."""
    w, x = jnp.stack([draw(seed, 9, 20) for seed in range(3)]), draw(5, 3, 2, 9)
    product = partial(skinny_matmul, implementation=native)
    for axes in ((0, None), (None, 0), (0, 0)):
        arguments = (x if axes[0] == 0 else x[0]), (w if axes[1] == 0 else w[0])
        got = jax.vmap(lambda x, w: product(x, pack(w)), in_axes=axes)(*arguments)
        want = [product(x[i if axes[0] == 0 else 0], pack(w[i if axes[1] == 0 else 0])) for i in range(3)]
        np.testing.assert_array_equal(bits(got), bits(jnp.stack(want)))


@pytest.mark.parametrize("rows", [MAX_ROWS, MAX_ROWS + 1])
def test_more_rows_are_the_references(native, rows):
    """The rule of the docstring, read off what is compiled."""
    packed, x = pack(draw(0, 9, 20)), draw(1, rows, 9)
    lowered = jax.jit(partial(skinny_matmul, implementation=native)).lower(x, packed)
    assert (TARGET in lowered.as_text()) == (rows <= MAX_ROWS)


def test_there_are_no_derivatives(native):
    packed = pack(draw(0, 9, 20))
    with pytest.raises(ValueError, match="cannot be differentiated"):
        jax.grad(lambda x: skinny_matmul(x, packed, implementation=native).sum())(draw(1, 2, 9))


WRONG = {
    "implementation='eigen' must be one of": lambda x, p: skinny_matmul(x, p, implementation="eigen"),
    "x.dtype=bfloat16 must be float32": lambda x, p: skinny_matmul(x.astype(jnp.bfloat16), p, implementation="xla"),
    "w.dtype=bfloat16 must be float32": lambda x, p: pack(x.astype(jnp.bfloat16)),
    r"x.shape=\(2, 8\) must end in K=9": lambda x, p: skinny_matmul(x[:, 1:], p, implementation="xla"),
    r"x.shape=\(0, 9\) must hold at least one row": lambda x, p: skinny_matmul(x[:0], p, implementation="xla"),
    r"w.shape=\(9,\) must be \[K, N\]": lambda x, p: pack(x[0]),
    r"w.shape=\(2, 0\) must be \[K, N\]": lambda x, p: pack(x[:, :0]),
    r"packed.panels.shape=\(2, 9, 16\) must be": lambda x, p: skinny_matmul(
        x, PackedWeight(p.panels, 40), implementation="xla"
    ),
    "threads=0 must be >= 1": lambda x, p: skinny_matmul(x, p, implementation="xla", threads=0),
}


@pytest.mark.parametrize("message", WRONG)
def test_bad_input_is_one_line(message):
    with pytest.raises(ValueError, match=message) as error:
        WRONG[message](draw(0, 2, 9), pack(draw(1, 9, 20)))
    assert "\n" not in str(error.value)


def test_nothing_is_taken_instead_of_what_is_not_built(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert not available()
    with pytest.raises(ValueError, match="python -m pallas_kernels.skinny_matmul.build"):
        skinny_matmul(draw(0, 2, 9), pack(draw(1, 9, 20)), implementation="native")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(RuntimeError, match="CXX='no-such-compiler': no C\\+\\+ compiler found"):
        build()
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(RuntimeError, match="could not compile native.cc: exit 1"):
        build()
    assert not list(tmp_path.rglob("*.so"))


def test_building_is_a_command_of_one_line(native_matmul):
    command = [sys.executable, "-m", "pallas_kernels.skinny_matmul.build"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("skinny_matmul: ") and done.stdout.count("\n") == 1 and not done.stderr


def test_the_bench_compares_both(native_matmul, tmp_path, capsys):
    assert bench(["--shape", "tiny", "--rounds", "1", "--json", str(tmp_path / "rows.json")]) == 0
    out = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in out[1:-1:2]] == ["xla", "native"] and out[-1].startswith("load ")
    assert (tmp_path / "rows.json").read_text().count('"over_one_row": 1.0') >= 2
