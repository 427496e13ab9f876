"""No importer raises on damaged input, other than the documented errors, and every reading adds up."""

import importlib.util
import math
import struct
import subprocess
import sys
import time
import zlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runhealth.storage.blocks import StepBlock
from runhealth.storage.errors import NoUsableDataError
from runhealth.storage.importers import open as open_module
from runhealth.storage.importers import open_log
from runhealth.storage.importers.tfevents import _masked_crc
from runhealth.storage.records import StepRecord


def framed(data: bytes) -> bytes:
    head = struct.pack("<Q", len(data))
    return head + struct.pack("<I", _masked_crc(head)) + data + b"crc?"


_EVENTS = framed(b"\x09" + struct.pack("<d", 1.7e9) + b"\x1a\x0dbrain.Event:2")
_LOSS = b"\x09" + struct.pack("<d", 1.7e9) + b"\x10\x0a*\x0d\x0a\x0b\x0a\x04loss\x15" + struct.pack("<f", 2.5)


def wandb_record(data: bytes) -> bytes:
    return struct.pack("<IHB", zlib.crc32(b"\x01" + data), len(data), 1) + data


_ITEMS = b"\x0a\x0c\x0a\x04loss\x82\x01\x032.5\x0a\x0b\x0a\x05_step\x82\x01\x011"
_HISTORY = b"\x12" + bytes([len(_ITEMS)]) + _ITEMS
SAMPLES: dict[str, bytes] = {
    "wandb": b":W&B\xe1\xbe\x00" + wandb_record(_HISTORY) + wandb_record(_HISTORY.replace(b"\x011", b"\x012")),
    "bars": b"Epoch 1:  20%|##  | 20/100 [00:01<00:10, loss=2.5, v=0]\rEpoch 1:  30%|### | 30/100 [00:01, loss=2.4]\n"
    b"[step=4/9,epoch=1]\n    train/loss=2.5\n    optim/total_grad_norm=1\n{'loss': '2.5', 'epoch': 0.5}\n"
    b"[Rank 0] step=10, skipped=1, lr=[1e-05], mom=[(0.9, 0.9)]\n"
    b"[rank1]:[E1 ProcessGroupNCCL.cpp:607] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, "
    b"OpType=ALLREDUCE, Timeout(ms)=60) ran for 61 milliseconds\nE1 failed (exitcode: -9) local_rank: 2 (pid: 9)\n",
    "megatron": b" iteration 1/ 9 | consumed samples: 8 | lm loss: 2.5E+00 | loss scale: 1.0 | grad norm: nan |\n"
    b"time (ms) | forward-compute: 1.5 | optimizer: 2.0\n validation loss at iteration 1 | lm loss value: 2.0E+00 | \n"
    b"  successfully saved checkpoint from iteration 1 to /x [ t 1/1 ]\n iteration 2/ 9 | lm loss: 2.4E+00 |\n",
    "nanogpt": b"import x\nstep:1/9 train_loss:3.5 train_time:10ms step_avg:10.00ms\n"
    b"step:2/9 train_loss:nan train_time:20ms\n"
    b"step:2/9 val_loss:3.4 train_time:21ms\ns:3 trl:3.0\nstep 4/9 | loss 3.0 (+1.0z)| norm 1.0 (nanz)| 3.0 ms\n",
    "hf": b'{"epoch": 1.0, "log_history": [{"step": 1, "loss": NaN, "lr": "1e-4"}, {"step": 2, "eval_loss": 2.5},'
    b' {"step": 2, "loss": 2.0}], "max_steps": 2}',
    "jsonl": b'{"step": 0, "loss": 2.5, "rank": 0}\n{"step": 0, "loss": NaN, "rank": 1}\n'
    b'{"step": 1, "a": {"loss": 1}}\n',
    "array": b'[{"step": 0, "loss": 2.5, "rank": 0}, {"step": 1, "loss": NaN}, {"step": 2, "loss": [1]}]',
    "csv": b'step,rank,loss,step_ms\n0,0,2.5,90\n0,1,"2.5",91\n1,0,,90\n1,1,inf,90\n',
    "torchtitan": b"[rank0]:[titan] 2026-01-02 03:04:05,500 - root - INFO - \x1b[31mstep:  1  loss: 12.5  "
    b"grad_norm: 1.2  memory: 2.0GiB(1%)\n"
    b"[rank1]:[titan] 2026-01-02 03:04:06,500 - root - INFO - step:  2  loss: 11.5  grad_norm: 1.2\n",
    "text": b"Gradient overflow. Skipping step, reducing loss scale to 512.0\nstep 1 | loss 5.5 | lr 1e-4 | 182.5 ms\n"
    b"step 2 | loss 5.4\nTraceback (most recent call last):\n  File 'x'\nValueError: bad\n"
    b"Resuming from step 1\nstep 1 loss 5\n",
    "tfevents": _EVENTS + framed(_LOSS) + framed(_LOSS.replace(b"\x10\x0a", b"\x10\x0b")),
}
_NASTY = [
    b"\n",
    b"\r",
    b"\0",
    b"nan",
    b"1e999",
    b"-",
    b"9" * 30,
    b'"',
    b"{",
    b"}",
    b"[",
    b"|",
    b",",
    b"\x1b[31m",
    b"\xff",
]
_MUTATION = st.one_of(
    st.tuples(st.just("cut"), st.integers(0, 600), st.just(b"")),
    st.tuples(st.just("insert"), st.integers(0, 600), st.binary(max_size=12)),
    st.tuples(st.just("insert"), st.integers(0, 600), st.sampled_from(_NASTY)),
    st.tuples(st.just("drop"), st.integers(0, 600), st.binary(min_size=1, max_size=20)),
    st.tuples(st.just("repeat"), st.integers(0, 600), st.binary(min_size=1, max_size=80)),
)


