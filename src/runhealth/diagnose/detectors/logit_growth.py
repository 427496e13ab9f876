"""The largest logit climbs and climbs: over 50, and 1.7 x what it was 8 blocks ago, rising in nearly every block.

Blocks are medians of 16 rows. Logits grow in every run while it learns; over 50 the softmax saturates, and attention
entropy collapse is close (QK-clip caps at 100).
"""

import itertools
from collections import deque
from typing import ClassVar

import numpy as np

from runhealth.diagnose.detector import Detector
from runhealth.diagnose.findings import Alarm
from runhealth.diagnose.frame_block import FrameBlock
from runhealth.diagnose.frames import Frame
from runhealth.diagnose.robust import median
from runhealth.diagnose.windows import medians

ROWS = 16
BLOCKS = 8
LEAST = 50.0
FACTOR = 1.7
RISING = 6  # of 7


class LogitGrowth(Detector):
    name: ClassVar[str] = "logit_growth"
    kinds: ClassVar[tuple[str, ...]] = ("logit_growth",)
    reads: ClassVar[tuple[str, ...]] = ("logit_max",)

    def __init__(self) -> None:
        self._rows: list[float] = []
        self._blocks: deque[tuple[int, float]] = deque(maxlen=BLOCKS)
        self._told = False

    def update(self, frame: Frame) -> list[Alarm]:
        value = frame.largest("logit_max")
        if value is None:
            return []
        self._rows.append(float(value))
        if len(self._rows) < ROWS:
            return []
        self._blocks.append((frame.step, median(self._rows)))
        self._rows = []
        return self._look(frame)

    def update_block(self, block: FrameBlock) -> list[tuple[int, Alarm]]:
        signal = block.largest("logit_max")
        if signal is None:
            return []
        rows = np.flatnonzero(signal.present)
        values = np.concatenate([self._rows, signal.values[rows]])
        full = len(values) // ROWS
        levels = medians(values[: full * ROWS].reshape(full, ROWS)).tolist()
        ends = rows[np.arange(1, full + 1) * ROWS - len(self._rows) - 1].tolist()
        self._rows = values[full * ROWS :].tolist()
        found: list[tuple[int, Alarm]] = []
        for row, level in zip(ends, levels, strict=True):
            self._blocks.append((int(block.steps[row]), level))
            found.extend((row, alarm) for alarm in self._look(block.frame(row)))
        return found

    def _look(self, frame: Frame) -> list[Alarm]:
        """A block is full."""
        blocks = self._blocks
        levels = [level for _, level in blocks]
        if len(levels) < BLOCKS or levels[-1] < LEAST:
            self._told = False
            return []
        rising = sum(b > a for a, b in itertools.pairwise(levels))
        if self._told or levels[-1] < FACTOR * levels[0] or rising < RISING:
            return []
        self._told = True
        message = (
            f"the largest logit rose from {levels[0]:.3g} to {levels[-1]:.3g} since step {blocks[0][0]:,}: attention "
            "or output logits run away before the loss shows it"
        )
        return [
            self.fact(
                frame, "logit_growth", "logit_max", message, onset=blocks[0][0], value=levels[-1], baseline=levels[0]
            )
        ]


DETECTOR = LogitGrowth
