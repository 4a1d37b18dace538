"""The bench of the branch op: that it counts bytes as the op's formulas do and writes what it says. No times here."""

from __future__ import annotations

import json

import jax
import pytest

from pallas_kernels.branch_attention.bench import arrays, kernel_bytes, main
from pallas_kernels.branch_attention.shapes import SHAPES
from pallas_kernels.branch_attention.tuning import Launch, Tuning, pick


@pytest.mark.parametrize("name", ["small_pass4", "small_block8"])
def test_the_minimum_is_the_size_of_what_goes_in_and_comes_out(name):
    shape = SHAPES[name]
    given = arrays(shape)
    size = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree))  # noqa: E731
    branch = given["forward"][2]
    # The kernels read `live` as int32; out has the shape and type of q; the gradients here are float32 like the inputs.
    live = 3 * branch.live.nbytes
    forward = size(given["forward"]) + live + given["forward"][0].nbytes + given["forward"][1].lse.nbytes
    backward = size(given["backward"]) + live + size((given["backward"][0], branch.keys, branch.values))
    assert shape.minimum_bytes() == (forward, backward)


def test_a_block_in_chunks_reads_its_keys_again():
    shape = SHAPES["small_block8"]  # 32 rows
    whole, halves = (Tuning(forward=Launch(rows=rows), backward=Launch(rows=16)) for rows in (32, 16))
    d = shape.dims
    keys = 2 * 4 * d.branches * d.keys * d.kv_heads * d.width
    assert kernel_bytes(shape, "forward", whole) == shape.minimum_bytes()[0]
    assert kernel_bytes(shape, "forward", halves) == shape.minimum_bytes()[0] + keys
    assert kernel_bytes(shape, "backward", halves) == shape.minimum_bytes()[1]


def test_the_table_keeps_every_shape_within_a_fifth_of_the_minimum():
    """What is read more than once is little."""
    for name, shape in SHAPES.items():
        if name.startswith("small"):
            continue  # float32 on purpose, whose tiles are the smallest
        moved = kernel_bytes(shape, "forward", pick(shape.dims, shape.dtype))
        assert moved <= 1.2 * shape.minimum_bytes()[0], name


def test_the_command_writes_a_row_for_each_program(tmp_path, capsys):
    path = tmp_path / "rows.json"
    assert main(["--shape", "small_pass4", "--rounds", "1", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())
    wanted = {(what, name) for what in ("forward", "backward") for name in ("blockwise", "pallas_interpret")}
    assert {(row["what"], row["implementation"]) for row in rows} == wanted
    for row in rows:
        if row["implementation"] == "blockwise":
            assert row["over_blockwise"] == 1.0 and row["bytes_over_minimum"] > 1.0
        else:
            assert row["bytes_over_minimum"] == 1.0
        assert row["seconds"] > 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(rows)


def test_the_command_refuses_what_it_cannot_do(capsys):
    for wrong in (["--rounds", "0"], ["--shape", "huge"]):
        with pytest.raises(SystemExit, match="2"):
            main(wrong)
    assert "rounds=0 must be >= 1" in capsys.readouterr().err
