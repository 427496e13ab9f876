"""The evaluation loss has turned and rises while the training loss goes on falling.

The last three evaluations lie over the best one, by 3 % and four sigma of the evaluations around their course, without
a single jump that makes up most of it (that is `eval_drift`), and the training loss is 2 % lower than it was at the
best. Under 15 % it is info: many runs are trained past the lowest evaluation loss on purpose.
"""

import itertools
import math
from dataclasses import replace
from typing import ClassVar

from runhealth.diagnose.detector import Detector
from runhealth.diagnose.evaluations import Evaluations
from runhealth.diagnose.findings import Alarm, Severity
from runhealth.diagnose.frame_block import FrameBlock
from runhealth.diagnose.frames import Frame
from runhealth.diagnose.robust import mad_sigma, median

LAST = 3
LEAST = 5
RISE = math.log(1.03)
FALL = math.log(1.02)
SIGMAS = 4.0
JUMP_SHARE = 0.7
MUCH = math.log(1.15)
KEEP = 512


class Overfitting(Detector):
    name: ClassVar[str] = "overfitting"
    kinds: ClassVar[tuple[str, ...]] = ("overfitting",)
    reads: ClassVar[tuple[str, ...]] = ("eval_loss",)

    def __init__(self) -> None:
        self._evaluations = Evaluations(KEEP)
        self._told: Severity | None = None

    def update(self, frame: Frame) -> list[Alarm]:
        evaluation = self._evaluations.take(frame)
        if evaluation is None:
            return []
        points = self._evaluations.points
        if self._told is Severity.WARNING or len(points) < LEAST:
            return []
        values = [y for _, y, _ in points]
        best = min(range(len(values)), key=values.__getitem__)
        since = values[best + 1 :]
        if len(since) < LAST:
            return []
        steps = [b - a for a, b in itertools.pairwise(values)]
        sigma = mad_sigma(sorted(steps), median(steps)) / math.sqrt(2)
        rise = min(values[-LAST:]) - values[best]
        jump = max(b - a for a, b in itertools.pairwise(values[best:]))
        fell = points[best][2] - points[-1][2]
        if rise < max(RISE, SIGMAS * sigma) or jump > JUMP_SHARE * (max(since) - values[best]) or fell < FALL:
            return []
        severity = Severity.WARNING if rise >= MUCH else Severity.INFO
        if severity is self._told:
            return []
        again, self._told = self._told is not None, severity
        onset, low = points[best][0], math.exp(values[best])
        message = (
            f"the evaluation loss rose from {low:.4g} at step {onset:,} to {evaluation:.4g} while the training loss "
            f"fell by {-math.expm1(-fell):.0%}: overfitting; the best weights are those of step {onset:,}"
        )
        alarm = self.fact(
            frame, "overfitting", "eval_loss", message, onset=onset, value=evaluation, baseline=low, severity=severity
        )
        return [replace(alarm, end_step=frame.step) if again else alarm]

    def update_block(self, block: FrameBlock) -> list[tuple[int, Alarm]]:
        return self._evaluations.walk(block, self.update_rows)


DETECTOR = Overfitting
