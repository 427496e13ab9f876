"""Trains the bases and the runs that fork from them, and leaves their telemetry in the cache. Resumable: what is there
is not made again."""

import dataclasses
import json
import math
import os
import random
from pathlib import Path
from typing import Any

import torch
from bench.faults import clock, telemetry
from bench.faults.corpus import Corpus
from bench.faults.kinds import BY_NAME
from bench.faults.plan import FORKS, LR_NUDGE, RunPlan
from bench.faults.telemetry import Recorder
from bench.faults.world import CHECKPOINT_EVERY, EVAL_EVERY, FIRST_SCALE, World

from runhealth.storage.records import Record
from runhealth.trainer.config import FaultSpec
from runhealth.trainer.data import shard_name
from runhealth.trainer.fault import FaultContext, create

LOST_STEPS = (0, 9)  # steps that a resume has to do again
EVAL_PAUSE_S = 20.0
BLIP = 2.5
DOWN_S = 90.0  # from the end of an attempt to the next
TIMEOUT_S = 600.0


def single_threaded() -> None:
    torch.set_num_threads(1)


def base(cache: Path, corpus: Corpus, seed: int, precision: str) -> None:
    """Train a base up to the last fork; its telemetry and its state at each fork are kept."""
    folder = cache / "bases"
    name = f"{precision}-{seed}"
    if (folder / f"{name}-{len(FORKS) - 1}.pt").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    world = World(seed, precision, corpus)
    recorder = Recorder(world, start_ns=1_760_000_000 * 10**9 + seed * 86_400 * 10**9)
    records: list[Record] = recorder.started(0)
    fork = 0
    for step in range(FORKS[-1]):
        records.extend(_step(world, recorder, step))
        if step + 1 == FORKS[fork]:
            telemetry.write(folder / f"{name}-{fork}.jsonl.gz", records)
            state = {**world.state(), "now_ns": recorder.now_ns, "norms": list(recorder.norms)}
            temporary = folder / f"{name}-{fork}.{os.getpid()}.tmp"
            torch.save(state, temporary)
            temporary.replace(folder / f"{name}-{fork}.pt")
            records = []
            fork += 1


def _step(
    world: World,
    recorder: Recorder,
    step: int,
    *,
    blip: tuple[int, float] | None = None,
    pause_s: float = 0.0,
) -> list[Record]:
    """One step with its telemetry; the evaluation and the checkpoint where they are due."""
    eval_loss = world.evaluate(step) if step % EVAL_EVERY == 0 else None
    outcome = world.train(step)
    faults = world.faults

    def stall(rank: int, phase: Any) -> float:
        return sum(fault.stall_s(step, phase) for fault in faults[rank])

    times = clock.draw(world.config.seed, step, stall, blip)
    saves = (step + 1) % CHECKPOINT_EVERY == 0
    save_s = clock.CHECKPOINT_S + stall(0, "checkpoint") if saves else 0.0
    records = recorder.step(step, outcome, times, eval_loss=eval_loss, checkpoint_s=save_s, pause_s=pause_s)
    if saves:
        records.extend(recorder.saved(step + 1, save_s))
    return records


