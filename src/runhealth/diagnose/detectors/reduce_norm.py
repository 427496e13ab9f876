"""The norm of the mean gradient is over the mean of the ranks' own norms, which no correct all-reduce yields.

|mean g| <= mean |g| (triangle inequality). Logs whose norms mean something else (sums, clipped norms, other parameter
sets) break it always and are left alone: it must have held in 32 frames before.
"""

import math
from typing import ClassVar

import numpy as np

from runhealth.diagnose.detector import Detector
from runhealth.diagnose.findings import Alarm, Severity
from runhealth.diagnose.frame_block import FrameBlock
from runhealth.diagnose.frames import Frame
from runhealth.diagnose.observe import TRIANGLE, reduce_ratio
from runhealth.diagnose.robust import Baseline
from runhealth.diagnose.windows import Ahead, push, refreshes, settled, take_looking
from runhealth.storage.blocks import Floats

HELD_FRAMES = 32
REARM_FRAMES = 256
SMALLEST_BLOCK, LARGEST_BLOCK = 64, 4096
NEARLY = 1e-6
Z_ALARM = 4.0  # where norms are measured on different samples, the ratio scatters around its habit


class ReduceNorm(Detector):
    name: ClassVar[str] = "reduce_norm"
    kinds: ClassVar[tuple[str, ...]] = ("rank_outlier",)
    reads: ClassVar[tuple[str, ...]] = ("grad_norm_rank",)

    def __init__(self) -> None:
        self._held = 0
        self._habit = Baseline(128, least=32, floor=0.01)  # log of the ratio
        self._since = REARM_FRAMES
        self._largest = 0.0

    def update(self, frame: Frame) -> list[Alarm]:
        ratio = reduce_ratio(frame)
        if ratio is None:
            return []
        self._since += 1
        habit = self._habit
        if ratio <= TRIANGLE or (habit.ready and ratio > 0 and habit.z(math.log(ratio)) < Z_ALARM):
            self._held = self._held + 1 if ratio <= TRIANGLE else 0
            self._largest = max(self._largest, ratio)
            if ratio > 0:
                habit.push(math.log(ratio))
            return []
        held, since = self._held, self._since
        if held < HELD_FRAMES:
            self._held = 0
            return []
        self._since = 0
        if since < REARM_FRAMES:
            return []
        message = (
            f"the gradient's norm after the reduce is {ratio:.3g} x the mean of the ranks' own norms, which no correct "
            "reduce yields: something changed it on its way"
        )
        return [
            self.fact(
                frame,
                "rank_outlier",
                "grad_norm",
                message,
                value=ratio,
                baseline=self._largest,
                severity=Severity.WARNING,
            )
        ]

    def update_block(self, block: FrameBlock) -> list[tuple[int, Alarm]]:
        norm, own = block.get("grad_norm"), block.per_rank("grad_norm_rank")
        if len(block.ranks) < 2 or norm is None or own is None:
            return []
        whole = np.isfinite(norm.values) & np.isfinite(own.values).all(axis=1)
        means = np.array([sum(row) for row in own.values.tolist()]) / len(block.ranks)
        whole &= means > 0
        ratios = np.divide(norm.values, means, out=np.full(len(block), np.nan), where=whole)
        loud = norm.present & ~(whole & (ratios > 0))  # what can be measured in part, or is 0
        rows = np.flatnonzero(norm.present)
        found: list[tuple[int, Alarm]] = []
        at, size = 0, SMALLEST_BLOCK
        while at < len(rows):
            end = min(len(rows), at + size)
            some = loud[rows[at:end]]
            stop = at + (int(some.argmax()) if some.any() else end - at)
            if stop > at:
                stop = at + self._take(ratios[rows[at:stop]])
            size = min(4 * size, LARGEST_BLOCK)
            if stop < end:
                found.extend(self.update_rows(block, (int(rows[stop]),)))
                stop, size = stop + 1, SMALLEST_BLOCK
            at = stop
        return found

    def _take(self, ratios: Floats) -> int:
        """Take in the rows before the first whose ratio may be over the habit. Returns how many."""
        habit = self._habit
        logs, over = np.log(ratios), ratios > TRIANGLE  # nearly: NumPy's differs in the last bit
        looks, stop = np.flatnonzero(over), len(ratios)
        if len(looks) and not settled(habit):
            looks, stop = looks[:0], int(looks[0])
        elif len(looks):
            ahead = Ahead(habit, logs, looks)
            far = over & ((logs - ahead.center()) / ahead.sigma() >= Z_ALARM - NEARLY)
            stop = int(far.argmax()) if far.any() else stop
        if stop:
            looks = looks[looks < stop]
            self._since += stop
            self._held = stop - 1 - int(looks[-1]) if len(looks) else self._held + stop
            self._largest = max(self._largest, float(ratios[:stop].max()))
            for end in [*refreshes(habit, looks)[-1:], stop]:  # what the baseline keeps of them is exact
                kept = slice(max(0, end - habit.size), end)
                logs[kept] = list(map(math.log, ratios[kept].tolist()))
            if len(looks):
                take_looking(habit, logs[:stop], looks)
            else:
                push(habit, logs[:stop])
        return stop


DETECTOR = ReduceNorm
