"""What a resume failed to restore: the position in the data, the learning rate, the loss scale.

The first frames of a new attempt are compared with what the earlier attempts had reached before that step.
"""

import itertools
import math
from collections import deque
from dataclasses import replace
from typing import ClassVar

from runhealth.diagnose.detector import Detector
from runhealth.diagnose.findings import Alarm, Severity
from runhealth.diagnose.frames import Frame

KEEP = 2048
LEAST = 4
LR_FACTOR = 1.4
SCALE_DOUBLINGS = 3.5
DATA_STEPS = 2.0  # a position so many steps back is more than an off-by-one
WARM_UP_ROWS = 8
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
        self._low: Alarm | None = None  # a rate under its schedule: does it warm up again?
        self._rates: list[float] = []

    def update(self, frame: Frame) -> list[Alarm]:
        alarms: list[Alarm] = []
        if self._attempt is not None and frame.attempt != self._attempt:
            alarms.extend(self._judge_low())
            self._pending = set(self._points)
            self._waited = 0
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
            points.append((frame.step, float(value)))
        if self._pending:
            self._waited += 1
            if self._waited >= WAIT_FRAMES:
                self._pending.clear()
        return alarms

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
        return [alarm]

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
