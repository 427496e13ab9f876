"""The loss leaves its trend upward: trailing robust z on log-loss.

Centre = median of the last 128 points plus the split-median slope carried forward, at least the median of the last 16;
scale = 1.4826·MAD (without the slope, if that is less), at least 0.01. Alarm at z >= 5 with an effect of at least
+10 %. Flagged points enter the baseline winsorised at 3 sigma, so a spike never hides the next one; non-finite points
never enter it. One-sided: a falling loss is no spike. Losses that can be zero or negative are judged on a linear scale:
the effect is then +10 % of the range that the losses have covered so far.
"""

import math
from typing import ClassVar

from runhealth.diagnose.detector import Detector
from runhealth.diagnose.findings import Alarm
from runhealth.diagnose.frames import Frame
from runhealth.diagnose.robust import SortedWindow, mad_sigma, median

WINDOW = 128
LEAST = 32
Z_ALARM = 5.0
EFFECT = 0.10
FLOOR = 0.01
WINSOR_Z = 3.0
DEBOUNCE_STEPS = 20
REARM_POINTS = WINDOW // 2
SCALE_EVERY = 8  # points between two computations of the scale
RELEARN_POINTS = 512  # flagged without a pause for so long: this is the new level

# A log may be an excerpt of a few lines: so few points only speak when the jump is beyond doubt.
SHORT_LEAST = 3
SHORT_Z = 12.0
SHORT_EFFECT = 0.5
SHORT_SPREAD = 0.25
SHORT_BEYOND = 6.0  # nats of log-loss, 400 x: no series scatters so far
SHORT_RANGES = 3.0  # x the range of the points so far: a few points tell little of how far a loss scatters


class LossSpike(Detector):
    name: ClassVar[str] = "loss_spike"
    kinds: ClassVar[tuple[str, ...]] = ("loss_spike",)
    reads: ClassVar[tuple[str, ...]] = ("loss",)

    def __init__(self, *, effect: float = EFFECT, floor: float = FLOOR) -> None:
        self._least_effect, self._least_sigma = effect, floor
        self._all = SortedWindow(WINDOW)
        self._old = SortedWindow(WINDOW // 2)
        self._new = SortedWindow(WINDOW // 2)
        self._last = SortedWindow(WINDOW // 8)
        self._log = True
        self._lowest, self._highest = math.inf, -math.inf  # of all losses that were not flagged
        self._sigma = math.nan
        self._sigma_age = SCALE_EVERY
        self._since_alarm = 10**9
        self._last_alarm_step: int | None = None
        self._flagged_run = 0
        self._above = False

    def update(self, frame: Frame) -> list[Alarm]:
        loss = frame.loss
        if loss is None or not math.isfinite(loss) or loss == 0.0:
            return []
        if self._log and loss <= 0.0:
            self._to_linear()
        y = math.log(loss) if self._log else loss
        count = len(self._all)
        flagged, alarms = False, []
        if count >= SHORT_LEAST:
            center = self._center()
            self._since_alarm += 1
            excess = y - center
            if excess > WINSOR_Z * self._floor():
                sigma = self._scale()
                short = count < LEAST
                flagged = excess >= (SHORT_Z if short else Z_ALARM) * sigma
                if short and flagged:
                    flagged = _towers(y, self._all.ordered, y - excess / 2)
                if flagged and self._effect(excess, sigma) >= (SHORT_EFFECT if short else self._least_effect):
                    alarms = self._alarm(frame, loss, center, excess / sigma)
                else:
                    self._above = False
            else:
                self._above = False
        if flagged:
            self._flagged_run += 1
            if self._flagged_run < RELEARN_POINTS:
                y = center + WINSOR_Z * sigma
            else:
                self._relearn()
        else:
            self._flagged_run = 0
            self._lowest, self._highest = min(loss, self._lowest), max(loss, self._highest)
        self._push(y)
        return alarms

    def _effect(self, excess: float, sigma: float) -> float:
        if self._log:
            return math.expm1(min(excess, 700.0))
        return excess / max(self._highest - self._lowest, sigma)

    def _alarm(self, frame: Frame, loss: float, center: float, z: float) -> list[Alarm]:
        armed = not self._above or self._since_alarm >= REARM_POINTS
        self._above = True
        last = self._last_alarm_step
        if not armed or (last is not None and 0 <= frame.step - last < DEBOUNCE_STEPS):
            return []
        self._since_alarm = 0
        self._last_alarm_step = frame.step
        baseline = math.exp(center) if self._log else center
        ranks = _outlying_ranks(frame, baseline)
        return [
            Alarm(
                detector=self.name,
                kind="loss_spike",
                signal="loss",
                attempt=frame.attempt,
                step=frame.step,
                onset_step=frame.step,
                score=z,
                value=loss,
                baseline=baseline,
                ranks=ranks,
                message=f"loss {loss:.4g} against {baseline:.4g}, {z:.1f} robust sigma",
            )
        ]

    def _push(self, y: float) -> None:
        self._all.push(y)
        self._last.push(y)
        moved = self._new.push(y)
        if moved is not None:
            self._old.push(moved)
        self._sigma_age += 1

    def _center(self) -> float:
        """Median plus the slope between the medians of the two halves, carried from the window's middle to now; not
        under the median of the newest points, since a learning curve flattens."""
        center = self._all.median()
        if len(self._old) >= REARM_POINTS // 4:
            center = max(center + self._new.median() - self._old.median(), self._last.median())
        return center

    def _scale(self) -> float:
        if self._sigma_age >= SCALE_EVERY or len(self._all) < LEAST:
            self._sigma = self._spread()
            self._sigma_age = 0
        return max(self._sigma, self._floor())

    def _spread(self) -> float:
        """1.4826·MAD of the points, or of what is left of them when the slope is taken out, if that is less: on a
        steep stretch of the curve the trend is no noise."""
        plain = mad_sigma(self._all.ordered, self._all.median())
        if len(self._old) < REARM_POINTS // 4:
            return plain
        slope = (self._new.median() - self._old.median()) / (len(self._all) / 2)
        level = sorted(v - slope * i for i, v in enumerate(self._all.values))
        return min(plain, mad_sigma(level, median(level)))

    def _floor(self) -> float:
        if self._log:
            return self._least_sigma
        ordered = self._all.ordered
        return max(FLOOR * (ordered[-1] - ordered[0]), FLOOR * abs(self._all.median()), 1e-12)

    def _to_linear(self) -> None:
        points = [math.exp(v) for v in self._all.values]
        self._log = False
        self._relearn()
        for point in points:
            self._push(point)

    def _relearn(self) -> None:
        for window in (self._all, self._old, self._new, self._last):
            window.clear()
        self._sigma_age = SCALE_EVERY
        self._flagged_run = 0


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
