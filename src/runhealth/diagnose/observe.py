"""What suspects look for again and again: a habit, the first step off it, a rank unlike its peers, what else moved.

All of them are linear in the ranks, and look at ranks in a few frames only.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from runhealth.diagnose import queries
from runhealth.diagnose.case import Case
from runhealth.diagnose.findings import Evidence
from runhealth.diagnose.frames import Frame
from runhealth.diagnose.robust import Baseline, median
from runhealth.storage.records import LayerSample

LEAD_STEPS = 32  # a cause shows itself at most so long before the loss
LEAD_ROWS = 4  # or so many rows, where a log has one only every so many steps
RANK_FRAMES = 32  # frames that tell how far ranks usually lie apart
OWN_SIGMA, OWN_LOG = 6.0, 0.3  # a rank's value left its own past
LR_FACTOR = 1.4
LEAST_ALONE = 3  # steps
TRIANGLE = 1.02  # |mean g| is at most mean |g|; the rest is rounding

Reader = Callable[[Frame], float | int | None]


def lead_from(case: Case, steps: int = LEAD_STEPS) -> int:
    """The first step that may hold the cause of what the loss did: `steps` before it, and at least `LEAD_ROWS` rows."""
    rows = case.between(0, case.loss_step - 1)[-LEAD_ROWS:]
    return min([case.loss_step - steps, *(frame.step for frame in rows)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A value off its habit: the first such step, how many there were, the most extreme one."""

    step: int
    value: float
    extreme: float
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Odd:
    """The rank that lies furthest from the median of the others. `log_ratio` is signed; `next_ratio` is the distance
    of the rank that comes second."""

    rank: int
    value: float
    others: float
    log_ratio: float
    next_ratio: float


def largest(signal: str) -> Reader:
    """The maximum over the ranks."""
    return lambda frame: frame.largest(signal)


def single(signal: str) -> Reader:
    """The value of the whole job."""
    return lambda frame: frame.get(signal)


def total(signal: str) -> Reader:
    """The sum over the ranks."""
    return lambda frame: frame.total(signal)


def layer_largest(signal: str) -> Reader:
    """The maximum over layer samples."""
    return partial(_layer_largest, signal)


def _layer_largest(signal: str, frame: Frame) -> float | None:
    found = [float(v) for s in frame.layers if (v := s.values.get(signal)) is not None and math.isfinite(v)]
    return max(found, default=None)


def values(frames: Iterable[Frame], read: Reader) -> list[tuple[int, float]]:
    """(step, value) of the frames that hold a finite value."""
    found = []
    for frame in frames:
        value = read(frame)
        if value is not None and math.isfinite(value):
            found.append((frame.step, float(value)))
    return found


def habit(case: Case, read: Reader, *, least: int = 8, frames: int = 192) -> Baseline:
    """Median, sigma and quantiles before the incident, over the last `frames`."""
    baseline = Baseline(512, least=least)
    baseline.extend(value for _, value in values(case.before[-frames:], read))
    return baseline


def move(case: Case, read: Reader, beyond: float, *, first: int, last: int, below: bool = False) -> Move | None:
    """Where a value is over `beyond` (under it with `below`) in the incident's own frames of a range."""
    found = [(s, v) for s, v in values(case.between(first, last), read) if (v < beyond if below else v > beyond)]
    if not found:
        return None
    pick = min if below else max
    return Move(step=found[0][0], value=found[0][1], extreme=pick(value for _, value in found), count=len(found))


def jump(case: Case, read: Reader, factor: float, *, first: int, last: int) -> Move | None:
    """A step from one value to the next: over `factor` x the median of the four values before it. A slow climb is none;
    `value` and `extreme` are the value and what it was before."""
    points = values((f for f in case.frames if first - 16 <= f.step <= last), read)
    for i in range(2, len(points)):
        before = median([value for _, value in points[max(0, i - 4) : i]])
        step, value = points[i]
        if step >= first and before > 0 and value > factor * before:
            return Move(step=step, value=value, extreme=before, count=1)
    return None


