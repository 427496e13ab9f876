"""What the ranks sent does not average to what the reduce returned.

The mean over all ranks of <g, h> / <h, h>, with g a rank's gradient before the reduce and h its result, is exactly 1
where h is their mean, whatever they sent. Rounding moves it, more so in half precision: a run's own habit tells by how
much. All ranks must have measured it; a log in which it is never 1 means something else and is left alone.
"""

import itertools
import math
from collections import deque
from collections.abc import Iterable
from typing import ClassVar

import numpy as np

from runhealth.diagnose.detector import Detector
from runhealth.diagnose.findings import Alarm, Severity
from runhealth.diagnose.frame_block import FrameBlock
from runhealth.diagnose.frames import Frame
from runhealth.diagnose.robust import Baseline
from runhealth.diagnose.windows import push
from runhealth.storage.blocks import Floats, Ints

SIGNAL = "grad_projection_rank"
LEAST, LEAST_ALONE = 0.001, 0.005  # off 1: in two of three rows, in one row
Z_ALARM, Z_ALONE = 8.0, 16.0
OVER_HABIT = 4.0  # x what 98 % of the rows stay under: rounding may have heavy tails
MEANS_ELSE = 0.02  # off 1 as a habit
OF_ROWS, IN_ROWS = 3, 2
REARM_FRAMES = 256


class ReduceProjection(Detector):
    name: ClassVar[str] = "reduce_projection"
    kinds: ClassVar[tuple[str, ...]] = ("rank_outlier",)
    reads: ClassVar[tuple[str, ...]] = (SIGNAL,)

    def __init__(self) -> None:
        self._world = 0
        self._habit = Baseline(128, least=16, floor=1e-5)  # how far from 1
        self._recent: deque[tuple[int, bool]] = deque(maxlen=OF_ROWS)
        self._since = REARM_FRAMES

    def update(self, frame: Frame) -> list[Alarm]:
        ranks = frame.ranks
        self._world = max(self._world, len(ranks))
        self._since += 1
        values = [float(v) for v in frame.per_rank(SIGNAL).values() if math.isfinite(v)]
        if len(values) < self._world or len(values) < 2 or max(ranks) >= self._world:
            return []
        mean = _sum(values) / len(values)
        off = abs(mean - 1.0)
        habit = self._habit
        if off <= LEAST or not habit.ready or habit.center > MEANS_ELSE:
            habit.push(off)
            self._recent.append((frame.step, False))
            return []
        away = (off - habit.center) / habit.sigma
        high = away > Z_ALARM and off > OVER_HABIT * habit.quantile(0.98)
        self._recent.append((frame.step, high))
        if not high:
            habit.push(off)
            return []
        over = [step for step, is_high in self._recent if is_high]
        if len(over) < IN_ROWS and not (off > LEAST_ALONE and away > Z_ALONE):
            return []
        since, self._since = self._since, 0
        if since < REARM_FRAMES:
            return []
        message = (
            f"what the {len(values)} ranks sent projects on the reduced gradient with a mean of {mean:.4g}, and the "
            f"mean of their gradients would with 1 (to {habit.center:.1g} in this run): the reduce returned something "
            "else"
        )
        return [
            self.fact(
                frame,
                "rank_outlier",
                SIGNAL,
                message,
                onset=over[0],
                value=mean,
                baseline=1.0,
                severity=Severity.WARNING,
            )
        ]

    def update_block(self, block: FrameBlock) -> list[tuple[int, Alarm]]:
        self._world = max(self._world, len(block.ranks))
        signal = block.per_rank(SIGNAL)
        if signal is None or len(block.ranks) < max(2, self._world) or block.ranks[-1] >= self._world:
            self._since += len(block)
            return []
        rows = np.flatnonzero(np.isfinite(signal.values).all(axis=1))
        # cumsum adds in the order of the ranks, as a loop does
        offs = np.abs(np.cumsum(signal.values[rows], axis=1)[:, -1] / len(block.ranks) - 1.0)
        found: list[tuple[int, Alarm]] = []
        at, row = 0, 0  # of `rows`, of the block
        for loud in [*np.flatnonzero(offs > LEAST).tolist(), len(rows)]:
            self._pass(offs[at:loud], block.steps[rows[at:loud]])
            if loud < len(rows):
                self._since += int(rows[loud]) - row
                found.extend(self.update_rows(block, (int(rows[loud]),)))
                row = int(rows[loud]) + 1
            at = loud + 1
        self._since += len(block) - row
        return found

    def _pass(self, offs: Floats, steps: Ints) -> None:
        push(self._habit, offs)
        self._recent.extend(zip(steps[-OF_ROWS:].tolist(), itertools.repeat(False)))


def _sum(values: Iterable[float]) -> float:
    """One after the other: `sum` compensates for rounding, which NumPy does not."""
    total = 0.0
    for value in values:
        total += value
    return total


DETECTOR = ReduceProjection