class Fork:
    """A run while it is made."""

    def __init__(self, cache: Path, corpus: Corpus, plan: RunPlan) -> None:
        self.plan, self.kind = plan, BY_NAME.get(plan.kind)
        self.draw = random.Random(f"draw/{plan.draw}")
        self.spec = self._spec(corpus)
        scene = plan.scene
        self.world = World(scene.seed, scene.precision, corpus, [self.spec] if self.spec else [])
        state = torch.load(cache / "bases" / f"{scene.base}-{scene.fork}.pt", weights_only=True)
        self.world.load(state)
        self.recorder = Recorder(self.world, start_ns=state["now_ns"])
        self.recorder.norms.extend(state["norms"])
        self.records: list[Record] = []
        self.resumes = self._resumes()
        if self.kind is not None and self.kind.resume and self.spec:
            self.world.rest()

    def _spec(self, corpus: Corpus) -> FaultSpec | None:
        if self.kind is None:
            return None
        spec = self.kind.spec(self.plan.onset, self.plan.level, self.plan.severity, self.draw)
        if spec is None:
            return None
        places = {"hard": corpus.hard + self.draw.randrange(4), "prose": corpus.prose}
        return FaultSpec(
            name=spec.name, params={k: places.get(v, v) if v in places else v for k, v in spec.params.items()}
        )

    def _resumes(self) -> dict[int, int]:
        """Checkpoint step that is resumed from -> steps done beyond it before the attempt ends."""
        scene = self.plan.scene
        found = {}
        if scene.distractor == "resume":
            found[scene.distractor_step] = random.Random(scene.twin).randint(*LOST_STEPS)
        if self.kind is not None and self.kind.resume:
            found[self.plan.onset] = self.draw.randint(*LOST_STEPS)
        return found

    def run(self) -> None:
        plan, scene = self.plan, self.plan.scene
        step = FORKS[scene.fork]
        kept: dict[int, dict[str, Any]] = {}
        ending: tuple[int, int] | None = None  # the step before which the attempt ends, the one it resumes from
        while step < plan.stop:
            if step in self.resumes:
                kept[step] = self.world.state()
                ending = (step + self.resumes.pop(step), step)
            if ending is not None and step == ending[0]:
                step = ending[1]
                self.resume(step, kept[step])
                ending = None
            if self.ended(step):
                return
            self.one(step)
            step += 1

    def one(self, step: int) -> None:
        scene, kind = self.plan.scene, self.kind
        here = step == scene.distractor_step
        self.world.lr_factor = LR_NUDGE if scene.distractor == "lr_nudge" and step >= scene.distractor_step else 1.0
        blip = (scene.rank, BLIP) if here and scene.distractor == "blip" else None
        pause_s = EVAL_PAUSE_S if here and scene.distractor == "eval_pause" else 0.0
        if kind is not None and step == self.plan.onset:
            if kind.scene == "blip":
                blip = (self.draw.randrange(clock.WORLD), kind.severities[self.plan.level])
            elif kind.scene == "eval_pause":
                pause_s = kind.severities[self.plan.level]
        if pause_s:
            self.records.append(
                self.recorder.event(step, 0, "eval_pause", f"evaluation of {pause_s:g} s", {"seconds": pause_s})
            )
        self.records.extend(_step(self.world, self.recorder, step, blip=blip, pause_s=pause_s))

    def resume(self, step: int, state: dict[str, Any]) -> None:
        self.world.load(state)
        if step == self.plan.onset:
            self.world.resumed(step)
            if self.kind is not None and self.kind.scene == "scaler":
                self.world.scale = FIRST_SCALE
        self.recorder.attempt += 1
        self.recorder.now_ns += int(DOWN_S * 1e9)
        self.records.extend(self.recorder.started(step, checkpoint=step))

    def ended(self, step: int) -> bool:
        """A rank died or hangs before this step: write what the others leave behind."""
        ends = {rank: fault.ends(step) for rank in range(clock.WORLD) for fault in self.world.faults[rank]}
        gone = [rank for rank, end in ends.items() if end]
        if not gone:
            return False
        dead, recorder, level = ends[gone[0]] == "dead", self.recorder, self.plan.level
        seconds = 2.0 if dead else TIMEOUT_S
        others = [rank for rank in range(clock.WORLD) if rank not in gone]
        if level < 2:  # what the monitor of a rank writes when an exception leaves its step
            outcome = self.world.train(step)
            times = clock.draw(self.world.config.seed, step, lambda *_: 0.0)
            for record in recorder.step(step, outcome, times, pause_s=seconds, absent=tuple(gone)):
                if isinstance(record, telemetry.StepRecord):
                    kept = ("loss", "t_data_s", "t_forward_s", "t_step_s", "logit_max")
                    record = dataclasses.replace(record, values={k: record.values[k] for k in kept})
                self.records.append(record)
        else:
            recorder.now_ns += int(seconds * 1e9)
        for order, rank in enumerate(others):
            if dead:
                message = "RuntimeError: Connection closed by peer [10.0.0.12]:41753"
            else:
                message = (
                    f"DistBackendError: [Rank {rank}] Watchdog caught collective operation timeout: "
                    f"WorkNCCL(SeqNum={step * 7 + 3}, OpType=ALLREDUCE, Timeout(ms)=600000) ran for "
                    f"{600_010 + order} milliseconds before timing out."
                )
            recorder.now_ns += 3_000_000
            data = {"type": message.split(":")[0]}
            self.records.append(recorder.event(step, rank, "exception", message, data))
        if level == 0:
            if dead:
                message = f"rank {gone[0]} was killed (signal 9)"
            else:
                message = f"rank {gone[0]} never joined the others; rank {others[0]}: DistBackendError: timed out"
            self.records.append(recorder.event(0, -1, "exception", message, {"exit_code": 1, "ranks": gone}))
        return True

    def label(self) -> dict[str, Any]:
        """The truth: what happened, when, and to whom."""
        plan, kind = self.plan, self.kind
        truth: dict[str, Any] = {"cause": "none", "onset_step": None, "ranks": [], "layers": [], "shards": []}
        if self.spec is not None:
            context = FaultContext(config=self.world.config, plan=self.world.plan, rank=0)
            truth = {**truth, **create(self.spec, context).label().to_json()}
            if truth["shards"]:
                truth |= self._readers(set(truth["shards"]))
            truth["params"] = dict(self.spec.params)
        elif kind is not None:
            truth |= {"cause": "benign", "onset_step": plan.onset}
        if kind is not None:
            truth["cause"] = kind.cause
        return {
            "name": plan.name,
            "split": plan.split,
            "kind": plan.kind,
            "held_out": kind is not None and kind.held_out,
            "level": plan.level,
            "severity": plan.severity,
            "base": plan.scene.base,
            "seed": plan.scene.seed,
            "precision": plan.scene.precision,
            "fork": plan.scene.fork,
            "fork_step": FORKS[plan.scene.fork],
            "twin": plan.scene.twin,
            "distractor": plan.scene.distractor,
            "distractor_step": plan.scene.distractor_step if plan.scene.distractor != "none" else None,
            **truth,
        }

    def _readers(self, shards: set[str]) -> dict[str, Any]:
        """Who reads these shards in this run, and when: a shard may come again in the next epoch, on another rank."""
        read = [
            (step, rank)
            for step in range(FORKS[self.plan.scene.fork], self.plan.stop)
            for rank in range(clock.WORLD)
            if shard_name(self.world.plan.shard_of(step, rank)) in shards
        ]
        steps = [step for step, _ in read]
        return {"onset_step": min(steps), "last_step": max(steps), "ranks": sorted({rank for _, rank in read})}


def fork(cache: Path, corpus: Corpus, plan: RunPlan) -> None:
    """Make one run, unless it is there."""
    folder = cache / "runs"
    if (folder / f"{plan.name}.json").exists():
        return
    base(cache, corpus, plan.scene.seed, plan.scene.precision)
    made = Fork(cache, corpus, plan)
    made.run()
    telemetry.write(folder / f"{plan.name}.jsonl.gz", made.records)
    temporary = folder / f"{plan.name}.{os.getpid()}.tmp"
    temporary.write_text(json.dumps(made.label(), indent=1, default=_plain))
    temporary.replace(folder / f"{plan.name}.json")


def _plain(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    raise TypeError(f"expected a JSON value, met {value!r}")
