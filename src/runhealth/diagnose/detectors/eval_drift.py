"""The evaluation loss leaves its trend upward and stays there while the training loss does not move.

Two evaluations in a row lie 10 % and six sigma over the median of the five before them, where sigma comes from the
steps between evaluations, and the training loss is within 3 % of where it was: the evaluation, its data or the weights
that it uses have changed, not the training.
"""

import itertools
import math
from typing import ClassVar

from runhealth.diagnose.detector import Detector
from runhealth.diagnose.evaluations import Evaluations
from runhealth.diagnose.findings import Alarm
from runhealth.diagnose.frame_block import FrameBlock
from runhealth.diagnose.frames import Frame
from runhealth.diagnose.robust import mad_sigma, median

BEFORE = 5
STAYS = 2
EFFECT = math.log(1.10)
SIGMAS = 6.0
TRAIN_MOVES = math.log(1.03)
KEEP = 64


class EvalDrift(Detector):
    name: ClassVar[str] = "eval_drift"
    kinds: ClassVar[tuple[str, ...]] = ("eval_drift",)
    reads: ClassVar[tuple[str, ...]] = ("eval_loss",)

    def __init__(self) -> None:
        self._evaluations = Evaluations(KEEP)
        self._told = False

    def update(self, frame: Frame) -> list[Alarm]:
        evaluation = self._evaluations.take(frame)
        if evaluation is None:
            return []
        points = self._evaluations.points
        if len(points) < BEFORE + STAYS:
            return []
        values = [y for _, y, _ in points]
        before, now = values[:-STAYS], values[-STAYS:]
        steps = [b - a for a, b in itertools.pairwise(before)]
        sigma = mad_sigma(sorted(steps), median(steps)) / math.sqrt(2)
        level = median(before[-BEFORE:])
        excess = min(now) - level
        train = max(p[2] for p in list(points)[-STAYS:]) - points[-STAYS - 1][2]
        away = excess >= max(EFFECT, SIGMAS * sigma) and min(now) > max(before[-BEFORE:])
        jumped = now[0] - before[-1] >= 0.5 * excess
        if not away:
            self._told = False
        if not away or not jumped or abs(train) > TRAIN_MOVES or self._told:
            return []
        self._told = True
        onset = points[-STAYS][0]
        message = (
            f"the evaluation loss rose from {math.exp(level):.4g} to {evaluation:.4g} at step {onset:,} and stays "
            "there; the training loss does not show it: look at the evaluation and its data"
        )
        return [
            self.fact(
                frame, "eval_drift", "eval_loss", message, onset=onset, value=evaluation, baseline=math.exp(level)
            )
        ]

    def update_block(self, block: FrameBlock) -> list[tuple[int, Alarm]]:
        return self._evaluations.walk(block, self.update_rows)


DETECTOR = EvalDrift
