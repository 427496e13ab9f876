"""A log as blocks says what it says as records, whatever its lines are like."""

import gzip
import json
import math
import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runhealth.storage.blocks import BlockSource, StepBlock
from runhealth.storage.errors import NoUsableDataError
from runhealth.storage.importers import assemble, open_log, scan
from runhealth.storage.importers import text as text_module
from runhealth.storage.importers.digits import Chunk, number_at, shape_of
from runhealth.storage.importers.values import to_number, to_ts_ns
from runhealth.storage.records import StepRecord

SLOW = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]


def told(record):
    if not isinstance(record, StepRecord):
        return repr(record)
    values = {name: "nan" if value != value else value for name, value in record.values.items()}
    return record.attempt, record.step, record.rank, record.ts_ns, values


def both(path):
    """(records, description) by lines and by blocks, or the error's text twice."""
    found = []
    for blocks in (False, True):
        try:
            log = open_log(str(path))
            if not blocks:
                records = list(log.records())
            else:
                records = [
                    record
                    for block in log.blocks()
                    for record in (block.records() if isinstance(block, StepBlock) else [block])
                ]
            found.append(([told(record) for record in records], log.describe()))
        except NoUsableDataError as error:
            found.append(str(error))
    return found


def same(path):
    by_lines, by_blocks = both(path)
    assert by_blocks == by_lines
    return by_lines


def colon(step, x):
    return f"step:{step}/9000 train_loss:{x:.4f} train_time:{step * 100 + x:.0f}ms step_avg:{x * 9:.2f}ms\n"


def llmc(step, x):
    return f"step {step:4d}/9000 | loss {x:.6f} ({x - 3:+.2f}z)| norm {x / 2:.4f} ({2 - x:+.2f}z)| {x * 30:.2f} ms\n"


def main_log(step, x):
    return f"s:{step} trl:{x:.4f}\n"


def iterations(step, x):
    return f"iter {step}: loss {x:.4f}, time {x * 50:.2f}ms, mfu {x:.2f}%\n"


def megatron(step, x):
    return (
        f" [2024-02-28 23:{step // 60 % 60:02d}:{step % 60:02d}] iteration {step:8d}/    9000 | consumed samples: "
        f"{step * 8:12d} | elapsed time per iteration (ms): {x * 500:.1f} | lm loss: {x:.6E} | loss scale: 4096.0 | "
        f"grad norm: {x / 3:.3f} | number of skipped iterations: {int(x) % 2} |\n"
    )


def timers(step, x):
    return megatron(step, x) + (
        f"(min, max) time across ranks (ms):\n    forward-backward ....: ({x * 90:.2f}, {x * 99:.2f})\n"
        f"    optimizer ...........: ({x:.2f}, {x + 1:.2f})\n"
    )


def deepspeed(step, x):
    return (
        f"[default3]: steps: {step} seen: {x:.4f} iter time (s): {x:.3f} samples/sec: 77.1\n"
        f"[default3]:{megatron(step, x)}time (ms)\n"
    )


def talkative(step, x):
    return (
        f"{keyvalue(step, x)}worker {step % 8} took {x:.1f} s, fine\n"
        f"saving memory\n{'-' * 40}\nthroughput {x * 900:.1f}\n"
    )


def torchtitan(step, x):
    return (
        f"[rank0]:[titan] 2026-01-02 03:{step // 60 % 60:02d}:{step % 60:02d},{step % 1000:03d} - root - INFO - "
        f"\x1b[31mstep: {step:2d}  \x1b[32mloss: {x:7.4f}  \x1b[33mgrad_norm: {x / 9:.4f}  memory: {x:.2f}GiB(5%)\n"
    )


def plain_titan(step, x):
    return torchtitan(step, x).removeprefix("[rank0]:")


def keyvalue(step, x):
    return (
        f"2026-01-02 03:04:{step % 60:02d},{step % 1000:03d} INFO step {step} | loss {x:.5f} | lr {x / 1e5:.3e} | "
        f"{x * 100:.1f} ms\n"
    )


def openmm(step, x):
    return f"Iter [{step}/9000] lr: {x / 1e5:.3e}, loss: {x:.4f}, time: {x:.3f}, data_time: {x / 9:.3f}\n"


def jsonl(step, x):
    return json.dumps({"step": step, "loss": x, "lr": x / 1e5, "tokens": int(x * 1e6), "ts": 1.7e9 + step}) + "\n"


def csv(step, x):
    return f"{step},{x:.5f},{x / 1e5},{'' if step % 7 else x},{int(x)}\n"


def lightning(step, x):
    return f"{step},{step // 50},{x:.5f},\n" if step % 10 else f"{step},{step // 50},,{x + 1:.4f}\n"


