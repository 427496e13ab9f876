"""Messages of protocol buffers, as far as a few known fields need: https://protobuf.dev/programming-guides/encoding."""

from collections.abc import Iterator


def fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of one message: varints as ints, everything else as bytes. ValueError if malformed."""
    at, end = 0, len(data)
    while at < end:
        key, at = varint(data, at)
        wire = key & 7
        if wire == 0:
            number, at = varint(data, at)
            yield key >> 3, number
            continue
        if wire == 2:
            length, at = varint(data, at)
        elif wire in (1, 5):
            length = 8 if wire == 1 else 4
        else:
            raise ValueError(f"wire type {wire} at byte {at}")
        if at + length > end:
            raise ValueError(f"a field runs over the end at byte {at}")
        yield key >> 3, data[at : at + length]
        at += length


def varint(data: bytes, at: int) -> tuple[int, int]:
    """(value, place after it) of the number at a place."""
    value = shift = 0
    while at < len(data) and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at
        shift += 7
    raise ValueError(f"no number at byte {at}")
