"""The bench of the block op: that it compares like with like and writes what it says. Nothing is timed here."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.block_attention import block_attention, block_attention_backward
from pallas_kernels.block_attention.bench import causal, dense, main
from pallas_kernels.block_attention.shapes import Shape


@pytest.mark.parametrize("window", [0, 5])
def test_the_dense_product_is_the_same_attention(window):
    """Value and gradients of what everything is divided by."""
    shape = Shape(queries=24, keys=24, heads=4, kv_heads=2, head_dim=8, dtype="float32", window=window)
    rng = np.random.default_rng(0)
    q, k, v, d_out = (jnp.asarray(rng.normal(size=(1, 24, heads, 8)), jnp.float32) for heads in (4, 2, 2, 4))
    seen, index = causal(shape)

    @jax.jit
    def run():
        options = {"scale": 0.3, "implementation": "blockwise", "tile": 8}
        part = block_attention(q, k, v, seen, index, **options)
        delta = jnp.sum(d_out * part.out, axis=-1)
        grads = block_attention_backward(q, k, v, seen, index, part.lse, delta, d_out, **options)
        out, pull = jax.vjp(lambda q, k, v: dense(q, k, v, seen, index, 0.3), q, k, v)
        return (part.out, *grads), (out, *pull(d_out))

    for got, want in zip(*run(), strict=True):
        np.testing.assert_allclose(got, want, atol=3e-6)  # float32: sums of some tens of terms of order one


def test_the_command_writes_a_row_for_each_program(tmp_path, capsys):
    path = tmp_path / "rows.json"
    assert main(["--shape", "small", "--rounds", "1", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())
    wanted = {(what, name) for what in ("forward", "both") for name in ("dense", "blockwise", "pallas_interpret")}
    assert {(row["what"], row["implementation"]) for row in rows} == wanted
    assert all(row["over_dense"] == 1.0 for row in rows if row["implementation"] == "dense")
    assert all(row["seconds"] > 0 and row["shape"] == "small" for row in rows)
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(rows)


def test_the_command_refuses_what_it_cannot_do(capsys):
    for wrong in (["--rounds", "0"], ["--shape", "huge"]):
        with pytest.raises(SystemExit, match="2"):
            main(wrong)
    assert "rounds=0 must be >= 1" in capsys.readouterr().err
