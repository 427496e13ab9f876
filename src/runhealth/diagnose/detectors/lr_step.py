"""The learning rate jumps: over 1.4 x off what its recent course leads to. A channel, no finding by itself."""

import math
from typing import ClassVar

import numpy as np

from runhealth.diagnose.detector import CHANNEL, Detector
from runhealth.diagnose.findings import Alarm
from runhealth.diagnose.frame_block import FrameBlock
from runhealth.diagnose.frames import Frame
from runhealth.storage.blocks import Floats

FACTOR = 1.4
LEAST_FRAMES = 8
MATERIAL_SHARE = 0.05  # of the largest rate so far: the last steps of a decay jump by large factors of next to nothing


class LrStep(Detector):
    name: ClassVar[str] = "lr_step"
    kinds: ClassVar[tuple[str, ...]] = (CHANNEL,)
    reads: ClassVar[tuple[str, ...]] = ("lr",)

    def __init__(self) -> None:
        self._last: list[tuple[int, float]] = []
        self._peak = 0.0

    def update(self, frame: Frame) -> list[Alarm]:
        lr = frame.get("lr")
        if lr is None or not math.isfinite(lr):
            return []
        alarms: list[Alarm] = []
        last = self._last
        expected = expected_lr(last, frame.step)
        self._peak = max(self._peak, float(lr))
        if len(last) >= LEAST_FRAMES and expected > 0 and lr > 0:
            factor = lr / expected
            material = abs(lr - expected) > MATERIAL_SHARE * self._peak
            if material and (factor > FACTOR or factor < 1 / FACTOR):
                alarms.append(
                    Alarm(
                        detector=self.name,
                        kind=CHANNEL,
                        signal="lr",
                        attempt=frame.attempt,
                        step=frame.step,
                        onset_step=frame.step,
                        score=abs(math.log(factor)),
                        value=float(lr),
                        baseline=expected,
                        message=f"learning rate {lr:.3g} against {expected:.3g} of its recent course",
                    )
                )
                last.clear()
        last.append((frame.step, float(lr)))
        if len(last) > LEAST_FRAMES:
            del last[0]
        return alarms

    def update_block(self, block: FrameBlock) -> list[tuple[int, Alarm]]:
        signal = block.get("lr")
        if signal is None:
            return []
        rows = np.flatnonzero(np.isfinite(signal.values))
        steps, rates = block.steps[rows], signal.values[rows]
        found: list[tuple[int, Alarm]] = []
        at = 0
        while at < len(rows):
            known = [step for step, _ in self._last], [rate for _, rate in self._last]
            loud = self._first_jump(np.concatenate([known[0], steps[at:]]), np.concatenate([known[1], rates[at:]]))
            quiet = at + loud - len(known[0])
            if quiet > at:
                kept = slice(max(at, quiet - LEAST_FRAMES), quiet)
                self._last.extend(zip(steps[kept].tolist(), rates[kept].tolist(), strict=True))
                del self._last[:-LEAST_FRAMES]
                self._peak = max(self._peak, float(rates[at:quiet].max()))
            if quiet < len(rows):
                found.extend(self.update_rows(block, (int(rows[quiet]),)))
            at = quiet + 1
        return found

    def _first_jump(self, step: Floats, lr: Floats) -> int:
        """Index of the first point at which the rate jumps; their number if none does."""
        n = LEAST_FRAMES
        if len(lr) <= n:
            return len(lr)
        slope = (lr[n - 1 : -1] - lr[:-n]) / (step[n - 1 : -1] - step[:-n])
        expected = lr[n - 1 : -1] + slope * (step[n:] - step[n - 1 : -1])
        now = lr[n:]
        peak = np.maximum.accumulate(np.maximum(now, self._peak))
        away = (expected > 0) & (now > 0) & (np.abs(now - expected) > MATERIAL_SHARE * peak)
        factor = np.divide(now, expected, out=np.ones(len(now)), where=away)
        jumps = (factor > FACTOR) | (factor < 1 / FACTOR)
        return n + int(jumps.argmax()) if jumps.any() else len(lr)


def expected_lr(points: list[tuple[int, float]], step: int) -> float:
    """The straight line through the first and last of the points, carried to `step`; NaN when there are too few."""
    if len(points) < 2:
        return math.nan
    (first_step, first), (last_step, last) = points[0], points[-1]
    if last_step == first_step:
        return last
    return last + (last - first) / (last_step - first_step) * (step - last_step)


DETECTOR = LrStep
