"""Frames: the checksummed unit of a rank log.

A frame is a 32-byte little-endian header and a payload:

    magic u32 | payload length u32 | step i64 | ts_ns u64 | kind u32 | crc32 u32 | payload

The checksum covers the 28 header bytes before it and the payload, so no bit of a frame is outside it. What a payload
means is the business of `storage.codec`; the format version is in the first frame of each segment.
"""

import struct
from enum import IntEnum
from typing import NamedTuple
from zlib import crc32

from runhealth.storage.errors import CorruptDataError

FORMAT_VERSION = 2  # that this release reads up to; a segment says the lowest one that can read it
MAGIC = int.from_bytes(b"RHLG", "little")
MAX_PAYLOAD_BYTES = 64 * 1024 * 1024  # a longer one is a damaged length

_HEAD = struct.Struct("<IIqQI")
_HEADER = struct.Struct("<IIqQII")
_CRC = struct.Struct("<I")
HEADER_BYTES = _HEADER.size


class FrameKind(IntEnum):
    SEGMENT = 1  # first frame of a segment: format version, attempt, rank, writer
    SCHEMA = 2  # names and types of the values that follow under its id
    STEP = 3
    LAYERS = 4
    BATCH = 5
    CHECKPOINT = 6
    EVENT = 7
    END = 8  # last frame of a segment that was closed
    RANKED = 9  # since format 2: frames of one rank of a node, in the log of the node's agent


class Frame(NamedTuple):
    """One decoded frame; `end` is the offset of the byte after it."""

    kind: int
    step: int
    ts_ns: int
    payload: bytes
    end: int


def encode_frame(kind: int, step: int, ts_ns: int, payload: bytes) -> bytes:
    """Header and payload. Raises ValueError or struct.error if a field does not fit."""
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise ValueError(f"a payload of {len(payload)} bytes is over the limit of {MAX_PAYLOAD_BYTES}")
    head = _HEAD.pack(MAGIC, len(payload), step, ts_ns, kind)
    return head + _CRC.pack(crc32(payload, crc32(head))) + payload


def decode_frame(data: bytes, offset: int = 0) -> Frame | None:
    """The frame at `offset`, or None if the data ends before the frame does.

    Raises CorruptDataError if the bytes there are no frame or fail their checksum.
    """
    if len(data) - offset < HEADER_BYTES:
        if len(data) > offset and not data.startswith(_MAGIC_BYTES[: len(data) - offset], offset):
            raise CorruptDataError(f"expected a frame, met bytes {data[offset : offset + 4].hex()}")
        return None
    magic, length, step, ts_ns, kind, crc = _HEADER.unpack_from(data, offset)
    if magic != MAGIC:
        raise CorruptDataError(f"expected a frame, met bytes {data[offset : offset + 4].hex()}")
    if length > MAX_PAYLOAD_BYTES:
        raise CorruptDataError(f"frame length {length} is over the limit of {MAX_PAYLOAD_BYTES} bytes")
    start = offset + HEADER_BYTES
    end = start + length
    if end > len(data):
        return None
    payload = data[start:end]
    if crc32(payload, crc32(data[offset : offset + _HEAD.size])) != crc:
        raise CorruptDataError(f"frame of kind {kind} fails its checksum")
    return Frame(kind, step, ts_ns, payload, end)


def find_frame(data: bytes, start: int) -> int:
    """Offset of the first whole frame at or after `start` whose checksum agrees; -1 if there is none."""
    position = data.find(_MAGIC_BYTES, start)
    while position >= 0:
        try:
            if decode_frame(data, position) is not None:
                return position
        except CorruptDataError:
            pass
        position = data.find(_MAGIC_BYTES, position + 1)
    return -1


_MAGIC_BYTES = MAGIC.to_bytes(4, "little")
