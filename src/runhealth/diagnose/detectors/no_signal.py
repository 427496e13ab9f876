"""Nothing is being trained: loss and gradient norm are exactly 0 from the first step on."""

from typing import ClassVar

import numpy as np

from runhealth.diagnose.detector import Detector
from runhealth.diagnose.findings import Alarm
from runhealth.diagnose.frame_block import FrameBlock
from runhealth.diagnose.frames import Frame

FRAMES = 10


class NoSignal(Detector):
    name: ClassVar[str] = "no_signal"
    kinds: ClassVar[tuple[str, ...]] = ("no_training_signal",)
    reads: ClassVar[tuple[str, ...]] = ("loss",)

    def __init__(self) -> None:
        self._zeros = 0
        self._first: int | None = None
        self._over = False

    def update(self, frame: Frame) -> list[Alarm]:
        loss, norm = frame.loss, frame.get("grad_norm")
        if self._over or loss is None or norm is None:
            return []
        if loss != 0.0 or norm != 0.0:
            self._over = True
            return []
        self._first = frame.step if self._first is None else self._first
        self._zeros += 1
        if self._zeros < FRAMES:
            return []
        self._over = True
        return [
            Alarm(
                detector=self.name,
                kind="no_training_signal",
                signal="loss",
                attempt=frame.attempt,
                step=frame.step,
                onset_step=self._first,
                score=1.0,
                value=0.0,
                baseline=0.0,
                message="loss and gradient norm are exactly 0 since the first step: nothing is being trained",
            )
        ]

    def update_block(self, block: FrameBlock) -> list[tuple[int, Alarm]]:
        loss, norm = block.loss, block.get("grad_norm")
        if self._over or loss is None or norm is None:
            return []
        rows = np.flatnonzero(loss.present & norm.present)
        moves = (loss.values[rows] != 0.0) | (norm.values[rows] != 0.0)
        told_by = int(moves.argmax()) if moves.any() else len(rows)
        return self.update_rows(block, rows[: min(told_by + 1, FRAMES)].tolist())


DETECTOR = NoSignal
