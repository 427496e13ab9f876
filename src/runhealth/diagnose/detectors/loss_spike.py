"""The loss leaves its trend upward: trailing robust z on log-loss, over single rows and over three to five of them.

Centre and sigma come from the last 128 points (`excursion`). Flagged points enter the window winsorised at 3 sigma, so
a spike never hides the next one; non-finite points never enter it. One-sided: a falling loss is no spike. An alarm is

- a row of +10 % beyond what single rows of this series reach: 5 sigma, up to 9.5 where its tails are heavy;
- two rows of +10 % and 5 sigma among three;
- three to five rows that together lie further out than sums of this series do, 4.1 sigma of their mean where it is
  normal noise; their rise, or the highest of them, is at least 10 % of the loss, or 0.1 nats (10 % of the perplexity,
  exp(loss), of a loss in nats a token), as far as the noise lets tell. What is under 10 % of the loss is told quietly.

Losses that can be zero or negative are judged on a linear scale: 10 % is then of the range that they have covered.
"""

import math
from collections import deque
from typing import ClassVar, NamedTuple

import numpy as np

from runhealth.diagnose.detector import Detector
from runhealth.diagnose.excursion import (
    BIG_Z,
    CHUNK_ROWS,
    HABIT_Z,
    SUM_ROWS,
    SUM_Z,
    Habit,
    Scale,
    centres,
    levels,
    spreads,
)
from runhealth.diagnose.findings import Alarm
from runhealth.diagnose.frame_block import FrameBlock
from runhealth.diagnose.frames import Frame
from runhealth.diagnose.printed_mean import PrintedMean, doubtful
from runhealth.diagnose.robust import mad_sigma, median
from runhealth.storage.blocks import Bools, Floats, Ints

WINDOW = 128
LEAST = 32
YOUNG_EVERY, CENTER_EVERY, SCALE_EVERY = 4, 8, 32  # points; CHUNK_ROWS is a multiple of all
Z_ALARM = 5.0
EFFECT = 0.10
NATS, NATS_MOST = math.log1p(EFFECT), 20.0  # a loss over 20 is not in nats a token
FLOOR = 0.005
WINSOR_Z = 3.0
CAP_Z = 3.25  # of a row within a sum: no single row makes one
ROWS = (SUM_ROWS, 4, 5)
SUM_ALARM, WIDENED = 4.1, 1.5
EXCLUDED_Z = 1.64  # a rise of 10 % that a mean is so many standard errors under is not excluded
FALLING_Z = 10.0  # on a steep stretch the rows lie under the centre and tell little of their tails
KNOWN_ROWS, UNKNOWN_FACTOR, DESCENT_FACTOR = 512, 1.15, 1.2
OVER_Z = 1.0  # an excursion is over once five rows lie no higher
DEBOUNCE_STEPS, TALLER = 20, 2.0  # so soon after an alarm, only a rise twice as high is another
REARM_POINTS = WINDOW // 2
PLATEAU_POINTS = 8  # flagged without a pause
RELEARN_POINTS = 512  # flagged without a pause for so long: this is the new level
FIRST_BLOCK, LARGEST_BLOCK = 256, 4096
SUM_LIMIT, SUM_HABIT = tuple(SUM_ALARM * math.sqrt(n) for n in ROWS), SUM_Z * math.sqrt(SUM_ROWS)

# A log may be an excerpt of a few lines: so few points only speak when the jump is beyond doubt.
SHORT_LEAST = 3
SHORT_Z = 12.0
SHORT_EFFECT = 0.5
SHORT_SPREAD = 0.25
SHORT_BEYOND = 6.0  # nats of log-loss, 400 x: no series scatters so far
SHORT_RANGES = 3.0  # x the range of the points so far: a few points tell little of how far a loss scatters


class _Row(NamedTuple):
    """A row that was judged: `capped` is its z within +-3.5, `rise` that of the loss over its trend."""

    step: int
    loss: float
    z: float
    capped: float
    rise: float
    effect: bool


