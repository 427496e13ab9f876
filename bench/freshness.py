"""How long after `RankLog.append` a step is visible in another process through the public reader.

One process writes, one publishes every second, this one follows with `RunReader.poll()`, then with `RunReader.sql()`.
The last line is one JSON object; times are milliseconds from just before the append to the moment the record is held.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

from runhealth.storage.ranklog import RankLog
from runhealth.storage.reader import RunReader
from runhealth.storage.records import StepRecord
from runhealth.storage.store import Store

SIGNALS = 200


def write(attempt_dir: str, steps: int, pause_s: float) -> None:
    with RankLog.create(attempt_dir, 0) as log:
        values = {f"signal_{i}": i * 0.37 for i in range(SIGNALS)}
        for step in range(steps):
            log.append([StepRecord(attempt=log.attempt, step=step, rank=0, ts_ns=time.time_ns(), values=values)])
            time.sleep(pause_s)


def publish(run_path: str) -> None:
    import threading

    from runhealth.storage.publish import Publisher

    Publisher(run_path).run_forever(threading.Event())


def follow(name: str, root: str, steps: int, look: Callable[[RunReader], list[int]], poll_s: float) -> list[float]:
    """Delays in ms of all steps of a fresh attempt."""
    store = Store(root)
    run = store.create_run(name)
    claim = store.claim_attempt(run, "bench")
    me = [sys.executable, __file__]
    delays: list[float] = []
    with RunReader.open(name, root) as reader:
        look(reader)
        writer = subprocess.Popen([*me, "--write", claim.path, "--steps", str(steps)])
        publisher = subprocess.Popen([*me, "--publish", run.path])
        try:
            while len(delays) < steps:
                times = look(reader)
                now = time.time_ns()
                delays += [(now - ts_ns) / 1e6 for ts_ns in times]
                if not times and writer.poll() not in (None, 0):
                    raise SystemExit("the writer failed")
                time.sleep(poll_s)
        finally:
            publisher.kill()
            publisher.wait()
            writer.wait()
    return sorted(delays)


def by_poll(reader: RunReader) -> list[int]:
    return [record.ts_ns for record in reader.poll()]


def by_sql() -> Callable[[RunReader], list[int]]:
    last = -1

    def look(reader: RunReader) -> list[int]:
        nonlocal last
        rows = reader.sql("SELECT step, ts_ns FROM steps WHERE step > ? ORDER BY step", [last]).rows()
        if rows:
            last = rows[-1][0]
        return [ts_ns for _, ts_ns in rows]

    return look


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--pause-ms", type=float, default=5.0, help="between two steps of the writer")
    parser.add_argument("--poll-ms", type=float, default=10.0, help="between two looks of the reader")
    parser.add_argument("--write", help=argparse.SUPPRESS)
    parser.add_argument("--publish", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.write:
        return write(args.write, args.steps, args.pause_ms / 1e3)
    if args.publish:
        return publish(args.publish)
    result: dict[str, object] = {"steps": args.steps, "signals": SIGNALS, "poll_interval_ms": args.poll_ms}
    with tempfile.TemporaryDirectory() as root:
        for name, look in (("poll", by_poll), ("sql", by_sql())):
            delays = follow(name, root, args.steps, look, args.poll_ms / 1e3)
            prefix = "" if name == "poll" else "sql_"
            result[f"{prefix}p50_ms"] = round(delays[len(delays) // 2], 2)
            result[f"{prefix}p99_ms"] = round(delays[len(delays) * 99 // 100], 2)
            result[f"{prefix}max_ms"] = round(delays[-1], 2)
    print(json.dumps(result))
    return None


if __name__ == "__main__":
    main()
