"""MXFP4 weights of GPT-OSS files to floats, on the host, one expert at a time.

A block is 32 numbers along the input dim: 16 bytes of two 4-bit codes each, the low half first, and one scale byte.
A code is sign, 2 exponent bits, 1 mantissa bit (E2M1); a scale is a power of two (E8M0, bias 127):

    value = TABLE[code] * 2^(scale - 127)

All of them are exact in float32 and in bfloat16, but for scales so large that 6 * 2^(scale - 127) overflows, which
gives infinities as the rule says. Source: OCP Microscaling Formats 1.0 and transformers' reading of these files.

Letters: E experts, O outputs (rows of the file), K = 32 * G inputs, G blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol, runtime_checkable

import numpy as np

BLOCK = 32
BIAS = 127
NOT_A_NUMBER = 255  # the one scale byte that is not a power of two
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
TABLE = np.array([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], np.float32)


@runtime_checkable
class Stacked(Protocol):
    """An array, or a slice of an open safetensors file, that gives the bytes of expert e as `stacked[e]`."""

    def __getitem__(self, index: int, /) -> Any:
        """The bytes of one expert."""
        ...


def unpack_expert(blocks: np.ndarray, scales: np.ndarray, dtype: Any = np.float32) -> np.ndarray:
    """blocks u8[O, G, 16] and scales u8[O, G] of one expert to its kernel [K, O] in `dtype`."""
    check_packed(blocks, scales)
    outputs, groups, half = blocks.shape
    pairs = np.empty((outputs, groups, half, 2), np.float32)
    pairs[..., 0] = TABLE[blocks & 0x0F]
    pairs[..., 1] = TABLE[blocks >> 4]
    exponents = scales.astype(np.int32) - BIAS
    with np.errstate(over="ignore"):  # an infinity is what the rule gives; readers of weights refuse it by name
        values = np.ldexp(pairs.reshape(outputs, groups, BLOCK), exponents[:, :, None])
    return np.ascontiguousarray(values.reshape(outputs, groups * BLOCK).T.astype(dtype))


def unpack_experts(
    blocks: Stacked, scales: Stacked, experts: Iterable[int], dtype: Any = np.float32
) -> Iterator[np.ndarray]:
    """Kernels [K, O] of the named experts in turn: the host holds one at a time, and a rank reads only its own."""
    for expert in experts:
        try:
            yield unpack_expert(np.asarray(blocks[expert]), np.asarray(scales[expert]), dtype)
        except ValueError as error:
            raise ValueError(f"expert {expert}: {error}") from error


def check_packed(blocks: np.ndarray, scales: np.ndarray) -> None:
    """Refuse arrays that are not the blocks and scales of one expert."""
    if blocks.dtype != np.uint8 or scales.dtype != np.uint8:
        raise ValueError(
            f"blocks.dtype={blocks.dtype}, scales.dtype={scales.dtype} must be uint8; read them as they are on disk"
        )
    if blocks.ndim != 3 or blocks.shape[-1] != BLOCK // 2:
        raise ValueError(
            f"blocks.shape={blocks.shape} must be [outputs, blocks, {BLOCK // 2}]; give one expert's packed bytes"
        )
    if scales.shape != blocks.shape[:-1]:
        raise ValueError(
            f"scales.shape={scales.shape} must be {blocks.shape[:-1]}, one a block; give the scales of the same tensor"
        )
    if (scales == NOT_A_NUMBER).any():
        raise ValueError(f"scales hold {NOT_A_NUMBER}, which must not occur, it is no number; get the file again")
