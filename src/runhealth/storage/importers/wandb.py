"""Weights & Biases: the file `run-ID.wandb` of an offline (or synchronised) run, without wandb.

The file is a log in LevelDB's format (https://github.com/google/leveldb/blob/main/doc/log_format.md) with a header of
seven bytes, in blocks of 32 KiB; a record is a `Record` message of wandb's wandb_internal.proto. Read are the
history (field 2), the console output (4 and 13) for how the job failed, the run's name (17) and its exit code (18).
Checksums are CRC-32 over type and data; a chunk that fails is rejected, and reading goes on with the next block.
"""

import struct
import zlib
from collections.abc import Iterator
from typing import BinaryIO

from runhealth.storage.importers.base import Item, Mark, ReadContext, Tally
from runhealth.storage.importers.failures import FailureReader
from runhealth.storage.importers.lines import without_ansi
from runhealth.storage.importers.names import Names
from runhealth.storage.importers.protobuf import fields
from runhealth.storage.importers.rows import RowBuilder
from runhealth.storage.jsontext import parse_json
from runhealth.storage.records import EventKind

_HEADER = b":W&B"
_HEADER_BYTES = 7
_BLOCK_BYTES = 1 << 15
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_MAX_RECORD_BYTES = 1 << 26
_HISTORY, _OUTPUT, _OUTPUT_RAW, _RUN, _EXIT = 2, 4, 13, 17, 18
_STEPS = ("trainer/global_step", "train/global_step", "global_step")  # counters of training steps; `_step` counts calls


class _Wandb:
    name = "wandb"

    def sniff(self, name: str, head: bytes) -> float:  # noqa: ARG002
        return 0.99 if head.startswith(_HEADER) and len(head) > _HEADER_BYTES else 0.0

    def read(self, stream: BinaryIO, context: ReadContext) -> Iterator[Item]:
        tally = context.tally
        builder = RowBuilder(context, Names(tally, context.mapping))
        failures = FailureReader()
        steps = _GlobalStep(tally)
        exit_code = 0
        for offset, data in _records(stream, tally):
            try:
                number, message = _payload(data)
                if number == _HISTORY:
                    entry = _entry(message)
                elif number in (_OUTPUT, _OUTPUT_RAW):
                    _output(message, offset, failures)
                    continue
                elif number == _EXIT:
                    exit_code = _exit_code(message)
                    continue
                else:
                    if number == _RUN:
                        _describe(message, tally)
                    continue
            except (ValueError, struct.error, RecursionError) as error:
                tally.rows_read += 1
                tally.reject(offset, f"no readable record: {error}")
                continue
            steps.complete(entry)
            if not any(key[:1] != "_" for key in entry):
                continue  # a step without values
            if failures.ended:
                if failures.line:
                    tally.note(f"training went on after the exception at byte {failures.line}")
                failures.take()
            row = builder.row(offset, entry)
            if row is not None:
                yield row
        builder.finish()
        marks = failures.take()
        yield from marks
        if exit_code and not any(mark.kind in (EventKind.EXCEPTION, EventKind.ATTEMPT_END) for mark in marks):
            if exit_code == 255:  # wandb's own code for a run that was interrupted
                yield Mark(line=0, kind=EventKind.ATTEMPT_END, message="W&B says that the run was interrupted (255)")
            else:
                said = f"W&B says that the run ended with exit code {exit_code}"
                yield Mark(line=0, kind=EventKind.EXCEPTION, message=said, data={"exitcode": exit_code})


