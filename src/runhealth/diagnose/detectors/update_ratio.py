"""The last update's norm over the parameters' norm: over twice its trailing median. A channel, no finding by itself.

It moves the same step as a wrong learning rate or a lost optimizer state, before the loss; bad data leave it near
normal (in 70 of 71 and 0 of 63 labelled spikes of the project's bench).
"""

from typing import ClassVar

from runhealth.diagnose.frame_block import FrameBlock, Signal
from runhealth.diagnose.frames import Frame
from runhealth.diagnose.over_habit import OverHabit
from runhealth.diagnose.robust import Baseline
from runhealth.diagnose.windows import Ahead, settled
from runhealth.storage.blocks import Floats

FACTOR = 2.0


class UpdateRatio(OverHabit):
    name: ClassVar[str] = "update_ratio"
    reads: ClassVar[tuple[str, ...]] = ("update_ratio",)
    signal: ClassVar[str] = "update_ratio"
    above: ClassVar[float] = 0.0

    def __init__(self) -> None:
        super().__init__(Baseline(64, least=16))

    def value(self, frame: Frame) -> float | None:
        return frame.get("update_ratio")

    def column(self, block: FrameBlock) -> Signal | None:
        return block.get("update_ratio")

    def usual(self) -> float:
        return self._habit.center

    def limit(self, usual: float) -> float:
        return FACTOR * usual

    def first_over(self, values: Floats) -> int:
        if not settled(self._habit):
            return 0
        if values.max() <= FACTOR * min(float(values.min()), min(self._habit.values)):
            return len(values)
        over = values > FACTOR * Ahead(self._habit, values).center()
        return int(over.argmax()) if over.any() else len(values)

    def message(self, value: float, usual: float) -> str:
        return f"update ratio {value:.3g}, {value / usual:.1f} x its median"


DETECTOR = UpdateRatio
