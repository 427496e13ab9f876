"""A resume that did not restore the optimizer.

In the first three frames of an attempt Adam's second moment is under half of what it was at that step, or updates are
over twice as large as before while the learning rate is not: fresh moments make the first updates far too large.
"""

import math
from typing import ClassVar

import numpy as np

from runhealth.diagnose.detector import Detector
from runhealth.diagnose.findings import Alarm
from runhealth.diagnose.frame_block import FrameBlock
from runhealth.diagnose.frames import Frame
from runhealth.diagnose.robust import Baseline
from runhealth.diagnose.windows import push

FRAMES = 3
SHRUNK = 0.5
LARGE = 2.0
SIGNALS = ("second_moment_norm", "update_ratio", "lr")


class OptimizerLost(Detector):
    name: ClassVar[str] = "optimizer_lost"
    kinds: ClassVar[tuple[str, ...]] = ("optimizer_state_lost",)
    reads: ClassVar[tuple[str, ...]] = ("second_moment_norm", "update_ratio")
    replay: ClassVar[bool] = False

    def __init__(self) -> None:
        self._habits = {signal: Baseline(32, least=8) for signal in SIGNALS}
        self._attempt: int | None = None
        self._young = 0  # frames of a resumed attempt that are still looked at
        self._first = 0

    def update(self, frame: Frame) -> list[Alarm]:
        if self._attempt is not None and frame.attempt != self._attempt:
            self._young, self._first = FRAMES, frame.step
        self._attempt = frame.attempt
        values = {s: float(v) for s in SIGNALS if (v := frame.get(s)) is not None and math.isfinite(v)}
        if self._young:
            self._young -= 1
            return self._compare(frame, values)
        for signal, value in values.items():
            self._habits[signal].push(value)
        return []

    def update_block(self, block: FrameBlock) -> list[tuple[int, Alarm]]:
        if self._attempt != block.attempt:
            return super().update_block(block)
        found: list[tuple[int, Alarm]] = []
        start = 0
        while self._young and start < len(block):
            found.extend(self.update_rows(block, (start,)))
            start += 1
        for signal in SIGNALS:
            column = block.get(signal)
            if column is not None:
                values = column.values[start:]
                push(self._habits[signal], values[np.isfinite(values)])
        return found

    def _compare(self, frame: Frame, values: dict[str, float]) -> list[Alarm]:
        usual = {s: self._habits[s].center for s in values if self._habits[s].ready and self._habits[s].center > 0}
        moment, ratio, rate = (values[s] / usual[s] if s in usual else None for s in SIGNALS)
        what = ""
        if moment is not None and moment < SHRUNK:
            what = f"Adam's second moment is {moment:.2g} x what it was"
            signal = "second_moment_norm"
        elif ratio is not None and ratio > LARGE * max(1.0, rate or 1.0):
            what = f"updates are {ratio:.1f} x as large as before, at an unchanged learning rate"
            signal = "update_ratio"
        if not what:
            return []
        self._young = 0
        message = f"after the resume at step {self._first:,} {what}: the optimizer was not restored"
        return [
            self.fact(
                frame,
                "optimizer_state_lost",
                signal,
                message,
                onset=self._first,
                value=values[signal],
                baseline=usual[signal],
            )
        ]


DETECTOR = OptimizerLost
