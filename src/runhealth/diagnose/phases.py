"""Where the extra time of slow steps went: which phase of the step grew, on which ranks."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from runhealth.diagnose import queries
from runhealth.diagnose.case import Case
from runhealth.diagnose.findings import Evidence
from runhealth.diagnose.frames import Frame
from runhealth.diagnose.robust import median
from runhealth.storage.records import Scalar

COMPUTE = ("t_forward_s", "t_backward_s")
DATA, COMM, GC, SAVE, WAIT = ("t_data_s",), ("t_comm_s",), ("t_gc_s",), ("t_checkpoint_s",), ("t_wait_s",)
SINGLE = (*DATA, *COMM, *GC)
TIMING_KINDS = ("straggler", "periodic_stall", "sustained_slowdown")
SLOW = 1.15  # x the usual time of a step
STALL = 1.3  # x; for kinds that tell of single steps
MOST_FRAMES = 64
LEAST_BEFORE = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Extra:
    """Extra seconds of one phase in slow steps. `share` of all extra time; `ranks` are those on which it grew, the
    most first, out of `of_ranks`; `steps` the first and last slow step."""

    seconds: float
    usual_s: float
    value_s: float
    share: float
    ranks: tuple[int, ...]
    of_ranks: int
    steps: tuple[int, int]


def slow_frames(case: Case) -> list[Frame]:
    """The steps that the finding is about."""
    own = [f for f in case.between(case.onset_step, case.horizon_step) if f.ranks][:MOST_FRAMES]
    told = next((a for a in case.incident.alarms if a.signal in SINGLE), None)
    if told is not None:  # the alarm is about one phase: the steps in which that phase was long
        middle = (told.value + told.baseline) / 2
        high = [f for f in own if (s := longest(f, (told.signal,))) is not None and s > middle]
        if high:
            return high
    usual = usual_step_s(case)
    if not math.isfinite(usual) or any(alarm.kind == "straggler" for alarm in case.incident.alarms):
        return own  # one that lags behind need not make steps slow by much
    stalls = any(alarm.kind == "periodic_stall" for alarm in case.incident.alarms)
    factor = STALL if stalls else SLOW
    slow = [f for f in own if (t := f.largest("t_step_s")) is not None and t >= factor * usual]
    return slow or own


def usual_step_s(case: Case) -> float:
    times = [float(t) for f in case.before if (t := f.largest("t_step_s")) is not None and math.isfinite(t)]
    return median(times) if len(times) >= LEAST_BEFORE else math.nan


def extra(case: Case, phase: Sequence[str]) -> Extra | None:
    """How much of the extra time a phase explains; None where it was not recorded or too little is known."""
    slow = slow_frames(case)
    before = [longest(f, phase) for f in case.before[-MOST_FRAMES:]]
    usual = [v for v in before if v is not None]
    now = [v for f in slow if (v := longest(f, phase)) is not None]
    if len(usual) < LEAST_BEFORE or not now:
        return None
    level, value = median(usual), median(now)
    step_s = usual_step_s(case)
    steps = [float(t) for f in slow if (t := f.largest("t_step_s")) is not None]
    whole = median(steps) - step_s if steps and math.isfinite(step_s) else math.nan
    # a step time may hold the phase or not: then the phase is all there is
    whole = max(whole, value - level) if math.isfinite(whole) else value - level
    by_rank: dict[int, list[float]] = {}
    for frame in slow:
        for rank, values in frame.ranks.items():
            seconds = spent(values, phase)
            if seconds is not None:
                by_rank.setdefault(rank, []).append(seconds)
    grew = {rank: median(found) - level for rank, found in by_rank.items()}
    most = max(grew.values(), default=0.0)
    ranks = tuple(sorted((r for r in grew if grew[r] > 0.5 * most > 0), key=lambda r: (-grew[r], r)))
    return Extra(
        seconds=value - level,
        usual_s=level,
        value_s=value,
        share=(value - level) / whole if whole > 0 else 0.0,
        ranks=ranks,
        of_ranks=len(by_rank),
        steps=(slow[0].step, slow[-1].step),
    )


def spent(values: Mapping[str, Scalar], phase: Sequence[str]) -> float | None:
    """Seconds of one rank in a phase; None where none of its times was recorded."""
    found = [float(v) for name in phase if (v := values.get(name)) is not None and math.isfinite(v)]
    return sum(found) if found else None


def longest(frame: Frame, phase: Sequence[str]) -> float | None:
    """The longest time that any rank spent in a phase."""
    found = [s for values in frame.ranks.values() if (s := spent(values, phase)) is not None]
    return max(found, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowest:
    """The rank that computed longest in most frames: `share` of the frames, and by how much (`excess`, as a share of
    the others' median, over what this rank's excess was before)."""

    rank: int
    share: float
    excess: float
    seconds: float
    others_s: float


def slowest_rank(case: Case, frames: Sequence[Frame]) -> Slowest | None:
    """Leave one out, over the frames of the finding."""
    leaders: Counter[int] = Counter()
    excess: dict[int, list[tuple[float, float, float]]] = {}
    for frame in frames:
        found = compute_excess(frame)
        if found is not None:
            leaders[found[0]] += 1
            excess.setdefault(found[0], []).append(found[1:])
    if not leaders:
        return None
    rank, count = max(leaders.items(), key=lambda item: (item[1], -item[0]))
    before = [e for f in case.before[-MOST_FRAMES:] if (e := rank_excess(f, rank)) is not None]
    habit = median(before) if len(before) >= LEAST_BEFORE else 0.0
    mine = excess[rank]
    return Slowest(
        rank=rank,
        share=count / leaders.total(),
        excess=median([e for e, _, _ in mine]) - max(0.0, habit),
        seconds=median([s for _, s, _ in mine]),
        others_s=median([o for _, _, o in mine]),
    )


def compute_excess(frame: Frame) -> tuple[int, float, float, float] | None:
    """(rank, excess, its seconds, the others' median) of the rank that computed longest."""
    times = {r: s for r, v in frame.ranks.items() if (s := spent(v, COMPUTE)) is not None}
    if len(times) < 2:
        return None
    rank = max(times, key=lambda r: (times[r], -r))
    others = median([s for r, s in times.items() if r != rank])
    return (rank, times[rank] / others - 1, times[rank], others) if others > 0 else None


def rank_excess(frame: Frame, rank: int) -> float | None:
    """By how much one rank computed longer than the median of the others."""
    times = {r: s for r, v in frame.ranks.items() if (s := spent(v, COMPUTE)) is not None}
    if rank not in times or len(times) < 2:
        return None
    others = median([s for r, s in times.items() if r != rank])
    return times[rank] / others - 1 if others > 0 else None


def beside_compute(case: Case) -> Iterator[Evidence]:
    """What compute did while something else took longer: a cause that lies elsewhere leaves it as it was."""
    compute = extra(case, COMPUTE)
    if compute is None:
        return
    normal = compute.share < 0.3
    yield Evidence(
        claim="compute took as long as ever" if normal else f"compute grew too, by {compute.seconds:.3g} s",
        weight_nats=1.5 if normal else -1.0,
        steps=compute.steps,
        value=compute.value_s,
        baseline=compute.usual_s,
        query=queries.phases("max", COMPUTE, case.incident.attempt, *compute.steps),
    )
