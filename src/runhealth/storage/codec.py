"""Records to frames and back.

Scalars are packed by a schema: signal names and one type code each (`f`, `d`, `q`, `Q` of `storage.signals.Dtype`).
A set of names and types that was not met before in a segment is announced by a schema frame, so every segment can be
read alone. A value never changes on its way: the code follows from the catalogue and from the value itself, and a
value that does not fit its catalogue type is kept under a wider one.
"""

import json
import operator
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from runhealth.storage.errors import CorruptDataError, StoreError
from runhealth.storage.frame import FORMAT_VERSION, Frame, FrameKind, decode_frame, encode_frame
from runhealth.storage.jsontext import parse_json
from runhealth.storage.records import (
    BatchRecord,
    CheckpointRecord,
    CheckpointStatus,
    LayerSample,
    Record,
    RunEvent,
    Scalar,
    StepRecord,
)
from runhealth.storage.signals import BATCH_SIGNALS, LAYER_SIGNALS, STEP_SIGNALS, Dtype, Signal

_I64_MIN, _I64_MAX, _U64_MAX = -(2**63), 2**63 - 1, 2**64 - 1
_EXACT_INT = 2**53  # integers up to here are exact in a double
_CATALOGUES: Mapping[int, Mapping[str, Signal]] = {
    FrameKind.STEP: STEP_SIGNALS,
    FrameKind.LAYERS: LAYER_SIGNALS,
    FrameKind.BATCH: BATCH_SIGNALS,
}
_BATCH_HEAD = struct.Struct(
    "<IqqqqBQQQI"
)  # schema, micro_batch, first, last, samples, known hashes, hashes, shard bytes
_F32 = struct.Struct("<f")
_RANK = struct.Struct("<iI")  # rank, number of its connection


@dataclass(eq=False, slots=True)
class _Schema:
    """How one set of values is packed. `layers` is empty but for layer rows, where the values repeat for each layer."""

    kind: FrameKind
    names: tuple[str, ...]
    codes: str
    layers: tuple[str, ...]
    pack: Callable[..., bytes]
    id: int = -1  # -1: not announced in this segment

    def frame(self) -> bytes:
        body: dict[str, object] = {"id": self.id, "kind": int(self.kind), "names": self.names, "codes": self.codes}
        if self.kind is FrameKind.LAYERS:
            body["layers"] = self.layers
        return encode_frame(FrameKind.SCHEMA, 0, 0, _dump(body))


def _dump(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, default=str).encode("utf-8", "replace")


def as_number(name: str, value: object) -> Scalar:
    """A Python int or float with the value of a bool, numpy or one-element tensor scalar. Raises StoreError."""
    if isinstance(value, float):
        return float(value)
    if not isinstance(value, str | bytes):
        try:
            return int(operator.index(value))  # type: ignore[arg-type]
        except TypeError:
            pass
        try:
            return float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError, RuntimeError):
            pass
    raise StoreError(f"value of {name!r} must be a number, met {type(value).__name__} {value!r:.60}")


def _code(signal: Signal | None, value: Scalar) -> str:
    """The narrowest code that keeps `value` exactly, given what the catalogue says of the signal."""
    declared = signal.dtype if signal is not None else None
    if isinstance(value, float):
        if declared is not Dtype.F32:
            return "d"
        try:
            _F32.pack(value)
        except OverflowError:
            return "d"
        return "f"
    if declared in (Dtype.F32, Dtype.F64) and abs(value) <= _EXACT_INT:
        return "d"
    if declared is Dtype.U64 and 0 <= value <= _U64_MAX:
        return "Q"
    if _I64_MIN <= value <= _I64_MAX:
        return "q"
    return "Q" if 0 <= value <= _U64_MAX else "d"


_TYPICAL: Mapping[type, Scalar] = {float: 0.0, int: 0, bool: 0}


