"""Repeated halving of the loss scale without regrowth, outside the start-up calibration.

At least 2^5 under where it was, by at least 4 decreases of which each follows the one before within 10 frames. A lone
halving is normal; so is the start of a run, when the scale is still looking for its level, and the start of an attempt
whose scale comes down to where it was.
"""

import math
from typing import ClassVar

import numpy as np

from runhealth.diagnose.detector import Detector
from runhealth.diagnose.findings import Alarm
from runhealth.diagnose.frame_block import FrameBlock
from runhealth.diagnose.frames import Frame

DOUBLINGS = 5.0
DECREASES = 4
GAP_FRAMES = 10
CALIBRATION_FRAMES = 64


class LossScaleCollapse(Detector):
    name: ClassVar[str] = "loss_scale_collapse"
    kinds: ClassVar[tuple[str, ...]] = ("loss_scale_collapse",)
    reads: ClassVar[tuple[str, ...]] = ("loss_scale",)

    def __init__(self) -> None:
        self._scale: float | None = None
        self._seen = 0
        self._resumed_at = 0
        self._resumed_over: float | None = None  # the scale before the resume
        self._first_step: int | None = None
        self._falls: list[tuple[int, int, float, float]] = []  # frame, step, from, to
        self._alarmed = False

    def update(self, frame: Frame) -> list[Alarm]:
        scale = frame.get("loss_scale")
        if scale is None or not math.isfinite(scale) or scale <= 0:
            return []
        if self._first_step is None:
            self._first_step = frame.step
        if frame.new_attempt:
            self._resumed_at = self._seen
            self._resumed_over = self._scale
        self._seen += 1
        before, self._scale = self._scale, float(scale)
        if before is None or scale == before:
            return []
        if scale > before:
            self._falls.clear()
            self._alarmed = False
            return []
        if self._falls and self._seen - self._falls[-1][0] > GAP_FRAMES:
            self._falls.clear()
            self._alarmed = False
        self._falls.append((self._seen, frame.step, before, float(scale)))
        # An excerpt of a long run starts late: its scale was calibrated before the first line.
        calibrating = self._first_step < CALIBRATION_FRAMES and self._seen <= CALIBRATION_FRAMES
        since = self._seen - self._resumed_at
        above = self._resumed_over is not None and scale >= self._resumed_over
        resuming = frame.attempt > 0 and (since <= 16 or (above and since <= CALIBRATION_FRAMES))
        doublings = math.log2(self._falls[0][2] / scale)
        if calibrating or resuming or self._alarmed or doublings < DOUBLINGS or len(self._falls) < DECREASES:
            return []
        self._alarmed = True
        return [
            Alarm(
                detector=self.name,
                kind="loss_scale_collapse",
                signal="loss_scale",
                attempt=frame.attempt,
                step=frame.step,
                onset_step=self._falls[0][1],
                score=doublings,
                value=float(scale),
                baseline=self._falls[0][2],
                message=f"loss scale fell from {self._falls[0][2]:g} to {scale:g} in {len(self._falls)} decreases",
            )
        ]

    def update_block(self, block: FrameBlock) -> list[tuple[int, Alarm]]:
        signal = block.get("loss_scale")
        if signal is None:
            return []
        rows = np.flatnonzero(np.isfinite(signal.values) & (signal.values > 0))
        scales = signal.values[rows]
        before = np.concatenate([[math.nan if self._scale is None else self._scale], scales[:-1]])
        found: list[tuple[int, Alarm]] = []
        at = 0
        for loud in [*np.flatnonzero(scales != before).tolist(), len(rows)]:
            self._seen += loud - at
            if loud < len(rows):
                found.extend(self.update_rows(block, (int(rows[loud]),)))
            at = loud + 1
        return found


DETECTOR = LossScaleCollapse
