"""The loss ends where it started. Only of a run that is seen from its beginning, and of at least 10 points.

A loss that reaches 0 or less says nothing about learning: policy losses hover around 0. Nor does that of a run which
logs rewards or returns: its targets move with the policy. Where the evaluation loss fell, something was learned; a loss
that scatters by a quarter from row to row (diffusion, small batches) hides a fall of 2 %: both are told as info.
"""

import math
from collections import deque
from functools import lru_cache
from typing import ClassVar

import numpy as np

from runhealth.diagnose.detector import Detector
from runhealth.diagnose.findings import Alarm, Severity
from runhealth.diagnose.frame_block import FrameBlock
from runhealth.diagnose.frames import Frame
from runhealth.diagnose.robust import mad_sigma, median

LEAST_POINTS = 10
BEGINNING_STEPS = 10
ENDS_OVER = 0.98  # of the start
SCATTER = 0.25  # of log-loss
EVAL_FELL = 0.95
REWARDS = ("reward", "ep_rew", "return", "approx_kl", "explained_variance")


class NotLearning(Detector):
    name: ClassVar[str] = "not_learning"
    kinds: ClassVar[tuple[str, ...]] = ("not_learning",)
    replay: ClassVar[bool] = False
    reads: ClassVar[tuple[str, ...]] = ("loss",)

    def __init__(self) -> None:
        self._head: list[float] = []
        self._tail: deque[float] = deque(maxlen=32)
        self._first: tuple[int, int] | None = None
        self._last = (0, 0)
        self._points = 0
        self._lowest = math.inf
        self._rewarded = False
        self._first_eval = self._lowest_eval = math.nan

    def update(self, frame: Frame) -> list[Alarm]:
        self._rewarded = self._rewarded or any(map(_is_reward, frame.values))
        evaluation = frame.get("eval_loss")
        if evaluation is not None and math.isfinite(evaluation):
            self._evaluated([float(evaluation)])
        loss = frame.loss
        if loss is None or not math.isfinite(loss) or loss == 0.0:
            return []
        if self._first is None:
            self._first = (frame.attempt, frame.step)
        self._last = (frame.attempt, frame.step)
        if len(self._head) < 32:
            self._head.append(loss)
        self._tail.append(loss)
        self._points += 1
        self._lowest = min(self._lowest, loss)
        return []

    def update_block(self, block: FrameBlock) -> list[tuple[int, Alarm]]:
        names = (name for name in block.names() if _is_reward(name))
        self._rewarded = self._rewarded or any(block.get(name) is not None for name in names)
        evaluation = block.get("eval_loss")
        if evaluation is not None:
            self._evaluated(evaluation.values[np.isfinite(evaluation.values)].tolist())
        if block.loss is None:
            return []
        values = block.loss.values
        rows = np.flatnonzero(np.isfinite(values) & (values != 0.0))
        if not len(rows):
            return []
        losses = values[rows]
        if self._first is None:
            self._first = (block.attempt, int(block.steps[rows[0]]))
        self._last = (block.attempt, int(block.steps[rows[-1]]))
        self._head.extend(losses[: 32 - len(self._head)].tolist())
        self._tail.extend(losses[-32:].tolist())
        self._points += len(rows)
        self._lowest = min(self._lowest, float(losses.min()))
        return []

    def _evaluated(self, losses: list[float]) -> None:
        if losses and math.isnan(self._first_eval):
            self._first_eval = self._lowest_eval = losses[0]
        self._lowest_eval = min([self._lowest_eval, *losses])

    def finish(self) -> list[Alarm]:
        if self._first is None or self._points < LEAST_POINTS or self._first[1] > BEGINNING_STEPS:
            return []
        width = max(1, min(16, self._points // 5))
        start, end = median(sorted(self._head[:width])), median(sorted(list(self._tail)[-width:]))
        noise = mad_sigma(sorted(self._head), median(sorted(self._head)))
        learned = start - self._lowest > 3 * noise and self._points >= 100 and self._lowest < 0.9 * start
        if start <= 0 or self._lowest <= 0 or end < ENDS_OVER * start or learned or self._rewarded:
            return []
        logs = sorted(math.log(loss) for loss in self._head)
        scatter = mad_sigma(logs, median(logs))
        message = (
            f"the loss is {end:.4g} after {self._points} points and was {start:.4g} at the start: nothing was learned"
        )
        unsure = ""
        if self._first_eval > 0 and self._lowest_eval < EVAL_FELL * self._first_eval:
            unsure = f", but the evaluation loss fell from {self._first_eval:.4g} to {self._lowest_eval:.4g}"
        elif scatter > SCATTER:
            unsure = f" as far as a loss tells that scatters by {scatter:.0%}"
        return [
            Alarm(
                detector=self.name,
                kind="not_learning",
                signal="loss",
                attempt=self._first[0],
                step=self._last[1],
                onset_step=self._first[1],
                score=1.0,
                value=end,
                baseline=start,
                end_step=self._last[1],
                message=message + unsure,
                severity=Severity.INFO if unsure else None,
            )
        ]


@lru_cache(maxsize=4096)
def _is_reward(name: str) -> bool:
    """Whether a signal is one that only reinforcement learning logs."""
    return any(word in name.lower() for word in REWARDS)


DETECTOR = NotLearning
