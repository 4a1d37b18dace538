"""MXFP4 against the definition written out number by number."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from draftco_jax.models.mxfp4 import unpack_expert, unpack_experts

RNG = np.random.default_rng(0)


def packed(*shape: int) -> tuple[np.ndarray, np.ndarray]:
    """Random codes, and scales from 2^-127 (whose smallest value is subnormal in float32) up."""
    blocks = RNG.integers(0, 256, (*shape, 16), dtype=np.uint8)
    return blocks, RNG.integers(0, 200, shape, dtype=np.uint8)


def by_definition(byte: int, high: bool, scale: int) -> float:
    """Sign, two exponent bits of bias 1, one mantissa bit; exponent 0 is subnormal. Exact in float64."""
    code = byte >> 4 if high else byte & 15
    sign, exponent, mantissa = -1.0 if code & 8 else 1.0, (code >> 1) & 3, code & 1
    magnitude = mantissa * 0.5 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return sign * magnitude * 2.0 ** (scale - 127)


def bits(array: np.ndarray) -> np.ndarray:
    """To compare bit for bit: -0.0 is not 0.0."""
    return array.view(np.dtype(f"u{array.dtype.itemsize}"))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_every_number_is_that_of_the_definition_bit_for_bit(dtype):
    blocks, scales = packed(3, 2)
    scales[0, 0], scales[0, 1] = 0, 252
    kernel = unpack_expert(blocks, scales, dtype)
    assert kernel.shape == (64, 3) and kernel.dtype == dtype and kernel.flags.c_contiguous
    expected = np.empty((64, 3), np.float64)
    for row, k in np.ndindex(3, 64):
        byte = int(blocks[row, k // 32, k % 32 // 2])
        expected[k, row] = by_definition(byte, k % 2 == 1, int(scales[row, k // 32]))
    np.testing.assert_array_equal(bits(kernel), bits(expected.astype(np.float32).astype(dtype)))
    np.testing.assert_array_equal(kernel.astype(np.float64), expected)  # nothing was rounded


def test_all_sixteen_codes_low_half_first():
    blocks = np.zeros((1, 1, 16), np.uint8)
    blocks[0, 0, :8] = [(2 * i) | ((2 * i + 1) << 4) for i in range(8)]
    values = unpack_expert(blocks, np.full((1, 1), 128, np.uint8))[:16, 0]
    np.testing.assert_array_equal(values, [0, 1, 2, 3, 4, 6, 8, 12, -0.0, -1, -2, -3, -4, -6, -8, -12])
    assert np.signbit(values[8])


def test_packing_what_was_unpacked_gives_the_same_numbers():
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    weights = RNG.normal(size=(5, 64))
    groups = weights.reshape(5, 2, 32)
    scale = np.floor(np.log2(np.abs(groups).max(axis=-1))) - 2
    codes = np.abs(np.abs(groups / 2.0 ** scale[..., None])[..., None] - table).argmin(axis=-1) | (groups < 0) << 3
    blocks = (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8)
    kernel = unpack_expert(blocks, (scale + 127).astype(np.uint8))
    # The largest step of the code is 2 around magnitudes of 4 to 6, and 8 is cut to 6: 2 units of the scale at most.
    assert (np.abs(kernel.T - weights).reshape(5, 2, 32) <= 2 * 2.0 ** scale[..., None]).all()
    assert np.corrcoef(kernel.T.ravel(), weights.ravel())[0, 1] > 0.98


def test_experts_are_read_one_at_a_time_from_an_open_file(tmp_path):
    blocks, scales = packed(4, 3, 2)
    save_file({"blocks": blocks, "scales": scales}, tmp_path / "experts.safetensors")
    asked = []

    class Watched:
        def __init__(self, inner):
            self.inner = inner

        def __getitem__(self, index):
            asked.append(index)
            return self.inner[index]

    with safe_open(tmp_path / "experts.safetensors", "numpy") as file:
        stream = unpack_experts(Watched(file.get_slice("blocks")), file.get_slice("scales"), (1, 3))
        np.testing.assert_array_equal(next(stream), unpack_expert(blocks[1], scales[1]))
        assert asked == [1], "an expert that was not asked for yet was read"
        np.testing.assert_array_equal(next(stream), unpack_expert(blocks[3], scales[3]))
    assert asked == [1, 3]


@pytest.mark.parametrize(
    ("blocks", "scales", "message"),
    [
        (np.zeros((2, 3, 15), np.uint8), np.zeros((2, 3), np.uint8), r"blocks.shape=\(2, 3, 15\) must be"),
        (np.zeros((1, 2, 3, 16), np.uint8), np.zeros((1, 2, 3), np.uint8), "one expert's packed bytes"),
        (np.zeros((2, 3, 16), np.uint8), np.zeros((3, 2), np.uint8), r"scales.shape=\(3, 2\) must be \(2, 3\)"),
        (np.zeros((2, 3, 16), np.int8), np.zeros((2, 3), np.uint8), "blocks.dtype=int8"),
        (np.zeros((2, 3, 16), np.uint8), np.zeros((2, 3), np.float32), "scales.dtype=float32"),
        (np.zeros((2, 3, 16), np.uint8), np.full((2, 3), 255, np.uint8), "scales hold 255"),
    ],
)
def test_what_is_not_one_expert_is_refused(blocks, scales, message):
    with pytest.raises(ValueError, match=message):
        unpack_expert(blocks, scales)
    with pytest.raises(ValueError, match=f"expert 0: .*{message}"):
        next(unpack_experts(blocks[None], scales[None], (0,)))
