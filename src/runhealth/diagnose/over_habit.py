"""A channel that tells when one number of a row is over a limit that its own last values set.

Detectors of this shape differ in what they read, in the limit and in the words.
"""

import math
from abc import abstractmethod
from typing import ClassVar

import numpy as np

from runhealth.diagnose.detector import CHANNEL, Detector
from runhealth.diagnose.findings import Alarm
from runhealth.diagnose.frame_block import FrameBlock, Signal
from runhealth.diagnose.frames import Frame
from runhealth.diagnose.robust import Baseline
from runhealth.diagnose.windows import quiet_stretches
from runhealth.storage.blocks import Floats

REARM_FRAMES = 32


class OverHabit(Detector):
    """`signal` is read; values at or under `above` are no measurement. Every value enters the habit."""

    kinds: ClassVar[tuple[str, ...]] = (CHANNEL,)
    signal: ClassVar[str]
    above: ClassVar[float] = -math.inf

    def __init__(self, habit: Baseline) -> None:
        self._habit = habit
        self._since = REARM_FRAMES

    @abstractmethod
    def value(self, frame: Frame) -> float | None:
        """What is measured in a row."""

    @abstractmethod
    def column(self, block: FrameBlock) -> Signal | None:
        """`value` of each row."""

    @abstractmethod
    def usual(self) -> float:
        """What is usual, out of a habit that is ready."""

    @abstractmethod
    def limit(self, usual: float) -> float:
        """What a value must exceed."""

    @abstractmethod
    def first_over(self, values: Floats) -> int:
        """The first of the next values that may be over the limit; their number if none is."""

    @abstractmethod
    def message(self, value: float, usual: float) -> str: ...

    def update(self, frame: Frame) -> list[Alarm]:
        value = self.value(frame)
        self._since += 1
        if value is None or not math.isfinite(value) or value <= self.above:
            return []
        usual = self.usual() if self._habit.ready else math.inf
        self._habit.push(float(value))
        if value <= self.limit(usual) or self._since < REARM_FRAMES:
            return []
        self._since = 0
        return [
            Alarm(
                detector=self.name,
                kind=CHANNEL,
                signal=self.signal,
                attempt=frame.attempt,
                step=frame.step,
                onset_step=frame.step,
                score=value / usual,
                value=float(value),
                baseline=usual,
                message=self.message(value, usual),
            )
        ]

    def update_block(self, block: FrameBlock) -> list[tuple[int, Alarm]]:
        column = self.column(block)
        if column is None:
            self._since += len(block)
            return []
        rows = np.flatnonzero(np.isfinite(column.values) & (column.values > self.above))
        found: list[tuple[int, Alarm]] = []
        at = 0
        for _, stop, loud in quiet_stretches(self._habit, column.values[rows], self.first_over):
            if loud:
                row = int(rows[stop])
                self._since += row - at
                found.extend(self.update_rows(block, (row,)))
                at = row + 1
        self._since += len(block) - at
        return found
