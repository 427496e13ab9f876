"""The binary file of a Weights & Biases run, exported charts, and output.log."""

import json
import math
import struct
import zlib

import pytest

from runhealth.storage.errors import NoUsableDataError

BLOCK = 1 << 15


def varint(number: int) -> bytes:
    out = b""
    while number > 0x7F:
        out += bytes([number & 0x7F | 0x80])
        number >>= 7
    return out + bytes([number])


def field(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def item(name: str, value: object) -> bytes:
    keys = b"".join(field(2, part.encode()) for part in name.split(".")) if "." in name else field(1, name.encode())
    return field(1, keys + field(16, json.dumps(value).encode()))


def history(step: int, values: dict[str, object]) -> bytes:
    items = b"".join(item(name, value) for name, value in {**values, "_step": step}.items())
    return field(2, items + field(2, b"\x08" + varint(step)))


def console(line: str) -> bytes:
    return field(13, field(3, line.encode()))


def exit_code(code: int) -> bytes:
    return field(18, b"\x08" + varint(code))


def frames(records: list[bytes]) -> bytes:
    """The records in blocks of 32 KiB, split where a block ends."""
    out = bytearray(b":W&B\xe1\xbe\x00")
    for record in records:
        left, first = record, True
        while left or first:
            room = BLOCK - len(out) % BLOCK
            if room < 7:
                out += bytes(room)
                continue
            part, left = left[: room - 7], left[room - 7 :]
            kind = {(True, True): 1, (True, False): 2, (False, False): 3, (False, True): 4}[first, not left]
            out += struct.pack("<IHB", zlib.crc32(bytes([kind]) + part), len(part), kind) + part
            first = False
    return bytes(out)


def log(steps: int = 20) -> list[bytes]:
    return [
        history(step, {"train/loss": 3 - step / 100, "_timestamp": 1.7e9 + step, "_runtime": step})
        for step in range(steps)
    ]


def test_history_becomes_steps(read):
    got = read(frames(log()))
    assert got.info.format == "wandb"
    assert got.series("loss") == [(step, 3 - step / 100) for step in range(20)]
    assert got.steps[5].ts_ns == 1_700_000_005_000_000_000
    assert got.steps[5].values["t_step_s"] == 1.0


def test_records_over_several_blocks_are_put_together(read):
    records = [history(step, {"loss": 1.0 + step, "note": "x" * 20_000}) for step in range(12)]
    assert read(frames(records)).series("loss") == [(step, 1.0 + step) for step in range(12)]


def test_nan_nested_names_and_typed_values(read):
    typed = field(1, field(1, b"grad_norm") + b"\x31" + struct.pack("<d", 2.5))
    second = field(2, typed + item("loss", "Infinity") + item("_step", 1))
    got = read(frames([history(0, {"loss": math.nan, "opt.beta": 0.9}), second]))
    assert math.isnan(got.steps[0].values["loss"])
    assert got.steps[0].values["opt/beta"] == 0.9
    assert got.steps[1].values == {"grad_norm": 2.5, "loss": math.inf}


def test_a_counter_of_training_steps_comes_before_the_counter_of_calls(read):
    rows = [
        history(0, {"train/loss": 3.0, "trainer/global_step": 0}),
        history(1, {"eval/loss": 2.9}),
        history(2, {"train/loss": 2.8, "trainer/global_step": 50}),
    ]
    got = read(frames(rows))
    assert got.series("loss") == [(0, 3.0), (50, 2.8)]
    assert got.series("eval_loss") == [(0, 2.9)]


def test_a_damaged_block_is_rejected_and_the_next_one_read(read):
    records = [history(step, {"loss": 1.0 + step, "note": "x" * 5000}) for step in range(30)]
    data = bytearray(frames(records))
    data[BLOCK + 100] ^= 0xFF
    got = read(bytes(data))
    steps = [record.step for record in got.steps]
    assert steps[0] == 0
    assert steps[-1] == 29
    assert 20 <= len(steps) < 30
    assert "checksum" in got.info.rejected[0].why


def test_a_file_that_is_still_written_ends_where_it_ends(read):
    data = frames(log())
    got = read(data[:-5])
    assert [record.step for record in got.steps] == list(range(19))
    assert "still written" in got.info.rejected[0].why


def test_the_console_tells_how_the_job_failed(read):
    lines = ["Traceback (most recent call last):\n", '  File "t.py", line 1\n', "ValueError: bad batch\n"]
    got = read(frames([*log(), *map(console, lines), exit_code(1)]))
    assert [(event.kind, event.message, event.step) for event in got.events] == [
        ("exception", "ValueError: bad batch", 19)
    ]


def test_an_exit_code_without_a_reason_is_an_exception_all_the_same(read):
    assert [event.kind for event in read(frames([*log(), exit_code(1)])).events] == ["exception"]
    assert [event.kind for event in read(frames([*log(), exit_code(255)])).events] == ["attempt_end"]
    assert read(frames([*log(), exit_code(0)])).events == []


def test_an_exported_chart(read):
    got = read(
        '"Step","fancy-run-7 - train/loss","fancy-run-7 - train/loss__MIN","fancy-run-7 - train/loss__MAX"\n'
        '"0","3.5","3.5","3.5"\n"10","NaN","NaN","NaN"\n"20","3.25","3.25","3.25"\n'
    )
    assert [step for step, _ in got.series("loss")] == [0, 10, 20]
    assert math.isnan(got.series("loss")[1][1])


def test_a_chart_of_several_runs_is_refused_and_the_runs_are_named(read):
    with pytest.raises(NoUsableDataError, match=r"2 runs.*run-a.*run-b"):
        read('"Step","run-a - train/loss","run-b - train/loss"\n"0","3.5","3.6"\n"10","3.4","3.5"\n')
    text = '"Step","run-a - train/loss","run-b - train/loss"\n"0","3.5","3.6"\n"10","3.4","3.5"\n'
    assert read(text, mapping={"loss": "run-b - train/loss"}).series("loss") == [(0, 3.6), (10, 3.5)]


def test_output_log_with_progress_bars(read):
    text = "".join(
        f"\r {n}%|██        | {n}/100 [00:01<00:09]\n{{'loss': {3 - n / 100}, 'grad_norm': 1.0, 'epoch': {n / 100}}}\n"
        for n in range(10)
    )
    assert len(read(text, name="output.log").series("loss")) == 10