class Encoder:
    """Turns the records of one rank into frames; remembers which schemas the current segment knows."""

    def __init__(self, *, doubles: bool = False) -> None:
        self._doubles = doubles
        self._by_types: dict[tuple[object, ...], tuple[_Schema, tuple[int, ...]]] = {}
        self._by_codes: dict[tuple[object, ...], _Schema] = {}
        self._next_id = 0

    def forget(self) -> None:
        """A new segment begins, or the last frames did not reach the file: announce every schema again.

        Ids are not used twice, so frames that did reach the file stay readable.
        """
        self._by_types.clear()
        self._by_codes.clear()

    def encode(self, records: Sequence[Record]) -> list[bytes]:
        """Frames in the order of `records`; layer samples of one step and key set share a frame. Raises StoreError."""
        try:
            return self._encode(records)
        except StoreError:
            self.forget()  # schema frames made so far are not going to be written
            raise

    def _encode(self, records: Sequence[Record]) -> list[bytes]:
        frames: list[bytes] = []
        layers: dict[tuple[object, ...], list[LayerSample]] = {}
        for record in records:
            try:
                if isinstance(record, StepRecord):
                    self._step(record, frames)
                elif isinstance(record, LayerSample):
                    values = record.values
                    key = (record.step, record.ts_ns, tuple(values), tuple(map(type, values.values())))
                    layers.setdefault(key, []).append(record)
                elif isinstance(record, BatchRecord):
                    self._batch(record, frames)
                elif isinstance(record, CheckpointRecord):
                    frames.append(_checkpoint_frame(record))
                else:
                    frames.append(_event_frame(record))
            except (struct.error, OverflowError, ValueError, RecursionError) as err:
                raise StoreError(f"{type(record).__name__} of step {record.step} cannot be stored: {err}") from err
        for group in layers.values():
            try:
                self._layers(group, frames)
            except (struct.error, OverflowError, ValueError) as err:
                raise StoreError(f"layer samples of step {group[0].step} cannot be stored: {err}") from err
        return frames

    def _step(self, record: StepRecord, frames: list[bytes]) -> None:
        values = record.values
        payload = self._pack(FrameKind.STEP, tuple(values), tuple(values.values()), (), frames)
        frames.append(encode_frame(FrameKind.STEP, record.step, record.ts_ns, payload))

    def _layers(self, group: list[LayerSample], frames: list[bytes]) -> None:
        names = tuple(group[0].values)
        values = tuple(chain.from_iterable(sample.values.values() for sample in group))
        layers = tuple(sample.layer for sample in group)
        payload = self._pack(FrameKind.LAYERS, names, values, layers, frames)
        frames.append(encode_frame(FrameKind.LAYERS, group[0].step, group[0].ts_ns, payload))

    def _batch(self, record: BatchRecord, frames: list[bytes]) -> None:
        values = record.values
        packed = self._pack(FrameKind.BATCH, tuple(values), tuple(values.values()), (), frames)
        schema_id = int.from_bytes(packed[:4], "little")
        shard = record.shard.encode("utf-8", "replace")
        hashes = (record.content_hash, record.shard_hash, record.manifest_hash)
        known = sum(1 << i for i, value in enumerate(hashes) if value is not None)
        head = _BATCH_HEAD.pack(
            schema_id, record.micro_batch, record.first_sample, record.last_sample, record.samples,
            known, *(value or 0 for value in hashes), len(shard),
        )  # fmt: skip
        frames.append(encode_frame(FrameKind.BATCH, record.step, record.ts_ns, head + shard + packed[4:]))

    def _pack(
        self, kind: FrameKind, names: tuple[str, ...], values: tuple[Any, ...], layers: tuple[str, ...],
        frames: list[bytes],
    ) -> bytes:  # fmt: skip
        """Schema id and values; appends the schema frame if the segment does not know it yet."""
        types = tuple(map(type, values))
        key = (kind, names, types, layers)
        known = self._by_types.get(key)
        if known is None and all(t in _TYPICAL for t in types):
            schema = self._schema(kind, names, tuple(_TYPICAL[t] for t in types), layers)
            known = schema, tuple(i for i, t in enumerate(types) if t is not float and schema.codes[i] == "d")
            self._by_types[key] = known
        if known is not None:
            schema, integers_as_double = known
            try:
                payload = schema.pack(schema.id, *values)
            except (struct.error, OverflowError):
                pass  # a value outside the usual range of its type
            else:
                if all(abs(values[i]) <= _EXACT_INT for i in integers_as_double):
                    if schema.id >= 0:
                        return payload
                    self._announce(schema, frames)
                    return schema.pack(schema.id, *values)
        width = len(names)
        numbers = tuple(as_number(names[i % width], value) for i, value in enumerate(values))
        schema = self._schema(kind, names, numbers, layers)
        self._announce(schema, frames)
        return schema.pack(schema.id, *numbers)

    def _schema(
        self, kind: FrameKind, names: tuple[str, ...], numbers: tuple[Scalar, ...], layers: tuple[str, ...]
    ) -> _Schema:
        catalogue, width = _CATALOGUES[kind], len(names)
        codes = "".join(_code(catalogue.get(names[i % width]), number) for i, number in enumerate(numbers))
        if self._doubles:
            codes = codes.replace("f", "d")
        key = (kind, names, codes, layers)
        schema = self._by_codes.get(key)
        if schema is None:
            schema = _Schema(kind, names, codes, layers, struct.Struct("<i" + codes).pack)
            self._by_codes[key] = schema
        return schema

    def _announce(self, schema: _Schema, frames: list[bytes]) -> None:
        if schema.id < 0:
            schema.id = self._next_id
            self._next_id += 1
            frames.append(schema.frame())


