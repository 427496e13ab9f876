"""The largest logit climbs anew: 1.7 x what it was 48 rows ago, and 1.35 x at most in the 48 rows before those.

Medians of eight rows are compared, of attention and of output logits. Logits grow in every run while it learns, ever
more slowly; growth that sets in anew is how attention entropy collapses, tens to hundreds of steps before the loss
shows it. Sooner than `logit_growth`, which needs no stretch of calm before.
"""

from collections import deque
from typing import ClassVar

import numpy as np

from runhealth.diagnose.detector import Detector
from runhealth.diagnose.findings import Alarm
from runhealth.diagnose.frame_block import FrameBlock
from runhealth.diagnose.frames import Frame
from runhealth.diagnose.robust import median
from runhealth.diagnose.windows import medians

SIGNALS = ("attn_logit_max", "logit_max")
BLOCK = 8
BLOCKS_BACK = 6
CLIMB, CALM = 1.7, 1.35
STEP = 1.03  # each of the last three blocks over the one before by this
RISES = 3
LEAST = 4.0  # smaller logits saturate no softmax


class LogitClimb(Detector):
    name: ClassVar[str] = "logit_climb"
    kinds: ClassVar[tuple[str, ...]] = ("logit_growth",)
    reads: ClassVar[tuple[str, ...]] = SIGNALS

    def __init__(self) -> None:
        self._rows: dict[str, list[float]] = {signal: [] for signal in SIGNALS}
        self._blocks: dict[str, deque[tuple[int, float]]] = {s: deque(maxlen=2 * BLOCKS_BACK + 1) for s in SIGNALS}
        self._told: set[str] = set()

    def update(self, frame: Frame) -> list[Alarm]:
        alarms = []
        for signal in SIGNALS:
            value = frame.largest(signal)
            if value is None or not value < float("inf"):
                continue
            rows = self._rows[signal]
            rows.append(float(value))
            if len(rows) < BLOCK:
                continue
            blocks = self._blocks[signal]
            blocks.append((frame.step, median(rows)))
            rows.clear()
            alarms += self._judge(frame, signal, blocks)
        return alarms

    def update_block(self, block: FrameBlock) -> list[tuple[int, Alarm]]:
        full: list[tuple[int, int, float]] = []  # row, signal, level
        for number, name in enumerate(SIGNALS):
            signal = block.largest(name)
            if signal is None:
                continue
            rows = np.flatnonzero(signal.present & (signal.values < np.inf))
            before = self._rows[name]
            values = np.concatenate([before, signal.values[rows]])
            count = len(values) // BLOCK
            levels = medians(values[: count * BLOCK].reshape(count, BLOCK)).tolist()
            ends = rows[np.arange(1, count + 1) * BLOCK - len(before) - 1].tolist()
            full.extend((row, number, level) for row, level in zip(ends, levels, strict=True))
            self._rows[name] = values[count * BLOCK :].tolist()
        found: list[tuple[int, Alarm]] = []
        for row, number, level in sorted(full):
            name = SIGNALS[number]
            frame = block.frame(row)
            self._blocks[name].append((frame.step, level))
            found.extend((row, alarm) for alarm in self._judge(frame, name, self._blocks[name]))
        return found

    def _judge(self, frame: Frame, signal: str, blocks: deque[tuple[int, float]]) -> list[Alarm]:
        levels = [level for _, level in blocks]
        if len(levels) < 2 * BLOCKS_BACK + 1 or levels[-1] < LEAST:
            return []
        before, now = levels[BLOCKS_BACK], levels[-1]
        rising = all(levels[-i] > STEP * levels[-i - 1] for i in range(1, RISES + 1))
        if now < CLIMB * before:
            self._told.discard(signal)
            return []
        if not rising or before > CALM * levels[0] or self._told:
            return []
        self._told.add(signal)
        first = next(i for i in range(BLOCKS_BACK, len(levels)) if levels[i] > 1.1 * before)
        onset = blocks[first - 1][0]
        name = "attention logit" if signal == "attn_logit_max" else "logit"
        message = f"the largest {name} rose from {before:.3g} to {now:.3g} since step {onset:,} and goes on rising"
        return [self.fact(frame, "logit_growth", signal, message, onset=onset, value=now, baseline=before)]


DETECTOR = LogitClimb
