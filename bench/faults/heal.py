"""Brings the runs of the bench back: the engine reads along, the guard of `diagnose watch --rollback` decides, the plan
is carried out in the simulation as the trainer would, and the weights at the end are held against the exact twin.

The repairs are those of the trainer: a fault goes away where a repair of the plan is one that takes it away, or where
it was a machine's passing trouble; else it comes again at its step.
"""

import statistics
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.faults import make, store
from bench.faults.corpus import DATA, Corpus
from bench.faults.examine import SOURCE
from bench.faults.plan import FORKS, TWIN_STEPS, RunPlan
from bench.faults.world import CHECKPOINT_EVERY, FIRST_SCALE, WORLD, World

from runhealth.diagnose.engine import Engine
from runhealth.diagnose.guard import Act, Guard
from runhealth.diagnose.plans import RollbackPlan
from runhealth.storage.records import EventKind, StepRecord
from runhealth.trainer.skips import SkipSet

EARLIEST_STEP = 100  # checkpoints from here on are kept
LAST_EVALS = 3
Result = dict[str, Any]


def states_of(corpus: Corpus, plan: RunPlan) -> dict[int, dict[str, Any]]:
    """The checkpoints that the plan's base left behind, by step."""
    scene = plan.scene
    world = World(scene.seed, scene.precision, corpus)
    kept = {}
    for step in range(FORKS[-1]):
        world.train(step)
        if (step + 1) % CHECKPOINT_EVERY == 0 and step + 1 >= EARLIEST_STEP:
            kept[step + 1] = world.state()
    return kept


class _Attended(make.Fork):
    """A run while it is made, with somebody who watches it. It goes on as long as its twin."""

    def __init__(
        self, cache: Path, corpus: Corpus, plan: RunPlan, policy: str, checkpoints: dict[int, dict[str, Any]]
    ) -> None:
        self.first = FORKS[plan.scene.fork]
        super().__init__(cache, corpus, replace(plan, stop=self.first + TWIN_STEPS))
        self.policy, self.guard = policy, Guard()
        self.kept = {step: state for step, state in checkpoints.items() if step <= self.first}
        self.engine = Engine()
        for record in store.base_records(cache, plan.scene.twin):
            self.engine.feed_quietly(record)
        self.read = 0
        self.applied: list[RollbackPlan] = []
        self.again = 0  # steps that rollbacks made to do again
        self.why = ""
        self._waits = False

    def run(self) -> None:
        step = self.first
        ending: tuple[int, int] | None = None
        while step < self.plan.stop:
            if step in self.resumes:
                self.kept[step] = self.world.state()
                ending = (step + self.resumes.pop(step), step)
            if ending is not None and step == ending[0]:
                step, ending = ending[1], None
                self.resume(step, self.kept[step])
            if self.ended(step):
                return
            self.one(step)
            step += 1
            if step % CHECKPOINT_EVERY == 0:
                self.kept[step] = self.world.state()
            wanted = self._decided() if self.policy != "nothing" else None
            if wanted is not None:
                self.again += step - wanted.checkpoint_step
                self._roll_back(wanted)
                step, ending = wanted.checkpoint_step, None

    def _decided(self) -> RollbackPlan | None:
        news = self._waits
        for record in self.records[self.read :]:
            news |= self.engine.feed_quietly(record)
        self.read = len(self.records)
        self._waits = False
        if not news:
            return None
        report = self.engine.report(SOURCE)
        for finding in report.findings:
            decision = self.guard.decide(finding, report, self.applied, pending=False)
            self._waits |= decision.act is Act.WAIT
            again = any(plan.is_for(finding.onset_step) for plan in self.applied)
            if decision.act is Act.ASK:
                self.why = decision.why
            if decision.act is Act.APPLY or (decision.act is Act.ASK and self.policy == "asked" and not again):
                return finding.remedy.plan
        return None

    def _roll_back(self, plan: RollbackPlan) -> None:
        self.applied.append(plan)
        made = {repair.kind for repair in plan.repairs}
        world = self.world
        world.faults = [
            [f for f in faults if not f.transient and not made.intersection(f.repaired_by)] for faults in world.faults
        ]
        skips: SkipSet = world.plan.skips.add(plan.skip)
        world.plan = replace(world.plan, skips=skips)
        for repair in plan.repairs:
            if repair.kind == "lower_clip_threshold" and repair.value is not None:
                world.config = replace(
                    world.config, optim=replace(world.config.optim, clip_threshold=float(repair.value))
                )
        self.resume(plan.checkpoint_step, self.kept[plan.checkpoint_step])
        self.records.append(
            self.recorder.event(plan.checkpoint_step, 0, EventKind.ROLLBACK, plan.cause, plan.to_json())
        )
        if "reset_loss_scale" in made:
            world.scale, world.clean_steps = FIRST_SCALE, 0
        for later in [kept for kept in self.kept if kept > plan.checkpoint_step]:
            del self.kept[later]


def heal(
    cache: Path, corpus: Corpus, plan: RunPlan, policy: str, checkpoints: dict[int, dict[str, Any]], *, spiky: bool
) -> Result:
    made = _Attended(cache, corpus, plan, policy, checkpoints)
    made.run()
    twin = _evaluations(store.records(cache, plan.scene.twin))
    mine = _evaluations(made.records)
    steps = sorted(set(twin) & set(mine))[-LAST_EVALS:]
    gap = statistics.fmean(mine[s] - twin[s] for s in steps) if steps else None
    return {
        "name": plan.name,
        "kind": plan.kind,
        "spiky": spiky,
        "policy": policy,
        "gap_nats": None if gap is None or gap != gap else round(gap, 4),
        "rollbacks": [
            {"checkpoint": p.checkpoint_step, "cause": p.cause, "probability": round(p.probability, 3)}
            for p in made.applied
        ],
        "steps_again": made.again,
        "batches_skipped": round(made.world.plan.skips.samples() / (DATA.batch_size * WORLD), 1),
        "asked": made.why,
    }


def _evaluations(records: Iterable[Any]) -> dict[int, float]:
    """Held-out loss by step, of the last attempt that did the step."""
    return {
        r.step: float(r.values["eval_loss"]) for r in records if isinstance(r, StepRecord) and "eval_loss" in r.values
    }
