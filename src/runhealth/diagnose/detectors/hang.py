"""No progress: a row came over half an hour, and 50 times the usual time, after the one before it in its attempt."""

from typing import ClassVar

import numpy as np

from runhealth.diagnose.detector import Detector
from runhealth.diagnose.findings import Alarm, Severity
from runhealth.diagnose.frame_block import FrameBlock
from runhealth.diagnose.frames import Frame
from runhealth.diagnose.robust import Baseline
from runhealth.diagnose.windows import take

LEAST_S = 1800.0
FACTOR = 50.0


class Hang(Detector):
    name: ClassVar[str] = "hang"
    kinds: ClassVar[tuple[str, ...]] = ("hang",)
    reads: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        self._gap = Baseline(64, least=8)
        self._last_ns = 0

    def update(self, frame: Frame) -> list[Alarm]:
        last, self._last_ns = self._last_ns, frame.ts_ns
        if not last or frame.ts_ns <= last or frame.new_attempt:
            return []
        seconds = (frame.ts_ns - last) / 1e9
        usual = self._gap.center if self._gap.ready else float("inf")
        if seconds < LEAST_S or seconds < FACTOR * usual:
            self._gap.push(seconds)
            return []
        message = f"no row for {seconds / 60:,.0f} minutes before step {frame.step:,}; rows came every {usual:.3g} s"
        return [self.fact(frame, "hang", "", message, value=seconds, baseline=usual, severity=Severity.WARNING)]

    def update_block(self, block: FrameBlock) -> list[tuple[int, Alarm]]:
        times = block.ts_ns
        before = np.concatenate([[self._last_ns], times[:-1]])
        rows = np.flatnonzero((before != 0) & (times > before))
        seconds = (times[rows] - before[rows]) / 1e9
        found: list[tuple[int, Alarm]] = []
        at = 0
        for late in [*np.flatnonzero(seconds >= LEAST_S).tolist(), len(rows)]:
            take(self._gap, seconds[at:late])
            if late < len(rows):
                row = int(rows[late])
                self._last_ns = int(before[row])
                found.extend(self.update_rows(block, (row,)))
            at = late + 1
        self._last_ns = int(times[-1])
        return found


DETECTOR = Hang
