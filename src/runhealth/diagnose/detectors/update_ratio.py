"""The last update's norm over the parameters' norm: over twice its trailing median. A channel, no finding by itself.

It moves the same step as a wrong learning rate or a lost optimizer state, before the loss; bad data leave it near
normal (in 70 of 71 and 0 of 63 labelled spikes of the project's bench).
"""

import math
from typing import ClassVar

import numpy as np

from runhealth.diagnose.detector import CHANNEL, Detector
from runhealth.diagnose.findings import Alarm
from runhealth.diagnose.frame_block import FrameBlock
from runhealth.diagnose.frames import Frame
from runhealth.diagnose.robust import Baseline
from runhealth.diagnose.windows import Ahead, Chunks, settled, take
from runhealth.storage.blocks import Floats

FACTOR = 2.0
REARM_FRAMES = 32


class UpdateRatio(Detector):
    name: ClassVar[str] = "update_ratio"
    kinds: ClassVar[tuple[str, ...]] = (CHANNEL,)
    reads: ClassVar[tuple[str, ...]] = ("update_ratio",)

    def __init__(self) -> None:
        self._ratio = Baseline(64, least=16)
        self._since = REARM_FRAMES

    def update(self, frame: Frame) -> list[Alarm]:
        ratio = frame.get("update_ratio")
        self._since += 1
        if ratio is None or not math.isfinite(ratio) or ratio <= 0:
            return []
        center = self._ratio.center if self._ratio.ready else math.inf
        self._ratio.push(float(ratio))
        if ratio <= FACTOR * center or self._since < REARM_FRAMES:
            return []
        self._since = 0
        return [
            Alarm(
                detector=self.name,
                kind=CHANNEL,
                signal="update_ratio",
                attempt=frame.attempt,
                step=frame.step,
                onset_step=frame.step,
                score=ratio / center,
                value=float(ratio),
                baseline=center,
                message=f"update ratio {ratio:.3g}, {ratio / center:.1f} x its median",
            )
        ]

    def update_block(self, block: FrameBlock) -> list[tuple[int, Alarm]]:
        signal = block.get("update_ratio")
        if signal is None:
            self._since += len(block)
            return []
        rows = np.flatnonzero(np.isfinite(signal.values) & (signal.values > 0))
        ratios = signal.values[rows]
        found: list[tuple[int, Alarm]] = []
        at, part = 0, Chunks(self._ratio, len(rows))
        while part:
            loud = self._first_leap(ratios[part.at : part.end])
            quiet = part.at + loud
            take(self._ratio, ratios[part.at : quiet])
            if quiet == part.end:
                part.quiet()
                continue
            row = int(rows[quiet])
            self._since += row - at
            found.extend(self.update_rows(block, (row,)))
            at = row + 1
            part.loud(quiet)
        self._since += len(block) - at
        return found

    def _first_leap(self, ratios: Floats) -> int:
        """The first that may be one; their number if none is."""
        if not settled(self._ratio):
            return 0
        if ratios.max() <= FACTOR * min(float(ratios.min()), min(self._ratio.values)):
            return len(ratios)
        over = ratios > FACTOR * Ahead(self._ratio, ratios).center()
        return int(over.argmax()) if over.any() else len(ratios)


DETECTOR = UpdateRatio
