"""Updates are over twice as large, against the parameters, as their trailing median, in two of three rows.

It is the first sign of a wrong learning rate or a damaged optimizer, before the loss; bad data leave it near normal.
A learning rate that rises smoothly (warm-up) takes the update with it and is allowed for. The first rows after a resume
are left to `optimizer_lost`, unless the learning rate jumped after it. One alarm an episode: the next needs 64 rows at
the old level.
"""

import math
from collections import deque
from typing import ClassVar

import numpy as np

from runhealth.diagnose.detector import Detector
from runhealth.diagnose.findings import Alarm
from runhealth.diagnose.frame_block import FrameBlock
from runhealth.diagnose.frames import Frame
from runhealth.diagnose.robust import Baseline
from runhealth.diagnose.windows import Ahead, settled, take
from runhealth.storage.blocks import Floats

FACTOR = 2.0
OF_ROWS, IN_ROWS = 3, 2
REARM_ROWS = 64
JUMP = 1.4
JUMP_ROWS = 64
SMALLEST_BLOCK, LARGEST_BLOCK = 64, 4096
RESUME_ROWS = 4
SIGMAS = 6.0


class UpdateJump(Detector):
    name: ClassVar[str] = "update_jump"
    kinds: ClassVar[tuple[str, ...]] = ("update_jump",)
    reads: ClassVar[tuple[str, ...]] = ("update_ratio",)

    def __init__(self) -> None:
        self._ratio = Baseline(64, least=32, every=4)
        self._rate = Baseline(64, least=8, every=4)
        self._last_rate = math.nan
        self._jumped = JUMP_ROWS  # rows since the learning rate jumped
        self._recent: deque[tuple[int, bool]] = deque(maxlen=OF_ROWS)
        self._quiet = 0
        self._told = False
        self._young = RESUME_ROWS

    def update(self, frame: Frame) -> list[Alarm]:
        if frame.new_attempt:
            self._young = 0
        alarm = self._row(frame.attempt, frame.step, frame.get("update_ratio"), frame.get("lr"))
        return [alarm] if alarm is not None else []

    def update_block(self, block: FrameBlock) -> list[tuple[int, Alarm]]:
        ratio, rate = _listed(block, "update_ratio"), _listed(block, "lr")
        steps, found = block.steps.tolist(), []
        ratios, rates = block.get("update_ratio"), block.get("lr")
        row, size = 0, SMALLEST_BLOCK
        while row < len(block):
            end = min(len(block), row + size)
            stop = row
            if ratios is not None and rates is not None:
                stop += self._take(ratios.values[row:end], rates.values[row:end], steps[row:end])
            size = min(4 * size, LARGEST_BLOCK)
            if stop < end:
                alarm = self._row(block.attempt, steps[stop], ratio[stop], rate[stop])
                if alarm is not None:
                    found.append((stop, alarm))
                stop, size = stop + 1, SMALLEST_BLOCK
            row = stop
        return found

    def _take(self, ratios: Floats, rates: Floats, steps: list[int]) -> int:
        """Take in the rows before the first in which updates may be large, or the rate jumps or was not measured.
        Returns how many."""
        loud = ~(np.isfinite(rates) & (rates > 0))
        loud |= rates > JUMP * np.concatenate([[self._last_rate], rates[:-1]])
        stop = int(loud.argmax()) if loud.any() else len(loud)
        rows = np.flatnonzero(np.isfinite(ratios[:stop]) & (ratios[:stop] > 0))
        ready = self._jumped >= JUMP_ROWS and settled(self._ratio) and settled(self._rate)
        if len(rows) and not ready:
            rows, stop = rows[:0], int(rows[0])
        found = ratios[rows]
        if len(rows) and found.max() > FACTOR * min(float(found.min()), min(self._ratio.values)):
            ahead, pace = Ahead(self._ratio, found), Ahead(self._rate, rates[rows]).center()
            usual = ahead.center() * np.maximum(
                1.0, np.divide(rates[rows], pace, out=np.ones(len(rows)), where=pace > 0)
            )
            high = (found > FACTOR * usual) & (found - usual > SIGMAS * ahead.sigma())
            if high.any():
                rows, stop = rows[: int(high.argmax())], int(rows[high.argmax()])
        if stop:
            self._jumped += stop
            self._last_rate = float(rates[stop - 1])
        if len(rows):
            self._young += len(rows)
            self._quiet += len(rows)
            if self._quiet >= REARM_ROWS:
                self._told = False
            self._recent.extend((steps[row], False) for row in rows[-OF_ROWS:].tolist())
            take(self._ratio, ratios[rows])
            take(self._rate, rates[rows])
        return stop

    def _row(self, attempt: int, step: int, ratio: float | None, rate: float | None) -> Alarm | None:
        self._jumped += 1
        if rate is not None and rate > 0:
            if rate > JUMP * self._last_rate:
                self._jumped = 0
            self._last_rate = float(rate)
        if ratio is None or not math.isfinite(ratio) or ratio <= 0:
            return None
        self._young += 1
        if not self._ratio.ready:
            self._push(float(ratio), rate)
            return None
        usual = self._ratio.center
        if self._jumped >= JUMP_ROWS and rate is not None and self._rate.ready and self._rate.center > 0:
            usual *= max(1.0, rate / self._rate.center)
        high = ratio > FACTOR * usual and ratio - usual > SIGMAS * self._ratio.sigma
        self._recent.append((step, high))
        if not high:
            self._quiet += 1
            if self._quiet >= REARM_ROWS:
                self._told = False
            self._push(float(ratio), rate)
            return None
        self._quiet = 0
        over = [step for step, is_high in self._recent if is_high]
        self._told = self._told or (self._young <= RESUME_ROWS and self._jumped >= self._young)
        if len(over) < IN_ROWS or self._told:
            return None
        self._told = True
        return Alarm(
            detector=self.name,
            kind="update_jump",
            signal="update_ratio",
            attempt=attempt,
            step=step,
            onset_step=over[0],
            score=ratio / usual,
            value=float(ratio),
            baseline=usual,
            message=f"updates are {ratio / usual:.1f} x as large as before (update ratio {ratio:.3g})",
        )

    def _push(self, ratio: float, rate: float | None) -> None:
        self._ratio.push(ratio)
        if rate is not None and math.isfinite(rate):
            self._rate.push(float(rate))


def _listed(block: FrameBlock, name: str) -> list[float | None]:
    """`Frame.get` of each row."""
    column = block.get(name)
    if column is None:
        return [None] * len(block)
    return [v if there else None for v, there in zip(column.values.tolist(), column.present.tolist(), strict=True)]


DETECTOR = UpdateJump
