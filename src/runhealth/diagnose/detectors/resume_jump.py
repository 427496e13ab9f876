"""The loss right after a resume is off the trend that led to it.

Medians of up to 16 rows are compared: with the same steps of the attempt before where those were done twice, else with
the last rows before the resume, whose slope is carried on. Off by 5 % and five standard errors counts. A run that
begins again where the first one began, or at its loss, is a new run and no jump. After data that were seen before the
loss is lower, and back at its trend after the next resume: `data_repeated` says so where positions are logged.
"""

import math
from collections import deque
from typing import ClassVar

from runhealth.diagnose.detector import Detector
from runhealth.diagnose.findings import Alarm, Severity
from runhealth.diagnose.frame_block import FrameBlock
from runhealth.diagnose.frames import Frame
from runhealth.diagnose.robust import mad_sigma, median

ROWS = 16
LEAST_ROWS = 4
KEEP = 4096
EFFECT = math.log(1.05)
ERRORS = 5.0
NEW_RUN_STEPS = 10
LIKE_NEW = 0.9


class ResumeJump(Detector):
    name: ClassVar[str] = "resume_jump"
    kinds: ClassVar[tuple[str, ...]] = ("resume_jump",)
    reads: ClassVar[tuple[str, ...]] = ("loss",)
    replay: ClassVar[bool] = False

    def __init__(self) -> None:
        self._points: deque[tuple[int, float]] = deque(maxlen=KEEP)
        self._old: list[tuple[int, float]] = []  # the attempt before, while the new one is young
        self._new: list[tuple[int, float]] = []
        self._start: float | None = None
        self._attempt: int | None = None
        self._repeated = False
        self._was_repeated = False
        self._first: int | None = None
        self._positions: deque[tuple[int, float]] = deque(maxlen=KEEP)

    def update(self, frame: Frame) -> list[Alarm]:
        loss = frame.loss
        if self._attempt is not None and frame.attempt != self._attempt:
            self._old, self._new = list(self._points), []
            position = frame.get("consumed_samples")
            # data seen before are told by positions; the loss is then low for a known reason
            self._was_repeated = self._repeated
            self._repeated = self._goes_back(frame.step, position)
            while self._points and self._points[-1][0] >= frame.step:
                self._points.pop()
            if self._first is not None and frame.step <= self._first + NEW_RUN_STEPS:
                self._old = []
        self._attempt = frame.attempt
        self._first = frame.step if self._first is None else self._first
        if (consumed := frame.get("consumed_samples")) is not None:
            self._positions.append((frame.step, float(consumed)))
        if loss is None or not math.isfinite(loss) or loss <= 0:
            return []
        point = (frame.step, math.log(loss))
        self._start = point[1] if self._start is None else self._start
        self._points.append(point)
        if not self._old:
            return []
        self._new.append(point)
        if len(self._new) < ROWS:
            return []
        alarms = self._compare(frame)
        self._old, self._new = [], []
        return alarms

    def update_block(self, block: FrameBlock) -> list[tuple[int, Alarm]]:
        found: list[tuple[int, Alarm]] = []
        row = 0
        while row < len(block) and (self._old or self._attempt != block.attempt):
            found.extend(self.update_rows(block, (row,)))
            row += 1
        if row < len(block):
            rest = block.part(row)
            positions, logs = rest.get("consumed_samples"), rest.log_loss
            if positions is not None:
                self._positions.extend(rest.pairs(positions, KEEP))
            if logs is not None:
                points = rest.pairs(logs, KEEP)
                self._start = float(logs.values[logs.present][0]) if self._start is None else self._start
                self._points.extend(points)
        return found

    def _goes_back(self, step: int, position: float | None) -> bool:
        """Whether the data position is lower than it was at this step, or at the last one before it."""
        before = next((value for at, value in reversed(self._positions) if at < step), None)
        return position is not None and before is not None and position < before

    def _compare(self, frame: Frame) -> list[Alarm]:
        first = self._new[0][0]
        again = dict(self._old)
        shared = [(again[step], y) for step, y in self._new if step in again]
        before = [y for step, y in self._old if step < first][-2 * ROWS :]
        if len(shared) >= LEAST_ROWS:
            change = [new - old for old, new in shared]
            off = median(change)
            sigma = mad_sigma(sorted(change), off)
            count = len(change)
        elif len(before) >= 2 * LEAST_ROWS:
            half = len(before) // 2
            slope = (median(before[half:]) - median(before[:half])) / half
            new = [y for _, y in self._new]
            level = median(before[half:]) + min(0.0, slope) * (half / 2 + len(new) / 2)
            off = median(new) - level
            off = min(off, median(new) - median(before[half:])) if off < 0 else off
            sigma = max(mad_sigma(sorted(before[half:]), median(before[half:])), mad_sigma(sorted(new), median(new)))
            count = min(half, len(new))
        else:
            return []
        error = 1.25 * sigma * math.sqrt(2 / count)
        now = median([y for _, y in self._new])
        if abs(off) < max(EFFECT, ERRORS * error) or self._start is None or now >= self._start + math.log(LIKE_NEW):
            return []
        if self._repeated if off < 0 else self._was_repeated:
            return []
        step = self._new[0][0]
        way = "over" if off > 0 else "under"
        why = (
            "weights, optimizer state or data order were not restored as they were"
            if off > 0
            else "it may see samples again that it has seen before"
        )
        message = f"after the resume at step {step:,} the loss is {abs(math.expm1(off)):.0%} {way} its trend: {why}"
        return [
            self.fact(
                frame,
                "resume_jump",
                "loss",
                message,
                onset=step,
                value=math.exp(now),
                baseline=math.exp(now - off),
                severity=Severity.WARNING,
            )
        ]


DETECTOR = ResumeJump
