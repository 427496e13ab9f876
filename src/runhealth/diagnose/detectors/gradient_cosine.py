"""One rank's gradient points elsewhere than its peers': turned round, or that of something else.

What a rank sends is part of what the reduce returns, so its cosine with the result is never that of a stranger. Out of
projection and cosine follows the cosine with what all *others* sent: with g a rank's gradient, h the mean of R ranks,
p = <g, h> / <h, h> and n = |g| / |h| = p / cosine, it is (R p - n^2) / (n sqrt(R^2 - 2 R p + n^2)). It scatters from
batch to batch, by more the smaller the batches are, but for all ranks alike. A rank is named when three to five rows
together lie 5.3 standard errors (more where ranks are many) under its peers, and as far under its own habit, and
neither its batches nor its loss are unlike theirs, and no two ranks read the same: else the data are the reason.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import ClassVar

import numpy as np

from runhealth.diagnose.detector import Detector
from runhealth.diagnose.findings import Alarm
from runhealth.diagnose.frame_block import FrameBlock, Signal
from runhealth.diagnose.frames import Frame
from runhealth.diagnose.robust import MAD_TO_SIGMA, Baseline, median, middle
from runhealth.diagnose.windows import Ahead, settled, take
from runhealth.storage.blocks import Bools, Floats

PROJECTION, COSINE = "grad_projection_rank", "grad_cosine_rank"
LEAST_RANKS = 3
ROWS = (3, 4, 5)
SUM_ALARM, CAP_Z = 5.3, 3.25
FEW_RANKS = 4  # the more there are, the further one of them lies off by chance
OWN_ROWS, OWN_LEAST = 64, 16
LOSS_Z = 3.0
NOW_ROWS = 8
DATA_ROWS = 8
REARM_ROWS = 256
SMALLEST_BLOCK, LARGEST_BLOCK = 64, 4096


class GradientCosine(Detector):
    name: ClassVar[str] = "gradient_cosine"
    kinds: ClassVar[tuple[str, ...]] = ("rank_outlier",)
    reads: ClassVar[tuple[str, ...]] = (COSINE,)

    def __init__(self) -> None:
        self._ranks: tuple[int, ...] = ()
        self._habit = Baseline(128, least=32)  # median over the ranks of how far they lie from their peers
        self._z: deque[list[float]] = deque(maxlen=ROWS[-1])  # of the last rows, by rank
        self._away: deque[list[float]] = deque(maxlen=OWN_ROWS)
        self._losses: deque[list[float]] = deque(maxlen=OWN_ROWS)  # log, less their median; empty where not measured
        self._steps: deque[int] = deque(maxlen=ROWS[-1])
        self._shared: deque[bool] = deque(maxlen=ROWS[-1])  # in which of them ranks read the same batch
        self._since = REARM_ROWS
        self._bad_data: dict[int, int] = {}  # rank -> rows since a batch of it was unlike the others

    def update(self, frame: Frame) -> list[Alarm]:
        self._since += 1
        for rank in self._bad_data:
            self._bad_data[rank] += 1
        for outlier in frame.outliers:
            if outlier.strong:
                self._bad_data[outlier.batch.rank] = 0
        ranks = tuple(frame.ranks)
        projections, cosines = ([float(v) for v in frame.per_rank(name).values()] for name in (PROJECTION, COSINE))
        if len(ranks) < LEAST_RANKS or not len(projections) == len(cosines) == len(ranks):
            return []
        matrix = np.array([projections]), np.array([cosines])
        if not _plain(*matrix)[0]:
            return []
        self._meet(ranks)
        away = _away(*matrix)
        losses = [float(v) for v in frame.per_rank("loss").values()]
        if not self._habit.ready:
            self._enter(frame, away, losses)
            self._z.append([0.0] * len(ranks))
            return []
        sigma = MAD_TO_SIGMA * self._habit.center
        z = _capped(away, np.array([sigma]))[0].tolist()
        self._z.append(z)
        self._enter(frame, away, losses)
        found = self._lowest()
        if found is None or self._since < REARM_ROWS:
            return []
        at, length = found
        rank = ranks[at]
        mine = [row[at] for row in list(self._away)[-length:]]
        sigma = max(sigma, self._scatter(at, length))
        if not self._own(at, length, sigma) or self._by_data(at, length):
            return []
        self._since = 0
        value = float(cosines[at])
        others = median([v for i, v in enumerate(cosines) if i != at])
        lower = -sum(mine) / length
        onset = next(step for step, v in zip(list(self._steps)[-length:], mine, strict=True) if v <= -lower / 2)
        errors = lower / sigma * math.sqrt(length)
        message = (
            f"the gradient of rank {rank} points elsewhere than its peers' since step {onset:,}: its cosine with what "
            f"they sent is {lower:.2g} under theirs in {length} steps, {errors:.1f} standard errors, and its data look "
            "like theirs"
        )
        return [
            self.fact(frame, "rank_outlier", COSINE, message, onset=onset, value=value, baseline=others, ranks=(rank,))
        ]

    def _meet(self, ranks: tuple[int, ...]) -> None:
        if ranks != self._ranks:
            self._ranks = ranks
            for rows in (self._z, self._away, self._losses, self._steps, self._shared):
                rows.clear()

    def _enter(self, frame: Frame, away: Floats, losses: Sequence[float]) -> None:
        self._habit.push(float(_middle_of(away)[0]))
        self._away.append(away[0].tolist())
        self._losses.append(_log_losses(losses, away.shape[1]))
        self._steps.append(frame.step)
        self._shared.append(_share((b.content_hash, b.rank) for b in frame.batches))

    def _lowest(self) -> tuple[int, int] | None:
        """The rank, by its place, whose last rows are under a limit, and how many rows; the lowest of several."""
        if len(self._z) < ROWS[0]:
            return None
        rows = np.array(self._z)
        found: list[tuple[float, int, int]] = []
        for n, limit, total in zip(ROWS, _limits(len(self._ranks)), _sums(rows), strict=True):
            if len(rows) >= n:
                last = total[-1]
                place = int(last.argmin())
                if last[place] <= limit:
                    found.append((float(last[place]) / math.sqrt(n), place, n))
        return min(found)[1:] if found else None

    def _scatter(self, at: int, length: int) -> float:
        """Standard deviation of the rows before, tails and all, and how far the others lie from each other now: early
        in training directions part within a few steps."""
        rows = list(self._away)
        before = [v for row in rows[:-length] for v in row]
        square = 0.0
        for value in before:
            square += value * value
        others = MAD_TO_SIGMA * median([abs(v) for row in rows[-NOW_ROWS:] for i, v in enumerate(row) if i != at])
        return max(others, math.sqrt(square / len(before)) if before else math.inf)

    def _own(self, at: int, length: int, sigma: float) -> bool:
        """Whether the rank lies under its own habit by as much, of `sigma`."""
        own = [row[at] for row in list(self._away)[:-length]]
        if len(own) < OWN_LEAST:
            return False
        now = [row[at] for row in list(self._away)[-length:]]
        total = 0.0
        for value in now:
            total += min(max((value - min(median(own), 0.0)) / sigma, -CAP_Z), CAP_Z)
        return total <= _limits(len(self._ranks))[ROWS.index(length)]

    def _by_data(self, at: int, length: int) -> bool:
        """Whether the data are the reason: the rank's batches are unlike the others, its loss rose against its peers'
        in these rows, or ranks read the same batch, so that who reads another one is odd."""
        if self._bad_data.get(self._ranks[at], DATA_ROWS) < DATA_ROWS:
            return True
        if any(list(self._shared)[-length:]):
            return True
        rows = [row for row in self._losses if row]
        now = [row[at] for row in list(self._losses)[-length:] if row]
        if len(rows) < OWN_LEAST or not now:
            return False
        scatter = MAD_TO_SIGMA * median([abs(v) for row in rows for v in row])
        return sum(now) / math.sqrt(len(now)) > LOSS_Z * scatter

    def update_block(self, block: FrameBlock) -> list[tuple[int, Alarm]]:
        projections, cosines = block.per_rank(PROJECTION), block.per_rank(COSINE)
        if len(block.ranks) < LEAST_RANKS or projections is None or cosines is None:
            return super().update_block(block)
        plain = _plain(projections.values, cosines.values)
        losses = block.per_rank("loss")
        odd = np.zeros(len(block), dtype=np.bool_)
        odd[[row for row, outliers in block.outliers.items() if any(o.strong for o in outliers)]] = True
        away = _away(np.where(plain[:, None], projections.values, 1.0), np.where(plain[:, None], cosines.values, 0.5))
        found: list[tuple[int, Alarm]] = []
        row, size = 0, SMALLEST_BLOCK
        while row < len(block):
            end = min(len(block), row + size)
            stop = row
            if self._ranks == block.ranks and settled(self._habit) and len(self._z) == ROWS[-1]:
                some = odd[row:end]
                quiet = row + (int(some.argmax()) if some.any() else end - row)
                stop += self._take(block.part(row, quiet), away[row:quiet], plain[row:quiet], losses, row)
            size = min(4 * size, LARGEST_BLOCK)
            if stop < end:
                found.extend(self.update_rows(block, (stop,)))
                stop, size = stop + 1, SMALLEST_BLOCK
            row = stop
        return found

    def _take(self, block: FrameBlock, away: Floats, plain: Bools, losses: Signal | None, start: int) -> int:
        """Take in the rows before the first in which a rank may be under a limit. Returns how many."""
        rows = np.flatnonzero(plain)
        stop = len(plain)
        if len(rows):
            sigma = MAD_TO_SIGMA * Ahead(self._habit, _middle_of(away[rows])).center()
            z = _capped(away[rows], sigma)
            before = len(self._z) - 1
            every = np.concatenate([np.array(self._z)[1:], z])
            low = np.zeros(len(rows), dtype=np.bool_)
            for limit, total in zip(_limits(len(self._ranks)), _sums(every), strict=True):
                low |= total[-len(rows) :].min(axis=1) <= limit
            if low.any():
                first = int(low.argmax())
                stop, rows = int(rows[first]), rows[:first]
            if len(rows):
                self._z.extend(every[before : before + len(rows)][-ROWS[-1] :].tolist())
                take(self._habit, _middle_of(away[rows]))
                kept = rows[-OWN_ROWS:]
                self._away.extend(away[kept].tolist())
                self._steps.extend(block.steps[kept[-ROWS[-1] :]].tolist())
                self._shared.extend(_shared_rows(block, kept[-ROWS[-1] :].tolist()))
                for row in kept.tolist():
                    values: list[float] = []
                    if losses is not None:
                        there = losses.present[start + row]
                        values = losses.values[start + row][there].tolist()
                    self._losses.append(_log_losses(values, away.shape[1]))
        self._since += stop
        for rank in self._bad_data:
            self._bad_data[rank] += stop
        return stop


def _limits(ranks: int) -> tuple[float, ...]:
    """What the sums of 3, 4 and 5 rows must be under."""
    errors = math.sqrt(SUM_ALARM**2 + 2 * math.log(max(1.0, ranks / FEW_RANKS)))
    return tuple(-errors * math.sqrt(n) for n in ROWS)


def _plain(projections: Floats, cosines: Floats) -> Bools:
    """Rows in which the cosine with the others can be told of every rank."""
    known = np.isfinite(projections) & np.isfinite(cosines) & (cosines != 0.0) & (projections != 0.0)
    return np.asarray(known.all(axis=1), dtype=np.bool_)


def _away(projections: Floats, cosines: Floats) -> Floats:
    """(m, R): each rank's cosine with what the others sent, less the median of that of all ranks."""
    ranks = projections.shape[1]
    norms = projections / cosines
    rest = np.sqrt(np.maximum(ranks * ranks - 2.0 * ranks * projections + norms * norms, 1e-12))
    found = (ranks * projections - norms * norms) / (norms * rest)
    return np.asarray(found - middle(np.sort(found, axis=1))[:, None], dtype=np.float64)


