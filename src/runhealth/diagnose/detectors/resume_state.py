"""What a resume failed to restore: the position in the data, the learning rate, the loss scale.

The first frames of a new attempt are compared with what the earlier attempts had reached before that step.
"""

import itertools
import math
from collections import deque
from dataclasses import replace
from typing import ClassVar

import numpy as np

from runhealth.diagnose.detector import Detector
from runhealth.diagnose.findings import Alarm, Severity
from runhealth.diagnose.frame_block import FrameBlock, Signal
from runhealth.diagnose.frames import Frame
from runhealth.storage.blocks import Floats, Ints

KEEP = 2048
LEAST = 4
LR_FACTOR = 1.4
SCALE_DOUBLINGS = 3.5
DATA_STEPS = 2.0  # a position so many steps back is more than an off-by-one
WARM_UP_ROWS = 8
RESTART_FROM, RESTART_UP_TO = 0.5, 1.1  # of the highest rate so far: where cycles begin
ENDED = 0.02  # of the highest rate: a schedule that has come so far down is over
LAST_RATES = 8
CYCLE_STEPS, CYCLE_SHARE = 2, 0.02  # how exactly the next cycle has to come
WAIT_FRAMES = 4  # frames after the restart in which the signals have to show up

Point = tuple[int, float]


