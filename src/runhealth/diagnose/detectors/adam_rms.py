"""The RMS of g/sqrt(v) goes far over its habit: the second moment is behind the gradient. A channel, no finding by
itself: alone it is a false alarm 49 times in 10,000 healthy steps of the project's bench."""

import math
from typing import ClassVar

from runhealth.diagnose.detector import CHANNEL, Detector
from runhealth.diagnose.findings import Alarm
from runhealth.diagnose.frames import Frame
from runhealth.diagnose.robust import Baseline

LEAST_RMS = 1.5
OVER_HABIT = 1.5
REARM_FRAMES = 32


class AdamRms(Detector):
    name: ClassVar[str] = "adam_rms"
    kinds: ClassVar[tuple[str, ...]] = (CHANNEL,)
    reads: ClassVar[tuple[str, ...]] = ("adam_rms",)

    def __init__(self) -> None:
        self._rms = Baseline(128, least=16)
        self._since = REARM_FRAMES

    def update(self, frame: Frame) -> list[Alarm]:
        value = frame.largest("adam_rms")
        self._since += 1
        if value is None or not math.isfinite(value):
            return []
        usual = self._rms.quantile(0.98) if self._rms.ready else math.inf
        self._rms.push(float(value))
        if value <= max(LEAST_RMS, OVER_HABIT * usual) or self._since < REARM_FRAMES:
            return []
        self._since = 0
        return [
            Alarm(
                detector=self.name,
                kind=CHANNEL,
                signal="adam_rms",
                attempt=frame.attempt,
                step=frame.step,
                onset_step=frame.step,
                score=value / usual,
                value=float(value),
                baseline=usual,
                message=f"RMS of g/sqrt(v) {value:.3g}, 98 % of steps under {usual:.3g}",
            )
        ]


DETECTOR = AdamRms