def _checkpoint_frame(record: CheckpointRecord) -> bytes:
    body = {
        "path": record.path, "status": str(record.status), "seconds": record.seconds,
        "size_bytes": record.size_bytes, "reason": record.reason,
    }  # fmt: skip
    return encode_frame(FrameKind.CHECKPOINT, record.step, record.ts_ns, _dump(body))


def _event_frame(record: RunEvent) -> bytes:
    body = {"kind": str(record.kind), "message": record.message, "data": dict(record.data)}
    return encode_frame(FrameKind.EVENT, record.step, record.ts_ns, _dump(body))


class Decoder:
    """Turns the frames of one segment back into records. Feed it every frame, in order."""

    def __init__(self) -> None:
        self.header: Mapping[str, Any] = {}
        self.unreadable = False  # the segment has a format that this release does not know
        self.ended = False
        self._node = False
        self.attempt = 0
        self.rank = 0
        self._schemas: dict[int, tuple[int, tuple[str, ...], struct.Struct, tuple[str, ...]]] = {}
        self._ranks: dict[tuple[int, int], Decoder] = {}  # of a node's log: each connection numbers its own schemas

    def structure(self, frame: Frame) -> bool:
        """Take in a segment header, schema or end frame; False if the frame holds records instead."""
        self._check_place(frame.kind)
        try:
            if frame.kind == FrameKind.SCHEMA:
                body = parse_json(frame.payload)
                packing = struct.Struct("<i" + body["codes"])
                self._schemas[body["id"]] = (body["kind"], tuple(body["names"]), packing, tuple(body.get("layers", ())))
            elif frame.kind == FrameKind.SEGMENT:
                self.header = parse_json(frame.payload)
                version = self.header["format_version"]
                if version > FORMAT_VERSION:
                    self.unreadable = True
                    raise CorruptDataError(f"format version {version}; this release reads up to {FORMAT_VERSION}")
                self.attempt, self.rank = self.header["attempt"], self.header["rank"]
                self._node = "node" in self.header
            elif frame.kind == FrameKind.END:
                self.ended = True
            elif frame.kind == FrameKind.RANKED:
                rank, inner = self._ranked(frame)
                for one in inner:
                    if one.kind == FrameKind.SCHEMA:
                        rank.structure(one)
                return False
            else:
                return False
        except (ValueError, KeyError, TypeError, struct.error) as err:
            if isinstance(err, CorruptDataError):
                raise
            raise CorruptDataError(f"frame of kind {frame.kind} does not follow the format: {err}") from err
        return True

    def decode(self, frame: Frame) -> Iterable[Record]:
        """The records of a frame; nothing for header, schema and end frames. Raises CorruptDataError."""
        kind, step, ts_ns, payload, _ = frame
        if not self.header and kind != FrameKind.SEGMENT:
            raise CorruptDataError("the segment has no header frame")
        self._check_place(kind)
        try:
            if kind == FrameKind.STEP:
                _, names, packing, _ = self._schemas[int.from_bytes(payload[:4], "little")]
                values = dict(zip(names, packing.unpack(payload)[1:], strict=True))
                return (StepRecord(attempt=self.attempt, step=step, rank=self.rank, ts_ns=ts_ns, values=values),)
            if kind == FrameKind.RANKED:
                decoder, inner = self._ranked(frame)
                return [record for one in inner for record in decoder.decode(one)]
            if kind == FrameKind.LAYERS:
                return self._decode_layers(step, ts_ns, payload)
            if kind == FrameKind.BATCH:
                return (self._decode_batch(step, ts_ns, payload),)
            if self.structure(frame):
                return ()
            body = parse_json(payload)
            if kind == FrameKind.CHECKPOINT:
                body["status"] = CheckpointStatus(body["status"])
                return (CheckpointRecord(attempt=self.attempt, step=step, rank=self.rank, ts_ns=ts_ns, **body),)
            if kind == FrameKind.EVENT:
                return (RunEvent(attempt=self.attempt, step=step, rank=self.rank, ts_ns=ts_ns, **body),)
        except (ValueError, KeyError, TypeError, struct.error) as err:
            if isinstance(err, CorruptDataError):
                raise
            raise CorruptDataError(f"frame of kind {kind} does not follow the format: {err!r}") from err
        raise CorruptDataError(f"frame kind {kind} is not known to format version {FORMAT_VERSION}")

    def _check_place(self, kind: int) -> None:
        """In a node's log every frame of a rank is inside another; one that is not is left of a damaged one."""
        if self._node and kind not in (FrameKind.SEGMENT, FrameKind.RANKED, FrameKind.END):
            raise CorruptDataError(f"frame of kind {kind} without the frame that says whose it is")

    def _ranked(self, frame: Frame) -> "tuple[Decoder, list[Frame]]":
        """The frames inside a frame of a node's log, and the decoder of the rank they are of."""
        rank, connection = _RANK.unpack_from(frame.payload)
        decoder = self._ranks.get((rank, connection))
        if decoder is None:
            decoder = self._ranks[rank, connection] = Decoder()
            decoder.header, decoder.attempt, decoder.rank = self.header, self.attempt, rank
        return decoder, inner_frames(frame.payload, _RANK.size)

    def _decode_layers(self, step: int, ts_ns: int, payload: bytes) -> list[Record]:
        _, names, packing, layers = self._schemas[int.from_bytes(payload[:4], "little")]
        values, width = packing.unpack(payload)[1:], len(names)
        return [
            LayerSample(
                attempt=self.attempt, step=step, rank=self.rank, layer=layer, ts_ns=ts_ns,
                values=dict(zip(names, values[i * width : (i + 1) * width], strict=True)),
            )
            for i, layer in enumerate(layers)
        ]  # fmt: skip

    def _decode_batch(self, step: int, ts_ns: int, payload: bytes) -> BatchRecord:
        schema_id, micro_batch, first, last, samples, known, content, shard_hash, manifest, shard_bytes = (
            _BATCH_HEAD.unpack_from(payload)
        )
        _, names, packing, _ = self._schemas[schema_id]
        start = _BATCH_HEAD.size + shard_bytes
        values = packing.unpack(payload[:4] + payload[start:])[1:]
        return BatchRecord(
            attempt=self.attempt, step=step, rank=self.rank, micro_batch=micro_batch, ts_ns=ts_ns,
            shard=payload[_BATCH_HEAD.size : start].decode(),
            first_sample=first, last_sample=last, samples=samples,
            content_hash=content if known & 1 else None,
            shard_hash=shard_hash if known & 2 else None,
            manifest_hash=manifest if known & 4 else None,
            values=dict(zip(names, values, strict=True)),
        )  # fmt: skip