def told(record):
    if not isinstance(record, StepRecord):
        return repr(record)
    values = {name: "nan" if value != value else value for name, value in record.values.items()}
    return record.attempt, record.step, record.rank, record.ts_ns, values


def mutate(data: bytes, changes: list[tuple[str, int, bytes]]) -> bytes:
    for kind, place, material in changes:
        at = place % (len(data) + 1)
        if kind == "cut":
            data = data[:at]
        elif kind == "insert":
            data = data[:at] + material + data[at:]
        elif kind == "drop":
            data = data[:at] + data[at + len(material) :]
        else:
            data = data[:at] + data[max(0, at - len(material)) : at] + data[at:]
    return data


@pytest.mark.parametrize("sample", sorted(SAMPLES))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(_MUTATION, min_size=1, max_size=6))
def test_damage_is_survived(sample, changes, tmp_path):
    path = tmp_path / "log"
    path.write_bytes(mutate(SAMPLES[sample], changes))
    try:
        log = open_log(str(path))
        records = list(log.records())
    except NoUsableDataError:
        return
    info = log.describe()
    again = open_log(str(path))
    unpacked = [one.records() if isinstance(one, StepBlock) else [one] for one in again.blocks()]
    assert [told(record) for part in unpacked for record in part] == [told(record) for record in records]
    assert again.describe() == info
    steps = [record for record in records if isinstance(record, StepRecord)]
    assert len(steps) <= info.rows_kept <= info.rows_read
    assert info.rows_rejected >= len(info.rejected) or len(info.rejected) == 20
    for record in steps:
        assert 0 <= record.step < 2**62
        assert record.rank >= 0
        assert all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in record.values.values())
        assert not math.isnan(record.attempt)


@pytest.fixture(scope="module")
def bench():
    """bench/fuzz.py, of which the long runs are made."""
    script = Path(__file__).resolve().parents[3] / "bench" / "fuzz.py"
    spec = importlib.util.spec_from_file_location("bench_fuzz", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("seed", [1_000_001, 1_000_002])
def test_a_short_run_of_the_bench_finds_nothing(bench, seed, tmp_path):
    inputs = bench.inputs_of(seed, 150)
    assert [why for _, why in bench.fuzz(inputs, tmp_path)] == []


def test_the_bench_finds_what_is_wrong(bench, tmp_path, monkeypatch):
    sound = [data for name, data in bench.samples().items() if name == "colon"]
    assert [why for _, why in bench.fuzz(iter(sound), tmp_path)] == []
    packed = open_module.packed
    monkeypatch.setattr(open_module, "packed", lambda records: list(packed(records))[:-1])
    assert [why for _, why in bench.fuzz(iter(sound), tmp_path)] == ["blocks differ from records"]
    monkeypatch.setattr(open_module, "packed", lambda _: 1 / 0)
    assert [why for _, why in bench.fuzz(iter(sound), tmp_path)] == ["ZeroDivisionError: division by zero"]
    monkeypatch.setattr(bench, "LIMIT_S", 0.2)
    monkeypatch.setattr(open_module, "packed", lambda _: time.sleep(5))
    assert [why for _, why in bench.fuzz(iter(sound), tmp_path)] == ["Hang: more than 0.2 s"]


def test_the_bench_sees_code_that_is_loaded(bench):
    """In a process of its own: an audit hook cannot be taken back."""
    script = (
        f"import runpy; bench = runpy.run_path({bench.__file__!r}); watch = bench['Watch'](); watch.armed = True\n"
        "import pickle; pickle.loads(b'cdatetime\\ndate\\n.'); eval('1'); watch.armed = False; print(*watch.seen)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "pickle.find_class" in done.stdout
    assert "compile" in done.stdout


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(_MUTATION, max_size=4), noise=st.binary(max_size=60))
def test_damaged_events_in_whole_frames_are_rejected_and_the_next_ones_read(changes, noise, tmp_path):
    path = tmp_path / "events"
    last = _LOSS.replace(b"\x10\x0a", b"\x10\x7f")
    path.write_bytes(_EVENTS + framed(mutate(_LOSS, changes)) + framed(noise) + framed(last))
    log = open_log(str(path))
    values = [record.values.get("loss") for record in log.records() if isinstance(record, StepRecord)]
    assert values[-1] == 2.5 or any(record.step > 127 for record in log.records())


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "filler", [b"a", b"a ", b"loss ", b"1,", b"loss: ", b" |", b"\x1b[31m", b"step:1/2 ", b'{"a":', b"9"]
)
@pytest.mark.parametrize("sample", ["megatron", "nanogpt", "torchtitan", "text", "jsonl", "csv"])
def test_long_lines_neither_hang_nor_hide_what_follows(sample, filler, tmp_path):
    path = tmp_path / "log"
    data = SAMPLES[sample]
    path.write_bytes(data + (filler * 400_000)[:400_000] + b"\n" + data)
    log = open_log(str(path))
    lines = [record.step for record in log.records() if isinstance(record, StepRecord)]
    clean = tmp_path / "clean"
    clean.write_bytes(data + data)
    assert lines == [record.step for record in open_log(str(clean)).records() if isinstance(record, StepRecord)]
