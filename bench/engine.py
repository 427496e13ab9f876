"""What the diagnosis engine costs: CPU seconds of one core, the same whatever else the machine does, nearly.

- `rows_1m_s`: 1,000,000 steps of a single rank (loss, gradient norm, learning rate, step time), the engine alone;
- `post_mortem_40k_s`: `diagnose --run` in a new process of a packed run of 40,000 steps on 8 ranks, 18 signals;
- `post_mortem_40k_batches_s`: the same with the batch of each step and rank;
- `post_mortem_1m_s`: the same as the first of 1,000,000 steps on 8 ranks, and `post_mortem_1m_mib`, its peak memory;
- `demo_s`: `diagnose --run 40k-spike` in a new process;
- `ranks_step_s`: one step of so many ranks, record by record and (`ranks_block_step_s`) as blocks.

`medians_s` is the bound to read them by: 1,000,000 medians of 128 values in NumPy, in the same run. The last line is
one JSON object:

    OMP_NUM_THREADS=1 python bench/engine.py [--only post_mortem_40k] [--scale 0.1]
"""

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import polars as pl

from runhealth.diagnose.engine import Engine
from runhealth.diagnose.service import diagnose
from runhealth.storage.blocks import Column, StepBlock
from runhealth.storage.records import EventKind, Record, RunEvent, SourceInfo
from runhealth.storage.signals import STEP_SIGNALS

DIAGNOSE = Path(sys.executable).with_name("diagnose")
BLOCK_STEPS = 4096
RANKS = (1_000, 10_000)
SPIKE = 0.7  # of the run, where the loss jumps


def scalars(steps: int, ranks: int, seed: int) -> dict[str, Column]:
    """A healthy run but for one spike that recovers: (steps, ranks) each, global signals of rank 0 only."""
    rng = np.random.default_rng(seed)
    shape = (steps, ranks)
    at = np.arange(steps)[:, None]
    since = at - int(SPIKE * steps)
    bump = np.where(since >= 0, 1.2 * np.exp(-np.maximum(since, 0) / 30), 0.0)
    head = np.zeros(shape, dtype=np.bool_)
    head[:, 0] = True

    def noisy(level: float, sigma: float) -> np.ndarray:
        return level * np.exp(rng.normal(0, sigma, shape))

    def first(values: np.ndarray) -> Column:
        return Column(values=np.broadcast_to(values, shape).copy(), present=head if ranks > 1 else None)

    compute = noisy(0.3, 0.01)
    return {
        "loss": Column(values=(2.5 + 5 * np.exp(-at / 3000) + bump) * noisy(1.0, 0.01)),
        "grad_norm_rank": Column(values=noisy(0.5, 0.1) * (1 + 2 * bump)),
        "tokens": Column(values=np.full(shape, 8192)),
        "t_step_s": Column(values=noisy(0.95, 0.01)),
        "t_forward_s": Column(values=compute),
        "t_backward_s": Column(values=2 * compute),
        "t_optimizer_s": Column(values=noisy(0.02, 0.02)),
        "t_data_s": Column(values=noisy(0.005, 0.05)),
        "t_wait_s": Column(values=noisy(0.03, 0.1)),
        "mem_allocated_bytes": Column(values=np.full(shape, 40_000_000_000)),
        "grad_norm": first(noisy(0.5, 0.1)[:, :1] * (1 + 2 * bump)),
        "lr": first(3e-4 * np.minimum(1, (at + 1) / 2000) * (0.55 + 0.45 * np.cos(math.pi * at / (1.2 * steps)))),
        "clip_threshold": first(np.ones((steps, 1))),
        "clip_coef": first(np.ones((steps, 1))),
        "update_ratio": first(noisy(1e-3, 0.05)[:, :1]),
        "weight_norm": first(100 + np.sqrt(at + 1.0)),
        "consumed_samples": first(512 * (at + 1)),
        "eval_loss": Column(
            values=np.broadcast_to(2.5 + 5 * np.exp(-at / 3000) + bump, shape) * noisy(1.0, 0.002),
            present=head & (at % 1000 == 999),
        ),
    }


