"""Tests of the way from tensors to arrays: sources, what is refused before loading, dtypes, vocabularies."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.errors import UserError
from draftco_jax.models.checkpoint_files import SafetensorsReader, write_sharded
from draftco_jax.models.checkpoint_trees import (
    Computed,
    Part,
    Stacked,
    Tensor,
    TensorSpec,
    Transposed,
    load_tree,
    vocabulary_rows,
)

EXPERTS = 4


def stored_tensors():
    rng = np.random.default_rng(0)

    def draw(*shape):
        return rng.standard_normal(shape, np.float32)

    tensors = {f"experts.{e}.up": draw(6, 8) for e in range(EXPERTS)}
    tensors |= {"w": draw(6, 8), "fused": draw(EXPERTS, 12, 8), "norm": draw(8), "scalar": np.array(2.5, np.float32)}
    tensors |= {"low": draw(5, 3).astype(jnp.bfloat16), "codes": rng.integers(0, 16, (EXPERTS, 3, 8)).astype(np.uint8)}
    return tensors | {
        "scales": draw(EXPERTS, 3),
        "ids": np.arange(5, dtype=np.int64),
        "large": np.array([2**24 + 1], "<i4"),
    }


TENSORS = stored_tensors()


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    """Every tensor in a shard of about its own."""
    folder = tmp_path_factory.mktemp("weights")
    write_sharded(folder, TENSORS.items(), max_shard_bytes=256)
    return SafetensorsReader(folder)


def unpack(codes, scales):
    return codes.astype(np.float32) * scales[..., None]


STACK = Stacked(tuple(Transposed(Tensor(f"experts.{e}.up")) for e in range(EXPERTS)))
STACKED = np.stack([TENSORS[f"experts.{e}.up"].T for e in range(EXPERTS)])
PACKED = (Tensor("codes"), Tensor("scales"))
UNPACKED = unpack(TENSORS["codes"], TENSORS["scales"])
SOURCES = {
    "tensor": (Tensor("w"), TENSORS["w"]),
    "scalar": (Tensor("scalar"), TENSORS["scalar"]),
    "transposed": (Transposed(Tensor("w")), TENSORS["w"].T),
    "stacked": (STACK, STACKED),
    "layers of experts": (Stacked((STACK, STACK)), np.stack([STACKED, STACKED])),
    "half": (Transposed(Part(Tensor("fused"), 1, slice(6, None))), TENSORS["fused"][:, 6:].swapaxes(1, 2)),
    "every second": (
        Part(Transposed(Tensor("fused")), 2, slice(1, None, 2)),
        TENSORS["fused"].swapaxes(1, 2)[..., 1::2],
    ),
    "computed": (Computed(PACKED, unpack, UNPACKED.shape), UNPACKED),
    "computed by entry": (Transposed(Computed(PACKED, unpack, UNPACKED.shape, by_entry=True)), UNPACKED.swapaxes(1, 2)),
}


def spec(source, shape, dtype=jnp.float32):
    return TensorSpec(source=source, shape=tuple(shape), dtype=dtype)


def everything_but(*wanted):
    return [name for name in TENSORS if name not in wanted]


def load_one(reader, source, shape, dtype=jnp.float32):
    names = source.names()
    return load_tree(reader, {"x": spec(source, shape, dtype)}, ignored=everything_but(*names))["x"]


def assert_one_line(call, *patterns):
    with pytest.raises(UserError) as caught:
        call()
    assert "\n" not in str(caught.value)
    for pattern in patterns:
        assert re.search(pattern, str(caught.value)), f"{pattern!r} is not said: {caught.value}"


def test_every_source_gives_what_numpy_gives(reader):
    wanted = {(name, 0): spec(source, expected.shape) for name, (source, expected) in SOURCES.items()}
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for shardings in (None, dict.fromkeys(wanted, here)):
        loaded = load_tree(reader, wanted, shardings, ignored=["norm", "low", "ids", "large"])
        assert loaded.keys() == wanted.keys()
        for name, (source, expected) in SOURCES.items():
            assert source.shape(reader) == expected.shape
            assert loaded[name, 0].dtype == jnp.float32
            np.testing.assert_array_equal(loaded[name, 0], expected)


@pytest.mark.parametrize("name", [name for name, (_, expected) in SOURCES.items() if expected.ndim])
def test_a_slice_of_a_source_is_the_slice_of_the_whole(reader, name):
    source, expected = SOURCES[name]
    whole = [slice(None)] * expected.ndim
    for axis in range(expected.ndim):
        for chosen in (slice(0, 1), slice(1, 2), slice(1, None, 2), slice(1, 1)):
            index = tuple(whole[:axis] + [chosen] + whole[axis + 1 :])
            np.testing.assert_array_equal(source.read(reader, index), expected[index])
    corner = (slice(1, 2),) * expected.ndim
    np.testing.assert_array_equal(source.read(reader, corner), expected[corner])


def test_only_the_entries_of_a_slice_are_read_and_computed(reader):
    asked = []

    class Noted(SafetensorsReader):
        def read(self, name, index=None):
            asked.append((name, super().read(name, index)))
            return asked[-1][1]

    def count(codes, scales):
        asked.append(("computed", codes))
        return unpack(codes, scales)

    noted = Noted(reader.source.parent)
    STACK.read(noted, (slice(2, 4), slice(0, 3), slice(None)))
    assert [(name, values.shape) for name, values in asked] == [("experts.2.up", (6, 3)), ("experts.3.up", (6, 3))]
    asked.clear()
    Computed(PACKED, count, UNPACKED.shape, by_entry=True).read(noted, (slice(1, 2), slice(None), slice(0, 4)))
    assert {name: values.shape for name, values in asked} == {
        "codes": (1, 3, 8),
        "scales": (1, 3),
        "computed": (1, 3, 8),
    }


def test_bug_case_b61_missing_and_unexpected_tensors_are_named_with_their_files(reader):
    names = everything_but("w", "norm")
    wanted = {n: spec(Tensor(f"head.{n}"), (2,)) for n in range(6)} | {"norm": spec(Tensor("norm"), (8,))}
    place = reader.tensors["w"].file.name
    assert_one_line(
        lambda: load_tree(reader, wanted, ignored=names),
        "model.safetensors.index.json: missing tensors head.0, head.1, head.2, head.3 and 2 more",
        f"unexpected tensors w in {place};",
    )
    assert_one_line(lambda: load_tree(reader, {"norm": wanted["norm"]}, ignored=["experts.*"]), "and 4 more")


def test_misshapen_tensors_are_named_with_their_files(reader):
    wanted = {"a": spec(Transposed(Tensor("w")), (6, 8)), "b": spec(Tensor("norm"), (9,))}
    place = reader.tensors["w"].file.name
    assert_one_line(
        lambda: load_tree(reader, wanted, ignored=everything_but("w", "norm")),
        rf"w in {place} with stored shape \(6, 8\) gives \(8, 6\) but \(6, 8\) is asked for",
        r"norm in .* but \(9,\) is asked for",
    )
    odd = Stacked((Tensor("experts.0.up"), Tensor("experts.1.up"), Tensor("fused")))
    assert_one_line(lambda: load_one(reader, odd, (3, 6, 8)), r"experts.0.up has shape \(6, 8\) but .*: fused")
    assert_one_line(lambda: load_one(reader, Transposed(Tensor("norm")), (8,)), "norm has shape .* two axes")
    assert_one_line(
        lambda: load_one(reader, Part(Tensor("norm"), 1, slice(2)), (8,)), "norm has shape .* without axis 1"
    )
    entries = Computed(PACKED, unpack, (3, 3, 8), by_entry=True)
    assert_one_line(lambda: load_one(reader, entries, (3, 3, 8)), "codes has shape .* must have 3 entries")
    mixed = Stacked((Tensor("w"), Part(Tensor("codes"), 0, slice(0, 1))))
    assert_one_line(lambda: load_one(reader, mixed, (2, 6, 8)), "another: codes")


def test_nothing_is_read_before_all_is_checked(reader, monkeypatch):
    def refuse(self, name, index=None):
        raise AssertionError("read")

    monkeypatch.setattr(SafetensorsReader, "read", refuse)
    good = {"norm": spec(Tensor("norm"), (8,))}
    for bad in (spec(Tensor("w"), (8, 6)), spec(Tensor("gone"), (2,)), spec(Tensor("w"), (6, 8), jnp.int32)):
        with pytest.raises(UserError):
            load_tree(reader, good | {"bad": bad}, ignored=everything_but("norm", "w"))


def test_floats_are_rounded_to_the_dtype_asked_for(reader):
    low = load_one(reader, Tensor("w"), (6, 8), jnp.bfloat16)
    np.testing.assert_array_equal(low, TENSORS["w"].astype(jnp.bfloat16))
    wide = load_one(reader, Tensor("low"), (5, 3))
    assert wide.dtype == jnp.float32
    np.testing.assert_array_equal(wide, TENSORS["low"].astype(np.float32))
    ids = load_one(reader, Tensor("ids"), (5,), jnp.int32)
    assert ids.dtype == jnp.int32
    np.testing.assert_array_equal(ids, np.arange(5))


def test_bug_case_b65_another_kind_of_dtype_is_refused(reader):
    # 2**24 + 1 as float32 would be 2**24.
    assert_one_line(lambda: load_one(reader, Tensor("large"), (1,)), "large in .* is int32 but float32 is asked for")
    assert_one_line(lambda: load_one(reader, Tensor("w"), (6, 8), jnp.int32), "w in .* is float32 but int32")
    assert_one_line(lambda: load_one(reader, Tensor("ids"), (5,), jnp.bool_), "ids in .* is int64 but bool")
    computed = Computed((Tensor("ids"),), lambda ids: ids, (5,))
    with pytest.raises(ValueError, match="ids is computed as int64 but dtype=float32"):
        load_one(reader, computed, (5,))
    with pytest.raises(ValueError, match="dtype=int64 must be one that JAX holds without x64"):
        load_one(reader, Tensor("ids"), (5,), np.int64)
    with pytest.raises(ValueError, match="dtype=complex64 must be one of"):
        spec(Tensor("w"), (6, 8), np.complex64)


def test_values_that_do_not_fit_the_dtype_are_refused_by_name(tmp_path):
    tensors = {"w": np.array([1e5], np.float32), "ids": np.array([2**31], np.int64), "codes": np.array([300], np.int32)}
    write_sharded(tmp_path, tensors.items())
    found = SafetensorsReader(tmp_path)
    for name, dtype in (("w", "float16"), ("ids", "int32"), ("codes", "uint8")):
        wanted = {name: spec(Tensor(name), (1,), dtype)}
        told = rf"model.safetensors: {name} holds a value that {dtype} cannot hold"
        assert_one_line(lambda wanted=wanted: load_tree(found, wanted, ignored=["*"]), told)


def test_a_value_that_is_not_finite_is_refused_inside_a_stack(tmp_path):
    bad = np.array([1.0, np.nan], np.float32)
    write_sharded(tmp_path, [("e.0", np.ones(2, np.float32)), ("e.1", bad)], max_shard_bytes=8)
    wanted = {"e": spec(Stacked((Tensor("e.0"), Tensor("e.1"))), (2, 2))}
    told = "model-00002-of-00002.safetensors: tensor e.1 holds a value that is not finite"
    assert_one_line(lambda: load_tree(SafetensorsReader(tmp_path), wanted), told)


def test_bug_case_b64_padded_vocabularies_are_refused_or_cut(tmp_path):
    rows = np.arange(160 * 4, dtype=np.float32).reshape(160, 4)
    write_sharded(tmp_path, [("lm_head.weight", rows)])
    found = SafetensorsReader(tmp_path)
    told = "lm_head.weight has 160 rows but vocab_size=151; set vocab_size=160 in config.json"
    assert_one_line(lambda: vocabulary_rows(found, "lm_head.weight", 151), "model.safetensors: " + told)
    source = vocabulary_rows(found, "lm_head.weight", 151, cut_padding=True)
    loaded = load_tree(found, {"head": spec(Transposed(source), (4, 151))})
    np.testing.assert_array_equal(loaded["head"], rows[:151].T)
    for cut in (False, True):
        assert_one_line(
            lambda cut=cut: vocabulary_rows(found, "lm_head.weight", 161, cut), "160 rows but vocab_size=161"
        )
    assert vocabulary_rows(found, "lm_head.weight", 160) == Tensor("lm_head.weight")
    missing = {"embed": spec(vocabulary_rows(found, "embed", 151), (151, 4))}
    assert_one_line(lambda: load_tree(found, missing), "missing tensors embed")


def test_sources_that_make_no_sense_are_refused(reader):
    for make in (
        lambda: Stacked(()),
        lambda: Part(Tensor("w"), -1, slice(2)),
        lambda: Part(Tensor("w"), 0, slice(None, None, -1)),
        lambda: Computed((), unpack, (2,)),
        lambda: Computed(PACKED, unpack, (), by_entry=True),
        lambda: Computed(PACKED, unpack, (1, 2)).read(reader),
        lambda: load_tree(reader, {"w": spec(Tensor("w"), (6, 8))}, {}),
    ):
        with pytest.raises(ValueError, match="must|asks for") as caught:
            make()
        assert "\n" not in str(caught.value)
