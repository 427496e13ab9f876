"""What telemetry costs the training step: 200 scalars a step through `RankLog.append`, and bytes a point.

The last line is one JSON object. `us` are microseconds of wall time in the training thread, `cpu_us` of CPU time of the
whole process, flushing thread included.

`--peers VENV` measures other loggers in the same run, with the Python of that virtual environment: trackio, wandb
offline, TensorBoard and MLflow's file store. What is not installed there is reported as missing; `--install` makes the
environment if it is not there.

    python bench/telemetry_cost.py --peers /tmp/peers --install
"""

import argparse
import json
import random
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from runhealth.storage.archive import pack
from runhealth.storage.publish import Publisher
from runhealth.storage.ranklog import RankLog
from runhealth.storage.records import StepRecord
from runhealth.storage.signals import STEP_SIGNALS, Dtype
from runhealth.storage.store import Store
from runhealth.storage.usage import usage

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
    Publisher(run.path).publish(seal=True)
    used = usage(store.resolve(name))
    packed = sum(pack(run.path, f"{root}/{name}-packed").size_bytes.values())
    times.sort()
    return {
        "us_p50": round(times[steps // 2], 1),
        "us_p99": round(times[steps * 99 // 100], 1),
        "cpu_us": round(cpu_s / steps * 1e6, 1),
        "raw_bytes_per_point": round(raw / points, 2),
        "published_bytes_per_point": round(published / points, 2),
        "compacted_bytes_per_point": round((used.parts_bytes + used.database_bytes) / points, 2),
        "packed_bytes_per_point": round(packed / points, 2),
    }


PEERS = ("trackio", "wandb", "tensorboard", "mlflow")
PEER = """
import json, os, pathlib, random, sys, time
peer, root, steps, scalars, pause_s = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5])
os.chdir(root)
os.environ.update(TRACKIO_DIR=root, WANDB_MODE="offline", WANDB_SILENT="true", WANDB_DIR=root,
                  GIT_PYTHON_REFRESH="quiet", MLFLOW_ALLOW_FILE_STORE="true",
                  MLFLOW_DISABLE_TELEMETRY="true", HF_HUB_OFFLINE="1")
try:
    if peer == "trackio":
        import trackio
        trackio.init(project="bench", embed=False)
        def log(step, values): trackio.log(values, step=step)
        end = trackio.finish
    elif peer == "wandb":
        import wandb
        run = wandb.init(project="bench", dir=root)
        def log(step, values): run.log(values, step=step)
        end = run.finish
    elif peer == "tensorboard":
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
        writer = EventFileWriter(root)
        def log(step, values):  # as SummaryWriter.add_scalar does, one event a value
            for name, value in values.items():
                summary = Summary(value=[Summary.Value(tag=name, simple_value=value)])
                writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))
        end = writer.close
    else:
        import mlflow
        mlflow.set_tracking_uri("file://" + root + "/mlruns")  # which it has to make itself
        mlflow.start_run()
        def log(step, values): mlflow.log_metrics(values, step=step)
        end = mlflow.end_run
except ImportError as error:
    print(json.dumps({"missing": str(error)})); sys.exit()
rng, times, names = random.Random(0), [], [f"signal_{i}" for i in range(scalars)]
cpu_s = time.process_time()
idle = 0.0
for step in range(steps):
    before = time.process_time()
    values = {name: rng.gauss(1.0, 0.1) for name in names}
    idle += time.process_time() - before
    start = time.perf_counter()
    log(step, values)
    times.append((time.perf_counter() - start) * 1e6)
    time.sleep(pause_s)
end()
cpu_s = time.process_time() - cpu_s - idle
size = sum(file.stat().st_size for file in pathlib.Path(root).rglob("*") if file.is_file())
times.sort()
print(json.dumps({"us_p50": round(times[steps // 2], 1), "us_p99": round(times[steps * 99 // 100], 1),
                  "cpu_us": round(cpu_s / steps * 1e6, 1), "bytes_per_point": round(size / steps / scalars, 1)}))
"""


def measure_peer(peer: str, python: str, steps: int, pause_s: float) -> dict[str, object]:
    """What another logger costs for the same steps; in a process of its own, as its users have it."""
    with tempfile.TemporaryDirectory() as root:
        command = [python, "-c", PEER, peer, root, str(steps), str(SCALARS), str(pause_s)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        except (OSError, subprocess.TimeoutExpired) as error:
            return {"missing": str(error)}
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if not lines:
            return {"failed": (done.stderr.strip().splitlines() or ["no output"])[-1]}
        result: dict[str, object] = json.loads(lines[-1])
        return result


def peers(venv: str, *, install: bool) -> str:
    """The Python of the environment with the other loggers."""
    python = Path(venv, "bin", "python")
    if install and not python.exists():
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
        for peer in PEERS:  # one that cannot be installed does not keep out the others
            subprocess.run([str(python), "-m", "pip", "install", "-q", peer])
    return str(python)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--pause-ms", type=float, default=1.0, help="the rest of the training step")
    parser.add_argument("--peers", metavar="VENV", help="virtual environment with the other loggers")
    parser.add_argument("--install", action="store_true", help="make that environment if it is not there")
    parser.add_argument("--peer-steps", type=int, default=200)
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
    if args.peers:
        python = peers(args.peers, install=args.install)
        others = {peer: measure_peer(peer, python, args.peer_steps, args.pause_ms / 1e3) for peer in PEERS}
        for other in others.values():
            for name in ("us_p50", "cpu_us"):
                ours = result[name]
                if name in other and isinstance(ours, float):
                    other[f"{name}_ratio"] = round(float(str(other[name])) / ours, 1)
        result["peers"] = others
    print(json.dumps(result))


if __name__ == "__main__":
    main()
