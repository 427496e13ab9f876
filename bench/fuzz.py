"""Damaged logs by the hundred thousand: does an importer crash, hang, eat memory, run code, or contradict itself?

Each input is one of the logs below (one of every format, and the dialects of the tests), cut, spliced, repeated and
sprinkled with nasty text. It is read as records and as blocks. A find is: an exception that is not documented, a
reading that takes over 10 seconds, records that do not add up with the description, blocks that differ from the
records, or an audit event that says that code was loaded, compiled or run (pickle, marshal, exec, import of a module
that the undamaged logs do not need, a process, a socket). Memory is limited for the process, and its peak is printed.

Inputs come in seeds of 2,000 each, so that a find can be repeated and a long run continued; with `--state FILE` the
seeds that are done are counted there, over all runs. The last line is one JSON object:

    python bench/fuzz.py --inputs 1000000 [--state FILE] [--keep FOLDER] [--first-seed 0]
"""

import argparse
import json
import math
import random
import resource
import signal
import sqlite3
import struct
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from runhealth.storage.blocks import StepBlock
from runhealth.storage.errors import NoUsableDataError
from runhealth.storage.importers import open_log
from runhealth.storage.importers.tfevents import _masked_crc
from runhealth.storage.records import Record, StepRecord

PER_SEED = 2000
LIMIT_S = 10
MEMORY_BYTES = 6 << 30
DIALECTS = Path(__file__).resolve().parents[1] / "tests" / "storage" / "importers" / "dialects"
MAX_BYTES = 4096
NASTY = (
    b"\n", b"\r", b"\r\n", b"\0", b"nan", b"NaN", b"inf", b"Infinity", b"1e999", b"-", b"+", b".", b"e5", b"9" * 30,
    b"0" * 20, b'"', b"'", b"{", b"}", b"[", b"]", b"|", b",", b":", b"=", b"/", b"%", b"\t", b"\x1b[31m", b"\xff",
    b"\xef\xbb\xbf", b"\xd9\xa3", b"step", b"loss", b"iteration 5/ 9 |", b"step:3/9 train_loss:1.5", b"<<<<<<< HEAD\n",
    b"null", b"true", b'{"step": 1, "loss": 2}', b"Traceback (most recent call last):\n", b"ValueError: x\n",
    b"Gradient overflow. Skipping step, reducing loss scale to 2.0\n", b"Resuming from step 3\n", b"[rank3]: ",
    b"c__builtin__\neval\n", b"!!python/object/apply:os.system ['true']\n", b"__import__('os')", b"\x80\x04\x95",
)  # fmt: skip
RUNS_CODE = (
    "pickle.",
    "marshal.",
    "exec",
    "compile",
    "import",
    "os.system",
    "os.exec",
    "subprocess.",
    "socket.",
    "ctypes.",
)


def framed(data: bytes) -> bytes:
    head = struct.pack("<Q", len(data))
    return head + struct.pack("<I", _masked_crc(head)) + data + b"crc?"


def wandb_record(data: bytes) -> bytes:
    return struct.pack("<IHB", zlib.crc32(b"\x01" + data), len(data), 1) + data


def _events() -> bytes:
    data = framed(b"\x09" + struct.pack("<d", 1.7e9) + b"\x1a\x0dbrain.Event:2")
    for step in range(1, 12):
        value = b"\x0a\x0b\x0a\x04loss\x15" + struct.pack("<f", 3 - step / 9)
        event = b"\x09" + struct.pack("<d", 1.7e9 + step) + bytes([0x10, step]) + b"\x2a" + bytes([len(value)]) + value
        data += framed(event)
    return data


def _wandb() -> bytes:
    data = b":W&B\xe1\xbe\x00"
    for step in range(1, 12):
        items = b"\x0a\x0c\x0a\x04loss\x82\x01\x032.%d\x0a\x0b\x0a\x05_step\x82\x01\x01%d" % (step % 10, step % 10)
        data += wandb_record(b"\x12" + bytes([len(items)]) + items)
    return data


def _mlflow() -> bytes:
    connection = sqlite3.connect(":memory:")
    connection.execute("CREATE TABLE runs (run_uuid TEXT, name TEXT, status TEXT)")
    connection.execute(
        "CREATE TABLE metrics (key TEXT, value REAL, timestamp INTEGER, step INTEGER, is_nan INTEGER, run_uuid TEXT)"
    )
    connection.execute("INSERT INTO runs VALUES ('r', 'n', 'FINISHED')")
    rows = [("loss", 3 - step / 9, 1_700_000_000_000 + step, step, 0, "r") for step in range(8)]
    connection.executemany("INSERT INTO metrics VALUES (?, ?, ?, ?, ?, ?)", rows)
    connection.commit()
    return connection.serialize()


def _lines(count: int, line: Callable[[int, float], str], head: str = "") -> bytes:
    rng = random.Random(count)
    return (head + "".join(line(step, 3 + rng.random()) + "\n" for step in range(1, count))).encode()


