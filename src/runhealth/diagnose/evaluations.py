"""Evaluations beside the training loss between them: what the detectors of the evaluation loss look at."""

import math
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from runhealth.diagnose.findings import Alarm
from runhealth.diagnose.frame_block import FrameBlock
from runhealth.diagnose.frames import Frame
from runhealth.diagnose.robust import median

TRAIN_ROWS = 32


class Evaluations:
    """The last `keep` evaluations as `points`: (step, log of the evaluation loss, log of the median training loss
    since the evaluation before)."""

    def __init__(self, keep: int) -> None:
        self._train: deque[float] = deque(maxlen=TRAIN_ROWS)
        self.points: deque[tuple[int, float, float]] = deque(maxlen=keep)

    def take(self, frame: Frame) -> float | None:
        """Take in a frame; the evaluation loss if it added one. What is not finite or not positive is no point."""
        loss, evaluation = frame.loss, frame.get("eval_loss")
        if loss is not None and math.isfinite(loss) and loss > 0:
            self._train.append(math.log(loss))
        if evaluation is None or not math.isfinite(evaluation) or evaluation <= 0 or not self._train:
            return None
        self.points.append((frame.step, math.log(evaluation), median(list(self._train))))
        while len(self._train) > 1:
            self._train.popleft()  # the next one is compared with the rows from here on
        return float(evaluation)

    def walk(
        self, block: FrameBlock, update_rows: Callable[[FrameBlock, Sequence[int]], list[tuple[int, Alarm]]]
    ) -> list[tuple[int, Alarm]]:
        """The alarms of a block: `update_rows` is asked for rows with an evaluation, of the others the losses are
        taken in."""
        evaluation = block.get("eval_loss")
        rows = np.flatnonzero(np.isfinite(evaluation.values)).tolist() if evaluation is not None else []
        found: list[tuple[int, Alarm]] = []
        at = 0
        for row in rows:
            self._take_losses(block, at, row)
            found.extend(update_rows(block, (row,)))
            at = row + 1
        self._take_losses(block, at, len(block))
        return found

    def _take_losses(self, block: FrameBlock, start: int, stop: int) -> None:
        """Take in the rows from `start` to before `stop`, none of which has an evaluation."""
        logs = block.log_loss
        if logs is not None:
            self._train.extend(logs.values[start:stop][logs.present[start:stop]][-TRAIN_ROWS:].tolist())
