"""Reads the container in which XLA keeps a compiled program: Riegeli records, compressed with Snappy.

Only what such a program uses: one record chunk after another, simple (not transposed), Snappy or no compression.
Formats as written down in google/riegeli, doc/riegeli_records_file_format.md, and google/snappy,
format_description.txt.
"""

from __future__ import annotations

from collections.abc import Iterator

# A file starts with a block header (of nothing) and the header of the signature chunk, which never change.
SIGNATURE = bytes.fromhex("83af70d10d884a3f00000000000000004000000000000000")
_BLOCK = 1 << 16
_BLOCK_HEADER = 24
_CHUNK_HEADER = 40


def varint(data: bytes, place: int) -> tuple[int, int]:
    """A number of seven bits a byte, lowest first, and where it ends."""
    value = shift = 0
    while True:
        byte = data[place]
        place += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, place


def unsnap(data: bytes) -> bytes:
    """Snappy: literal bytes, and copies of what came before."""
    size, place = varint(data, 0)
    out = bytearray()
    while place < len(data):
        tag = data[place]
        place += 1
        kind, high = tag & 3, tag >> 2
        if kind == 0:
            width = max(high - 59, 0)
            length = (int.from_bytes(data[place : place + width], "little") if width else high) + 1
            place += width
            out += data[place : place + length]
            place += length
            continue
        width = (1, 2, 4)[kind - 1]
        offset = int.from_bytes(data[place : place + width], "little")
        place += width
        length = 4 + (high & 7) if kind == 1 else 1 + high
        offset += (tag >> 5) << 8 if kind == 1 else 0
        # A copy may reach into what it writes: then it repeats.
        piece = bytes(out[len(out) - offset : len(out) - offset + length])
        out += (piece * (length // len(piece) + 1))[:length]
    if len(out) != size:
        raise ValueError(
            f"snappy block has {len(out)} bytes and must have {size}; it is cut short or of another format"
        )
    return bytes(out)


def records(data: bytes) -> Iterator[bytes]:
    """The records of the first file that starts in `data`; files inside records are opened too."""
    start = data.find(SIGNATURE)
    if start < 0:
        raise ValueError("program must be a serialized GPU executable of jax 0.10 or 0.11; it has no Riegeli file")
    file = data[start:]
    stream = b"".join(file[p + _BLOCK_HEADER : p + _BLOCK] for p in range(0, len(file), _BLOCK))
    place = 0
    while place + _CHUNK_HEADER <= len(stream):
        size = int.from_bytes(stream[place + 8 : place + 16], "little")
        kind = stream[place + 24 : place + 25]
        count = int.from_bytes(stream[place + 25 : place + 32], "little")
        if kind not in (b"s", b"r"):  # past the end: what follows the file in `data`
            return
        body = stream[place + _CHUNK_HEADER : place + _CHUNK_HEADER + size]
        place += _CHUNK_HEADER + size
        for record in _simple_chunk(body, count) if kind == b"r" else ():
            if SIGNATURE in record:
                yield from records(record)
            else:
                yield record


def _simple_chunk(body: bytes, count: int) -> Iterator[bytes]:
    """Compression, how many bytes the sizes take, the sizes of the records, the records."""
    compression, (length, place) = body[:1], varint(body, 1)
    sizes, values = (_expand(compression, part) for part in (body[place : place + length], body[place + length :]))
    place = start = 0
    for _ in range(count):
        size, place = varint(sizes, place)
        yield values[start : start + size]
        start += size


def _expand(compression: bytes, data: bytes) -> bytes:
    if compression == b"\0":
        return data
    if compression != b"s":
        raise ValueError(f"compression={compression!r} must be Snappy or none; this XLA writes programs in another way")
    return unsnap(data[varint(data, 0)[1] :])