def segment_frame(header: Mapping[str, object], ts_ns: int, format_version: int = 1) -> bytes:
    """The first frame of a segment."""
    return encode_frame(FrameKind.SEGMENT, 0, ts_ns, _dump({"format_version": format_version, **header}))


def ranked_frame(rank: int, connection: int, frames: bytes, ts_ns: int) -> bytes:
    """Frames of one rank, as they stand in the log of its node's agent. `connection` is never used twice in a log."""
    return encode_frame(FrameKind.RANKED, 0, ts_ns, _RANK.pack(rank, connection) + frames)


def ranked_of(frame: Frame) -> tuple[int, bytes]:
    """The rank that a frame of a node's log is of, and its frames."""
    return _RANK.unpack_from(frame.payload)[0], frame.payload[_RANK.size :]


def inner_frames(data: bytes, start: int = 0) -> list[Frame]:
    """All frames from `start` to the end of `data`. Raises CorruptDataError unless they are whole and sound."""
    frames = []
    while start < len(data):
        frame = decode_frame(data, start)
        if frame is None:
            raise CorruptDataError(f"a frame inside another is cut off at byte {start}")
        frames.append(frame)
        start = frame.end
    return frames


def end_frame(ts_ns: int) -> bytes:
    """The last frame of a segment that was closed."""
    return encode_frame(FrameKind.END, 0, ts_ns, b"")
