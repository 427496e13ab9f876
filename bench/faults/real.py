"""The simulated ranks beside the real trainer: the same faults, once in one process, once with a process a rank.

    python -m bench.faults real

Compares what both record, step by step and rank by rank, and what the diagnosis says of both.
"""

import json
import math
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.faults import corpus, results
from bench.faults.clock import WORLD, draw
from bench.faults.examine import SOURCE
from bench.faults.telemetry import Recorder
from bench.faults.world import World, config

from runhealth.diagnose.engine import Engine
from runhealth.storage.reader import RunReader
from runhealth.storage.records import BatchRecord, Record, StepRecord
from runhealth.storage.store import Store
from runhealth.trainer.config import FaultSpec
from runhealth.trainer.supervisor import Supervisor, create

SEED, STEPS, ONSET = 7, 24, 12
CHECKS: tuple[FaultSpec | None, ...] = (
    None,
    FaultSpec(name="lr_change", params={"step": ONSET, "severity": 10.0}),
    FaultSpec(name="label_shift", params={"step": ONSET, "rank": 1}),
    FaultSpec(name="silent_corruption", params={"step": ONSET, "rank": 2, "mode": "scale", "severity": 100.0}),
    FaultSpec(name="replica_desync", params={"step": ONSET, "rank": 3}),
    FaultSpec(name="wrong_beta2", params={"step": ONSET, "severity": 0.1}),
    FaultSpec(name="clip_breach", params={"step": ONSET, "severity": 15.0}),
    FaultSpec(name="nan_batch", params={"step": ONSET, "rank": 1}),
)
SIGNALS = (
    "loss",
    "grad_norm_rank",
    "grad_projection_rank",
    "grad_cosine_rank",
    "grad_norm",
    "clip_coef",
    "lr",
    "beta1",
    "beta2",
    "weight_decay",
    "adam_eps",
    "update_ratio",
    "weight_norm",
    "consumed_samples",
)
Key = tuple[int, int, str]


def main() -> int:
    """Prints and stores, for each fault, the largest relative difference of each signal, and both verdicts."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        store = Store(folder)
        for number, spec in enumerate(CHECKS):
            name = f"{number}-{spec.name if spec else 'healthy'}"
            found.append({"run": name, **_compare(list(_real(store, name, spec)), list(_simulated(folder, spec)))})
            print(json.dumps(found[-1]), flush=True)
    summary = {"bench": "faults/real", "ranks": WORLD, "steps": STEPS, "commit": results.commit(), "runs": found}
    results.REAL.parent.mkdir(exist_ok=True)
    results.REAL.write_text(json.dumps(summary, indent=1) + "\n")
    return 0


def _real(store: Store, name: str, spec: FaultSpec | None) -> Iterable[Record]:
    run = create(store, name, config(SEED, "fp32", [spec] if spec else []))
    code = Supervisor(store, run, stop_step=STEPS, max_restarts=0, say=lambda _: None).supervise()
    if code:
        raise RuntimeError(f"the real trainer ended with code {code} in {run.path}")
    with RunReader.open(name, store.root) as reader:
        yield from reader.records()


def _simulated(folder: str, spec: FaultSpec | None) -> Iterable[Record]:
    world = World(SEED, "fp32", corpus.load(Path(folder)), [spec] if spec else [])
    recorder = Recorder(world)
    yield from recorder.started(0)
    for step in range(STEPS):
        outcome = world.train(step)
        yield from recorder.step(step, outcome, draw(SEED, step, lambda *_: 0.0))


def _compare(real: list[Record], simulated: list[Record]) -> dict[str, Any]:
    here, there = _values(real), _values(simulated)
    apart = sorted({name for _, _, name in here.keys() ^ there.keys()})
    worst: dict[str, float] = {}
    for key in here.keys() & there.keys():
        a, b = here[key], there[key]
        same = a == b or (math.isnan(a) and math.isnan(b))
        worst[key[2]] = max(worst.get(key[2], 0.0), 0.0 if same else abs(a - b) / max(abs(a), abs(b)))
    return {
        "compared": len(here.keys() & there.keys()),
        "not_in_both": apart,
        "batches_equal": _batches(real) == _batches(simulated),
        "largest_difference": {name: float(f"{worst[name]:.2g}") for name in SIGNALS if name in worst},
        "verdicts_real": _verdicts(real),
        "verdicts_simulated": _verdicts(simulated),
    }


def _values(records: Iterable[Record]) -> dict[Key, float]:
    return {
        (record.step, record.rank, name): float(record.values[name])
        for record in records
        if isinstance(record, StepRecord)
        for name in SIGNALS
        if name in record.values
    }


def _batches(records: Iterable[Record]) -> list[tuple[int, int, str, int | None]]:
    return sorted((r.step, r.rank, r.shard, r.content_hash) for r in records if isinstance(r, BatchRecord))


def _verdicts(records: Iterable[Record]) -> list[str]:
    """Of findings that are about the numbers of training: times are those of this machine in one of the two."""
    engine = Engine()
    for record in records:
        engine.feed_quietly(record)
    engine.finish()
    timing = ("slow_step", "periodic_stall", "sustained_slowdown", "straggler", "checkpoint_slow", "restart")
    return sorted(
        f"{f.kind} {f.verdict} {list(f.ranks) if f.ranks else ''}".strip()
        for f in engine.report(SOURCE).findings
        if f.kind not in timing
    )