LINES = {
    "colon": ("", colon),
    "llmc": ("", llmc),
    "main": ("", main_log),
    "iter": ("", iterations),
    "megatron": ("", megatron),
    "timers": ("", timers),
    "deepspeed": ("", deepspeed),
    "talkative": ("", talkative),
    "torchtitan": ("", torchtitan),
    "plain_titan": ("", plain_titan),
    "keyvalue": ("", keyvalue),
    "openmm": ("", openmm),
    "jsonl": ("", jsonl),
    "csv": ("step,loss,lr,eval_loss,tokens\n", csv),
    "lightning": ("step,epoch,train_loss,val_loss\n", lightning),
}
OTHERS = [
    "",
    "hello",
    "step 12",
    "[Rank 0] step=40, skipped=1, lr=[1e-05], mom=[(0.9, 0.9)]",
    "step:250/9000 val_loss:3.5 train_time:25000ms",
    "s:30 tel:3.5",
    "val loss 3.5",
    "step 250: train loss 3.1, val loss 3.3",
    " validation loss at iteration 60 | lm loss value: 2.5E+00 | lm loss PPL: 9.1E+01 | ",
    "time (ms) | forward-compute: 1.5 | optimizer: 2.0",
    "  successfully saved checkpoint from iteration 40 to /ckpt",
    " > successfully loaded checkpoint from /ckpt at iteration 40",
    "validate step: 40  loss: 3.25  memory: 3.0GiB(5%)",
    "Gradient overflow. Skipping step, reducing loss scale to 512.0",
    "Resuming from step 30",
    "Traceback (most recent call last):\n  File 'x'\nValueError: bad",
    '{"event": "exception", "message": "bad"}',
    "loss,step,lr,eval_loss,tokens",
    "50,,,,",
    "\u00fcber",
    "step:5/10 train_loss:nan train_time:9ms",
    "1,NaN,0.1,,3",
]
EVENT = st.one_of(
    st.tuples(st.just("line"), st.integers(0, 400), st.sampled_from(OTHERS)),
    st.tuples(st.just("back"), st.integers(0, 400), st.integers(1, 60)),
    st.tuples(st.just("twice"), st.integers(0, 400), st.just(0)),
    st.tuples(st.just("value"), st.integers(0, 400), st.sampled_from([math.nan, math.inf, -math.inf, 0.0, 1e30, 5.0])),
    st.tuples(st.just("cut"), st.integers(0, 400), st.integers(1, 40)),
    st.tuples(st.just("glue"), st.integers(0, 400), st.just(0)),
    st.tuples(st.just("bytes"), st.integers(0, 400), st.binary(min_size=1, max_size=4)),
    st.tuples(st.just("digit"), st.integers(0, 400), st.integers(0, 300)),
    st.tuples(st.just("total"), st.integers(0, 400), st.sampled_from(["9000", "900", "90000"])),
)


def made(kind, events, seed, count=120, end=True):
    """A log of `count` steps with what happens at some of them."""
    head, line = LINES[kind]
    rng = random.Random(seed)
    by_place = {}
    for name, place, detail in events:
        by_place.setdefault(place % count, []).append((name, detail))
    text, step = head.encode(), 0
    for place in range(count):
        step += 1
        value = 3 + rng.random()
        happening = by_place.get(place, ())
        for name, detail in happening:
            if name == "line":
                text += detail.encode() + b"\n"
            elif name == "back":
                step = max(0, step - detail)
            elif name == "value":
                value = detail
        try:
            one = line(step, value).encode()
        except (ValueError, OverflowError):  # int(nan)
            one = line(step, 2.5).encode()
        for name, detail in happening:
            if name == "cut":
                one = one[:-detail] + b"\n"
            elif name == "glue":
                one = one[:-1]
            elif name == "bytes":
                one = one[: len(one) // 2] + detail + one[len(one) // 2 :]
            elif name == "digit":
                at = detail % len(one)
                one = one[:at] + b"7" + one[at:]
            elif name == "twice":
                one *= 2
            elif name == "total":
                one = one.replace(b"9000", detail.encode())
        text += one
    return text if end else text[:-5]


@pytest.mark.parametrize("kind", sorted(LINES))
@settings(max_examples=12, deadline=None, suppress_health_check=SLOW)
@given(events=st.lists(EVENT, max_size=8), seed=st.integers(0, 3), end=st.booleans())
def test_blocks_equal_records(kind, events, seed, end, tmp_path):
    path = tmp_path / "log"
    path.write_bytes(made(kind, events, seed, end=end))
    same(path)


@pytest.mark.parametrize("kind", sorted(LINES))
def test_regular_lines_are_read_as_a_whole(kind, tmp_path, monkeypatch):
    """Not only equal: most of the rows must not have been read one by one."""
    path = tmp_path / "log"
    path.write_bytes(made(kind, [], 1, count=600))
    read, passed = [], []
    feed = assemble.Assembler.feed

    def counted(self, item):
        read.append(item)
        return feed(self, item)

    monkeypatch.setattr(assemble.Assembler, "feed", counted)
    other_line = text_module._State.other_line
    monkeypatch.setattr(text_module._State, "other_line", lambda *one: passed.append(one) or other_line(*one))
    steps = sum(len(block) for block in open_log(str(path)).blocks() if isinstance(block, StepBlock))
    assert steps > 500
    assert len(read) < (320 if kind == "lightning" else 100)
    assert len(passed) < 400


def test_compressed_logs_and_chunk_edges(tmp_path, monkeypatch):
    monkeypatch.setattr(scan, "CHUNK_BYTES", 1000)
    path = tmp_path / "log.gz"
    path.write_bytes(gzip.compress(made("llmc", [("line", 100, "val loss 3.5")], 1, count=900)))
    records, info = same(path)
    assert (len(records), info.rows_read) == (900, 901)


def test_a_log_is_a_source_of_blocks(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(made("csv", [], 1))
    assert isinstance(open_log(str(path)), BlockSource)


def test_events_stand_between_the_steps_of_a_block(tmp_path):
    path = tmp_path / "log"
    saved = ("line", 100, "  successfully saved checkpoint from iteration 40 to /ckpt")
    path.write_bytes(made("megatron", [saved], 1))
    (block,) = open_log(str(path)).blocks()
    assert [(at, record.path) for at, record in block.others] == [(99, "/ckpt")]
    assert block.attempt == 0
    assert block.ranks == (0,)


def test_values_that_no_column_holds_stay_records(tmp_path):
    path = tmp_path / "log"
    rows = [{"step": step, "loss": 2.5, "tokens": 2**53 + step} for step in range(30)]
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"step": 30, "loss": 2.5, "tokens": 0.5}]))
    records, _ = same(path)
    assert records[29][4]["tokens"] == 2**53 + 29


