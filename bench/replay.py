"""How much a replay proves: real small runs with a fault of known cause, diagnosed before and after `diagnose replay`.

    python bench/replay.py [--seeds 1 2] [--only NAME ...]

For each run: the suspect that stands first and its probability from the record alone, then with the replays; whether
the replay as it was is bit-equal to the record; replays made, steps trained in them, seconds. The
rates behind the replays' weights are in docs/decisions/345. The last line is one JSON object.
"""

import argparse
import json
import sys
import tempfile
import time
from dataclasses import dataclass

from runhealth.diagnose.findings import UNDETERMINED, Finding, Report
from runhealth.diagnose.port import ReplayProcess
from runhealth.diagnose.replay import Inquiry
from runhealth.diagnose.replay_measure import CHANNELS
from runhealth.diagnose.replays import Replayed
from runhealth.diagnose.service import diagnose
from runhealth.storage.errors import ReplayError
from runhealth.storage.reader import RunReader
from runhealth.storage.store import Store
from runhealth.trainer.config import CheckpointConfig, FaultSpec, ModelConfig, OptimConfig, TrainConfig
from runhealth.trainer.data import BatchPlan, DataConfig
from runhealth.trainer.fault import FaultContext, FaultLabel
from runhealth.trainer.fault import create as create_fault
from runhealth.trainer.supervisor import Supervisor, create

STEP = 140
NEAR_STEPS = 12  # a finding so close to where the fault begins is about it


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`resumes`: the run stops before `STEP` and is resumed there, since the fault strikes at a load."""

    fault: str
    precision: str = "fp32"
    resumes: bool = False


CASES = {
    "bad shard": Case(fault=f"bad_shard:step={STEP},rank=1"),
    "bad shard, shuffled": Case(fault=f"bad_shard:step={STEP},rank=1,mode=shuffle"),
    "label shift": Case(fault=f"label_shift:step={STEP},rank=1"),
    "NaN in a batch": Case(fault=f"nan_batch:step={STEP},rank=1"),
    "learning rate x 20": Case(fault=f"lr_change:step={STEP},severity=20"),
    "optimizer state lost": Case(fault=f"optimizer_state_lost:step={STEP}", resumes=True),
    "wrong beta2": Case(fault=f"wrong_beta2:step={STEP}"),
    "Adam staleness": Case(fault=f"adam_staleness:step={STEP},severity=1000000,steps=30"),
    "fp8, stale amax": Case(fault=f"fp8_stale_amax:step={STEP},severity=256", precision="fp8"),
    "fp16 overflow": Case(fault=f"fp16_overflow:step={STEP}", precision="fp16"),
    "logit growth": Case(fault=f"logit_growth:step={STEP},severity=0.2,mode=output"),
    "clip breach": Case(fault=f"clip_breach:step={STEP}"),
    "silent corruption, gradient": Case(fault=f"silent_corruption:step={STEP},mode=scale"),
    "silent corruption, reduce": Case(fault=f"silent_corruption:step={STEP},mode=reduce,severity=20"),
}


def config(case: Case, seed: int) -> TrainConfig:
    return TrainConfig(
        steps=STEP + 60,
        seed=seed,
        data=DataConfig(shards=32, heldout_shards=1, shard_bytes=8_192, piece_bytes=512, seq_len=32, batch_size=8),
        model=ModelConfig(layers=2, width=32, heads=4, ffn_width=80, precision=case.precision),  # type: ignore[arg-type]
        optim=OptimConfig(lr=4e-3, warmup_steps=20),
        checkpoint=CheckpointConfig(every=20),
        eval_samples=32,
        faults=(FaultSpec.parse(case.fault),),
    )


def label_of(made: TrainConfig) -> FaultLabel:
    plan = BatchPlan(data=made.data, seed=made.seed, world=made.dp)
    return create_fault(made.faults[0], FaultContext(config=made, plan=plan, rank=0)).label()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--only", nargs="+", default=list(CASES), choices=list(CASES), metavar="NAME")
    args = parser.parse_args()
    print("| fault | seed | from the record | after replay | as it was | tried | replays | steps | s |")
    print("|---|---|---|---|---|---|---|---|---|")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in args.only:
            for seed in args.seeds:
                rows.append(_row(Store(folder), name, CASES[name], seed))
                print(rows[-1].pop("line"), flush=True)
    found = [row for row in rows if row["found"]]
    answer = {
        "runs": len(rows),
        "found": len(found),
        "top1_before": sum(row["before"] for row in found),
        "top1_after": sum(row["after"] for row in found),
        "bit_equal": sum(row["bit_equal"] for row in found),
        "replays_mean": round(sum(row["replays"] for row in found) / max(1, len(found)), 2),
        "steps_mean": round(sum(row["steps"] for row in found) / max(1, len(found)), 1),
    }
    print(json.dumps(answer))
    return 0


def _row(store: Store, name: str, case: Case, seed: int) -> dict[str, object]:
    made = config(case, seed)
    label = label_of(made)
    run = create(store, f"{name.replace(' ', '-').replace(',', '')}-{seed}", made)
    if case.resumes:
        Supervisor(store, run, stop_step=STEP, say=lambda _: None).supervise()
    Supervisor(store, run, say=lambda _: None).supervise()
    with RunReader.open(run.path) as reader:
        report = diagnose(reader, results=())
        finding = _about(report, label)
        if finding is None:
            return {"line": f"| {name} | {seed} | no finding that can be replayed | | | | | | |", "found": False}
        began = time.monotonic()
        try:
            inquiry = Inquiry(reader, report, finding, say=lambda _: None)
            with ReplayProcess(run.path) as trainer:
                result = inquiry.run(trainer)
        except ReplayError as error:
            return {"line": f"| {name} | {seed} | {_first(finding)[0]} | {error} | | | | | |", "found": False}
        seconds = time.monotonic() - began
        after = _replayed(diagnose(reader, results=(result,)), result)
    before_name, before_p = _first(finding)
    after_name, after_p = _first(after)
    ok = {True: "", False: " ✗"}
    equal = result.equal_steps
    parted = "bit-equal" if result.parted_step is None else f"bit-equal for {equal} steps"
    came = "comes back" if result.reproduced else "does not come back"
    tried = ", ".join(f"{t.change} {'vanishes' if t.vanished else 'stays'}" for t in result.tried[1:]) or "-"
    line = (
        f"| {name} | {seed} | {before_name} {before_p:.2f}{ok[before_name == label.cause]}"
        f" | {after_name} {after_p:.2f}{ok[after_name == label.cause]} | {came}, {parted} | {tried}"
        f" | {len(result.tried)} | {result.steps} | {seconds:.0f} |"
    )
    return {
        "line": line,
        "found": True,
        "before": before_name == label.cause,
        "after": after_name == label.cause,
        "bit_equal": equal >= 3,
        "replays": len(result.tried),
        "steps": result.steps,
    }


def _about(report: Report, label: FaultLabel) -> Finding | None:
    able = [
        f
        for f in report.findings
        if f.kind in CHANNELS and f.suspects and abs(f.onset_step - label.onset_step) <= NEAR_STEPS
    ]
    return able[0] if able else None


def _replayed(report: Report, result: Replayed) -> Finding:
    return next(f for f in report.findings if f.replay is not None and f.replay.incident == result.incident)


def _first(finding: Finding) -> tuple[str, float]:
    named = [s for s in finding.suspects if s.suspect != UNDETERMINED or s.probability >= 0.5]
    return named[0].suspect, named[0].probability


if __name__ == "__main__":
    sys.exit(main())