class _GlobalStep:
    """`_step` counts calls of `wandb.log`. Once a row has a counter of training steps, rows without take the last."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._name = ""
        self._last: object = None

    def complete(self, entry: dict[str, object]) -> None:
        name = next((known for known in _STEPS if known in entry), "")
        if name:
            self._name, self._last = name, entry[name]
        elif self._name:
            entry[self._name] = self._last
            self._tally.note(f"rows without '{self._name}' belong to the step of the row before them")


def _records(stream: BinaryIO, tally: Tally) -> Iterator[tuple[int, bytes]]:
    """Yield (byte offset, data) of each record, put together from its chunks."""
    offset = 0
    parts: list[bytes] = []
    size = start = 0
    while block := stream.read(_BLOCK_BYTES):
        at = _HEADER_BYTES if offset == 0 else 0
        while at + 7 <= len(block):
            checksum, length, kind = struct.unpack_from("<IHB", block, at)
            if kind == 0 and length == 0:
                break  # the rest of the block is padding
            data = block[at + 7 : at + 7 + length]
            where = offset + at
            if len(data) < length and len(block) < _BLOCK_BYTES:
                tally.reject(where, "the file ends inside a record: it is torn or still written")
                return
            if len(data) < length or zlib.crc32(block[at + 6 : at + 7 + length]) != checksum:
                tally.reject(where, "a record fails its checksum; the rest of its block of 32 KiB is skipped")
                parts, size = [], 0
                break
            at += 7 + length
            if kind in (_FULL, _FIRST):
                parts, size, start = [data], length, where
            elif parts:
                parts.append(data)
                size += length
            if size > _MAX_RECORD_BYTES:
                tally.reject(start, f"a record of more than {_MAX_RECORD_BYTES} bytes")
                parts, size = [], 0
            elif kind in (_FULL, _LAST) and parts:
                yield start, b"".join(parts)
                parts, size = [], 0
        offset += len(block)


def _payload(data: bytes) -> tuple[int, bytes]:
    """The number and content of the message that a record holds."""
    for number, value in fields(data):
        if isinstance(value, bytes) and number in (_HISTORY, _OUTPUT, _OUTPUT_RAW, _RUN, _EXIT):
            return number, value
    return 0, b""


def _entry(history: bytes) -> dict[str, object]:
    """HistoryRecord: items (1) and step (2)."""
    entry: dict[str, object] = {}
    for number, value in fields(history):
        if not isinstance(value, bytes):
            continue
        if number == 1:
            name, found = _item(value)
            if name:
                entry[name] = found
        elif number == 2:
            step = next((step for inner, step in fields(value) if inner == 1 and isinstance(step, int)), 0)
            entry.setdefault("_step", step)
    return entry


def _item(data: bytes) -> tuple[str, object]:
    """HistoryItem: key (1) or nested keys (2), and the value as JSON (16), or typed (4 bool, 5 sint64, 6 double)."""
    key, nested, found = "", [], None
    for number, value in fields(data):
        if isinstance(value, bytes):
            if number == 1:
                key = value.decode("utf-8", "replace")
            elif number == 2:
                nested.append(value.decode("utf-8", "replace"))
            elif number == 16:
                found = parse_json(value)  # NaN and infinities as bare words or as text
            elif number == 6 and len(value) == 8:
                found = struct.unpack("<d", value)[0]
        elif number == 5:
            found = (value >> 1) ^ -(value & 1)
        elif number == 4:
            found = value
    return (key or "/".join(nested))[:200], found


def _exit_code(message: bytes) -> int:
    return next((value for number, value in fields(message) if number == 1 and isinstance(value, int)), 0) & 0xFF


def _describe(message: bytes, tally: Tally) -> None:
    texts = {number: value.decode("utf-8", "replace") for number, value in fields(message) if isinstance(value, bytes)}
    known = " / ".join(texts[number][:80] for number in (3, 8, 1) if texts.get(number))
    if known:
        tally.note(f"W&B run: {known}")


def _output(message: bytes, offset: int, failures: FailureReader) -> None:
    for number, value in fields(message):
        if number == 3 and isinstance(value, bytes):
            for line in without_ansi(value.decode("utf-8", "replace")).splitlines()[:100]:
                failures.feed(line, offset, None)


IMPORTER = _Wandb()
