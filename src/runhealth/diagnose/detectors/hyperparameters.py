"""A setting of the optimizer goes from one value to another at once: within a run, or at a resume.

Betas are compared by the time they average over, 1 / (1 - beta). A slow schedule is no jump: a change must be by a
factor of 1.25 and four times as large as the one before. What a jump did shows in `update_jump`.
"""

import math
from typing import ClassVar

import numpy as np

from runhealth.diagnose.detector import Detector
from runhealth.diagnose.findings import Alarm, Severity
from runhealth.diagnose.frame_block import FrameBlock
from runhealth.diagnose.frames import Frame

LABELS = {"beta1": "beta1", "beta2": "beta2", "weight_decay": "the weight decay", "adam_eps": "Adam's epsilon"}
BETAS = ("beta1", "beta2")
FACTOR, LOUD_FACTOR = 1.25, 1.5
OFF_COURSE = 4.0
MATERIAL_SHARE = 0.05  # of the largest value so far: the last steps of a decay go by large factors of next to nothing


class Hyperparameters(Detector):
    name: ClassVar[str] = "hyperparameters"
    kinds: ClassVar[tuple[str, ...]] = ("hyperparameter_changed",)
    reads: ClassVar[tuple[str, ...]] = tuple(LABELS)
    replay: ClassVar[bool] = False

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self._largest: dict[str, float] = {}
        self._pace: dict[str, float] = {}  # the last change that was no jump

    def update(self, frame: Frame) -> list[Alarm]:
        alarms = []
        for signal in LABELS:
            value = frame.get(signal)
            if value is None or not math.isfinite(value):
                continue
            before = self._last.get(signal)
            self._last[signal] = float(value)
            now = _measured(signal, value)
            self._largest[signal] = max(self._largest.get(signal, 0.0), abs(now))
            if before is not None and before != value:
                alarm = self._change(frame, signal, before, float(value))
                if alarm is not None:
                    alarms.append(alarm)
        return alarms

    def update_block(self, block: FrameBlock) -> list[tuple[int, Alarm]]:
        changes = np.zeros(len(block), dtype=np.bool_)
        for signal in LABELS:
            column = block.get(signal)
            if column is not None:
                rows = np.flatnonzero(np.isfinite(column.values))
                values = column.values[rows]
                changes[rows] |= values != np.concatenate([[self._last.get(signal, math.nan)], values[:-1]])
        return self.update_rows(block, np.flatnonzero(changes).tolist())

    def _change(self, frame: Frame, signal: str, before: float, value: float) -> Alarm | None:
        old, new = _measured(signal, before), _measured(signal, value)
        size = abs(new - old)
        factor = max(old, new) / min(old, new) if min(old, new) > 0 else math.inf
        jumps = factor > FACTOR and size > MATERIAL_SHARE * self._largest[signal]
        if not jumps or size <= OFF_COURSE * self._pace.get(signal, 0.0):
            self._pace[signal] = size
            return None
        where = "at the resume at step" if frame.new_attempt else "at step"
        message = f"{LABELS[signal]} went from {before:.6g} to {value:.6g} {where} {frame.step:,}"
        severity = Severity.WARNING if factor >= LOUD_FACTOR else Severity.INFO
        return self.fact(
            frame, "hyperparameter_changed", signal, message, value=value, baseline=before, severity=severity
        )


def _measured(signal: str, value: float) -> float:
    return 1.0 - value if signal in BETAS else value


DETECTOR = Hyperparameters
