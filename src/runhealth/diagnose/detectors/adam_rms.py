"""The RMS of g/sqrt(v) goes far over its habit: the second moment is behind the gradient. A channel, no finding by
itself: alone it is a false alarm 49 times in 10,000 healthy steps of the project's bench."""

from typing import ClassVar

import numpy as np

from runhealth.diagnose.frame_block import FrameBlock, Signal
from runhealth.diagnose.frames import Frame
from runhealth.diagnose.over_habit import OverHabit
from runhealth.diagnose.robust import Baseline
from runhealth.diagnose.windows import Ahead, settled
from runhealth.storage.blocks import Floats

LEAST_RMS = 1.5
OVER_HABIT = 1.5
MOST_SHARE = 0.98


class AdamRms(OverHabit):
    name: ClassVar[str] = "adam_rms"
    reads: ClassVar[tuple[str, ...]] = ("adam_rms",)
    signal: ClassVar[str] = "adam_rms"

    def __init__(self) -> None:
        super().__init__(Baseline(128, least=16))

    def value(self, frame: Frame) -> float | None:
        return frame.largest("adam_rms")

    def column(self, block: FrameBlock) -> Signal | None:
        return block.largest("adam_rms")

    def usual(self) -> float:
        return self._habit.quantile(MOST_SHARE)

    def limit(self, usual: float) -> float:
        return max(LEAST_RMS, OVER_HABIT * usual)

    def first_over(self, values: Floats) -> int:
        over = values > LEAST_RMS
        if over.any() and settled(self._habit):
            over &= values > np.maximum(LEAST_RMS, OVER_HABIT * Ahead(self._habit, values).quantile(MOST_SHARE))
        return int(over.argmax()) if over.any() else len(values)

    def message(self, value: float, usual: float) -> str:
        return f"RMS of g/sqrt(v) {value:.3g}, 98 % of steps under {usual:.3g}"


DETECTOR = AdamRms
