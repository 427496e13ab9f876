"""No progress: a row came over half an hour, and 50 times the usual time, after the one before it in its attempt."""

from typing import ClassVar

from runhealth.diagnose.detector import Detector
from runhealth.diagnose.findings import Alarm, Severity
from runhealth.diagnose.frames import Frame
from runhealth.diagnose.robust import Baseline

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


DETECTOR = Hang
