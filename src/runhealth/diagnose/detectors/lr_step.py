"""The learning rate jumps: over 1.4 x off what its recent course leads to. A channel, no finding by itself."""

import math
from typing import ClassVar

from runhealth.diagnose.detector import CHANNEL, Detector
from runhealth.diagnose.findings import Alarm
from runhealth.diagnose.frames import Frame

FACTOR = 1.4
LEAST_FRAMES = 8
MATERIAL_SHARE = 0.05  # of the largest rate so far: the last steps of a decay jump by large factors of next to nothing


class LrStep(Detector):
    name: ClassVar[str] = "lr_step"
    kinds: ClassVar[tuple[str, ...]] = (CHANNEL,)
    reads: ClassVar[tuple[str, ...]] = ("lr",)

    def __init__(self) -> None:
        self._last: list[tuple[int, float]] = []
        self._peak = 0.0

    def update(self, frame: Frame) -> list[Alarm]:
        lr = frame.get("lr")
        if lr is None or not math.isfinite(lr):
            return []
        alarms: list[Alarm] = []
        last = self._last
        expected = expected_lr(last, frame.step)
        self._peak = max(self._peak, float(lr))
        if len(last) >= LEAST_FRAMES and expected > 0 and lr > 0:
            factor = lr / expected
            material = abs(lr - expected) > MATERIAL_SHARE * self._peak
            if material and (factor > FACTOR or factor < 1 / FACTOR):
                alarms.append(
                    Alarm(
                        detector=self.name,
                        kind=CHANNEL,
                        signal="lr",
                        attempt=frame.attempt,
                        step=frame.step,
                        onset_step=frame.step,
                        score=abs(math.log(factor)),
                        value=float(lr),
                        baseline=expected,
                        message=f"learning rate {lr:.3g} against {expected:.3g} of its recent course",
                    )
                )
                last.clear()
        last.append((frame.step, float(lr)))
        if len(last) > LEAST_FRAMES:
            del last[0]
        return alarms


def expected_lr(points: list[tuple[int, float]], step: int) -> float:
    """The straight line through the first and last of the points, carried to `step`; NaN when there are too few."""
    if len(points) < 2:
        return math.nan
    (first_step, first), (last_step, last) = points[0], points[-1]
    if last_step == first_step:
        return last
    return last + (last - first) / (last_step - first_step) * (step - last_step)


DETECTOR = LrStep
