"""Make `examples/40k-spike` again, from nothing, with one command:

    python examples/make_40k_spike.py

It trains the recipe `spike_40k` (about 15 minutes on two idle cores), packs what the monitor recorded into
`src/runhealth/bundled/40k-spike/` and writes `truth.json` beside it. The run is real; nothing is drawn by hand. What is
left out of the pack, to keep it small and honest:

- the `fault_injected` event and the fault in the config: they would give the answer away;
- host name and process ids;
- the time stamps of batches and `batch_loss`, which repeat those of the step (there is one micro-batch a step);
- digits of phase times beyond 0.1 ms.

Stopped half-way, it goes on where it was: the training resumes from its newest verified checkpoint. When the training
is done, it only packs.
"""

import argparse
import dataclasses
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from runhealth.storage.archive import pack
from runhealth.storage.ranklog import RankLog
from runhealth.storage.reader import RunReader
from runhealth.storage.records import (
    BatchRecord,
    CheckpointRecord,
    CheckpointStatus,
    EventKind,
    LayerSample,
    Record,
    RunEvent,
    StepRecord,
)
from runhealth.storage.store import Store
from runhealth.trainer import recipes
from runhealth.trainer.config import TrainConfig
from runhealth.trainer.data import BatchPlan
from runhealth.trainer.fault import FaultContext, FaultLabel, create
from runhealth.trainer.progress import ProgressLine
from runhealth.trainer.supervisor import Supervisor
from runhealth.trainer.supervisor import create as create_run

NAME = "40k-spike"
TARGET = Path(__file__).resolve().parent.parent / "src" / "runhealth" / "bundled" / NAME
LIMIT_BYTES = 5_000_000
CHUNK = 4_000
TIME_DIGITS = 4


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", default="40k-spike-work", help="scratch folder (default: ./%(default)s)")
    parser.add_argument("--target", default=str(TARGET), help="where the packed run goes (default: the package)")
    arguments = parser.parse_args()

    config = recipes.load("spike_40k")
    store = Store(f"{arguments.work}/store")
    run = create_run(store, NAME, config)
    if not is_finished(store, config):
        line = ProgressLine(NAME)
        code = Supervisor(store, run, on_progress=line).supervise()
        line.close()
        if code:
            return code
    target = Path(arguments.target)
    shutil.rmtree(target, ignore_errors=True)
    with RunReader.open(NAME, store.root) as reader:
        staged = stage(reader, f"{arguments.work}/staged", config)
        result = pack(staged, str(target))
        truth = truth_of(reader, label_of(config))
    (target / "truth.json").write_text(json.dumps(truth, indent=1) + "\n")
    size = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    print(f"{target}: {size:,} bytes, {result.rows}\n{json.dumps(truth)}", file=sys.stderr)
    if size > LIMIT_BYTES:
        print(f"expected at most {LIMIT_BYTES:,} bytes, met {size:,}", file=sys.stderr)
        return 1
    return 0


def is_finished(store: Store, config: TrainConfig) -> bool:
    with RunReader.open(NAME, store.root) as reader:
        last = reader.sql("SELECT max(step) AS step FROM steps")["step"][0]
    return last is not None and last >= config.steps - 1


def label_of(config: TrainConfig) -> FaultLabel:
    plan = BatchPlan(data=config.data, seed=config.seed, world=config.world)
    return create(config.faults[0], FaultContext(config=config, plan=plan, rank=0)).label()


def truth_of(reader: RunReader, label: FaultLabel) -> dict[str, object]:
    """What a diagnosis should find. The last good checkpoint is the newest one verified before the fault began."""
    good = [
        record.step
        for record in reader.records()
        if isinstance(record, CheckpointRecord)
        and record.status is CheckpointStatus.VERIFIED
        and record.step <= label.onset_step
    ]
    return {
        "cause": label.cause,
        "onset_step": label.onset_step,
        "ranks": list(label.ranks),
        "shards": list(label.shards),
        "layers": list(label.layers),
        "last_good_step": max(good),
    }


def stage(reader: RunReader, folder: str, config: TrainConfig) -> str:
    """Write the records that are kept into a run of their own; returns its path."""
    shutil.rmtree(folder, ignore_errors=True)
    clean = dataclasses.replace(config, faults=())
    store = Store(folder)
    run = store.create_run(NAME, clean.to_json())
    logs: dict[tuple[int, int], RankLog] = {}
    waiting: dict[tuple[int, int], list[Record]] = {}
    attempts: dict[int, str] = {}
    for record in kept(reader.records()):
        if record.attempt not in attempts:
            attempts[record.attempt] = store.claim_attempt(run, f"attempt {record.attempt}").path
        key = (record.attempt, record.rank)
        if key not in logs:
            logs[key] = RankLog.create(attempts[record.attempt], record.rank)
            waiting[key] = []
        waiting[key].append(record)
        if len(waiting[key]) >= CHUNK:
            logs[key].append(waiting[key])
            waiting[key] = []
    for key, log in logs.items():
        if waiting[key]:
            log.append(waiting[key])
        log.close()
    return run.path


def kept(records: Iterator[Record]) -> Iterator[Record]:
    for record in records:
        if isinstance(record, RunEvent):
            if record.kind != EventKind.FAULT_INJECTED:
                data = {key: value for key, value in record.data.items() if key not in ("host", "pid")}
                yield dataclasses.replace(record, data=data)
        elif isinstance(record, BatchRecord):
            values = {key: value for key, value in record.values.items() if key != "batch_loss"}
            yield dataclasses.replace(record, ts_ns=0, values=values)
        elif isinstance(record, StepRecord):
            values = {
                key: round(value, TIME_DIGITS) if key.startswith("t_") else value
                for key, value in record.values.items()
            }
            yield dataclasses.replace(record, values=values)
        elif isinstance(record, LayerSample):
            yield dataclasses.replace(record, ts_ns=0)
        else:
            yield record


if __name__ == "__main__":
    sys.exit(main())
