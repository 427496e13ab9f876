"""The clip threshold is exceeded far more than the run's own habit: over 5 x the threshold and over 3 x the 95th
percentile of what the run is used to, in at least 3 of the last 5 frames.

A run that always clips a little is in order, so the norm is measured against both. One alarm an episode: the next one
needs 64 frames without a breach before it.
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
from runhealth.diagnose.windows import Ahead, quiet_stretches, settled
from runhealth.storage.blocks import Floats

OVER_THRESHOLD = 5.0
OVER_HABIT = 3.0
OF_FRAMES = 5
IN_FRAMES = 3
REARM_FRAMES = 64


class ClipBreach(Detector):
    name: ClassVar[str] = "clip_breach"
    kinds: ClassVar[tuple[str, ...]] = ("clip_breach",)
    reads: ClassVar[tuple[str, ...]] = ("clip_threshold",)

    def __init__(self) -> None:
        self._ratio = Baseline(256, least=32)
        self._recent: deque[tuple[int, float]] = deque(maxlen=OF_FRAMES)
        self._since = REARM_FRAMES  # frames since the last breach
        self._told = False

    def update(self, frame: Frame) -> list[Alarm]:
        norm, threshold = frame.get("grad_norm"), frame.get("clip_threshold")
        self._since += 1
        if norm is None or threshold is None or not threshold > 0 or not math.isfinite(norm) or norm <= 0:
            return []
        ratio = norm / threshold
        habit = max(self._ratio.quantile(0.95), 0.0) if self._ratio.ready else math.inf
        breached = ratio > OVER_THRESHOLD and ratio > OVER_HABIT * habit
        self._recent.append((frame.step, ratio if breached else 0.0))
        if not breached:
            self._ratio.push(ratio)
            return []
        breaches = [(step, r) for step, r in self._recent if r > 0]
        if self._told:
            self._told = self._since < REARM_FRAMES
        self._since = 0
        if len(breaches) < IN_FRAMES or self._told:
            return []
        self._told = True
        return [
            Alarm(
                detector=self.name,
                kind="clip_breach",
                signal="grad_norm",
                attempt=frame.attempt,
                step=frame.step,
                onset_step=breaches[0][0],
                score=ratio / OVER_THRESHOLD,
                value=float(norm),
                baseline=float(threshold),
                message=f"gradient norm {ratio:.0f} x the clip threshold {threshold:g} in {len(breaches)} of "
                f"{len(self._recent)} steps; the run is used to {habit:.2g} x",
            )
        ]

    def update_block(self, block: FrameBlock) -> list[tuple[int, Alarm]]:
        norm, threshold = block.get("grad_norm"), block.get("clip_threshold")
        if norm is None or threshold is None:
            self._since += len(block)
            return []
        measured = np.isfinite(norm.values) & (norm.values > 0) & (threshold.values > 0)
        rows = np.flatnonzero(measured)
        ratios = norm.values[rows] / threshold.values[rows]
        found: list[tuple[int, Alarm]] = []
        at = 0
        for start, stop, loud in quiet_stretches(self._ratio, ratios, self._first_breach):
            self._recent.extend((step, 0.0) for step in block.steps[rows[start:stop][-OF_FRAMES:]].tolist())
            if loud:
                row = int(rows[stop])
                self._since += row - at
                found.extend(self.update_rows(block, (row,)))
                at = row + 1
        self._since += len(block) - at
        return found

    def _first_breach(self, ratios: Floats) -> int:
        """The first that may be one; their number if none is."""
        over = ratios > OVER_THRESHOLD
        if over.any() and settled(self._ratio):
            over &= ratios > OVER_HABIT * np.maximum(Ahead(self._ratio, ratios).quantile(0.95), 0.0)
        return int(over.argmax()) if over.any() else len(ratios)


DETECTOR = ClipBreach