class ResumeState(Detector):
    name: ClassVar[str] = "resume_state"
    kinds: ClassVar[tuple[str, ...]] = ("data_repeated", "data_restarted", "lr_discontinuity", "loss_scale_reset")
    replay: ClassVar[bool] = False
    reads: ClassVar[tuple[str, ...]] = ("lr", "loss_scale", "consumed_samples")

    def __init__(self) -> None:
        self._points: dict[str, deque[Point]] = {
            name: deque(maxlen=KEEP) for name in ("lr", "loss_scale", "consumed_samples")
        }
        self._pending: set[str] = set()
        self._waited = 0
        self._attempt: int | None = None
        self._peak = 0.0  # of the learning rate
        self._cycles: list[int] = []  # the last two steps at which it went back to its peak within an attempt
        self._first_step: int = 0
        self._low: Alarm | None = None  # a rate under its schedule: does it warm up again?
        self._rates: list[float] = []

    def update(self, frame: Frame) -> list[Alarm]:
        alarms: list[Alarm] = []
        if self._attempt is None:
            self._first_step = frame.step
        if self._attempt is not None and frame.attempt != self._attempt:
            alarms.extend(self._judge_low())
            self._pending = set(self._points)
            self._waited = 0
            self._cycles = [step for step in self._cycles if step < frame.step]
            for points in self._points.values():
                while points and points[-1][0] >= frame.step:
                    points.pop()
        self._attempt = frame.attempt
        if self._low is not None and "lr" in frame.values:
            self._rates.append(float(frame.values["lr"]))
            if len(self._rates) >= WARM_UP_ROWS:
                alarms.extend(self._judge_low())
        for name, points in self._points.items():
            value = frame.get(name)
            if value is None or not math.isfinite(value):
                continue
            if name in self._pending:
                self._pending.discard(name)
                if len(points) >= LEAST:
                    compare = {"lr": self._lr, "loss_scale": self._scale, "consumed_samples": self._data}[name]
                    alarms.extend(compare(frame, list(points), float(value)))
                if name == "consumed_samples":
                    points.clear()
            elif name == "lr" and points:
                self._note_cycle(frame.step, points[-1][1], float(value), self._peak)
            if name == "lr":
                self._peak = max(self._peak, float(value))
            points.append((frame.step, float(value)))
        if self._pending:
            self._waited += 1
            if self._waited >= WAIT_FRAMES:
                self._pending.clear()
        return alarms

    def update_block(self, block: FrameBlock) -> list[tuple[int, Alarm]]:
        found: list[tuple[int, Alarm]] = []
        row = 0
        while row < len(block) and (self._pending or self._low is not None or self._attempt != block.attempt):
            found.extend(self.update_rows(block, (row,)))
            row += 1
        if row < len(block):
            rest = block.part(row)
            for name, points in self._points.items():
                if (signal := rest.get(name)) is not None:
                    finite = Signal(signal.values, np.isfinite(signal.values))
                    if name == "lr" and finite.present.any():
                        self._note_rates(rest.steps[finite.present], finite.values[finite.present])
                    points.extend(rest.pairs(finite, KEEP))
        return found

    def _lr(self, frame: Frame, points: list[Point], lr: float) -> list[Alarm]:
        (s0, v0), (s1, v1) = points[-min(8, len(points))], points[-1]
        expected = v1 + ((v1 - v0) / (s1 - s0) * (frame.step - s1) if s1 > s0 else 0.0)
        largest = max(v for _, v in points)
        if expected <= 0 or lr <= 0 or abs(lr - expected) < 0.02 * largest:
            return []
        factor = lr / expected
        if 1 / LR_FACTOR < factor < LR_FACTOR:
            return []
        alarm = self._alarm(
            frame,
            "lr_discontinuity",
            "lr",
            lr,
            expected,
            f"the learning rate resumes at {lr:.3g} where its schedule had led to {expected:.3g}: the "
            "schedule was not restored",
        )
        if factor < 1:
            self._low, self._rates = alarm, [lr]
            return []
        if why := self._begins_anew(frame.step, lr, [v for _, v in points[-LAST_RATES:]]):
            message = f"the learning rate starts again at {lr:.3g} after the resume: {why}"
            return [replace(alarm, message=message, severity=Severity.INFO)]
        return [alarm]

    def _begins_anew(self, step: int, lr: float, last: list[float]) -> str:
        """Why a rate that is back at its peak may be so on purpose; empty if nothing says so."""
        peak = self._peak
        if not RESTART_FROM * peak <= lr <= RESTART_UP_TO * peak:
            return ""
        if last[-1] <= ENDED * peak or (len(last) == LAST_RATES and max(last) == min(last) <= peak / 2):
            return "its schedule had come to its end before"
        if self._cycles:
            cycle = self._cycles[-1] - (self._cycles[-2] if len(self._cycles) > 1 else self._first_step)
            near = max(CYCLE_STEPS, CYCLE_SHARE * cycle)
            if any(abs(step - self._cycles[-1] - times * cycle) <= near for times in (1, 2)):
                return f"the next of its cycles, the last of which began at step {self._cycles[-1]:,}"
        return ""

    def _note_cycle(self, step: int, before: float, lr: float, peak: float) -> None:
        """A rate that returns to its peak from one row to the next within an attempt starts a cycle."""
        returns = before <= RESTART_FROM * peak <= lr <= RESTART_UP_TO * peak
        if returns and lr > LR_FACTOR * before:
            self._cycles = [*self._cycles[-1:], step]

    def _note_rates(self, steps: Ints, rates: Floats) -> None:
        """`_note_cycle` of rows that follow each other in an attempt."""
        known = self._points["lr"]
        before = np.concatenate([[known[-1][1] if known else rates[0]], rates[:-1]])
        peaks = np.maximum.accumulate(np.concatenate([[self._peak], rates]))
        for i in np.flatnonzero(rates > LR_FACTOR * before).tolist():
            self._note_cycle(int(steps[i]), float(before[i]), float(rates[i]), float(peaks[i]))
        self._peak = float(peaks[-1])

    def finish(self) -> list[Alarm]:
        return self._judge_low()

    def _judge_low(self) -> list[Alarm]:
        """A rate that resumes too low is told once its next rows show whether it warms up again on purpose."""
        alarm, rates, self._low = self._low, self._rates, None
        if alarm is None:
            return []
        if len(rates) >= WARM_UP_ROWS and all(b > a for a, b in itertools.pairwise(rates)):
            message = f"the learning rate warms up again after the resume, from {alarm.value:.3g}"
            return [replace(alarm, message=message, severity=Severity.INFO)]
        return [alarm]

    def _scale(self, frame: Frame, points: list[Point], scale: float) -> list[Alarm]:
        before = points[-1][1]
        if before <= 0 or scale <= 0 or abs(math.log2(scale / before)) < SCALE_DOUBLINGS:
            return []
        return [
            self._alarm(
                frame,
                "loss_scale_reset",
                "loss_scale",
                scale,
                before,
                f"the loss scale resumes at {scale:g} and had been {before:g}: the scaler was not restored",
            )
        ]

    def _data(self, frame: Frame, points: list[Point], position: float) -> list[Alarm]:
        (s0, v0), (s1, v1) = points[-min(64, len(points))], points[-1]
        a_step = (v1 - v0) / (s1 - s0) if s1 > s0 else 0.0
        if a_step <= 0:
            return []
        expected = v1 + a_step * (frame.step - s1)
        if expected - position <= DATA_STEPS * a_step:
            return []
        restarted = position <= DATA_STEPS * a_step
        return [
            self._alarm(
                frame,
                "data_restarted" if restarted else "data_repeated",
                "consumed_samples",
                position,
                expected,
                f"the data {'start again from the beginning' if restarted else 'go back'}: position {position:,.0f} at "
                f"the resume, {expected:,.0f} expected; samples seen before come again and the loss is too low",
            )
        ]

    def _alarm(self, frame: Frame, kind: str, signal: str, value: float, baseline: float, message: str) -> Alarm:
        return Alarm(
            detector=self.name,
            kind=kind,
            signal=signal,
            attempt=frame.attempt,
            step=frame.step,
            onset_step=frame.step,
            score=1.0,
            value=value,
            baseline=baseline,
            message=message,
        )


DETECTOR = ResumeState