NO_ROW = _Row(0, 0.0, 0.0, 0.0, 0.0, False)


class LossSpike(Detector):
    name: ClassVar[str] = "loss_spike"
    kinds: ClassVar[tuple[str, ...]] = ("loss_spike",)
    reads: ClassVar[tuple[str, ...]] = ("loss",)

    def __init__(self) -> None:
        self._points: deque[float] = deque(maxlen=WINDOW)
        self._count = 0  # points since the window was last emptied
        self._log = True
        self._lowest, self._highest = math.inf, -math.inf  # of all losses that were not flagged
        self._center, self._sigma, self._least_sigma = math.nan, math.nan, 0.0
        self._level, self._falling = math.nan, False  # the centre as a loss
        self._scale, self._habit = Scale(), Habit()
        self._rows: deque[_Row] = deque([NO_ROW] * ROWS[-1], maxlen=ROWS[-1])
        self._since_alarm = 10**9
        self._last_alarm_step: int | None = None
        self._last_rise = 0.0
        self._mean = PrintedMean()
        self._flagged_run, self._plateau_end = 0, 0
        self._above = False

    # -- row by row -------------------------------------------------------------------------------------------------

    def update(self, frame: Frame) -> list[Alarm]:
        loss = frame.loss
        if loss is None or not math.isfinite(loss) or loss == 0.0 or self._mean.hides(frame, loss):
            return []
        if self._log and loss <= 0.0:
            self._to_linear()
        y = math.log(loss) if self._log else loss
        alarms: list[Alarm] = []
        flagged = False
        if self._count >= SHORT_LEAST:
            self._since_alarm += 1
            if self._count < LEAST:
                flagged, alarms = self._judge_short(frame, loss, y)
            else:
                self._refresh()
                flagged, alarms = self._judge(frame, loss, y)
        if flagged:
            self._flagged_run += 1
            if self._flagged_run >= PLATEAU_POINTS:
                self._plateau_end = self._count + WINDOW
            if self._flagged_run < RELEARN_POINTS:
                y = self._center + WINSOR_Z * self._sigma
            else:
                self._relearn()
        else:
            self._flagged_run = 0
            self._lowest, self._highest = min(loss, self._lowest), max(loss, self._highest)
        self._push(y)
        return alarms

    def _push(self, y: float) -> None:
        self._points.append(y)
        self._count += 1
        if self._count % CHUNK_ROWS == 0:
            self._habit.close()

    def _refresh(self) -> None:
        """Centre and scale, out of the points before this row; more often while points are few."""
        settled = self._count >= WINDOW
        if self._count % (CENTER_EVERY if settled else YOUNG_EVERY):
            return
        window = np.array([self._points])
        found = levels(window)
        if math.isnan(self._sigma) or self._count % (SCALE_EVERY if settled else CENTER_EVERY) == 0:
            spread = float(spreads(window, found)[0])
            floor = FLOOR if self._log else self._linear_floor(float(found.span[0]), float(found.median[0]))
            self._sigma = max(self._scale.take(spread, settled=settled, plateau=self._count < self._plateau_end), floor)
        center, falling = centres(found, np.array([self._sigma]))
        self._set_center(float(center[0]), bool(falling[0]))

    def _set_center(self, center: float, falling: bool) -> None:
        self._center, self._falling = center, falling
        self._level = math.exp(min(center, 700.0)) if self._log else center

    def _linear_floor(self, span: float, middle: float) -> float:
        return max(FLOOR * span, FLOOR * abs(middle), 1e-12)

    def _needed(self) -> tuple[float, float]:
        """The rise of the loss that counts at all, and the one that is told aloud."""
        if not self._log:
            tenth = EFFECT * max(self._highest - self._lowest, self._sigma)
            return tenth, tenth
        tenth = EFFECT * self._level
        return (min(NATS, tenth) if self._level <= NATS_MOST else tenth), tenth

    def _judge(self, frame: Frame, loss: float, y: float) -> tuple[bool, list[Alarm]]:
        z = (y - self._center) / self._sigma
        rise = loss - self._level
        needed, loud = self._needed()
        capped = min(max(z, -CAP_Z), CAP_Z)
        rows = self._rows
        rows.append(_Row(frame.step, loss, z, capped, rise, rise >= needed))
        sums = self._sums()
        bump = z >= Z_ALARM and rise >= loud
        if not self._above and not self._falling:
            self._habit.add(1, z > BIG_Z, sums[0] > SUM_HABIT, bump and z >= HABIT_Z)
        length = 0
        if bump and (z >= self._single_z() or any(r.z >= Z_ALARM and r.rise >= loud for r in (rows[-2], rows[-3]))):
            length = 1
        elif self._count >= WINDOW:  # how far sums wander is not known before
            young = self._habit.rows < KNOWN_ROWS
            least = UNKNOWN_FACTOR if self._falling or young else 1.0
            if self._falling and young:
                least = DESCENT_FACTOR
            factor = max(self._habit.factor, least) ** WIDENED
            for n, total, limit in zip(ROWS, sums, SUM_LIMIT, strict=True):
                if not length and total >= limit * factor and self._rises(n, needed):
                    length = n
        if length:
            alarms = self._alarm(frame, length)
            self._above = True
            return z >= Z_ALARM, alarms
        self._above = self._above and sums[-1] > OVER_Z * ROWS[-1]
        return z >= Z_ALARM, []

    def _sums(self) -> tuple[float, float, float]:
        a, b, c, d, e = (row.capped for row in self._rows)
        three = e + d + c
        return three, three + b, three + b + a

    def _single_z(self) -> float:
        return max(self._habit.single_z, FALLING_Z if self._falling else 0.0)

    def _rises(self, n: int, needed: float) -> bool:
        rows = list(self._rows)[-n:]
        if any(row.effect for row in rows):
            return True
        total = 0.0
        for row in rows:
            total += row.rise
        width = self._sigma * (self._level if self._log else 1.0)
        return total / n + EXCLUDED_Z * width / math.sqrt(n) >= needed

    def _judge_short(self, frame: Frame, loss: float, y: float) -> tuple[bool, list[Alarm]]:
        ordered = sorted(self._points)
        self._set_center(median(ordered), False)
        floor = FLOOR if self._log else self._linear_floor(ordered[-1] - ordered[0], self._center)
        self._sigma = max(mad_sigma(ordered, self._center), 2 * floor)
        excess = y - self._center
        if excess < SHORT_Z * self._sigma or not _towers(y, ordered, y - excess / 2):
            return False, []
        span = max(self._highest - self._lowest, self._sigma)
        effect = math.expm1(min(excess, 700.0)) if self._log else excess / span
        self._rows.append(_Row(frame.step, loss, excess / self._sigma, 0.0, loss - self._level, True))
        return True, self._alarm(frame, 1) if effect >= SHORT_EFFECT else []

    def _alarm(self, frame: Frame, length: int) -> list[Alarm]:
        """One alarm an excursion, of its highest row. `length` rows show it."""
        if self._above and self._since_alarm < REARM_POINTS:
            return []
        rows = list(self._rows)[-length:]
        peak = max(rows, key=lambda row: row.z)
        last = self._last_alarm_step
        bounce = last is not None and 0 <= frame.step - last < DEBOUNCE_STEPS
        if bounce and peak.rise < TALLER * self._last_rise:
            return []
        self._since_alarm = 0
        self._last_alarm_step, self._last_rise = frame.step, peak.rise
        onset = next(row.step for row in rows if row.capped >= peak.capped / 2)
        baseline = self._level
        together = f" within {length} rows that lie high" if length > 1 else ""
        return [
            Alarm(
                detector=self.name,
                kind="loss_spike",
                signal="loss",
                attempt=frame.attempt,
                step=frame.step,
                onset_step=onset,
                score=peak.z,
                value=peak.loss,
                baseline=baseline,
                ranks=_outlying_ranks(frame, baseline),
                message=f"loss {peak.loss:.4g} against {baseline:.4g}, {peak.z:.1f} robust sigma{together}",
            )
        ]

    def _to_linear(self) -> None:
        points = [math.exp(v) for v in self._points]
        self._log = False
        self._relearn()
        for point in points:
            self._push(point)

    def _relearn(self) -> None:
        self._points.clear()
        self._count = self._flagged_run = self._plateau_end = 0
        self._sigma, self._scale = math.nan, Scale()
        self._rows.extend([NO_ROW] * ROWS[-1])

    # -- in blocks --------------------------------------------------------------------------------------------------

    def update_block(self, block: FrameBlock) -> list[tuple[int, Alarm]]:
        signal = block.loss
        if signal is None:
            return []
        at = np.flatnonzero(signal.present & np.isfinite(signal.values) & (signal.values != 0.0))
        logs, doubts = block.log_loss, doubtful(block)[at]
        found: list[tuple[int, Alarm]] = []
        i, size = 0, FIRST_BLOCK
        while i < len(at):
            if logs is not None and self._log and self._count >= WINDOW and not self._above and not self._flagged_run:
                rows = at[i : i + size]
                if doubts[i : i + size].any():
                    rows = rows[: doubts[i : i + size].argmax()]
                quiet = self._take(signal.values[rows], logs.values[rows], block.steps[rows])
                i += quiet
                if quiet == size or i == len(at):
                    size = min(2 * size, LARGEST_BLOCK)
                    continue
                size = max(size // 2, FIRST_BLOCK)
            found.extend(self.update_rows(block, (int(at[i]),)))
            i += 1
        return found

    def _take(self, losses: Floats, y: Floats, steps: Ints) -> int:
        """Take in the rows up to the first that is, or might be, high. Returns how many."""
        below = np.flatnonzero(losses <= 0.0)
        if len(below):
            losses, y = losses[: below[0]], y[: below[0]]
        m = len(losses)
        if not m:
            return 0
        points = np.concatenate([np.array(self._points), y])
        first = -self._count % CENTER_EVERY  # the first row at which the centre is due
        course = self._course(points, first, m)
        part = (np.arange(m) - first) // CENTER_EVERY + 1
        z = (y - course.center[part]) / course.sigma[part]
        rise = losses - course.level[part]
        capped = np.minimum(np.maximum(z, -CAP_Z), CAP_Z)
        w = np.concatenate([np.array([row.capped for row in self._rows][1:]), capped])
        three = w[4:] + w[3:-1] + w[2:-2]
        four = three + w[1:-3]
        hot = z >= Z_ALARM
        for total, limit in zip((three, four, four + w[:-4]), SUM_LIMIT, strict=True):
            hot |= total >= limit
        quiet = int(hot.argmax()) if hot.any() else m
        if not quiet:
            return 0
        last = int(part[quiet - 1])
        self._center, self._sigma = float(course.center[last]), float(course.sigma[last])
        self._level, self._falling = float(course.level[last]), bool(course.falling[last])
        self._scale.mean = course.means[last]
        counted = ~course.falling[part[:quiet]]
        self._count_habit(counted, z[:quiet], three[:quiet])
        self._points.extend(points[WINDOW : WINDOW + quiet].tolist())
        self._mean.take(losses[:quiet])
        self._since_alarm += quiet
        self._lowest = min(self._lowest, float(losses[:quiet].min()))
        self._highest = max(self._highest, float(losses[:quiet].max()))
        for i in range(max(0, quiet - ROWS[-1]), quiet):
            level = float(course.level[part[i]])
            tenth = EFFECT * level
            needed = min(NATS, tenth) if level <= NATS_MOST else tenth
            values = float(losses[i]), float(z[i]), float(capped[i]), float(rise[i])
            self._rows.append(_Row(int(steps[i]), *values, values[3] >= needed))
        return quiet

    def _course(self, points: Floats, first: int, m: int) -> "_Course":
        """Centre and scale from the row `first` on at every eighth of m rows, after those that hold now."""
        centers, sigmas, levels_, falls, means = (
            [self._center], [self._sigma], [self._level], [self._falling], [self._scale.mean],
        )  # fmt: skip
        if first < m:
            windows = np.lib.stride_tricks.sliding_window_view(points, WINDOW)[first:m:CENTER_EVERY]
            found = levels(windows)
            due = (-(self._count + first) % SCALE_EVERY) // CENTER_EVERY  # the first of them at which the scale is due
            spread = spreads(windows[due :: SCALE_EVERY // CENTER_EVERY], type(found)(*(v[due::4] for v in found)))
            scale, sigma = Scale(), self._sigma
            scale.mean = self._scale.mean
            wide = spread.tolist()
            every = SCALE_EVERY // CENTER_EVERY
            for i in range(len(windows)):
                if i >= due and (i - due) % every == 0:
                    plateau = self._count + first + i * CENTER_EVERY < self._plateau_end
                    sigma = max(scale.take(wide[(i - due) // every], settled=True, plateau=plateau), FLOOR)
                sigmas.append(sigma)
                means.append(scale.mean)
            center, falling = centres(found, np.array(sigmas[1:]))
            centers += center.tolist()
            falls += falling.tolist()
            levels_ += [math.exp(min(v, 700.0)) for v in center.tolist()]
        return _Course(np.array(centers), np.array(sigmas), np.array(levels_), np.array(falls), means)

    def _count_habit(self, counted: Bools, z: Floats, three: Floats) -> None:
        big, wide = counted & (z > BIG_Z), counted & (three > SUM_HABIT)
        start, end = 0, len(counted)
        while start < end:
            stop = min(end, start + CHUNK_ROWS - self._count % CHUNK_ROWS)
            here = slice(start, stop)
            sums = int(np.count_nonzero(wide[here]))
            self._habit.add(int(np.count_nonzero(counted[here])), int(np.count_nonzero(big[here])), sums, 0)
            self._count += stop - start
            if self._count % CHUNK_ROWS == 0:
                self._habit.close()
            start = stop


class _Course(NamedTuple):
    center: Floats
    sigma: Floats
    level: Floats
    falling: Bools
    means: list[float]


def _towers(y: float, ordered: list[float], middle: float) -> bool:
    """Whether `y` is further from the points under `middle` than they are from each other, by far. In a series that
    scatters or falls steeply, half a dozen points say nothing."""
    low = [v for v in ordered if v < middle]
    if len(low) < max(2, 2 * len(ordered) / 3):
        return False
    spread = low[-1] - low[0]
    tells = spread <= SHORT_SPREAD or len(ordered) >= LEAST // 2 or y - low[-1] >= SHORT_BEYOND
    return tells and y - low[-1] >= SHORT_RANGES * spread


def _outlying_ranks(frame: Frame, baseline: float) -> tuple[int, ...]:
    """The ranks that carry the excess, when it is not shared by all: those with over half the largest excess."""
    losses = frame.per_rank("loss")
    if len(losses) < 2:
        return ()
    excess = {rank: (loss - baseline if math.isfinite(loss) else math.inf) for rank, loss in losses.items()}
    largest = max(excess.values())
    if median(sorted(excess.values())) > 0.5 * largest and len(losses) > 2:
        return ()
    chosen = tuple(rank for rank, value in excess.items() if value >= 0.5 * largest)
    return chosen if len(chosen) < len(losses) else ()


DETECTOR = LossSpike
