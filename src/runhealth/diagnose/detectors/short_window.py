"""The last step of each epoch holds a short accumulation window: loss and gradient norm are an exact fraction."""

import math
from collections import deque
from typing import ClassVar

import numpy as np

from runhealth.diagnose.detector import Detector
from runhealth.diagnose.findings import Alarm
from runhealth.diagnose.frame_block import FrameBlock
from runhealth.diagnose.frames import Frame
from runhealth.diagnose.robust import median

FRACTIONS = (1 / 2, 1 / 3, 2 / 3, 1 / 4, 3 / 4)
TOLERANCE = 0.08
TIMES = 2
RECENT = 9


class ShortWindow(Detector):
    name: ClassVar[str] = "short_window"
    kinds: ClassVar[tuple[str, ...]] = ("short_accumulation_window",)
    reads: ClassVar[tuple[str, ...]] = ("epoch",)

    def __init__(self) -> None:
        self._recent: deque[tuple[float, float]] = deque(maxlen=RECENT)
        self._seen: dict[float, list[int]] = {}
        self._told = False

    def update(self, frame: Frame) -> list[Alarm]:
        loss, norm, epoch = frame.loss, frame.get("grad_norm"), frame.get("epoch")
        if loss is None or norm is None or not (math.isfinite(loss) and math.isfinite(norm)):
            return []
        recent = self._recent
        alarms: list[Alarm] = []
        boundary = epoch is not None and epoch >= 1 and abs(epoch - round(epoch)) < 1e-6
        if boundary and not self._told and len(recent) == recent.maxlen:
            usual_loss = median(sorted(v for v, _ in recent))
            usual_norm = median(sorted(v for _, v in recent))
            for fraction in FRACTIONS:
                if (
                    usual_loss > 0
                    and usual_norm > 0
                    and _near(loss / usual_loss, fraction)
                    and _near(norm / usual_norm, fraction, 2 * TOLERANCE)
                ):
                    steps = self._seen.setdefault(fraction, [])
                    steps.append(frame.step)
                    if len(steps) >= TIMES:
                        self._told = True
                        alarms.append(self._alarm(frame, fraction, steps[0], loss, usual_loss))
                    break
        recent.append((loss, float(norm)))
        return alarms

    def update_block(self, block: FrameBlock) -> list[tuple[int, Alarm]]:
        loss, norm, epoch = block.loss, block.get("grad_norm"), block.get("epoch")
        if loss is None or norm is None:
            return []
        rows = np.flatnonzero(np.isfinite(loss.values) & np.isfinite(norm.values))
        ends: list[int] = []
        if epoch is not None:
            near = np.abs(epoch.values - np.rint(epoch.values)) < 1e-6
            ends = np.flatnonzero((near & (epoch.values >= 1))[rows]).tolist()
        found: list[tuple[int, Alarm]] = []
        at = 0
        for end in [*ends, len(rows)]:
            if self._told and end < len(rows):
                continue
            kept = rows[at:end][-RECENT:]
            self._recent.extend(zip(loss.values[kept].tolist(), norm.values[kept].tolist(), strict=True))
            if end < len(rows):
                found.extend(self.update_rows(block, (int(rows[end]),)))
            at = end + 1
        return found

    def _alarm(self, frame: Frame, fraction: float, onset: int, loss: float, usual: float) -> Alarm:
        return Alarm(
            detector=self.name,
            kind="short_accumulation_window",
            signal="loss",
            attempt=frame.attempt,
            step=frame.step,
            onset_step=onset,
            score=1.0,
            value=loss,
            baseline=usual,
            message=f"loss and gradient norm are {fraction:.2g} of their neighbours on the last step of each epoch: a "
            "short accumulation window, not a fault of the model",
        )


def _near(ratio: float, fraction: float, tolerance: float = TOLERANCE) -> bool:
    return abs(ratio / fraction - 1) <= tolerance


DETECTOR = ShortWindow
