"""Frames and codec: exact round trips, and no damage that passes unnoticed."""

import contextlib
import math
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runhealth.storage.codec import Decoder, Encoder, end_frame, segment_frame
from runhealth.storage.errors import CorruptDataError, StoreError
from runhealth.storage.frame import HEADER_BYTES, FrameKind, decode_frame, encode_frame
from runhealth.storage.records import BatchRecord, LayerSample, Record, RunEvent, StepRecord
from runhealth.storage.signals import BATCH_SIGNALS, LAYER_SIGNALS, STEP_SIGNALS, Dtype, Signal
from runhealth.storage.tail import SegmentTail

i64 = st.integers(-(2**63), 2**63 - 1)
u64 = st.integers(0, 2**64 - 1)
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


def values_of(catalogue: dict[str, Signal]) -> st.SearchStrategy[dict[str, float | int]]:
    """Numbers that fit what the catalogue promises for the name, free-form names with anything a 64-bit type holds."""
    of_type = {
        Dtype.F32: st.floats(width=32),
        Dtype.F64: st.floats(),
        Dtype.I64: i64 | u64,
        Dtype.U64: u64,
    }
    known = {name: of_type[signal.dtype] for name, signal in catalogue.items()}
    free = st.dictionaries(text.filter(lambda name: name not in catalogue), st.floats() | i64 | u64, max_size=4)
    return st.tuples(st.fixed_dictionaries({}, optional=known), free).map(lambda pair: {**pair[0], **pair[1]})


at = {"attempt": st.just(3), "step": i64, "rank": st.just(5), "ts_ns": st.integers(0, 2**63 - 1)}
records = st.one_of(
    st.builds(StepRecord, **at, values=values_of(dict(STEP_SIGNALS))),
    st.builds(LayerSample, **at, layer=text, values=values_of(dict(LAYER_SIGNALS))),
    st.builds(
        BatchRecord, **at, micro_batch=i64, shard=text, first_sample=i64, last_sample=i64, samples=i64,
        content_hash=st.none() | u64, shard_hash=st.none() | u64, manifest_hash=st.none() | u64,
        values=values_of(dict(BATCH_SIGNALS)),
    ),
    st.builds(RunEvent, **at, kind=text, message=text, data=st.dictionaries(text, st.none() | i64 | text, max_size=3)),
)  # fmt: skip


def exact(record: Record) -> tuple[object, ...]:
    """A key that tells apart what == does not: NaN equals itself, 0.0 is not -0.0, 1 is not 1.0."""
    values = {
        name: ("nan" if isinstance(v, float) and math.isnan(v) else struct.pack("<d", v) if isinstance(v, float) else v)
        for name, v in getattr(record, "values", {}).items()
    }
    rest = [getattr(record, name) for name in record.__slots__ if name != "values"]
    return type(record).__name__, repr(rest), sorted(values.items(), key=repr)


def round_trip(batches: list[list[Record]]) -> list[Record]:
    encoder, decoder = Encoder(), Decoder()
    data = segment_frame({"attempt": 3, "rank": 5}, 0)
    data += b"".join(frame for batch in batches for frame in encoder.encode(batch))
    out: list[Record] = []
    position = 0
    while (frame := decode_frame(data, position)) is not None:
        out.extend(decoder.decode(frame))
        position = frame.end
    assert position == len(data)
    return out


@given(st.lists(st.lists(records, max_size=4), max_size=4))
@settings(deadline=None, max_examples=80)
def test_records_survive_exactly(batches: list[list[Record]]) -> None:
    got = round_trip(batches)
    want = [record for batch in batches for record in batch]
    assert sorted(map(repr, map(exact, got))) == sorted(map(repr, map(exact, want)))


