"""A sustained climb of the loss over the lowest level it had reached, too slow for the spike detector.

Two scales: the median of the last 16 points over the best such median by 25 % while four blocks of 8 points rise one
after the other; or the median of the last 128 points over the best such median by 15 % and not falling. Both need 6
robust sigma of the points at the best level, around their own course. The onset is the first point
after the last one that was still near the best level.
"""

import itertools
import math
from collections import deque
from collections.abc import Iterable
from typing import ClassVar

import numpy as np

from runhealth.diagnose.detector import Detector
from runhealth.diagnose.findings import Alarm
from runhealth.diagnose.frame_block import FrameBlock
from runhealth.diagnose.frames import Frame
from runhealth.diagnose.printed_mean import PrintedMean, doubtful
from runhealth.diagnose.robust import SortedWindow, mad_sigma, median, middle
from runhealth.storage.blocks import Bools, Floats, Ints

BLOCK = 8
RISING_BLOCKS = 3
RISE = math.log(1.01)  # a block counts as higher from here on
FAST, FAST_EFFECT = 16, math.log(1.25)
SLOW, SLOW_EFFECT = 128, math.log(1.15)
Z_ALARM = 6.0
NEAR = math.log(1.02)
KEEP = 2048
LEAST_SIGMA = 0.002
SMALLEST_BLOCK, LARGEST_BLOCK = 128, 4096


