"""A sustained climb of the loss over the lowest level it had reached, too slow for the spike detector.

Two scales: the median of the last 16 points over the best such median by 25 % while four blocks of 8 points rise one
after the other; or the median of the last 128 points over the best such median by 15 % and not falling. Both need 6
robust sigma of the points at the best level, around their own course. The onset is the first point
after the last one that was still near the best level.
"""

import itertools
import math
from collections import deque
from typing import ClassVar

from runhealth.diagnose.detector import Detector
from runhealth.diagnose.findings import Alarm
from runhealth.diagnose.frames import Frame
from runhealth.diagnose.robust import SortedWindow, mad_sigma, median

BLOCK = 8
RISING_BLOCKS = 3
RISE = math.log(1.01)  # a block counts as higher from here on
FAST, FAST_EFFECT = 16, math.log(1.25)
SLOW, SLOW_EFFECT = 128, math.log(1.15)
Z_ALARM = 6.0
NEAR = math.log(1.02)
KEEP = 2048
LEAST_SIGMA = 0.002


class _Level:
    """Running median of one width, and the best it has been."""

    def __init__(self, width: int) -> None:
        self.window = SortedWindow(width)
        self.best = math.inf
        self.sigma = 0.0
        self.at_best = 0
        self.now = math.nan
        self._since = 0

    def push(self, y: float, count: int) -> bool:
        """Whether the level was looked at: a wide window only now and then."""
        self.window.push(y)
        self._since += 1
        if len(self.window) < self.window.size or self._since < max(1, self.window.size // 16):
            return False
        self._since = 0
        self.now = self.window.median()
        if self.now < self.best:
            self.best, self.at_best = self.now, count
            self.sigma = max(_noise(list(self.window.values)), LEAST_SIGMA)
        return True

    @property
    def excess(self) -> float:
        return self.now - self.best


def _noise(values: list[float]) -> float:
    """Sigma of the points around their own course: from first differences, so that a trend adds nothing."""
    steps = sorted(b - a for a, b in itertools.pairwise(values))
    return mad_sigma(steps, median(steps)) / math.sqrt(2)


class LossDivergence(Detector):
    name: ClassVar[str] = "loss_divergence"
    kinds: ClassVar[tuple[str, ...]] = ("loss_divergence",)
    reads: ClassVar[tuple[str, ...]] = ("loss",)

    def __init__(self) -> None:
        self._fast, self._slow = _Level(FAST), _Level(SLOW)
        self._slow_before: deque[float] = deque(maxlen=9)
        self._points: deque[tuple[int, float]] = deque(maxlen=KEEP)
        self._block = SortedWindow(BLOCK)
        self._blocks: deque[float] = deque(maxlen=RISING_BLOCKS + 1)
        self._count = 0
        self._alarmed = False

    def update(self, frame: Frame) -> list[Alarm]:
        loss = frame.loss
        if loss is None or not math.isfinite(loss) or loss <= 0:
            return []
        y = math.log(loss)
        self._count += 1
        self._points.append((frame.step, y))
        self._block.push(y)
        if self._count % BLOCK == 0:
            self._blocks.append(self._block.median())
        looked = self._fast.push(y, self._count)
        if self._slow.push(y, self._count):
            self._slow_before.append(self._slow.now)
        if not looked:
            return []
        if self._alarmed:
            # told once a climb; a new one can only be told after the loss has been near its best again
            self._alarmed = self._fast.excess > NEAR + 3 * self._fast.sigma
            return []
        level = self._climbing()
        if level is None:
            return []
        self._alarmed = True
        onset = self._onset(level)
        return [
            Alarm(
                detector=self.name,
                kind="loss_divergence",
                signal="loss",
                attempt=frame.attempt,
                step=frame.step,
                onset_step=onset,
                score=level.excess / level.sigma,
                value=loss,
                baseline=math.exp(level.best),
                message=f"loss climbed from {math.exp(level.best):.4g} to {math.exp(level.now):.4g} "
                f"since step {onset:,}",
            )
        ]

    def _climbing(self) -> _Level | None:
        fast, slow, blocks = self._fast, self._slow, self._blocks
        if fast.excess >= FAST_EFFECT and fast.excess >= Z_ALARM * fast.sigma and len(blocks) > RISING_BLOCKS:
            rising = all(later - earlier >= RISE for earlier, later in itertools.pairwise(blocks))
            if rising:
                return fast
        before = self._slow_before
        high = slow.excess >= SLOW_EFFECT and slow.excess >= Z_ALARM * slow.sigma
        if high and len(before) == before.maxlen and slow.now >= before[0] + RISE:
            return slow
        return None

    def _onset(self, level: _Level) -> int:
        limit = level.best + max(NEAR, 2 * level.sigma)
        onset = self._points[0][0]
        for step, y in reversed(self._points):
            if y <= limit:
                break
            onset = step
        return onset


DETECTOR = LossDivergence
