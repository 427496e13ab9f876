"""Which runs the bench is made of: every draw is a function of the base seed, the run's name and the generation of the
splits."""

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from bench.faults.clock import WORLD
from bench.faults.corpus import DATA
from bench.faults.kind import Kind
from bench.faults.kinds import BY_NAME, GENERATION, KINDS, REPORT_SEEDS, TUNING_SEEDS
from bench.faults.telemetry import EPOCH_STEPS
from bench.faults.world import CHECKPOINT_EVERY

FORKS = (190, 214)  # steps at which runs leave a base
LEAD = (10, 24)  # steps from the fork to the onset
TWIN_STEPS = 116
DISTRACTORS = ("none", "resume", "eval_pause", "lr_nudge", "blip")
LR_NUDGE = 1.2
TUNING_REPEATS, REPORT_REPEATS = 2, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What happens to every run, and to the twin, of one base and fork: one healthy distraction."""

    seed: int
    precision: str
    fork: int
    distractor: str
    distractor_step: int
    rank: int  # of a blip

    @property
    def base(self) -> str:
        return f"{self.precision}-{self.seed}"

    @property
    def twin(self) -> str:
        return f"twin-{self.base}-{self.fork}"


def scene(seed: int, precision: str, fork: int) -> Scene:
    draw = random.Random(f"scene/{seed}/{precision}/{fork}")
    distractor = draw.choice(DISTRACTORS)
    step = FORKS[fork] + draw.randint(6, 36)
    if distractor == "resume":
        step = next_checkpoint(FORKS[fork] + 6)
    return Scene(
        seed=seed,
        precision=precision,
        fork=fork,
        distractor=distractor,
        distractor_step=step,
        rank=draw.randrange(WORLD),
    )


def next_checkpoint(step: int) -> int:
    return -(-step // CHECKPOINT_EVERY) * CHECKPOINT_EVERY


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """One run. A twin has no kind."""

    name: str
    split: str
    scene: Scene
    kind: str
    level: int
    severity: float
    onset: int
    stop: int
    draw: str  # seeds what is still to be drawn, such as the rank

    def label(self) -> dict[str, Any]:
        return asdict(self)


def runs(seeds: Iterator[int] | range | None = None) -> Iterator[RunPlan]:
    """All runs of the given base seeds (None: all), the repeats outermost, so that any first part is balanced. Twins
    come first in each seed's part."""
    wanted = list(seeds) if seeds is not None else [*TUNING_SEEDS, *REPORT_SEEDS]
    tuning = [seed for seed in wanted if seed in TUNING_SEEDS]
    report = [seed for seed in wanted if seed not in TUNING_SEEDS]
    for split, part, repeats in (("tuning", tuning, TUNING_REPEATS), ("report", report, REPORT_REPEATS)):
        plans = [
            plan
            for repeat in range(repeats)
            for level in range(3)
            for kind in KINDS
            if not (kind.held_out and split == "tuning")
            if (plan := _run(split, kind, level, repeat)).scene.seed in part
        ]
        twins = dict.fromkeys((plan.scene.seed, plan.scene.precision, plan.scene.fork) for plan in plans)
        yield from (_twin(split, scene(*key)) for key in twins)
        yield from plans


def _run(split: str, kind: Kind, level: int, repeat: int) -> RunPlan:
    name = f"{kind.name}-{split[0]}{level}{repeat}"
    key = f"generation {GENERATION}/{name}"
    draw = random.Random(f"run/{key}")
    seeds = TUNING_SEEDS if split == "tuning" else REPORT_SEEDS
    seed = draw.choice(list(seeds))
    precision = draw.choice(kind.precisions)
    fork = draw.randrange(len(FORKS))
    onset = FORKS[fork] + draw.randint(*LEAD)
    if kind.scene == "epoch":
        fork, onset = 1, EPOCH_STEPS
    elif kind.resume:
        onset = next_checkpoint(FORKS[fork] + LEAD[0])
    elif kind.visit:
        onset = _next_visit(onset)
    chosen = scene(seed, precision, fork)
    severity = kind.severity(level, None if split == "tuning" else random.Random(f"severity/{key}"))
    return RunPlan(
        name=name,
        split=split,
        scene=chosen,
        kind=kind.name,
        level=level,
        severity=severity,
        onset=onset,
        stop=onset + kind.tail,
        draw=key,
    )


def _next_visit(step: int) -> int:
    return -(-step // DATA.steps_per_visit) * DATA.steps_per_visit


def _twin(split: str, chosen: Scene) -> RunPlan:
    return RunPlan(
        name=chosen.twin,
        split=split,
        scene=chosen,
        kind="",
        level=0,
        severity=0.0,
        onset=-1,
        stop=FORKS[chosen.fork] + TWIN_STEPS,
        draw=chosen.twin,
    )


def kind_of(plan: RunPlan) -> Kind | None:
    return BY_NAME[plan.kind] if plan.kind else None