def odd_rank(by_rank: dict[int, float]) -> Odd | None:
    """Leave one out: the rank whose value is furthest (as a factor, up or down) from the median of all, against the
    median of the others. Values must be over 0; None for fewer than two."""
    logs = {rank: math.log(value) for rank, value in by_rank.items() if value > 0 and math.isfinite(value)}
    if len(logs) < 2:
        return None
    center = median(list(logs.values()))
    away = sorted(((abs(y - center), -rank) for rank, y in logs.items()), reverse=True)
    rank = -away[0][1]
    others = median([y for r, y in logs.items() if r != rank])
    return Odd(
        rank=rank,
        value=by_rank[rank],
        others=math.exp(others),
        log_ratio=logs[rank] - others,
        next_ratio=away[1][0],
    )


def left_own_past(case: Case, frame: Frame, signal: str) -> int | None:
    """The one rank whose value left that rank's own past (by 6 sigma and 1.35 x); None where none did, or several. Of
    two ranks that differ, nothing else tells which is the odd one."""
    left = []
    for rank, value in frame.per_rank(signal).items():
        past = [v for f in case.before[-RANK_FRAMES:] if (v := f.per_rank(signal).get(rank)) is not None]
        habit = Baseline(RANK_FRAMES, least=8, floor=OWN_LOG / OWN_SIGMA)
        habit.extend(math.log(v) for v in past if v > 0 and math.isfinite(v))
        if not habit.ready or not (value > 0 and math.isfinite(value)):
            return None
        if abs(math.log(value) - habit.center) > OWN_SIGMA * habit.sigma:
            left.append(rank)
    return left[0] if len(left) == 1 else None


def odd_of_two(case: Case, frame: Frame, signal: str) -> Odd | None:
    """As `odd_rank` of two ranks, told by their own past; None where that does not tell."""
    rank = left_own_past(case, frame, signal)
    by_rank = {r: float(v) for r, v in frame.per_rank(signal).items()}
    if rank is None or len(by_rank) != 2:
        return None
    (others,) = (value for r, value in by_rank.items() if r != rank)
    ratio = math.log(by_rank[rank] / others)
    return Odd(rank=rank, value=by_rank[rank], others=others, log_ratio=ratio, next_ratio=abs(ratio) / 2)


def rank_spread(case: Case, signal: str, *, share: float = 0.98) -> float:
    """How far (log ratio) the oddest rank usually lies from the others; NaN where too little is known."""
    found = []
    for frame in case.before[-RANK_FRAMES:]:
        odd = odd_rank({r: float(v) for r, v in frame.per_rank(signal).items()})
        if odd is not None:
            found.append(abs(odd.log_ratio))
    found.sort()
    return found[min(len(found) - 1, int(share * len(found)))] if len(found) >= 8 else math.nan


def resumed_step(case: Case, last: int) -> int | None:
    """The first step of the incident's attempt, if it was a resume and lies in sight and not after `last`."""
    return next((f.step for f in case.frames if f.new_attempt and f.attempt > 0 and f.step <= last), None)


def steps_since_resume(case: Case, step: int) -> int | None:
    resumed = resumed_step(case, step)
    return None if resumed is None else step - resumed


def data_alike(case: Case, first: int, last: int, weight_nats: float = 0.7) -> Iterator[Evidence]:
    """For a suspect that is not the data: the batches were in order, or they were not."""
    outliers = case.outliers(case.between(first, last))
    read = case.batches(first, last)
    if outliers:
        batch = outliers[0].batch
        yield Evidence(
            claim=f"an unusual batch of shard {batch.shard or '(unnamed)'} was read at step {batch.step:,}",
            weight_nats=-2.5,
            steps=(batch.step, batch.step),
            ranks=(batch.rank,),
        )
    elif any(b.values for b in read):
        yield Evidence(
            claim=f"the {len(read)} batches read up to then look like all others",
            weight_nats=weight_nats,
            steps=(first, last),
        )


def lr_jump(case: Case, first: int, last: int) -> tuple[int, float, float] | None:
    """The first step where the learning rate leaves the straight line through the eight points before it."""
    points: list[tuple[int, float]] = []
    for frame in case.frames:
        value = frame.get("lr")
        if value is None or not math.isfinite(value) or frame.step > last + 1:
            continue
        if len(points) >= 4 and frame.step >= first:
            (s0, v0), (s1, v1) = points[-min(8, len(points))], points[-1]
            expected = v1 + ((v1 - v0) / (s1 - s0) * (frame.step - s1) if s1 > s0 else 0.0)
            if expected > 0 and not 1 / LR_FACTOR < value / expected < LR_FACTOR:
                return frame.step, float(value), expected
        points.append((frame.step, float(value)))
    return None


