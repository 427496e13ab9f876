"""How fast the questions of an on-call engineer are answered on a big run, through the public reader.

The run has `--rows` rows in `steps` and `layers` together, of 8 ranks, in parts as a publisher makes them, with some
rows that are in no part yet and a live tail. The last line is one JSON object; times are milliseconds, `first` in a
reader that was just opened, `warm` the median of the later ones; `…_kept` is `RunReader.series`, which keeps what the
parts hold of a curve.

    python bench/queries.py --rows 1e7
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import polars as pl

from runhealth.storage.database import build_successor, connect, open_tables
from runhealth.storage.parts import write_part
from runhealth.storage.publish import PART_BYTES, Publisher
from runhealth.storage.ranklog import RankLog
from runhealth.storage.reader import RunReader
from runhealth.storage.records import StepRecord
from runhealth.storage.schema import LAYERS, STEPS, Table, quoted
from runhealth.storage.sink import Sink
from runhealth.storage.store import Store

RANKS, LAYER_COUNT, LAYERS_EVERY = 8, 90, 10
STEP_NAMES = (
    "loss", "grad_norm", "lr", "t_step_s", "t_data_s", "t_forward_s", "t_backward_s", "t_wait_s", "t_optimizer_s",
    "tokens", "grad_norm_rank", "clip_coef", "update_ratio", "weight_norm", "overflow_count", "nonfinite_count",
    "logit_max", "activation_max", "mem_allocated_bytes", "mem_reserved_bytes",
)  # fmt: skip
LAYER_NAMES = ("grad_norm", "weight_norm", "amax", "overflow_count")
ROW_BYTES = {STEPS.name: 32 + 5 * len(STEP_NAMES), LAYERS.name: 5 * len(LAYER_NAMES)}  # about, in a rank log
QUERIES = {
    "loss_series": "SELECT step, loss FROM steps WHERE rank = 0 ORDER BY attempt, step",
    "loss_mean_of_ranks": "SELECT step, avg(loss) AS loss FROM steps GROUP BY step ORDER BY step",
    "step_time_last_1000": (
        "SELECT rank, quantile_cont(t_step_s, [0.5, 0.99]) AS t FROM steps "
        "WHERE step > (SELECT max(step) FROM steps) - 1000 GROUP BY rank ORDER BY rank"
    ),
    "layer_window": (
        "SELECT step, rank, layer, grad_norm, weight_norm FROM layers "
        "WHERE step BETWEEN {middle} - 50 AND {middle} + 50 ORDER BY step, rank"
    ),
}


def column(table: Table, name: str) -> str:
    kind = {"f": "random()", "d": "0.1 * random()", "q": "CAST(1000000 * random() AS BIGINT)"}
    assert table.catalogue is not None
    code = str(table.catalogue[name].dtype)
    value = kind[code] if code != "f" else "CAST(CAST(random() AS FLOAT) AS DOUBLE)"
    return f"{value} AS {quoted(name)}"


def build(run_path: str, rows: int) -> int:
    """Parts of a run with `rows` rows; returns its steps. One step of all ranks has RANKS rows, and each tenth
    LAYER_COUNT for each rank more."""
    steps = max(LAYERS_EVERY, round(rows / (RANKS * (1 + LAYER_COUNT / LAYERS_EVERY))))
    bytes_a_step = RANKS * (ROW_BYTES[STEPS.name] + LAYER_COUNT / LAYERS_EVERY * ROW_BYTES[LAYERS.name])
    steps_a_part = max(LAYERS_EVERY, int(PART_BYTES / bytes_a_step))
    folder = Path(run_path, ".publish")
    folder.mkdir()
    private, successor = folder / "private.duckdb", folder / "successor.duckdb"
    for number, first in enumerate(range(0, steps, steps_a_part)):
        end = min(steps, first + steps_a_part)
        connection = connect(private)
        open_tables(connection)
        if number == 0:
            sink = Sink(connection)
            sink._add(STEPS, {name: "BIGINT" if "_bytes" in name or "count" in name or name == "tokens" else "DOUBLE"
                              for name in STEP_NAMES})  # fmt: skip
            sink._add(LAYERS, {name: "BIGINT" if "count" in name else "DOUBLE" for name in LAYER_NAMES})
        spans = f"range({first}, {end}) AS s(step), range({RANKS}) AS r(rank)"
        every = f"range({first}, {end}, {LAYERS_EVERY}) AS s(step), range({RANKS}) AS r(rank)"
        key = "0 AS attempt, step, rank, step * 1000000 AS ts_ns"
        values = ", ".join(column(STEPS, name) for name in STEP_NAMES)
        connection.execute(f"INSERT INTO steps BY NAME SELECT {key}, {values} FROM {spans} ORDER BY step, rank")
        values = ", ".join(column(LAYERS, name) for name in LAYER_NAMES)
        connection.execute(
            f"INSERT INTO layers BY NAME SELECT {key}, 'blocks.' || l || '.attn' AS layer, {values} "
            f"FROM {every}, range({LAYER_COUNT}) AS l(l) ORDER BY step, rank, l"
        )
        if end < steps:
            done = connection.execute("SELECT table_name, sum(rows)::BIGINT FROM parts GROUP BY ALL").fetchall()
            manifest = write_part(connection, Path(run_path), number, dict(done))
            assert manifest is not None
            build_successor(connection, successor, manifest)
        connection.execute("CHECKPOINT")
        connection.close()
        if end < steps:
            successor.replace(private)
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=float, default=1e7)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--folder", help="build here and leave it (default: a temporary folder)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        store = Store(args.folder or temporary)
        run = store.create_run("big")
        started = time.monotonic()
        steps = build(run.path, int(args.rows))
        built_s = time.monotonic() - started
        publisher = Publisher(run.path)
        log = RankLog.create(store.claim_attempt(run, "bench").path, 0)
        for step in range(steps, steps + 200):
            values = {name: 1 if name == "tokens" else 0.5 for name in STEP_NAMES if "_bytes" not in name}
            values.update(overflow_count=0, nonfinite_count=0)
            log.append([StepRecord(attempt=0, step=step, rank=0, values=values)])
            if step == steps + 100:
                published = publisher.publish()
        log.close()
        times = {}
        with RunReader.open(run.path) as reader:
            opened = time.perf_counter()
            reader.sql("SELECT 1")
            open_ms = (time.perf_counter() - opened) * 1e3
            questions: dict[str, Callable[[], pl.DataFrame]] = {
                name: partial(reader.sql, query.format(middle=steps // 2)) for name, query in QUERIES.items()
            }
            questions["loss_series_kept"] = lambda: reader.series("loss", 0)
            questions["loss_mean_of_ranks_kept"] = lambda: reader.series("loss")
            for name, ask in questions.items():
                laps, cpu = [], []
                for _ in range(args.repeats):
                    start, used = time.perf_counter(), time.process_time()
                    frame = ask()
                    laps.append((time.perf_counter() - start) * 1e3)
                    cpu.append((time.process_time() - used) * 1e3)
                times[name] = {
                    "first": round(laps[0], 1), "warm": round(statistics.median(laps[1:]), 1),
                    "warm_best": round(min(laps[1:]), 1), "warm_cpu": round(statistics.median(cpu[1:]), 1),
                    "rows": len(frame),
                }  # fmt: skip
            counted = reader.sql("SELECT (SELECT count(*) FROM steps) AS s, (SELECT count(*) FROM layers) AS l").row(0)
        files = list(Path(run.path, "parts").glob("*.parquet"))
        points = counted[0] * len(STEP_NAMES) + counted[1] * len(LAYER_NAMES)
        size = sum(file.stat().st_size for file in files) + Path(run.path, "run.duckdb").stat().st_size
    print(
        json.dumps({
            "rows": sum(counted), "points": points, "queries_ms": times, "open_ms": round(open_ms, 1),
            "publish_s": round(published.seconds, 2), "part_files": len(files),
            "bytes_per_point": round(size / points, 2), "build_s": round(built_s, 1),
        })
    )  # fmt: skip


if __name__ == "__main__":
    main()