def step(**values: object) -> StepRecord:
    return StepRecord(attempt=3, step=1, rank=5, values=values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("loss", 7),  # an int for a float32 signal
        ("loss", 2**53 + 1),  # which no float holds
        ("loss", 1e39),  # a float that float32 cannot hold
        ("loss", True),
        ("tokens", 1.5),  # a float for an integer signal
        ("tokens", float("nan")),
        ("tokens", 2**64 - 1),
        ("free", 2**64 - 1),
        ("free", -(2**63)),
    ],
)
def test_a_value_that_does_not_fit_its_catalogue_type_is_kept_wider(name: str, value: float) -> None:
    (got,) = round_trip([[step(**{name: value})]])
    assert isinstance(got, StepRecord)
    assert got.values[name] == value or (math.isnan(value) and math.isnan(got.values[name]))


def test_one_odd_value_does_not_disturb_the_usual_ones() -> None:
    got = round_trip([[step(loss=1.5)], [step(loss=1e39)], [step(loss=2.5)]])
    assert [record.values["loss"] for record in got if isinstance(record, StepRecord)] == [1.5, 1e39, 2.5]


def test_numpy_scalars_are_numbers() -> None:
    np = pytest.importorskip("numpy")
    (got,) = round_trip([[step(loss=np.float32(1.5), tokens=np.int64(2**62 + 1), lr=np.float64(0.1))]])
    assert isinstance(got, StepRecord)
    assert dict(got.values) == {"loss": 1.5, "tokens": 2**62 + 1, "lr": 0.1}
    assert all(type(value) in (int, float) for value in got.values.values())


@pytest.mark.parametrize("value", ["1.5", None, [1.0], 2**2000])
def test_what_is_no_number_is_named(value: object) -> None:
    with pytest.raises(StoreError, match=r"loss|step 1"):
        Encoder().encode([step(loss=value)])


def test_a_refused_record_leaves_the_encoder_usable() -> None:
    encoder, decoder = Encoder(), Decoder()
    with pytest.raises(StoreError):
        encoder.encode([step(loss=1.5), step(loss="x")])
    data = segment_frame({"attempt": 3, "rank": 5}, 0) + b"".join(encoder.encode([step(loss=1.5)]))
    position, got = 0, []
    while (frame := decode_frame(data, position)) is not None:
        got += decoder.decode(frame)
        position = frame.end
    assert [record.values for record in got if isinstance(record, StepRecord)] == [{"loss": 1.5}]


def test_absent_keys_stay_absent_and_layers_share_frames() -> None:
    samples = [LayerSample(attempt=3, step=1, rank=5, layer=f"b{i}", values={"amax": float(i)}) for i in range(50)]
    frames = Encoder().encode(samples)
    assert len(frames) == 2  # the schema, and one frame for all
    assert round_trip([[step(loss=1.0)], [step(lr=1.0)]])[1] == step(lr=1.0)


def a_segment() -> tuple[bytes, list[int], list[Record]]:
    """A small closed segment, the frame boundaries in it, and its records."""
    encoder = Encoder()
    wanted: list[Record] = [
        step(loss=1.5, tokens=3),
        BatchRecord(attempt=3, step=1, rank=5, shard="s", content_hash=2**64 - 1, values={"token_entropy": 2.0}),
        RunEvent(attempt=3, step=2, rank=5, kind="config", data={"x": 1}),
        LayerSample(attempt=3, step=2, rank=5, layer="a", values={"amax": 1.0}),
    ]
    frames = [segment_frame({"attempt": 3, "rank": 5}, 9)]
    for record in wanted:
        frames += encoder.encode([record])
    frames.append(end_frame(10))
    ends = [sum(map(len, frames[: i + 1])) for i in range(len(frames))]
    return b"".join(frames), ends, wanted


def read_bytes(path: Path, data: bytes) -> tuple[list[Record], SegmentTail]:
    path.write_bytes(data)
    tail = SegmentTail(path, "log/a003/r00005/000000.rlog")
    return tail.read(), tail


def test_cut_at_every_byte(tmp_path: Path) -> None:
    data, ends, wanted = a_segment()
    for length in range(len(data)):
        got, tail = read_bytes(tmp_path / "x.rlog", data[:length])
        assert got == wanted[: len(got)]
        rejected = tail.rejected(final=True)
        if length in (0, *ends):
            assert rejected is None
        else:
            assert rejected is not None
            assert rejected.line == max(end for end in (0, *ends) if end <= length)
            assert "000000.rlog" in rejected.why
        assert not tail.ended


