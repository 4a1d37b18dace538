"""Tests of safetensors folders: what is read by the slice, what is refused, what a writer leaves behind."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from draftco_jax.errors import UserError
from draftco_jax.models import checkpoint_files
from draftco_jax.models.checkpoint_files import (
    DTYPES,
    INDEX_FILE,
    Deferred,
    SafetensorsReader,
    read_header,
    write_sharded,
)
from draftco_jax.models.checkpoint_trees import cut_vocabulary

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "data" / "qwen3" / "model.safetensors"


def numbers(*shape, dtype=np.float32):
    return np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)


def assert_one_line(call, *patterns):
    with pytest.raises(UserError) as caught:
        call()
    assert "\n" not in str(caught.value)
    for pattern in patterns:
        assert re.search(pattern, str(caught.value)), f"{pattern!r} is not said: {caught.value}"


def assert_same(found, expected):
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert found.tobytes() == np.asarray(expected, order="C").tobytes()


def write_raw(path, header, body=b""):
    """A file with exactly this header; text is taken as it is, so that it can say a name twice."""
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


@pytest.fixture
def sharded(tmp_path):
    """a and b in the first file, c in the second."""
    tensors = {name: numbers(4, 4) for name in "abc"}
    write_sharded(tmp_path, tensors.items(), max_shard_bytes=128)
    return tmp_path


FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def edit_index(folder, **changes):
    index = json.loads((folder / INDEX_FILE).read_text())
    index["weight_map"] = {k: v for k, v in (index["weight_map"] | changes).items() if v is not None}
    (folder / INDEX_FILE).write_text(json.dumps(index))


def test_every_dtype_is_read_bit_for_bit(tmp_path):
    tensors = {spelling: numbers(3, 5).astype(dtype) for spelling, dtype in DTYPES.items()}
    tensors |= {"scalar": np.array(3.5, np.float32), "empty": numbers(0, 4)}
    save_file(tensors, tmp_path / "model.safetensors")
    reader = SafetensorsReader(tmp_path)
    assert reader.tensors.keys() == tensors.keys()
    for name, expected in tensors.items():
        assert_same(reader.read(name), expected)


SLICES = (
    (slice(1, 4), slice(None), slice(None)),
    (slice(None), slice(2, 3), slice(None)),
    (slice(None), slice(None), slice(1, 5)),
    (slice(4, 6), slice(1, 3), slice(0, 1)),
    (slice(1, None, 2), slice(None, None, 3), slice(2, None, 2)),
    (slice(2, 2), slice(None), slice(None)),
)


@pytest.mark.parametrize("limits", ["as they are", "every run alone", "rows in small blocks"])
def test_slices_along_any_axis_are_those_of_numpy(tmp_path, monkeypatch, limits):
    if limits == "every run alone":
        monkeypatch.setattr(checkpoint_files, "_RUN_BYTES", 1)
    elif limits == "rows in small blocks":
        monkeypatch.setattr(checkpoint_files, "_BLOCK_BYTES", 60)  # two rows of 28 bytes
    values, flat, deep = numbers(6, 5, 7), numbers(9, dtype=np.int32), numbers(2, 3, 4, 5, dtype=jnp.bfloat16)
    save_file({"x": values, "flat": flat, "deep": deep}, tmp_path / "model.safetensors")
    reader = SafetensorsReader(tmp_path)
    for index in SLICES:
        assert_same(reader.read("x", index), values[index])
    assert_same(reader.read("flat", (slice(3, 8),)), flat[3:8])
    index = (slice(1, 2), slice(0, 2), slice(1, 3), slice(2, 4))
    assert_same(reader.read("deep", index), deep[index])


def test_a_slice_does_not_read_what_lies_outside(tmp_path):
    # 1 TB, nearly all of it a hole in the file.
    side, header = 2**19, {"x": {"dtype": "F32", "shape": [2**19, 2**19], "data_offsets": [0, 2**40]}}
    path = tmp_path / "model.safetensors"
    write_raw(path, header)
    start = path.stat().st_size
    os.truncate(path, start + 2**40)
    value = np.float32(7.0)
    with path.open("r+b") as file:
        file.seek(start + 4 * (5 * side + 100))
        file.write(value.tobytes())
    reader = SafetensorsReader(tmp_path)
    part = reader.read("x", (slice(4, 7), slice(99, 102)))
    np.testing.assert_array_equal(part, [[0, 0, 0], [0, 7, 0], [0, 0, 0]])
    assert reader.read("x", (slice(5, 6), slice(100, 101)))[0, 0] == value


def test_values_that_are_not_finite_are_refused_by_name(tmp_path):
    tensors = {}
    for spelling in ("F64", "F32", "F16", "BF16"):
        for value in (np.nan, np.inf, -np.inf):
            values = numbers(3, 4).astype(DTYPES[spelling])
            values[1, 2] = value
            tensors[f"{spelling}.{value}"] = values
    save_file(tensors, tmp_path / "model.safetensors")
    reader = SafetensorsReader(tmp_path)
    for name in tensors:
        assert_one_line(lambda name=name: reader.read(name), rf"tensor {name} holds a value that is not finite")
    # A slice without it is fine: each host answers for what it loads.
    assert reader.read("BF16.nan", (slice(0, 1), slice(None))).shape == (1, 4)
    largest = np.array([jnp.finfo(jnp.bfloat16).max, jnp.finfo(jnp.bfloat16).min], jnp.bfloat16)
    write_sharded(tmp_path, [("x", largest)])
    assert_same(SafetensorsReader(tmp_path).read("x"), largest)


def test_folders_without_weights_say_what_they_hold(tmp_path):
    assert_one_line(lambda: SafetensorsReader(tmp_path), "holds neither model.safetensors nor model.safetensors.index")
    (tmp_path / "pytorch_model.bin").touch()
    assert_one_line(lambda: SafetensorsReader(tmp_path), "only pytorch_model.bin")


def test_a_file_with_another_name_is_found_by_the_index(sharded):
    (sharded / SECOND).rename(sharded / "head.safetensors")
    edit_index(sharded, c="head.safetensors")
    assert_same(SafetensorsReader(sharded).read("c"), numbers(4, 4))


@pytest.mark.parametrize("cut", [1, 64, 65, 250])
def test_a_file_cut_short_is_refused_by_file_and_tensor(sharded, cut):
    path = sharded / FIRST
    size = path.stat().st_size
    os.truncate(path, size - cut)
    # Two tensors of 64 bytes: the last byte is of b; from the 65th on a is not whole either; at 250 the header is not.
    told = "cut short in its header" if cut == 250 else f"tensor {'a' if cut > 64 else 'b'} ends at byte"
    assert_one_line(lambda: SafetensorsReader(sharded), FIRST, "cut short", told)


def test_a_file_that_shrinks_after_it_was_opened_is_refused(sharded):
    reader = SafetensorsReader(sharded)
    os.truncate(sharded / FIRST, (sharded / FIRST).stat().st_size - 8)
    assert_one_line(lambda: reader.read("b"), f"{FIRST}: tensor b ended while it was read")


def test_a_file_that_the_index_names_must_be_there(sharded):
    (sharded / SECOND).unlink()
    assert_one_line(lambda: SafetensorsReader(sharded), f"{SECOND} does not exist")


def test_a_file_that_cannot_be_read_is_refused(sharded, monkeypatch):
    def deny(self, *args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", deny)  # permissions do not stop root, who runs tests in containers
    assert_one_line(lambda: read_header(sharded / FIRST), f"{FIRST} cannot be read .*Permission denied")


def test_bug_case_b62_index_and_files_must_name_the_same_tensors(sharded):
    edit_index(sharded, **{"lm_head.weight": SECOND})
    assert_one_line(lambda: SafetensorsReader(sharded), f"do not hold: lm_head.weight in {SECOND}")
    edit_index(sharded, **{"lm_head.weight": None, "b": None})
    assert_one_line(lambda: SafetensorsReader(sharded), f"does not name tensors .*: b in {FIRST}")
    edit_index(sharded, b=SECOND)
    assert_one_line(lambda: SafetensorsReader(sharded), f"does not name tensors .*: b in {FIRST}")


def test_a_tensor_in_two_files_is_refused(sharded):
    save_file({"c": numbers(2), "a": numbers(2)}, sharded / SECOND)
    assert_one_line(lambda: SafetensorsReader(sharded), f"tensor a is in {FIRST} and in {SECOND}")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"weight_map": {"a": "../a.safetensors"}}', "tensor a is said to be in '../a.safetensors'"),
        ('{"weight_map": {"a": "x", "a": "y"}}', r"\['a'\] appear twice"),
        ('{"weight_map": {}}', "weight_map must be"),
        ('{"weight_map": ', "not JSON"),
        ("[]", "holds a list"),
    ],
)
def test_a_damaged_index_is_refused(sharded, text, told):
    (sharded / INDEX_FILE).write_text(text)
    assert_one_line(lambda: SafetensorsReader(sharded), INDEX_FILE, told)


def test_two_sets_of_weights_in_one_folder_are_refused(sharded):
    save_file({"a": numbers(2)}, sharded / "model.safetensors")
    assert_one_line(lambda: SafetensorsReader(sharded), "holds model.safetensors and model.safetensors.index.json")


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "body", "told"),
    [
        ({"a": F32 | {"data_offsets": [0, 7]}}, 7, "tensor a has 7 bytes but F32 of shape .* takes 8"),
        ({"a": F32, "b": F32 | {"data_offsets": [4, 12]}}, 12, "tensor b begins at byte"),  # they overlap
        ({"a": F32, "b": F32 | {"data_offsets": [12, 20]}}, 20, "tensor b begins at byte"),  # a hole between them
        ({"a": F32}, 9, "1 bytes follow the last tensor"),
        ({"a": F32 | {"dtype": "F8_E4M3"}}, 8, "tensor a has dtype 'F8_E4M3'; supported: F64, F32"),
        ({"a": F32 | {"shape": [-2]}}, 8, "entry of tensor a is malformed"),
        ({"a": F32 | {"shape": [2.0]}}, 8, "entry of tensor a is malformed"),
        ({"a": F32 | {"data_offsets": [0]}}, 8, "entry of tensor a is malformed"),
        ({"a": [1]}, 8, "tensor a has dtype None"),
        ('{"a": {"dtype": "U8", "shape": [], "data_offsets": [0, 1]}, "a": {}}', 1, r"\['a'\] appear twice"),
        ("{", 8, "not JSON"),
        ("[]", 8, "holds a list"),
    ],
)
def test_a_header_that_does_not_fit_its_bytes_is_refused(tmp_path, header, body, told):
    path = tmp_path / "model.safetensors"
    write_raw(path, header, b"\0" * body)
    assert_one_line(lambda: SafetensorsReader(tmp_path), re.escape(str(path)), told)


def test_a_file_of_something_else_is_refused(tmp_path):
    for content in (b"", b"\0" * 4, b"version https://git-lfs.github.com/spec/v1\n"):
        (tmp_path / "model.safetensors").write_bytes(content)
        assert_one_line(lambda: SafetensorsReader(tmp_path), "not a safetensors file")


def test_bug_cases_b59_and_b62_shards_hold_exactly_what_was_given(tmp_path):
    tensors = load_file(GOLDEN)
    paths = write_sharded(tmp_path, iter(tensors.items()), max_shard_bytes=100_000, metadata={"made_by": "test"})
    assert [path.name for path in paths] == [
        f"model-{n + 1:05d}-of-{len(paths):05d}.safetensors" for n in range(len(paths))
    ]
    assert len(paths) > 2
    index = json.loads((tmp_path / INDEX_FILE).read_text())
    # With the format's own library: each file opens, and says what the index says of it.
    for path in paths:
        with safe_open(path, framework="numpy") as file:
            assert file.metadata() == {"format": "pt", "made_by": "test"}
            assert set(file.keys()) == {name for name, place in index["weight_map"].items() if place == path.name}
        size = sum(tensor.nbytes for tensor in load_file(path).values())
        assert size <= 100_000 or len(load_file(path)) == 1
    assert index["metadata"] == {"total_size": sum(tensor.nbytes for tensor in tensors.values())}
    assert index["weight_map"].keys() == tensors.keys()
    reader = SafetensorsReader(tmp_path)
    for name, tensor in tensors.items():
        assert_same(reader.read(name), tensor)
        assert_same(load_file(reader.tensors[name].file)[name], tensor)


def test_weights_that_fit_become_one_file(tmp_path):
    tensors = {"scalar": jnp.float32(2.0), "low": jnp.ones((3, 5), jnp.bfloat16), "bytes": numbers(3, dtype=np.uint8)}
    (path,) = write_sharded(tmp_path / "new", tensors.items())
    assert path.name == "model.safetensors"
    assert [entry.name for entry in path.parent.iterdir()] == ["model.safetensors"]
    assert path.stat().st_mode & 0o444 == 0o444 & ~umask()  # as any new file, not for the owner only
    stored = read_header(path)
    assert all(place.offset % place.dtype.itemsize == 0 for place in stored.values())  # can be mapped by others
    for name, found in load_file(path).items():
        assert_same(found, np.asarray(tensors[name]))


def umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_fortran_order_is_written_as_c_order(tmp_path):
    fortran = np.asfortranarray(numbers(3, 4))
    deferred = Deferred(shape=(4, 3), dtype=np.float32, make=lambda: fortran.T)
    write_sharded(tmp_path, [("f", fortran), ("t", deferred), ("s", numbers(6, 4)[::2, 1:])])
    reader = SafetensorsReader(tmp_path)
    np.testing.assert_array_equal(reader.read("f"), numbers(3, 4))
    np.testing.assert_array_equal(reader.read("t"), numbers(3, 4).T)
    np.testing.assert_array_equal(reader.read("s"), numbers(6, 4)[::2, 1:])


def test_bug_case_b64_padded_rows_are_cut_on_export(tmp_path):
    trained = jnp.asarray(numbers(160, 8))
    write_sharded(tmp_path, [("lm_head.weight", cut_vocabulary("lm_head.weight", trained, 151))])
    assert_same(SafetensorsReader(tmp_path).read("lm_head.weight"), numbers(151, 8))
    with pytest.raises(ValueError, match="lm_head.weight has 160 rows but must have vocab_size=161"):
        cut_vocabulary("lm_head.weight", trained, 161)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("stopped_by", [RuntimeError, KeyboardInterrupt])
def test_a_writer_that_stops_leaves_the_folder_as_it_was(sharded, stopped_by):
    before = contents(sharded)
    seen = []

    def fail():
        seen.extend(path.name for path in sharded.glob(".model*"))
        raise stopped_by

    bad = Deferred(shape=(4,), dtype=np.float32, make=fail)
    with pytest.raises(stopped_by):
        write_sharded(sharded, [("a", numbers(64)), ("b", bad)], max_shard_bytes=100)
    assert len(seen) == 2  # both files were begun
    assert contents(sharded) == before


def test_a_writer_that_is_killed_while_renaming_leaves_no_mixture(sharded, monkeypatch):
    def stop(source, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        write_sharded(sharded, [("z", numbers(3))])
    assert_one_line(lambda: SafetensorsReader(sharded), "holds neither")
    monkeypatch.undo()
    write_sharded(sharded, [("z", numbers(3))])
    assert contents(sharded).keys() == {"model.safetensors"}  # nor anything of the killed one


def test_new_weights_replace_old_ones_of_another_number_of_files(sharded):
    write_sharded(sharded, [("z", numbers(3))])
    assert contents(sharded).keys() == {"model.safetensors"}
    write_sharded(sharded, [("y", numbers(3)), ("z", numbers(3))], max_shard_bytes=12)
    assert contents(sharded).keys() == {FIRST, SECOND, INDEX_FILE}
    assert SafetensorsReader(sharded).tensors.keys() == {"y", "z"}


@pytest.mark.parametrize(
    ("tensors", "told"),
    [
        ([("a", numbers(2)), ("a", numbers(2))], "name='a' must be given once"),
        ([("__metadata__", numbers(2))], "not be '__metadata__'"),
        ([("a", np.zeros(2, np.complex64))], "dtype=complex64"),
        ([("a", np.zeros(2, ">f4"))], "dtype=>f4"),
        ([("a", Deferred(shape=(3,), dtype=np.float32, make=lambda: numbers(2)))], r"float32'>\[3\] as announced"),
        ([("a", Deferred(shape=(2,), dtype=np.int32, make=lambda: numbers(2)))], r"not float32\[2\]"),
    ],
)
def test_tensors_that_cannot_be_written_are_refused(tmp_path, tensors, told):
    with pytest.raises(ValueError, match=told):
        write_sharded(tmp_path, tensors)
    assert contents(tmp_path) == {}
    with pytest.raises(ValueError, match="max_shard_bytes=0"):
        write_sharded(tmp_path, [], max_shard_bytes=0)