def _middle_of(away: Floats) -> Floats:
    """(m,): the median over the ranks of how far they lie from their peers."""
    return middle(np.sort(np.abs(away), axis=1))


def _capped(away: Floats, sigma: Floats) -> Floats:
    """In robust sigma, within what a single row may count for."""
    z = np.divide(away, sigma[:, None], out=np.zeros_like(away), where=sigma[:, None] > 0)
    return np.asarray(np.minimum(np.maximum(z, -CAP_Z), CAP_Z), dtype=np.float64)


def _sums(rows: Floats) -> tuple[Floats, Floats, Floats]:
    """Of 3, 4 and 5 rows that end at each row, from the third, fourth and fifth row on."""
    three = rows[2:] + rows[1:-1] + rows[:-2]
    four = three[1:] + rows[:-3]
    return three, four, four[1:] + rows[:-4]


def _share(read: Iterable[tuple[int | None, int]]) -> bool:
    """Whether two ranks read the same. `read`: contents and who read them."""
    known = {(content, rank) for content, rank in read if content is not None}
    return len({content for content, _ in known}) < len(known)


def _shared_rows(block: FrameBlock, rows: Sequence[int]) -> list[bool]:
    """The same of some rows."""
    batches = block.batches()
    if batches is None:
        return [False] * len(rows)
    columns, starts = batches
    spans = [slice(starts[row], starts[row + 1]) for row in rows]
    return [_share(zip(columns.content_hash[at], columns.rank[at].tolist(), strict=True)) for at in spans]


def _log_losses(losses: Sequence[float], ranks: int) -> list[float]:
    if len(losses) != ranks or not all(v > 0 and math.isfinite(v) for v in losses):
        return []
    logs = [math.log(v) for v in losses]
    center = median(logs)
    return [v - center for v in logs]


DETECTOR = GradientCosine