def samples() -> dict[str, bytes]:
    """A log of each format, long enough for a stretch of regular lines, and the dialects."""
    hf = {"log_history": [{"step": step, "loss": 3 - step / 9, "learning_rate": "1e-4"} for step in range(1, 9)]}
    found = {
        "colon": _lines(25, lambda s, x: f"step:{s}/90 train_loss:{x:.4f} train_time:{s * 100}ms step_avg:{x:.2f}ms"),
        "llmc": _lines(20, lambda s, x: f"step {s:4d}/90 | loss {x:.6f} ({x - 3:+.2f}z)| norm {x:.4f} | {x:.2f} ms"),
        "main": _lines(30, lambda s, x: f"s:{s} trl:{x:.4f}"),
        "iter": _lines(25, lambda s, x: f"iter {s}: loss {x:.4f}, time {x * 50:.2f}ms, mfu {x:.2f}%"),
        "megatron": _lines(
            16,
            lambda s, x: (
                f" iteration {s:5d}/   90 | consumed samples: {s * 8} | elapsed time per iteration (ms): "
                f"{x * 500:.1f} | lm loss: {x:.6E} | loss scale: 4096.0 | grad norm: {x:.3f} |"
                + ("\n validation loss at iteration 8 | lm loss value: 2.5E+00 | " if s == 8 else "")
            ),
        ),
        "timers": _lines(
            12,
            lambda s, x: (
                f" iteration {s:5d}/   90 | lm loss: {x:.6E} | grad norm: {x:.3f} |\n"
                f"(min, max) time across ranks (ms):\n    optimizer ....: ({x:.2f}, {x + 1:.2f})"
            ),
        ),
        "torchtitan": _lines(
            16,
            lambda s, x: (
                f"[rank0]:[titan] 2026-01-02 03:04:{s:02d},500 - root - INFO - \x1b[31mstep: {s:2d}  loss: "
                f"{x:7.4f}  grad_norm: {x:.4f}  memory: {x:.2f}GiB(5%)"
            ),
        ),
        "text": _lines(20, lambda s, x: f"2026-01-02 03:04:{s:02d},5 INFO step {s} | loss {x:.5f} | lr {x / 1e5:.3e}"),
        "jsonl": _lines(20, lambda s, x: json.dumps({"step": s, "loss": x, "lr": 1e-4, "tokens": int(x * 1e6)})),
        "ranks": _lines(30, lambda s, x: json.dumps({"step": s // 2, "rank": s % 2, "loss": round(x, 3)})),
        "array": json.dumps([{"step": step, "loss": 2.5, "rank": 0} for step in range(9)]).encode(),
        "csv": _lines(30, lambda s, x: f"{s},{x:.5f},{'' if s % 5 else x},{int(x)}", "step,loss,eval_loss,tokens\n"),
        "hf": json.dumps(hf).encode(),
        "console": _lines(15, lambda s, x: f"{{'loss': '{x:.4f}', 'learning_rate': 1e-4, 'epoch': {s / 10}}}"),
        "tfevents": _events(),
        "wandb": _wandb(),
        "mlflow": _mlflow(),
        "failure": b"step 1 | loss 5.5\nstep 2 | loss 5.4\nTraceback (most recent call last):\n  File 'x'\n"
        b"ValueError: bad\n[rank1]:[E1 ProcessGroupNCCL.cpp:607] [Rank 1] Watchdog caught collective operation "
        b"timeout: WorkNCCL(SeqNum=3, OpType=ALLREDUCE, Timeout(ms)=60) ran for 61 milliseconds\n"
        b"E1 failed (exitcode: -9) local_rank: 2 (pid: 9)\n",
    }
    if DIALECTS.is_dir():
        for path in sorted(DIALECTS.iterdir()):
            found[path.stem] = path.read_bytes()[:MAX_BYTES]
    return found


def mutated(rng: random.Random, known: list[bytes]) -> bytes:
    """One input: a log with up to eight changes."""
    data = rng.choice(known)
    for _ in range(rng.randint(1, 8)):
        at = rng.randint(0, len(data))
        kind = rng.randrange(9)
        if kind == 0:
            data = data[:at] + rng.choice(NASTY) + data[at:]
        elif kind == 1:
            data = data[:at] + rng.randbytes(rng.randint(1, 8)) + data[at:]
        elif kind == 2:
            data = data[:at] + data[at + rng.randint(1, 40) :]
        elif kind == 3:
            data = data[:at] + data[max(0, at - rng.randint(1, 300)) : at] + data[at:]
        elif kind == 4 and rng.random() < 0.3:
            data = data[:at]
        elif kind == 5:
            other = rng.choice(known)
            begin = rng.randint(0, len(other))
            data = data[:at] + other[begin : begin + rng.randint(1, 400)] + data[at:]
        elif kind == 6 and at < len(data):
            data = data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
        elif kind == 7:
            digit = data.find(bytes([48 + rng.randrange(10)]), at)
            if digit >= 0:
                data = data[:digit] + b"%d" % rng.choice([0, 7, 10**6, 2**53 + 1, 2**63, 10**25]) + data[digit + 1 :]
        else:
            lines = data.split(b"\n")
            one, two = rng.randrange(len(lines)), rng.randrange(len(lines))
            lines[one], lines[two] = lines[two], lines[one]
            data = b"\n".join(lines)
    return data[: 4 * MAX_BYTES]


def _told(record: Record) -> object:
    if not isinstance(record, StepRecord):
        return repr(record)
    values = {name: "nan" if value != value else value for name, value in record.values.items()}
    return record.attempt, record.step, record.rank, record.ts_ns, values


def _readings(path: Path) -> Iterator[tuple[list[object], object, str]]:
    """The records, the description, or the documented error: by lines, then by blocks."""
    try:
        log = open_log(str(path))
    except NoUsableDataError:
        return
    for blocks in (False, True):
        found: list[Record] = []
        said = ""
        try:
            if not blocks:
                found += log.records()
                _check(found, log.describe())
            else:
                for one in log.blocks():
                    found += one.records() if isinstance(one, StepBlock) else [one]
        except NoUsableDataError as error:
            said = str(error)
        yield [_told(record) for record in found], log.describe(), said


def _check(records: list[Record], info) -> None:  # type: ignore[no-untyped-def]
    steps = [record for record in records if isinstance(record, StepRecord)]
    assert len(steps) <= info.rows_kept <= info.rows_read, "the counts of rows do not add up"
    assert info.rows_rejected == len(info.rejected) or len(info.rejected) == 20, "rejections without a reason"
    for record in steps:
        assert 0 <= record.step < 2**62, f"step {record.step}"
        assert record.rank >= 0, f"rank {record.rank}"
        for name, value in record.values.items():
            assert type(value) in (int, float), f"{name} is {value!r}"
            assert isinstance(value, int) or not math.isnan(value) or value != value


class Hang(Exception):
    """A reading that took too long."""


def _alarm(*_: object) -> None:
    raise Hang(f"more than {LIMIT_S} s")


class Watch:
    """Audit events that mean that code is loaded or run, while it is armed."""

    def __init__(self) -> None:
        self.armed = False
        self.seen: Counter[str] = Counter()
        sys.addaudithook(self._event)

    def _event(self, event: str, arguments: tuple[object, ...]) -> None:
        if self.armed and event.startswith(RUNS_CODE) and not (event == "import" and arguments[0] in sys.modules):
            self.seen[f"{event} {arguments[:1]!r:.80}"] += 1


def fuzz(inputs: Iterator[bytes], folder: Path, watch: Watch | None = None) -> Iterator[tuple[bytes, str]]:
    """Read each input; yield those that find something, and what."""
    path = folder / "log"
    for data in inputs:
        path.write_bytes(data)
        before = signal.signal(signal.SIGALRM, _alarm)
        signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
        if watch is not None:
            watch.seen.clear()
            watch.armed = True
        why = ""
        try:
            readings = list(_readings(path))
            if readings and readings[0] != readings[1]:
                why = "blocks differ from records"
        except Exception as error:  # noqa: BLE001 - whatever it is, it is a find
            why = f"{type(error).__name__}: {error}"[:300]
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            if watch is not None:
                watch.armed = False
        if watch is not None and watch.seen:
            why = f"{why} code: {dict(watch.seen)}".strip()
        if why:
            yield data, why


def inputs_of(seed: int, count: int) -> Iterator[bytes]:
    """The inputs of one seed."""
    rng, known = random.Random(seed), list(samples().values())
    return (mutated(rng, known) for _ in range(count))


def _load(state: Path | None) -> dict[str, int]:
    if state is not None and state.exists():
        return json.loads(state.read_text())
    return {"next_seed": 0, "inputs": 0, "finds": 0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=20_000, help="how many in this run, in whole seeds")
    parser.add_argument("--first-seed", type=int, help="default: what the state says, else 0")
    parser.add_argument("--state", type=Path, metavar="FILE", help="counts over several runs")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where to put inputs that find something")
    args = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    state = _load(args.state)
    finds = state["finds"]
    seed = args.first_seed if args.first_seed is not None else state["next_seed"]
    watch, found, done, begin = Watch(), Counter[str](), 0, time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for _ in fuzz(iter(samples().values()), Path(folder)):
            pass  # what the undamaged logs need is imported
        while done < args.inputs:
            for data, why in fuzz(inputs_of(seed, PER_SEED), Path(folder), watch):
                found[why] += 1
                print(f"seed {seed}: {why}", file=sys.stderr, flush=True)
                if args.keep is not None:
                    args.keep.mkdir(parents=True, exist_ok=True)
                    (args.keep / f"{seed}-{zlib.crc32(data):08x}").write_bytes(data)
            seed, done = seed + 1, done + PER_SEED
            state = {"next_seed": seed, "inputs": state["inputs"] + PER_SEED, "finds": finds + sum(found.values())}
            if args.state is not None:
                args.state.write_text(json.dumps(state))
    result = {
        "bench": "fuzz",
        "inputs": done,
        "inputs_over_all_runs": state["inputs"],
        "next_seed": seed,
        "finds": dict(found.most_common(40)),
        "seconds": round(time.perf_counter() - begin, 1),
        "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
