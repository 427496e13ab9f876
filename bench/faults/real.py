"""The simulated ranks beside the real trainer: the same faults, once in one process, once with a process a rank.

    python -m bench.faults real

Compares what both record, step by step and rank by rank, and what the diagnosis says of both. A signal that only one of
the two records is named, and so is one that one of them records more often.

Times, memory and lengths of sequences belong to a simulated clock: of these only the presence is compared, as it is of
what is no measure of training (a checksum). So it is of whole runs in fp16 and with experts: those of the trainer
compute other numbers than the simulated ones.
"""

import json
import math
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.faults import corpus, moe, results
from bench.faults.clock import WORLD, draw
from bench.faults.examine import SOURCE
from bench.faults.telemetry import Recorder
from bench.faults.world import EVAL_EVERY, World, config

from runhealth.diagnose.engine import Engine
from runhealth.storage.reader import RunReader
from runhealth.storage.records import BatchRecord, LayerSample, Record, StepRecord
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
    FaultSpec(name="adam_staleness", params={"step": ONSET}),
    FaultSpec(name="logit_growth", params={"step": ONSET}),
)
OTHER_MODELS: dict[str, dict[str, Any]] = {  # precision of the bench: what it is in the trainer
    "fp8": {},
    "fp16": {"precision": "fp16"},
    "moe": {"experts": moe.EXPERTS},
}
SIGNALS = (
    "loss",
    "grad_norm_rank",
    "grad_projection_rank",
    "grad_cosine_rank",
    "grad_norm",
    "clip_threshold",
    "clip_coef",
    "lr",
    "beta1",
    "beta2",
    "weight_decay",
    "adam_eps",
    "update_ratio",
    "weight_norm",
    "adam_rms",
    "second_moment_norm",
    "logit_max",
    "attn_logit_max",
    "nonfinite_count",
    "tokens",
    "consumed_samples",
    "epoch",
    "eval_loss",
)
LAYER_SIGNALS = ("grad_norm", "grad_rms", "weight_norm", "update_norm", "adam_rms")
Key = tuple[int, int, str, str]  # step, rank, layer or nothing, signal


def main() -> int:
    """Prints and stores, for each fault and precision, which signals only one side has, the largest relative difference
    of each signal, and both verdicts."""
    found = []
    runs = [("fp32", spec) for spec in CHECKS] + [(precision, None) for precision in OTHER_MODELS]
    with tempfile.TemporaryDirectory() as folder:
        store = Store(folder)
        for number, (precision, spec) in enumerate(runs):
            name = f"{number}-{spec.name if spec else 'healthy'}{'' if precision == 'fp32' else f'-{precision}'}"
            real, simulated = list(_real(store, name, precision, spec)), list(_simulated(folder, precision, spec))
            found.append({"run": name, **_compare(real, simulated, numbers=precision in ("fp32", "fp8"))})
            print(json.dumps(found[-1]), flush=True)
    kinds = ("in_both", "only_real", "only_simulated")
    signals = {kind: sorted({name for run in found for name in run[kind]}) for kind in kinds}
    for kind in kinds[1:]:  # in no run in both
        signals[kind] = sorted(set(signals[kind]) - set(signals["in_both"]))
    for run in found:
        del run["in_both"]
    summary = {
        "bench": "faults/real",
        "ranks": WORLD,
        "steps": STEPS,
        "commit": results.commit(),
        "signals": signals,
        "runs": found,
    }
    results.REAL.parent.mkdir(exist_ok=True)
    results.REAL.write_text(json.dumps(summary, indent=1) + "\n")
    return 0


def _real(store: Store, name: str, precision: str, spec: FaultSpec | None) -> Iterable[Record]:
    plan = config(SEED, precision, [spec] if spec else [])
    plan = replace(plan, model=replace(plan.model, **OTHER_MODELS.get(precision, {})))
    run = create(store, name, plan)
    code = Supervisor(store, run, stop_step=STEPS, max_restarts=0, say=lambda _: None).supervise()
    if code:
        raise RuntimeError(f"the real trainer ended with code {code} in {run.path}")
    with RunReader.open(name, store.root) as reader:
        yield from reader.records()


def _simulated(folder: str, precision: str, spec: FaultSpec | None) -> Iterable[Record]:
    world = World(SEED, precision, corpus.load(Path(folder)), [spec] if spec else [])
    recorder = Recorder(world)
    yield from recorder.started(0)
    for step in range(STEPS):
        due = step == STEPS - 1 or (step and step % EVAL_EVERY == 0)
        eval_loss = world.evaluate(step) if due else None
        outcome = world.train(step)
        yield from recorder.step(step, outcome, draw(SEED, step, lambda *_: 0.0), eval_loss=eval_loss)


def _compare(real: list[Record], simulated: list[Record], *, numbers: bool) -> dict[str, Any]:
    """`numbers` says that both should compute the same."""
    here, there = (_values(records) if numbers else {} for records in (real, simulated))
    worst: dict[tuple[bool, str], float] = {}
    for key in here.keys() & there.keys():
        a, b = here[key], there[key]
        same = a == b or (math.isnan(a) and math.isnan(b))
        at = bool(key[2]), key[3]
        worst[at] = max(worst.get(at, 0.0), 0.0 if same else abs(a - b) / max(abs(a), abs(b)))

    def largest(names: Iterable[str], *, layers: bool) -> dict[str, float]:
        return {name: float(f"{worst[layers, name]:.2g}") for name in names if (layers, name) in worst}

    return {
        "compared": len(here.keys() & there.keys()),
        **presence(real, simulated),
        "batches_equal": _batches(real) == _batches(simulated),
        "largest_difference": largest(SIGNALS, layers=False),
        "largest_difference_layers": largest(LAYER_SIGNALS, layers=True),
        "verdicts_real": _verdicts(real),
        "verdicts_simulated": _verdicts(simulated),
    }


def presence(real: Iterable[Record], simulated: Iterable[Record]) -> dict[str, Any]:
    """Every signal that one of the two has: which only one has, and of which one has more records, with how many the
    real and the simulated ranks have. Layer and batch signals are named `layer.x` and `batch.x`."""
    here, there = _counts(real), _counts(simulated)
    return {
        "in_both": sorted(here.keys() & there.keys()),
        "only_real": sorted(here.keys() - there.keys()),
        "only_simulated": sorted(there.keys() - here.keys()),
        "other_number": {n: [here[n], there[n]] for n in sorted(here.keys() & there.keys()) if here[n] != there[n]},
    }


def _counts(records: Iterable[Record]) -> Counter[str]:
    prefixes = {StepRecord: "", LayerSample: "layer.", BatchRecord: "batch."}
    found: Counter[str] = Counter()
    for record in records:
        if isinstance(record, StepRecord | LayerSample | BatchRecord):
            found.update(f"{prefixes[type(record)]}{name}" for name in record.values)
    return found


def _values(records: Iterable[Record]) -> dict[Key, float]:
    found: dict[Key, float] = {}
    for record in records:
        if isinstance(record, StepRecord | LayerSample):
            layer = record.layer if isinstance(record, LayerSample) else ""
            for name in LAYER_SIGNALS if layer else SIGNALS:
                if name in record.values:
                    found[record.step, record.rank, layer, name] = float(record.values[name])
    return found


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
