"""The loss changes by an exact factor from one row to the next and stays there: sums for means, a lost division.

Medians of 16 rows before and after must differ by a whole number up to 64, or one over it, as exactly as the noise
allows to say at all (three standard errors of the medians, at most 4 %), and the step must be sharp: the last rows
before and the first after are at their levels. Learning moves the loss by such a factor only gradually.
"""

import math
from collections import deque
from typing import ClassVar

from runhealth.diagnose.detector import Detector
from runhealth.diagnose.findings import Alarm
from runhealth.diagnose.frames import Frame
from runhealth.diagnose.robust import mad_sigma, median

ROWS = 16
LARGEST = 64
TOLERANCE = 0.04
LEAST_SIGMA = 0.004
SHARP_ROWS = 4


class ScaleChange(Detector):
    name: ClassVar[str] = "scale_change"
    kinds: ClassVar[tuple[str, ...]] = ("scale_change",)
    reads: ClassVar[tuple[str, ...]] = ("loss",)

    def __init__(self) -> None:
        self._points: deque[tuple[int, float]] = deque(maxlen=2 * ROWS)
        self._quiet = 0  # rows that lie in the window of a step that was told

    def update(self, frame: Frame) -> list[Alarm]:
        loss = frame.loss
        if loss is None or not math.isfinite(loss) or loss <= 0:
            return []
        points = self._points
        points.append((frame.step, math.log(loss)))
        self._quiet -= 1
        if len(points) < 2 * ROWS or self._quiet > 0:
            return []
        if abs(points[ROWS][1] - points[ROWS - 1][1]) < 0.6:  # under ln 2, with noise
            return []
        before = [y for _, y in points][:ROWS]
        after = [y for _, y in points][ROWS:]
        low, high = median(before), median(after)
        change = high - low
        factor = round(math.exp(abs(change)))
        if not 2 <= factor <= LARGEST:
            return []
        sigma = max(mad_sigma(sorted(before), low), mad_sigma(sorted(after), high), LEAST_SIGMA)
        error = 1.25 * sigma * math.sqrt(2 / ROWS)
        if 3 * error > TOLERANCE or abs(abs(change) - math.log(factor)) > 3 * error:
            return []
        near = 4 * sigma
        if any(abs(y - low) > near for y in before[-SHARP_ROWS:]) or any(
            abs(y - high) > near for y in after[:SHARP_ROWS]
        ):
            return []
        self._quiet = ROWS
        step = points[ROWS][0]
        how = f"{factor} x" if change > 0 else f"1/{factor} of"
        message = (
            f"from step {step:,} on the loss is exactly {how} what it was: the way it is summed or divided has changed"
        )
        return [
            self.fact(frame, "scale_change", "loss", message, onset=step, value=math.exp(high), baseline=math.exp(low))
        ]


DETECTOR = ScaleChange