class _Level:
    """Running median of one width, and the best it has been."""

    def __init__(self, width: int) -> None:
        self.window = SortedWindow(width)
        self.every = max(1, width // 16)
        self.best = math.inf
        self.sigma = 0.0
        self.now = math.nan
        self._since = 0

    def push(self, y: float) -> bool:
        """Whether the level was looked at: a wide window only now and then."""
        self.window.push(y)
        self._since += 1
        if not self.full or self._since < self.every:
            return False
        self._since = 0
        self._look(self.window.median(), self.window.values)
        return True

    def _look(self, now: float, values: Iterable[float]) -> None:
        self.now = now
        if now < self.best:
            self.best = now
            self.sigma = max(_noise(list(values)), LEAST_SIGMA)

    @property
    def full(self) -> bool:
        return len(self.window) == self.window.size

    def ahead(self, y: Floats) -> tuple[Floats, Ints, Floats]:
        """What `push` of each of `y` would bring, from a full window: the windows that would be looked at (k, width),
        the number of points up to each, and their medians."""
        width = self.window.size
        points = np.concatenate([np.array(self.window.values), y])
        first = self.every - 1 - self._since
        windows = np.lib.stride_tricks.sliding_window_view(points, width)[1:][first :: self.every]
        counts = np.arange(first, len(y), self.every) + 1
        return windows, counts, middle(np.sort(windows, axis=1))

    def take(self, y: Floats, windows: Floats, medians: Floats) -> None:
        """`push` all of `y`; `windows` and `medians` are those that are looked at on the way."""
        if len(medians):
            at = int(medians.argmin())
            self._look(float(medians[at]), windows[at].tolist())
            self.now = float(medians[-1])
        looks = len(medians)
        self._since = self._since + len(y) - looks * self.every if looks else self._since + len(y)
        self.window.extend(y.tolist())

    def high(self, medians: Floats, effect: float) -> Bools:
        """Of medians to come: which may lie over the best by `effect` and 6 sigma. The sigma of a best that is still to
        come is not known."""
        best = np.minimum.accumulate(medians)
        known = best >= self.best
        limit = np.where(known, max(effect, Z_ALARM * self.sigma), effect)
        found: Bools = medians - np.minimum(best, self.best) >= limit
        return found

    @property
    def excess(self) -> float:
        return self.now - self.best


def _noise(values: list[float]) -> float:
    """Sigma of the points around their own course: from first differences, so that a trend adds nothing."""
    steps = sorted(b - a for a, b in itertools.pairwise(values))
    return mad_sigma(steps, median(steps)) / math.sqrt(2)


def _first(chosen: Bools, otherwise: int) -> int:
    return int(chosen.argmax()) if chosen.any() else otherwise


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
        self._mean = PrintedMean()
        self._count = 0
        self._alarmed = False

    def update(self, frame: Frame) -> list[Alarm]:
        loss = frame.loss
        if loss is None or not math.isfinite(loss) or loss <= 0 or self._mean.hides(frame, loss):
            return []
        y = math.log(loss)
        self._count += 1
        self._points.append((frame.step, y))
        self._block.push(y)
        if self._count % BLOCK == 0:
            self._blocks.append(self._block.median())
        looked = self._fast.push(y)
        if self._slow.push(y):
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

    def update_block(self, block: FrameBlock) -> list[tuple[int, Alarm]]:
        logs = block.log_loss
        if logs is None:
            return []
        rows = np.flatnonzero(logs.present)
        y, steps, doubts = logs.values[rows], block.steps[rows], doubtful(block)[rows]
        losses = block.loss.values[rows] if block.loss is not None else y
        found: list[tuple[int, Alarm]] = []
        i, size = 0, LARGEST_BLOCK
        while i < len(rows):
            if self._slow.full:
                end = min(len(rows), i + size)
                stop = i + _first(doubts[i:end], end - i)
                quiet = self._take(y[i:stop], steps[i:stop]) if stop > i else 0
                self._mean.take(losses[i : i + quiet])
                i += quiet
                if i == end:
                    size = min(4 * size, LARGEST_BLOCK)
                    continue
                size = SMALLEST_BLOCK  # what was computed ahead is lost
            found.extend(self.update_rows(block, (int(rows[i]),)))
            i += 1
        return found

    def _take(self, y: Floats, steps: Ints) -> int:
        """Take in the points up to the first at which there may be something to tell. Returns how many."""
        fast, slow = self._fast, self._slow
        windows, _, now = fast.ahead(y)
        wide, wide_at, wide_now = slow.ahead(y)
        first = (-self._count - 1) % BLOCK  # the point that fills a block
        points = np.concatenate([np.array(self._block.values), y])
        whole = np.lib.stride_tricks.sliding_window_view(points, BLOCK)[1:][first::BLOCK]
        blocks = middle(np.sort(whole, axis=1))
        if self._alarmed:
            excess = now - np.minimum(np.minimum.accumulate(now), fast.best)
            stop = _first(excess <= NEAR + 3 * fast.sigma, len(y))
        else:
            known = np.concatenate([np.array(self._blocks), blocks])
            higher = np.diff(known) >= RISE
            rises = np.zeros(len(known), dtype=np.bool_)
            if len(known) > RISING_BLOCKS:
                rises[RISING_BLOCKS:] = higher[2:] & higher[1:-1] & higher[:-2]
            rising = rises[(np.arange(len(y)) - first) // BLOCK + len(self._blocks)]
            levels = np.concatenate([np.array(self._slow_before), wide_now])
            before = len(self._slow_before)
            most = self._slow_before.maxlen or 0
            over = np.zeros(len(levels), dtype=np.bool_)
            if len(levels) >= most:
                over[most - 1 :] = levels[most - 1 :] >= levels[: len(levels) - most + 1] + RISE
            now_high = slow.excess >= SLOW_EFFECT and slow.excess >= Z_ALARM * slow.sigma
            lifted = np.concatenate([[now_high], slow.high(wide_now, SLOW_EFFECT)])
            high = lifted & over[before - 1 :] if before else np.zeros(len(lifted), dtype=np.bool_)
            high_now = high[np.searchsorted(wide_at, np.arange(1, len(y) + 1), side="right")]
            stop = _first((fast.high(now, FAST_EFFECT) & rising) | high_now, len(y))
        if stop:
            looks = int(np.searchsorted(wide_at, stop, side="right"))
            fast.take(y[:stop], windows[:stop], now[:stop])
            slow.take(y[:stop], wide[:looks], wide_now[:looks])
            self._slow_before.extend(wide_now[:looks].tolist())
            self._blocks.extend(blocks[: max(0, (stop - 1 - first) // BLOCK + 1)].tolist())
            self._block.extend(y[:stop].tolist())
            kept = slice(max(0, stop - KEEP), stop)
            self._points.extend(zip(steps[kept].tolist(), y[kept].tolist(), strict=True))
            self._count += stop
        return stop

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