def is_part_of(got: list[Record], wanted: list[Record]) -> bool:
    """All of `got` comes, unchanged and in this order, in `wanted`."""
    rest = iter(wanted)
    return all(any(record == one for one in rest) for record in got)


def test_what_follows_a_damaged_frame_is_read(tmp_path: Path) -> None:
    frames = [segment_frame({"attempt": 3, "rank": 5}, 9)]
    encoder = Encoder()
    for number in range(6):
        frames += encoder.encode([StepRecord(attempt=3, step=number, rank=5, values={"loss": 1.0})])
    frames.append(end_frame(10))
    assert len(frames) == 9  # header, schema, six steps, end
    for damage in (
        lambda f: b"\0" * len(f),
        lambda f: f[:-3],
        lambda f: f[:4] + b"\xff\xff\0\0" + f[8:],
        lambda _: b"x",
    ):
        hurt = [damage(frame) if i in (3, 4, 6) else frame for i, frame in enumerate(frames)]
        got, tail = read_bytes(tmp_path / "x.rlog", b"".join(hurt))
        assert [record.step for record in got] == [0, 3, 5]
        assert tail.ended
        first = len(frames[0] + frames[1] + frames[2])
        assert tail.gaps[0].line == first
        assert len(tail.gaps) == 2
        assert sum(int(gap.why.split("(")[1].split()[0]) for gap in tail.gaps) == sum(len(hurt[i]) for i in (3, 4, 6))


def test_rows_behind_a_lost_schema_are_rejected_not_misread(tmp_path: Path) -> None:
    encoder = Encoder()
    frames = [segment_frame({"attempt": 3, "rank": 5}, 9)]
    for values in ({"loss": 1.0}, {"loss": 2.0, "lr": 0.5}, {"loss": 3.0}):
        frames += encoder.encode([step(**values)])
    frames[3] = bytes(len(frames[3]))  # the schema of the second record
    got, tail = read_bytes(tmp_path / "x.rlog", b"".join(frames))
    assert [dict(record.values) for record in got if isinstance(record, StepRecord)] == [{"loss": 1.0}, {"loss": 3.0}]
    (gap,) = tail.gaps
    assert gap.line == len(frames[0] + frames[1] + frames[2])


def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    data, _, wanted = a_segment()
    path = tmp_path / "x.rlog"
    path.write_bytes(data)
    with path.open("r+b", buffering=0) as file:
        for bit in range(len(data) * 8):
            at_byte, good = bit // 8, data[bit // 8]
            file.seek(at_byte)
            file.write(bytes([good ^ 1 << bit % 8]))
            tail = SegmentTail(path, "log/a003/r00005/000000.rlog")
            got = tail.read()
            assert is_part_of(got, wanted), bit
            assert tail.gaps or tail.rejected(final=True) is not None, bit
            file.seek(at_byte)
            file.write(bytes([good]))


@given(st.binary(max_size=200), st.integers(0, 200))
@settings(deadline=None)
def test_foreign_bytes_are_no_frames(data: bytes, offset: int) -> None:
    if offset <= len(data):
        with contextlib.suppress(CorruptDataError):
            assert decode_frame(data, offset) is None


def test_frame_header_is_32_bytes_and_as_documented() -> None:
    frame = encode_frame(FrameKind.STEP, -2, 7, b"abc")
    assert len(frame) == HEADER_BYTES + 3 == 35
    assert frame[:4] == b"RHLG"
    assert struct.unpack_from("<IqQI", frame, 4) == (3, -2, 7, 3)


def test_a_newer_format_is_refused_by_name(tmp_path: Path) -> None:
    header = encode_frame(FrameKind.SEGMENT, 0, 0, b'{"format_version":99,"attempt":0,"rank":0}')
    _, tail = read_bytes(tmp_path / "x.rlog", header)
    rejected = tail.rejected(final=True)
    assert rejected is not None
    assert "format version 99" in rejected.why
