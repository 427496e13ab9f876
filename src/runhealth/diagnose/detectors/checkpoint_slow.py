"""Saving checkpoints costs a lot: 10 % of all time over at least three saves, or a save five times as long as usual."""

from collections import deque
from typing import ClassVar

import numpy as np

from runhealth.diagnose.detector import Detector
from runhealth.diagnose.findings import Alarm, Severity
from runhealth.diagnose.frame_block import FrameBlock
from runhealth.diagnose.frames import Frame
from runhealth.diagnose.robust import median
from runhealth.diagnose.windows import total

SAVES = 3
SHARE = 0.10
FACTOR = 5.0
LEAST_S = 10.0


class CheckpointSlow(Detector):
    name: ClassVar[str] = "checkpoint_slow"
    kinds: ClassVar[tuple[str, ...]] = ("checkpoint_slow",)
    reads: ClassVar[tuple[str, ...]] = ("t_checkpoint_s",)

    def __init__(self) -> None:
        self._saves: deque[float] = deque(maxlen=32)
        self._first: int | None = None
        self._save_s = 0.0
        self._count = 0
        self._all_s = 0.0
        self._told = False

    def update(self, frame: Frame) -> list[Alarm]:
        save, step_s = frame.largest("t_checkpoint_s"), frame.largest("t_step_s")
        if step_s is not None:
            self._all_s += step_s
        if not save or save <= 0:
            return []
        usual = median(sorted(self._saves)) if len(self._saves) >= SAVES else None
        self._first = frame.step if self._first is None else self._first
        self._saves.append(float(save))
        self._save_s += save
        self._count += 1
        if usual is not None and save >= FACTOR * usual and save - usual >= LEAST_S:
            message = f"saving the checkpoint at step {frame.step:,} took {save:.3g} s, others {usual:.3g} s"
            return [
                self.fact(
                    frame,
                    "checkpoint_slow",
                    "t_checkpoint_s",
                    message,
                    value=save,
                    baseline=usual,
                    severity=Severity.INFO,
                )
            ]
        # a step time may hold the save or not; the smaller share is claimed
        share = self._save_s / (self._all_s + self._save_s) if self._all_s else 0.0
        if self._told or self._count < SAVES or share < SHARE or self._save_s < LEAST_S:
            return []
        self._told = True
        message = (
            f"{self._count} checkpoints since step {self._first:,} took {self._save_s / self._count:.3g} s each, "
            f"{share:.0%} of all time: save less often, or asynchronously"
        )
        return [
            self.fact(
                frame, "checkpoint_slow", "t_checkpoint_s", message, onset=self._first, value=save, baseline=share
            )
        ]

    def update_block(self, block: FrameBlock) -> list[tuple[int, Alarm]]:
        saves, steps = block.largest("t_checkpoint_s"), block.largest("t_step_s")
        found: list[tuple[int, Alarm]] = []
        at = 0
        loud = np.flatnonzero(saves.values > 0).tolist() if saves is not None else []
        for row in [*loud, len(block)]:
            if steps is not None:
                self._all_s = total(self._all_s, steps.values[at:row][steps.present[at:row]])
            if row < len(block):
                found.extend(self.update_rows(block, (row,)))
            at = row + 1
        return found


DETECTOR = CheckpointSlow