def cut(columns: dict[str, Column], steps: int, ranks: int, size: int = BLOCK_STEPS) -> Iterator[StepBlock]:
    for start in range(0, steps, size):
        stop = min(steps, start + size)
        numbers = np.arange(start, stop, dtype=np.int64)
        yield StepBlock(
            attempt=0,
            ranks=tuple(range(ranks)),
            steps=numbers,
            ts_ns=np.repeat(1_000_000_000 * (numbers[:, None] + 1), ranks, axis=1),
            columns={
                name: Column(values=c.values[start:stop], present=None if c.present is None else c.present[start:stop])
                for name, c in columns.items()
            },
        )


class Blocks:
    def __init__(self, blocks: list[StepBlock]) -> None:
        self._blocks = blocks

    def blocks(self) -> Iterator[StepBlock | Record]:
        yield from self._blocks

    def records(self) -> Iterator[Record]:
        for block in self._blocks:
            yield from block.records()

    def describe(self) -> SourceInfo:
        return SourceInfo(name="bench", source="bench", format="csv")


def packed(folder: Path, steps: int, ranks: int, *, batches: bool) -> None:
    """A packed run as `runhealth pack` leaves it, without the hours of logging it."""
    parts = folder / "parts"
    parts.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"format_version": 1, "name": folder.name, "created_ns": 1}))
    columns = scalars(steps, ranks, seed=1)
    key = {
        "attempt": pl.Series(np.zeros(steps * ranks, dtype=np.int8)),
        "step": pl.Series(np.tile(np.arange(steps, dtype=np.int32), ranks)),
        "rank": pl.Series(np.repeat(np.arange(ranks, dtype=np.int16), steps)),
        "ts_ns": pl.Series(np.tile(1_000_000_000 * np.arange(1, steps + 1, dtype=np.int64), ranks)),
    }
    values = {}
    for name, column in columns.items():
        narrow = column.values if column.values.dtype.kind == "i" else column.values.astype(np.float32)
        series = pl.Series(narrow.T.ravel())
        if column.present is not None:
            series = pl.select(pl.when(pl.Series(column.present.T.ravel())).then(series)).to_series()
        values[name] = series
    pl.DataFrame({**key, **values}).write_parquet(parts / "steps.parquet", statistics=False)
    named = [("steps", name, "BIGINT" if values[name].dtype.is_integer() else "DOUBLE") for name in columns]
    if batches:
        rng = np.random.default_rng(2)
        count = steps * ranks
        statistics = {
            "token_entropy": 9.0 + 0.05 * rng.normal(size=count),
            "token_unique_share": 0.3 + 0.005 * rng.normal(size=count),
            "token_repeat_share": 0.05 + 0.002 * rng.normal(size=count),
        }
        shards = np.tile(np.arange(steps) // 1024, ranks) * ranks + np.repeat(np.arange(ranks), steps)
        samples = np.tile(16 * (np.arange(steps) % 1024), ranks)
        pl.DataFrame({
            **key,
            "micro_batch": np.zeros(count, dtype=np.int8),
            "shard": pl.Series(shards).cast(pl.String),
            "first_sample": samples,
            "last_sample": samples + 15,
            "samples": np.full(count, 16),
            "content_hash": np.arange(count, dtype=np.uint64),
            "shard_hash": np.full(count, 7, dtype=np.uint64),
            "manifest_hash": np.full(count, 7, dtype=np.uint64),
            **{name: found.astype(np.float32) for name, found in statistics.items()},
        }).write_parquet(parts / "batches.parquet", statistics=False)  # fmt: skip
        named += [("batches", name, "DOUBLE") for name in statistics]
    signals = []
    for table, name, kind in named:
        known = STEP_SIGNALS.get(name)
        signals.append({
            "table_name": table, "name": name, "column_name": name, "column_type": kind,
            "unit": known.unit if known else "", "scope": str(known.scope) if known else "", "meaning": "",
        })  # fmt: skip
    pl.DataFrame(signals).write_parquet(parts / "signals.parquet")
    pl.DataFrame({"key": ["format_version"], "value": ["1"]}).write_parquet(parts / "meta.parquet")
    pl.DataFrame({
        "attempt": [0], "step": [0], "rank": [0], "ts_ns": [1], "kind": ["attempt_start"], "message": [""],
        "data": [json.dumps({"world_size": ranks})],
    }).write_parquet(parts / "events.parquet")  # fmt: skip


def spent(work: Callable[[], object]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


def cold(arguments: list[str]) -> tuple[float, float]:
    """CPU seconds and peak MiB of `diagnose` in a process of its own."""
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen([str(DIAGNOSE), *arguments], stdout=subprocess.DEVNULL, stderr=errors)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = code = os.waitstatus_to_exitcode(status)
        errors.seek(0)
        if code not in (0, 1):
            raise SystemExit(f"diagnose {' '.join(arguments)}: exit {code}: {errors.read().decode()[-500:]}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def post_mortem(steps: int, ranks: int, *, batches: bool) -> tuple[float, float]:
    with tempfile.TemporaryDirectory() as root:
        made = [sys.executable, __file__, "--pack", f"{root}/made", str(steps), str(ranks), str(int(batches))]
        subprocess.run(made, check=True)  # a process of its own: its memory is not ours
        return cold(["--run", "made", "--store", root, "--format", "json"])


def rows(steps: int) -> float:
    columns = scalars(steps, 1, seed=3)
    kept = {name: columns[name] for name in ("loss", "grad_norm", "lr", "t_step_s", "tokens")}
    source = Blocks(list(cut(kept, steps, 1)))
    return spent(lambda: diagnose(source))


def ranks_step(ranks: int, steps: int, *, as_blocks: bool) -> float:
    """Seconds a step, once the engine is under way."""
    columns = scalars(2 * steps, ranks, seed=4)
    blocks = list(cut(columns, 2 * steps, ranks, size=steps))
    engine = Engine()
    engine.feed(RunEvent(attempt=0, step=0, rank=0, kind=EventKind.ATTEMPT_START, data={"world_size": ranks}))
    if as_blocks:
        engine.feed_block(blocks[0])
        return spent(lambda: engine.feed_block(blocks[1])) / steps
    for record in blocks[0].records():
        engine.feed_quietly(record)
    records = list(blocks[1].records())
    return spent(lambda: [engine.feed_quietly(record) for record in records]) / steps


def medians() -> float:
    values = np.random.default_rng(5).normal(size=(10_000, 128))
    return spent(lambda: [np.median(values, axis=1) for _ in range(100)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="numbers whose name begins so")
    parser.add_argument("--scale", type=float, default=1.0, help="steps of the runs, as a share of the full ones")
    parser.add_argument("--pack", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.pack is not None:
        folder, steps, ranks, batches = args.pack
        return packed(Path(folder), int(steps), int(ranks), batches=batches == "1")
    many, some = int(1_000_000 * args.scale), int(40_000 * args.scale)
    result: dict[str, object] = {"bench": "engine", "scale": args.scale, "cpus": os.cpu_count()}

    def want(name: str) -> bool:
        return args.only is None or name.startswith(args.only)

    result["medians_s"] = round(medians(), 2)
    if want("rows_1m"):
        result["rows_1m_s"] = round(rows(many), 2)
    for name, steps, with_batches in (
        ("post_mortem_40k", some, False),
        ("post_mortem_40k_batches", some, True),
        ("post_mortem_1m", many, False),
    ):
        if want(name):
            seconds, peak = post_mortem(steps, 8, batches=with_batches)
            result |= {f"{name}_s": round(seconds, 2), f"{name}_mib": round(peak)}
            print(name, result, file=sys.stderr)
    if want("demo"):
        seconds, peak = cold(["--run", "40k-spike", "--format", "json"])
        result |= {"demo_s": round(seconds, 2), "demo_mib": round(peak)}
    if want("ranks"):
        result["ranks_step_s"] = {n: round(ranks_step(n, 8, as_blocks=False), 3) for n in RANKS}
        result["ranks_block_step_s"] = {n: round(ranks_step(n, 8, as_blocks=True), 3) for n in RANKS}
    result["peak_mib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    print(json.dumps(result))
    return None


if __name__ == "__main__":
    main()
