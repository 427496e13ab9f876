"""The evaluation loss steps up from one evaluation to the next and stays there while the training loss does not move.

Smaller steps than `eval_drift` tells of: 3.5 % and six sigma of what evaluations usually move from one to the next, in
two evaluations, where the training loss does not rise by half of it, as far as its noise lets one say. Nor does it fall
by as much: then other data are trained on.
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

BEFORE = 8
RECENT = 16
EFFECT = math.log(1.035)
SIGMAS = 6.0
STAYS = 0.7


class EvalStep(Detector):
    name: ClassVar[str] = "eval_step"
    kinds: ClassVar[tuple[str, ...]] = ("eval_drift",)
    reads: ClassVar[tuple[str, ...]] = ("eval_loss",)

    def __init__(self) -> None:
        self._evaluations = Evaluations(64)
        self._told = False

    def update(self, frame: Frame) -> list[Alarm]:
        evaluation = self._evaluations.take(frame)
        points = list(self._evaluations.points)[-RECENT:]
        if evaluation is None or len(points) < BEFORE + 2:
            return []
        values = [y for _, y, _ in points]
        before, last, now = values[:-2], values[-3], values[-2:]
        moves = [b - a for a, b in itertools.pairwise(before)]
        sigma = max(mad_sigma(sorted(moves), median(moves)), 1e-4)
        rise = now[0] - last - min(0.0, median(moves))
        trains = [p[2] for p in points]
        train = median(trains[-2:]) - median(trains[-8:-2])
        scatter = mad_sigma(sorted(trains[:-2]), median(trains[:-2]))
        stays = now[1] - last >= STAYS * (now[0] - last)
        if not stays or now[0] - last < EFFECT or rise < SIGMAS * sigma or max(now) <= max(before[-2:]):
            self._told = False
            return []
        if self._told or train > 0.5 * rise + scatter or -train > rise + scatter:
            return []
        self._told = True
        message = (
            f"the evaluation loss rose from {math.exp(last):.4g} to {math.exp(now[0]):.4g} at step {points[-2][0]:,} "
            "and stays there; the training loss does not show it: look at the evaluation and its data"
        )
        return [
            self.fact(
                frame,
                "eval_drift",
                "eval_loss",
                message,
                onset=points[-2][0],
                value=math.exp(now[1]),
                baseline=math.exp(last),
            )
        ]

    def update_block(self, block: FrameBlock) -> list[tuple[int, Alarm]]:
        return self._evaluations.walk(block, self.update_rows)


DETECTOR = EvalStep
