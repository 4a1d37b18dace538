"""Snappy and Riegeli, on files written by hand."""

from __future__ import annotations

import pytest

from pallas_kernels.deviceless.riegeli import SIGNATURE, records, unsnap, varint


def test_varints_take_seven_bits_a_byte():
    assert varint(bytes([0xAC, 0x02, 0xFF]), 0) == (300, 2)


def test_snappy_literals_and_copies():
    literal = bytes([(4 - 1) << 2]) + b"abcd"
    near = bytes([0b01 | (5 - 4) << 2 | 0 << 5, 4])  # 5 bytes from 4 back: reaches into itself
    far = bytes([0b10 | (3 - 1) << 2, 9, 0])  # 3 bytes from 9 back
    farther = bytes([0b11 | (2 - 1) << 2, 1, 0, 0, 0])
    assert unsnap(bytes([14]) + literal + near + far + farther) == b"abcdabcdaabccc"
    long = bytes(range(100)) * 3
    assert unsnap(bytes([0xAC, 0x02, 61 << 2]) + (300 - 1).to_bytes(2, "little") + long) == long
    with pytest.raises(ValueError, match="has 4 bytes and must have 5"):
        unsnap(bytes([5]) + literal)


def file_of(items, compression=b"\0"):
    """A Riegeli file of one chunk of uncompressed records, with its block headers."""
    sizes = b"".join(_varint(len(item)) for item in items)
    body = compression + _varint(len(sizes)) + sizes + b"".join(items)
    header = (len(items) << 8 | ord("r")).to_bytes(8, "little")
    chunk = bytes(8) + len(body).to_bytes(8, "little") + bytes(8) + header + bytes(8) + body
    stream = bytes(24) + b"s" + bytes(15) + chunk
    blocks = [stream[p : p + 65536 - 24] for p in range(0, len(stream), 65536 - 24)]
    headers = [SIGNATURE, *[bytes([1]) * 24] * (len(blocks) - 1)]
    return b"".join(head + block for head, block in zip(headers, blocks, strict=True))


def _varint(value):
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def test_records_are_split_across_the_headers_of_blocks():
    items = [b"first", b"", bytes(range(256)) * 600, b"last"]
    assert list(records(b"whatever" + file_of(items))) == items


def test_a_file_in_a_record_is_opened():
    assert list(records(file_of([b"outer", b"x" + file_of([b"inner"])]))) == [b"outer", b"inner"]


def test_what_is_not_such_a_file_is_refused():
    with pytest.raises(ValueError, match="no Riegeli file"):
        list(records(b"nothing"))
    with pytest.raises(ValueError, match="must be Snappy or none"):
        list(records(file_of([b"x"], compression=b"z")))
