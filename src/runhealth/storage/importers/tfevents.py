"""TensorBoard event files, without TensorBoard.

A file is a sequence of TFRecords: length (8 bytes, little endian), masked CRC-32C of the length, data, masked CRC-32C
of the data (https://www.tensorflow.org/tutorials/load_data/tfrecord). The data are `Event` messages of protocol
buffers, of which a dozen fields are needed (tensorboard/compat/proto: event.proto, summary.proto, tensor.proto).

Simple values and scalar tensors are read; histograms, images and text are counted in a note. A length that fails its
checksum ends the reading, because no later record can be found; the checksums of the data are not verified, for speed.
"""

import struct
from collections.abc import Iterator
from typing import BinaryIO

from runhealth.storage.importers.base import EVALUATION, Item, ReadContext, Row
from runhealth.storage.importers.names import Names
from runhealth.storage.importers.protobuf import fields, varint
from runhealth.storage.importers.values import checked_ns, to_step
from runhealth.storage.records import Scalar

_MAX_RECORD_BYTES = 1 << 26
_FIRST_EVENT = b"brain.Event:"
# Hugging Face writes the mean over the whole training as train/train_loss; AlgoPerf's clock stands still in evaluations
# and is written with them only.
_TABLE = {"train/train_loss": "", "accumulated_submission_time": ""}
# DataType of tensor.proto: (field of the typed value list, struct code of tensor_content)
_TYPES = {1: "f", 2: "d", 3: "i", 9: "q", 10: "?", 22: "I", 23: "Q"}


class _TfEvents:
    name = "tfevents"

    def sniff(self, name: str, head: bytes) -> float:  # noqa: ARG002
        if len(head) < 12 or _masked_crc(head[:8]) != int.from_bytes(head[8:12], "little"):
            return 0.0
        return 0.99 if _FIRST_EVENT in head[12:64] else 0.5

    def read(self, stream: BinaryIO, context: ReadContext) -> Iterator[Item]:
        tally = context.tally
        names = Names(tally, context.mapping, _TABLE)
        others = 0
        gathered: Row | None = None
        last_of_tag: dict[str, int] = {}
        for offset, data in _frames(stream, context):
            try:
                event = _event(data)
            except (ValueError, struct.error, IndexError) as error:
                tally.rows_read += 1
                tally.reject(offset, f"no readable event: {error}")
                continue
            others += event.others
            if not event.values:
                continue
            step = to_step(event.step)
            if step is None:
                tally.rows_read += 1
                tally.reject(offset, f"expected a step number, met {event.step}")
                continue
            # A tag that comes again, or goes back, ends the row that is being gathered.
            again = any(last_of_tag.get(tag, -1) >= step for tag in event.values)
            if gathered is not None and (gathered.step != step or again):
                yield from _finished(gathered, names)
                gathered = None
            for tag in event.values:
                if len(last_of_tag) < 10_000:
                    last_of_tag[tag] = step
            if gathered is None:
                gathered = Row(line=offset, step=step, values={}, ts_ns=event.ts_ns)
            gathered.values.update(event.values)
        if gathered is not None:
            yield from _finished(gathered, names)
        names.finish()
        if others:
            tally.note(f"{others} summaries are no scalars (histograms, images, text) and were not read")


def _finished(row: Row, names: Names) -> Iterator[Row]:
    """The gathered tags as one row, or as two if it holds an evaluation beside training values."""
    row.values.pop("global_step", None)
    values, row.series = names.convert(row.values)
    row.values = values
    if row.series != EVALUATION and "eval_loss" in values:
        yield Row(
            line=row.line,
            step=row.step,
            values={"eval_loss": values.pop("eval_loss")},
            series=EVALUATION,
            ts_ns=row.ts_ns,
        )
    if values:
        yield row


class _Event:
    __slots__ = ("others", "step", "ts_ns", "values")

    def __init__(self) -> None:
        self.step = 0
        self.ts_ns = 0
        self.values: dict[str, Scalar] = {}
        self.others = 0


def _frames(stream: BinaryIO, context: ReadContext) -> Iterator[tuple[int, bytes]]:
    """Yield (byte offset, data) of each record."""
    offset = 0
    while header := stream.read(12):
        if len(header) < 12:
            context.tally.reject(offset, "the file ends inside the head of a record: it is torn or still written")
            return
        if _masked_crc(header[:8]) != int.from_bytes(header[8:], "little"):
            context.tally.reject(offset, "the length of a record fails its checksum: nothing after it can be read")
            return
        length = int.from_bytes(header[:8], "little")
        if length > _MAX_RECORD_BYTES:
            context.tally.reject(offset, f"a record of {length} bytes is over the limit of {_MAX_RECORD_BYTES}")
            return
        data = stream.read(length + 4)
        if len(data) < length + 4:
            context.tally.reject(offset, "the file ends inside a record: it is torn or still written")
            return
        yield offset, data[:length]
        offset += length + 16


def _event(data: bytes) -> _Event:
    event = _Event()
    for number, value in fields(data):
        if number == 1 and isinstance(value, bytes) and len(value) == 8:
            seconds = struct.unpack("<d", value)[0]
            event.ts_ns = checked_ns(int(seconds * 1e9)) if 0 < seconds < 1e10 else 0
        elif number == 2 and isinstance(value, int):
            event.step = value if value < 2**63 else value - 2**64
        elif number == 5 and isinstance(value, bytes):
            for inner, summary in fields(value):
                if inner == 1 and isinstance(summary, bytes):
                    _value(summary, event)
    return event


def _value(data: bytes, event: _Event) -> None:
    tag, scalar = "", None
    for number, value in fields(data):
        if number == 1 and isinstance(value, bytes):
            tag = value.decode("utf-8", "replace")[:200]
        elif number == 2 and isinstance(value, bytes) and len(value) == 4:
            scalar = struct.unpack("<f", value)[0]
        elif number == 8 and isinstance(value, bytes):
            scalar = _tensor(value)
    if tag and scalar is not None:
        event.values[tag] = scalar
    elif tag:
        event.others += 1


def _tensor(data: bytes) -> Scalar | None:
    """The value of a tensor that holds one number, else None."""
    dtype, scalar = 0, None
    for number, value in fields(data):
        if number == 1 and isinstance(value, int):
            dtype = value
        elif number == 2 and isinstance(value, bytes) and any(size != 1 for size in _sizes(value)):
            return None
        elif number == 4 and isinstance(value, bytes) and dtype in _TYPES:
            code = "<" + _TYPES[dtype]
            if len(value) != struct.calcsize(code):
                return None
            scalar = struct.unpack(code, value)[0]
        elif number in (5, 6) and isinstance(value, bytes):  # float_val, double_val; packed, or one by one
            code = "<f" if number == 5 else "<d"
            if len(value) != struct.calcsize(code):
                return None
            scalar = struct.unpack(code, value)[0]
        elif number in (7, 10, 11):  # int_val, int64_val, bool_val
            whole = value if isinstance(value, int) else varint(value, 0)[0]
            scalar = whole if whole < 2**63 else whole - 2**64
    if isinstance(scalar, bool):
        return int(scalar)
    return scalar if isinstance(scalar, (int, float)) else None


def _sizes(shape: bytes) -> Iterator[int]:
    for number, dim in fields(shape):
        if number == 2 and isinstance(dim, bytes):
            yield next((size for inner, size in fields(dim) if inner == 1 and isinstance(size, int)), 0)


def _crc_table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)  # Castagnoli, reflected
        table.append(value)
    return tuple(table)


_CRC_TABLE = _crc_table()


def _masked_crc(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC_TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


IMPORTER = _TfEvents()
