"""Where a noisy series runs, how far it scatters, and how heavy its tails are: what a rise has to exceed.

Written for many windows at once, one a row of a matrix; a single window is a matrix of one row, so that a series judged
row by row and one judged in blocks agree to the last bit. Nothing here sums up floats in an order of numpy's choice.
"""

import math
from collections import deque
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from runhealth.diagnose.frame_block import Signal
from runhealth.diagnose.robust import MAD_TO_SIGMA, middle
from runhealth.storage.blocks import Bools, Floats

NEWEST = 16  # points whose median the centre of a falling series does not go under
SHRINK_SIGMA = 0.6  # a slope over the window of up to so many sigma is none
EMA_SHARE, EMA_NEAR = 0.1, 1.3

BIG_Z = 3.0
SUM_ROWS, SUM_Z = 3, 2.0
CHUNK_ROWS, CHUNKS = 64, 32
PRIOR_ROWS, PRIOR_BIG, PRIOR_SUMS = 600, 0.008, 0.04  # before anything is known, tails are taken for heavy
NORMAL_Z, HEAVY_Z = 5.0, 9.5
NORMAL_RATE, HEAVY_RATE = 0.004, 0.008  # of rows over 3 sigma: 0.00135 are normal, Student t with 5 degrees has 0.012
NORMAL_SUMS = 0.0228  # of independent normal rows lie over 2 sigma
HABIT_BUMPS, HABIT_Z = 5, 6.0
WIDEST = 2.5
_inverse_normal = NormalDist().inv_cdf
_Counts = tuple[int, int, int, int]  # rows, those over 3 sigma, sums over 2 sigma, bumps
NOTHING: _Counts = (0, 0, 0, 0)


class Levels(NamedTuple):
    """Of each window (m,): its median, the rise from the median of its older to that of its newer half, the median of
    its newest points, and the distance from its lowest to its highest point."""

    median: Floats
    rise: Floats
    newest: Floats
    span: Floats


def logs_of(signal: Signal) -> Signal:
    """`math.log` of the values that are finite and positive; only these are present."""
    chosen = np.isfinite(signal.values) & (signal.values > 0)
    logs = np.full(chosen.shape, np.nan)
    logs[chosen] = list(map(math.log, signal.values[chosen].tolist()))  # np.log differs in the last bit
    return Signal(logs, chosen)


def levels(windows: Floats) -> Levels:
    """`windows` (m, n), oldest point first."""
    half = windows.shape[1] // 2
    ordered = np.sort(windows, axis=1)
    old, new = np.sort(windows[:, :half], axis=1), np.sort(windows[:, -half:], axis=1)
    newest = np.sort(windows[:, -NEWEST:], axis=1)
    return Levels(middle(ordered), middle(new) - middle(old), middle(newest), ordered[:, -1] - ordered[:, 0])


def spreads(windows: Floats, found: Levels) -> Floats:
    """1.4826·MAD of the points, or of what is left of them when the slope is taken out, if that is less: on a steep
    stretch of the curve the trend is no noise."""
    n = windows.shape[1]
    plain = middle(np.sort(np.abs(windows - found.median[:, None]), axis=1))
    slope = found.rise / (n - n // 2)
    level = np.sort(windows - slope[:, None] * np.arange(n, dtype=np.float64), axis=1)
    bent = middle(np.sort(np.abs(level - middle(level)[:, None]), axis=1))
    smaller: Floats = MAD_TO_SIGMA * np.minimum(plain, bent)
    return smaller


def centres(found: Levels, sigma: Floats) -> tuple[Floats, Bools]:
    """The median plus the slope carried from the window's middle to now, and whether the series falls. A slope that
    noise explains is none; a falling curve flattens, so its centre is not under the newest points."""
    beyond = np.maximum(np.abs(found.rise) - SHRINK_SIGMA * sigma, 0.0)
    centre = found.median + np.copysign(beyond, found.rise)
    falling = (found.rise < 0) & (beyond > 0)
    return np.where(falling, np.maximum(centre, found.newest), centre), falling


class Scale:
    """Sigma out of the spreads of windows that follow each other: a moving average, which chance moves less than one
    window's spread; where the two differ by more than 1.3, the window is right about it."""

    def __init__(self) -> None:
        self.mean = math.nan

    def take(self, spread: float, *, settled: bool, plateau: bool = False) -> float:
        """`plateau`: the window holds a stretch on another level, which is no noise."""
        if not settled or math.isnan(self.mean):
            self.mean = spread
            return spread
        if plateau:
            spread = min(spread, EMA_NEAR * self.mean)
        self.mean += EMA_SHARE * (min(spread, 2 * self.mean) - self.mean)
        if spread > EMA_NEAR * self.mean:
            return spread
        return EMA_NEAR * spread if EMA_NEAR * spread < self.mean else self.mean


class Habit:
    """How often rows lie far out, over the last 2,048 rows on flat ground, in chunks of 64.

    `single_z` is what one row must exceed: 5 sigma where the tails are like those of a normal distribution, up to 9.5
    where they are heavy. It is 5 again where rows over 6 sigma and 10 % are the series' habit: these are told as one
    finding with a count. `factor` is by how much sums of rows scatter more than those of independent normal rows.
    """

    def __init__(self) -> None:
        self._chunks: deque[_Counts] = deque(maxlen=CHUNKS)
        self._total = self._now = NOTHING
        self.single_z, self.factor = HEAVY_Z, 1.0
        self._learn()

    @property
    def rows(self) -> int:
        """How many rows it is made of."""
        return self._total[0]

    def add(self, rows: int, big: int, sums: int, bumps: int) -> None:
        now = self._now
        self._now = (now[0] + rows, now[1] + big, now[2] + sums, now[3] + bumps)

    def close(self) -> None:
        """64 rows have passed, whether they were counted or not."""
        now, total = self._now, self._total
        if not now[0]:
            return
        left = self._chunks[0] if len(self._chunks) == CHUNKS else NOTHING
        self._chunks.append(now)
        a, b, c, d = (total[i] + now[i] - left[i] for i in range(4))
        self._total, self._now = (a, b, c, d), NOTHING
        self._learn()

    def _learn(self) -> None:
        rows, big, sums, bumps = self._total
        prior = max(0.0, PRIOR_ROWS - rows / 2)  # what was taken for granted counts less the more is known
        rate = (big + PRIOR_BIG * prior) / (rows + prior)
        heavy = min(max((rate - NORMAL_RATE) / (HEAVY_RATE - NORMAL_RATE), 0.0), 1.0)
        self.single_z = NORMAL_Z if bumps >= HABIT_BUMPS else NORMAL_Z + heavy * (HEAVY_Z - NORMAL_Z)
        over = (sums + PRIOR_SUMS * prior) / (rows + prior)
        self.factor = 1.0
        if over > NORMAL_SUMS:
            self.factor = min(SUM_Z / _inverse_normal(1 - over), WIDEST) if over < 0.2 else WIDEST
