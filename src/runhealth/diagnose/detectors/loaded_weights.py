"""The weights after a load are not those that were saved.

The norm of the parameters moves slowly. In the first frame of an attempt it must go on where the step before left off
(or be what it was when the same step was done the first time): off by 0.3 %, and by ten times what it usually moves in
a step, tells of a damaged or wrong checkpoint, even where the loss hardly shows it.
"""

import itertools
import math
from collections import deque
from typing import ClassVar

import numpy as np

from runhealth.diagnose.detector import Detector
from runhealth.diagnose.findings import Alarm, Severity
from runhealth.diagnose.frame_block import FrameBlock
from runhealth.diagnose.frames import Frame
from runhealth.diagnose.robust import median

KEEP = 1024
LEAST = 8
OFF = 0.003
MOVES = 10.0


class LoadedWeights(Detector):
    name: ClassVar[str] = "loaded_weights"
    kinds: ClassVar[tuple[str, ...]] = ("checkpoint_corrupt",)
    reads: ClassVar[tuple[str, ...]] = ("weight_norm",)
    replay: ClassVar[bool] = False

    def __init__(self) -> None:
        self._points: deque[tuple[int, float]] = deque(maxlen=KEEP)
        self._attempt: int | None = None
        self._pending = False

    def update(self, frame: Frame) -> list[Alarm]:
        norm = frame.get("weight_norm")
        if self._attempt is not None and frame.attempt != self._attempt:
            self._pending = True
        self._attempt = frame.attempt
        if norm is None or not math.isfinite(norm) or norm <= 0:
            return []
        points = self._points
        alarms: list[Alarm] = []
        if self._pending:
            self._pending = False
            same = next((value for step, value in reversed(points) if step == frame.step), None)
            while points and points[-1][0] >= frame.step:
                points.pop()
            alarms = self._compare(frame, float(norm), same)
        points.append((frame.step, float(norm)))
        return alarms

    def update_block(self, block: FrameBlock) -> list[tuple[int, Alarm]]:
        norm = block.get("weight_norm")
        if self._pending or self._attempt != block.attempt:
            return super().update_block(block)
        if norm is not None:
            rows = np.flatnonzero(np.isfinite(norm.values) & (norm.values > 0))[-KEEP:]
            self._points.extend(zip(block.steps[rows].tolist(), norm.values[rows].tolist(), strict=True))
        return []

    def _compare(self, frame: Frame, norm: float, same: float | None) -> list[Alarm]:
        points = list(self._points)[-33:]
        if len(points) <= LEAST:
            return []
        moves = [abs(b - a) / max(1, t - s) for (s, a), (t, b) in itertools.pairwise(points)]
        step, last = points[-1]
        usual = median(moves)
        expected = last if same is None else same
        allowed = MOVES * usual * (max(1, frame.step - step) if same is None else 1)
        off = abs(norm - expected)
        if off <= OFF * expected or off <= allowed:
            return []
        message = (
            f"the norm of the weights is {norm:.5g} after the load at step {frame.step:,} where it had been "
            f"{expected:.5g}: the checkpoint does not hold what was saved, or another one was loaded"
        )
        return [
            self.fact(
                frame,
                "checkpoint_corrupt",
                "weight_norm",
                message,
                value=norm,
                baseline=expected,
                severity=Severity.WARNING,
            )
        ]


DETECTOR = LoadedWeights
