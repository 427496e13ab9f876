"""Event files: our own writer here, and TensorBoard's reader as the referee."""

import math
import struct

import pytest

from runhealth.storage.importers.tfevents import _masked_crc


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def chunk(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def simple(tag: str, value: float) -> bytes:
    return chunk(1, tag.encode()) + b"\x15" + struct.pack("<f", value)


def tensor(tag: str, value: float) -> bytes:
    return chunk(1, tag.encode()) + chunk(8, b"\x08\x01" + chunk(2, b"") + chunk(4, struct.pack("<f", value)))


def event(step: int, *values: bytes, wall: float = 1.7e9) -> bytes:
    data = b"\x09" + struct.pack("<d", wall) + b"\x10" + varint(step)
    if values:
        data += chunk(5, b"".join(chunk(1, value) for value in values))
    return frame(data)


def frame(data: bytes) -> bytes:
    head = struct.pack("<Q", len(data))
    return head + struct.pack("<I", _masked_crc(head)) + data + struct.pack("<I", _masked_crc(data))


HEAD = frame(b"\x09" + struct.pack("<d", 1.7e9) + chunk(3, b"brain.Event:2"))


def test_simple_values_and_tensors_of_one_step_are_one_record(read):
    got = read(
        HEAD
        + event(10, simple("train/loss", 2.5), wall=1.7e9 + 1)
        + event(10, tensor("train/grad_norm", math.nan))
        + event(10, tensor("eval/loss", 2.75))
        + event(20, simple("train/loss", math.inf), simple("other", 7.0))
    )
    assert got.info.format == "tfevents"
    assert got.series("loss") == [(10, 2.5), (20, math.inf)]
    assert math.isnan(got.series("grad_norm")[0][1])
    assert got.series("eval_loss") == [(10, 2.75)]
    assert got.series("other") == [(20, 7.0)]
    assert got.steps[0].ts_ns == 1_700_000_001_000_000_000


def test_steps_that_go_back_are_an_attempt(read):
    got = read(HEAD + b"".join(event(step, simple("loss", 2.0 + at)) for at, step in enumerate((10, 20, 30, 20, 30))))
    assert got.keys() == [(0, 10, 0), (0, 20, 0), (0, 30, 0), (1, 20, 0), (1, 30, 0)]


def test_a_torn_file_and_a_damaged_length_keep_what_came_before(read):
    whole = HEAD + event(10, simple("loss", 2.5)) + event(20, simple("loss", 2.4))
    torn = read(whole[:-9])
    assert torn.series("loss") == [(10, 2.5)]
    assert torn.info.rejected[0].line == len(HEAD) + len(event(10, simple("loss", 2.5)))
    damaged = bytearray(whole + event(30, simple("loss", 2.3)))
    damaged[torn.info.rejected[0].line] ^= 0xFF
    assert read(bytes(damaged)).series("loss") == [(10, 2.5)]


def test_agrees_with_tensorboard(tmp_path):
    """The same file read by TensorBoard itself gives the same numbers."""
    writer_module = pytest.importorskip("tensorboard.summary.writer.event_file_writer")
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    from runhealth.storage.importers import open_log

    writer = writer_module.EventFileWriter(str(tmp_path))
    for step in range(1, 300, 7):
        value = Summary.Value(tag="train/loss", simple_value=10.0 / step)
        writer.add_event(Event(wall_time=1.7e9 + step, step=step, summary=Summary(value=[value])))
    writer.close()
    (path,) = tmp_path.iterdir()
    records = list(open_log(str(path)).records())
    assert [record.step for record in records] == list(range(1, 300, 7))
    assert [record.values["loss"] for record in records] == pytest.approx([10.0 / step for step in range(1, 300, 7)])


def test_times_that_64_bits_do_not_hold_are_left_out(read):
    got = read(HEAD + event(1, simple("loss", 2.5), wall=9.9e9) + event(2, simple("loss", 2.4)))
    assert [record.ts_ns for record in got.steps] == [0, 1_700_000_000 * 10**9]