def lr_on_course(case: Case, first: int, last: int, weight_nats: float = 0.5) -> Iterator[Evidence]:
    """For a suspect that is not the learning rate."""
    jumps = [a for a in case.alarms("lr") if first <= a.onset_step <= last and a.value > a.baseline]
    jump = None if case.alarms("lr") else lr_jump(case, first, last)  # of a fact no channels are kept
    if jump is not None and jump[1] > jump[2]:
        yield Evidence(
            claim=f"the learning rate had jumped to {jump[1]:.3g} at step {jump[0]:,}",
            weight_nats=-3.0,
            steps=(jump[0], jump[0]),
            value=jump[1],
            baseline=jump[2],
        )
    elif jumps:
        yield Evidence(
            claim=f"the learning rate had jumped to {jumps[0].value:.3g} at step {jumps[0].onset_step:,}",
            weight_nats=-3.0,
            steps=(jumps[0].onset_step, jumps[0].step),
            value=jumps[0].value,
            baseline=jumps[0].baseline,
        )
    elif case.has("lr") and not case.alarms("lr"):
        yield Evidence(claim="the learning rate kept to its course", weight_nats=weight_nats, steps=(first, last))


def overflow_first(case: Case, first: int, last: int) -> Iterator[Evidence]:
    """For a suspect that is not the number format: values had overflowed before."""
    usual = habit(case, total("overflow_count"))
    limit = max(16.0, 8.0 * usual.quantile(0.98)) if usual.ready else 16.0
    moved = move(case, total("overflow_count"), limit, first=first, last=last)
    if moved is not None:
        yield Evidence(
            claim=f"values had overflowed in low precision from step {moved.step:,} on",
            weight_nats=-2.5,
            steps=(moved.step, last),
            value=moved.extreme,
            query=queries.steps("max", "overflow_count", case.incident.attempt, moved.step, last),
        )


def alone_again(frames: Sequence[Frame], first: int) -> Evidence | None:
    """Gradients that overflow in half precision do so on whichever rank has the largest; the same one, and no other, in
    step after step is another matter."""
    bad = [{r for r, v in f.ranks.items() if v.get("nonfinite_count", 0) > 0} for f in frames if f.step >= first]
    bad = [ranks for ranks in bad if ranks]
    if len(bad) < LEAST_ALONE or len(set.union(*bad)) > 1:
        return None
    (rank,) = bad[0]
    return Evidence(
        claim=f"the gradient of rank {rank} alone was not finite, in {len(bad)} steps, and no other's in any",
        weight_nats=3.5,
        steps=(first, frames[-1].step),
        ranks=(rank,),
        value=float(len(bad)),
        baseline=0.0,
    )


def norm_over_threshold(frame: Frame) -> float | None:
    """Gradient norm over the clip threshold."""
    norm, threshold = frame.get("grad_norm"), frame.get("clip_threshold")
    if norm is None or threshold is None or threshold <= 0 or not math.isfinite(norm):
        return None
    return norm / threshold


def reduce_ratio(frame: Frame) -> float | None:
    """Norm of the mean gradient over the mean of the ranks' norms."""
    norm = frame.get("grad_norm")
    own = [float(v) for v in frame.per_rank("grad_norm_rank").values()]
    if norm is None or len(own) < 2 or not math.isfinite(norm) or not all(math.isfinite(v) for v in own):
        return None
    mean = sum(own) / len(own)
    return norm / mean if mean > 0 else None


def layer_values(samples: Iterable[LayerSample], signal: str) -> dict[str, float]:
    """layer -> largest finite value over ranks and steps."""
    found: dict[str, float] = {}
    for sample in samples:
        value = sample.values.get(signal)
        if value is not None and math.isfinite(value):
            found[sample.layer] = max(found.get(sample.layer, -math.inf), float(value))
    return found
