"""What telemetry costs the training step: 200 scalars a step through `RankLog.append`, and bytes a point.

The last line is one JSON object. `us` are microseconds of wall time in the training thread, `cpu_us` of CPU time of the
whole process, flushing thread included.
"""

import argparse
import json
import random
import struct
import tempfile
import time
from pathlib import Path

from runhealth.storage.archive import pack
from runhealth.storage.publish import Publisher
from runhealth.storage.ranklog import RankLog
from runhealth.storage.records import StepRecord
from runhealth.storage.signals import STEP_SIGNALS, Dtype
from runhealth.storage.store import Store

SCALARS = 200


def measure(root: str, name: str, names: list[str], steps: int, pause_s: float) -> dict[str, float]:
    """Log noise under `names`, then publish and pack it."""
    rng = random.Random(0)
    single = struct.Struct("<f")
    store = Store(root)
    run = store.create_run(name)
    log = RankLog.create(store.claim_attempt(run, "bench").path, 0)
    times: list[float] = []
    cpu_s = 0.0
    for step in range(steps):
        values = {
            signal: single.unpack(single.pack(rng.gauss(1.0, 0.1)))[0] for signal in names
        }  # float32, as measured
        record = StepRecord(attempt=0, step=step, rank=0, ts_ns=time.time_ns(), values=values)
        cpu, start = time.process_time(), time.perf_counter()
        log.append([record])
        times.append((time.perf_counter() - start) * 1e6)
        cpu_s += time.process_time() - cpu
        time.sleep(pause_s)
    log.close()
    points = steps * len(names)
    raw = sum(file.stat().st_size for file in Path(log.path).iterdir())
    published = Path(Publisher(run.path).publish().path).stat().st_size
    packed = sum(pack(run.path, f"{root}/{name}-packed").size_bytes.values())
    times.sort()
    return {
        "us_p50": round(times[steps // 2], 1),
        "us_p99": round(times[steps * 99 // 100], 1),
        "cpu_us": round(cpu_s / steps * 1e6, 1),
        "raw_bytes_per_point": round(raw / points, 2),
        "published_bytes_per_point": round(published / points, 2),
        "packed_bytes_per_point": round(packed / points, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--pause-ms", type=float, default=1.0, help="the rest of the training step")
    args = parser.parse_args()
    free_form = [f"signal_{i}" for i in range(SCALARS)]
    catalogue = [name for name, signal in STEP_SIGNALS.items() if signal.dtype is Dtype.F32]
    with tempfile.TemporaryDirectory() as root:
        result: dict[str, object] = {
            "scalars": SCALARS, "steps": args.steps,
            **measure(root, "free", free_form, args.steps, args.pause_ms / 1e3),
            "catalogue_signals": {
                "scalars": len(catalogue), **measure(root, "catalogue", catalogue, args.steps, args.pause_ms / 1e3),
            },
        }  # fmt: skip
    print(json.dumps(result))


if __name__ == "__main__":
    main()
