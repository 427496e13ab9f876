"""Evaluations beside the training loss between them: what the detectors of the evaluation loss look at."""

import math
from collections import deque

import numpy as np

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

    def rows(self, block: FrameBlock) -> list[int]:
        """The rows of a block that may add a point."""
        evaluation = block.get("eval_loss")
        return np.flatnonzero(np.isfinite(evaluation.values)).tolist() if evaluation is not None else []

    def take_losses(self, block: FrameBlock, start: int, stop: int) -> None:
        """Take in the rows from `start` to before `stop`, none of which has an evaluation."""
        logs = block.log_loss
        if logs is not None:
            self._train.extend(logs.values[start:stop][logs.present[start:stop]][-TRAIN_ROWS:].tolist())