NUMBERS = st.one_of(
    st.from_regex(r"[-+]?[0-9]{1,25}", fullmatch=True),
    st.from_regex(r"[-+]?[0-9]{0,20}\.[0-9]{1,25}", fullmatch=True),
    st.from_regex(r"[-+]?[0-9]{1,20}\.", fullmatch=True),
    st.from_regex(r"[-+]?[0-9]{1,4}(\.[0-9]{1,6})?[eE][-+]?[0-9]{1,4}", fullmatch=True),
    st.floats().map(repr),
    st.floats().map(lambda value: f"{value:.6E}"),
    st.integers(-(10**18) + 1, 10**18 - 1).map(str),
    st.sampled_from(["nan", "-inf", "Infinity", "0", "-0", "-0.0", "007", "9007199254740993.0", "0.1e-22"]),
)


@settings(max_examples=120, deadline=None)
@given(texts=st.lists(NUMBERS, min_size=1, max_size=6))
def test_numbers_are_what_the_rules_make_of_them(texts):
    for text in texts:
        raw = f"loss: {text} x".encode()
        span = (6, 6 + len(text))
        number, shape = number_at(raw, *span), shape_of(raw, [], [span])
        if number is None or shape is None:
            continue
        others = [f"loss: {other} x".encode() for other in texts]
        chunk = Chunk(b"\n".join([raw, *others]) + b"\n")
        lines = chunk.fitting(shape, np.arange(len(chunk)))
        assert 0 in lines
        for line, value in zip(lines.tolist(), chunk.numbers(lines, number).tolist(), strict=True):
            want = to_number(([text, *texts])[line])
            assert type(value) is type(want)
            assert repr(value) == repr(want)


@settings(max_examples=300, deadline=None)
@given(
    parts=st.tuples(
        st.integers(1969, 2201), st.integers(0, 14), st.integers(0, 33), st.integers(0, 25), st.integers(0, 61),
        st.integers(0, 61), st.integers(0, 999_999),
    ),
    form=st.sampled_from(["{6:06d}", "{6:03.3}", ""]),
)  # fmt: skip
def test_stamps_are_what_the_rules_make_of_them(parts, form):
    year, month, day, hour, minute, second, micros = parts
    text = f"{year:04d}-{month:02d}-{day:02d} {hour:02d}:{minute:02d}:{second:02d}"
    fraction = {"{6:06d}": f".{micros:06d}", "{6:03.3}": f",{micros // 1000:03d}", "": ""}[form]
    chunk = Chunk(f"[{text}{fraction}] x\n".encode())
    times, good = chunk.stamps(np.array([0]), 0, bool(fraction))
    if good[0]:
        assert times[0] == to_ts_ns(text + fraction)
    else:
        assert to_ts_ns(text + fraction) == 0 or not 1970 <= year < 2200
