"""The train loss steps down at each epoch boundary and is level between: samples that were seen before. Info.

Medians of up to 32 rows on both sides of a boundary; told at the second boundary where the loss falls by 3 % and four
standard errors while it fell by less than half of that within the epoch.
"""

import math
from typing import ClassVar

import numpy as np

from runhealth.diagnose.detector import Detector
from runhealth.diagnose.findings import Alarm
from runhealth.diagnose.frame_block import FrameBlock
from runhealth.diagnose.frames import Frame
from runhealth.diagnose.robust import mad_sigma, median
from runhealth.storage.blocks import Floats, Ints

ROWS = 32
LEAST_ROWS = 8
DROP = math.log(1.03)
ERRORS = 4.0


class EpochStaircase(Detector):
    name: ClassVar[str] = "epoch_staircase"
    kinds: ClassVar[tuple[str, ...]] = ("epoch_staircase",)
    reads: ClassVar[tuple[str, ...]] = ("epoch",)

    def __init__(self) -> None:
        self._epoch: int | None = None
        self._rows: list[float] = []  # log-losses of the epoch that runs
        self._before: list[float] | None = None  # the last rows of the epoch before
        self._within = 0.0  # by how much the loss fell within the epoch before
        self._steps: list[tuple[int, float]] = []
        self._boundary = 0
        self._told = False

    def update(self, frame: Frame) -> list[Alarm]:
        loss, epoch = frame.loss, frame.get("epoch")
        if loss is None or epoch is None or self._told or not math.isfinite(loss) or loss <= 0:
            return []
        number = _number(epoch)
        if self._epoch is not None and number != self._epoch:
            self._close(frame.step)
        self._epoch = number
        self._rows.append(math.log(loss))
        if self._before is not None and len(self._rows) == min(ROWS, len(self._before)):
            self._compare()
        if len(self._steps) < 2:
            return []
        self._told = True
        step, drop = self._steps[0]
        message = (
            f"the train loss steps down by {-math.expm1(-drop):.0%} at the epoch boundary {step:,} and at those after "
            "it, and is nearly level between: it has seen these samples before"
        )
        return [self.fact(frame, "epoch_staircase", "loss", message, onset=step, value=loss)]

    def update_block(self, block: FrameBlock) -> list[tuple[int, Alarm]]:
        logs, epoch = block.log_loss, block.get("epoch")
        if logs is None or epoch is None:
            return []
        rows = np.flatnonzero(logs.present & epoch.present)
        numbers = _numbers(epoch.values[rows])
        changes = np.flatnonzero(numbers[1:] != numbers[:-1]) + 1
        found: list[tuple[int, Alarm]] = []
        at = 0
        while at < len(rows) and not self._told:
            if self._before is None and numbers[at] == self._epoch:  # nothing but the next epoch is waited for
                after = int(min(changes[changes > at], default=len(rows)))
                self._rows.extend(logs.values[rows[at:after]].tolist())
                at = after
            else:
                found.extend(self.update_rows(block, (int(rows[at]),)))
                at += 1
        return found

    def _close(self, step: int) -> None:
        rows = self._rows
        self._boundary = step
        self._before = rows[-ROWS:] if len(rows) >= 2 * LEAST_ROWS else None
        quarter = len(rows) // 4
        self._within = median(rows[:quarter]) - median(rows[-quarter:]) if quarter else 0.0
        self._rows = []

    def _compare(self) -> None:
        assert self._before is not None
        before, after = sorted(self._before), sorted(self._rows)
        drop = median(before) - median(after)
        sigma = max(mad_sigma(before, median(before)), mad_sigma(after, median(after)))
        error = 1.25 * sigma * math.sqrt(2 / len(after))
        if drop >= DROP and drop >= ERRORS * error and self._within < 0.5 * drop:
            self._steps.append((self._boundary, drop))
        else:
            self._steps.clear()
        self._before = None


def _number(epoch: float) -> int:
    """The epoch that a fraction of epochs lies in."""
    return math.ceil(round(epoch, 6)) if math.isfinite(epoch) else 0


def _numbers(epochs: Floats) -> Ints:
    whole = np.rint(epochs)
    close = ~(np.abs(epochs - whole) > 1e-5)  # where rounding decides
    numbers = np.ceil(np.where(close, 0.0, epochs)).astype(np.int64)
    numbers[close] = [_number(value) for value in epochs[close].tolist()]
    return numbers


DETECTOR = EpochStaircase
