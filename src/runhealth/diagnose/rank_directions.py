"""Where the ranks' gradients point, and whether the reduce returned their mean: what norms alone cannot tell.

With g_r the gradient of rank r before the reduce and h what came out of it, `grad_projection_rank` is <g_r, h> / <h, h>
and `grad_cosine_rank` is <g_r, h> / (|g_r| |h|), both over one bucket of parameters. The mean of the projections over
all ranks is <mean g, h> / <h, h>: exactly 1 where h is the mean of what the ranks sent, whatever they sent.

A rank's own gradient is part of h, so its cosine with h is never that of a stranger. With R ranks, p the projection and
n = |g| / |h| = p / cosine, its cosine with the mean of all others is (R p - n^2) / (n sqrt(R^2 - 2 R p + n^2)).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from runhealth.diagnose.case import Case
from runhealth.diagnose.frames import Frame
from runhealth.diagnose.robust import median

PROJECTION, COSINE = "grad_projection_rank", "grad_cosine_rank"
HABIT_FRAMES = 64
LEAST_FRAMES = 8
LEAST_OFF, OFF_HABIT = 0.02, 4.0  # rounding of a reduce in half precision stays under 1 %
LEAST_AWAY, AWAY_HABIT = 0.1, 1.25  # of a cosine
ALONE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduced:
    """The mean of the projections at a step; `usual_off` is the largest distance from 1 before."""

    step: int
    mean: float
    usual_off: float
    limit: float

    @property
    def is_off(self) -> bool:
        return abs(self.mean - 1.0) > self.limit


@dataclass(frozen=True, slots=True, kw_only=True)
class OddDirection:
    """A rank whose gradient points elsewhere than its peers': its cosine with what the others sent, the median of the
    same of the others, how far apart they usually lie at most, the first step and how many there were. `negative`: its
    projection has the wrong sign."""

    rank: int
    step: int
    count: int
    cosine: float
    others: float
    usual: float
    negative: bool


def mean_projection(frame: Frame) -> float | None:
    """Over all ranks of the frame; None where one of them did not measure it."""
    found = [float(v) for v in frame.per_rank(PROJECTION).values() if math.isfinite(v)]
    return math.fsum(found) / len(found) if len(found) == len(frame.ranks) > 1 else None


def reduced(case: Case, first: int, last: int) -> Reduced | None:
    """The step of a range at which the mean of the projections is furthest from 1; None where it was not measured, or
    where it is never 1 in this log, which then means something else."""
    before = [abs(m - 1.0) for f in case.before[-HABIT_FRAMES:] if (m := mean_projection(f)) is not None]
    if len(before) < LEAST_FRAMES or median(before) > LEAST_OFF:
        return None
    before.sort()
    usual = before[int(0.98 * (len(before) - 1))]
    means = [(f.step, m) for f in case.between(first, last) if (m := mean_projection(f)) is not None]
    if not means:
        return None
    step, mean = max(means, key=lambda found: (abs(found[1] - 1.0), -found[0]))
    return Reduced(step=step, mean=mean, usual_off=usual, limit=max(LEAST_OFF, OFF_HABIT * usual))


def odd_direction(case: Case, first: int, last: int) -> OddDirection | None:
    """The rank that was furthest off its peers, beyond what is usual, in most frames of the range. None where none was,
    or where the directions were not measured."""
    known = [away for f in case.before[-HABIT_FRAMES:] if (away := _furthest(f)) is not None]
    if len(known) < LEAST_FRAMES:
        return None
    usual = max(away for _, away, _, _ in known)
    wrong = {rank for f in case.before[-HABIT_FRAMES:] for rank in _negative(f)}
    limit = max(LEAST_AWAY, AWAY_HABIT * usual)
    found: dict[int, list[tuple[int, float, float, bool]]] = {}
    for frame in case.between(first, last):
        away = _furthest(frame)
        negative = [rank for rank in _negative(frame) if rank not in wrong]
        if away is not None and away[1] > limit:
            found.setdefault(away[0], []).append((frame.step, away[2], away[3], away[0] in negative))
        elif len(negative) == 1 and away is not None and away[0] == negative[0] and away[1] > usual:
            found.setdefault(away[0], []).append((frame.step, away[2], away[3], True))
    if not found:
        return None
    rank = max(found, key=lambda r: (len(found[r]), -found[r][0][0]))
    step, cosine, others, _ = found[rank][0]
    return OddDirection(
        rank=rank,
        step=step,
        count=len(found[rank]),
        cosine=cosine,
        others=others,
        usual=usual,
        negative=any(negative for *_, negative in found[rank]),
    )


def cosines(frame: Frame) -> dict[int, float]:
    """Of each rank with the mean of all others."""
    found, count = {}, len(frame.ranks)
    for rank, values in frame.ranks.items():
        projection, cosine = values.get(PROJECTION), values.get(COSINE)
        if projection is None or cosine is None or not cosine or not math.isfinite(projection / cosine):
            continue
        n = projection / cosine
        rest = count * count - 2 * count * projection + n * n
        if n > 0 and rest > 0:
            found[rank] = max(-1.0, min(1.0, (count * projection - n * n) / (n * math.sqrt(rest))))
    return found


def _negative(frame: Frame) -> Sequence[int]:
    return [rank for rank, v in frame.per_rank(PROJECTION).items() if math.isfinite(v) and v < 0]


def _furthest(frame: Frame) -> tuple[int, float, float, float] | None:
    """(rank, distance, its cosine, the median of the others) of the rank that lies furthest from its peers; of one that
    lies alone, where there are at least three."""
    found = cosines(frame)
    if len(found) < 3:
        return None
    away = []
    for rank, cosine in found.items():
        others = median([v for r, v in found.items() if r != rank])
        away.append((abs(cosine - others), -rank, cosine, others))
    away.sort(reverse=True)
    distance, rank, cosine, others = away[0]
    # a rank far out pulls the median of the others as well: the second must lie clearly closer
    rest = [v for r, v in found.items() if r != -rank]
    spread = max(abs(v - others) for v in rest)
    return (-rank, distance, cosine, others) if spread <= ALONE * distance else None
