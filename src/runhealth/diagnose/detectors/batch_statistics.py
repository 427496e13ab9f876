"""A batch whose token statistics or shard hash are unlike the others'. A channel, no finding by itself.

The judgement is made in `diagnose.batches`, once for detectors, suspects and plans.
"""

import math
from typing import ClassVar

from runhealth.diagnose.detector import CHANNEL, Detector
from runhealth.diagnose.findings import Alarm
from runhealth.diagnose.frame_block import FrameBlock
from runhealth.diagnose.frames import Frame

DEBOUNCE_FRAMES = 16


class BatchStatistics(Detector):
    name: ClassVar[str] = "batch_statistics"
    kinds: ClassVar[tuple[str, ...]] = (CHANNEL,)

    def __init__(self) -> None:
        self._since = DEBOUNCE_FRAMES

    def update(self, frame: Frame) -> list[Alarm]:
        self._since += 1
        strong = [outlier for outlier in frame.outliers if outlier.strong]
        if not strong:
            return []
        fresh = self._since >= DEBOUNCE_FRAMES
        self._since = 0
        if not fresh:
            return []
        first = strong[0]
        deviation = first.largest
        signal = deviation.signal if deviation else "shard_hash"
        what = (
            f"{deviation.signal} {deviation.value:.3g} against {deviation.baseline:.3g}"
            if deviation
            else "hash differs from the manifest"
        )
        return [
            Alarm(
                detector=self.name,
                kind=CHANNEL,
                signal=signal,
                attempt=frame.attempt,
                step=frame.step,
                onset_step=frame.step,
                score=abs(deviation.z) if deviation else math.inf,
                value=deviation.value if deviation else math.nan,
                baseline=deviation.baseline if deviation else math.nan,
                ranks=tuple(sorted({o.batch.rank for o in strong})),
                message=f"shard {first.batch.shard}: {what}",
            )
        ]

    def update_block(self, block: FrameBlock) -> list[tuple[int, Alarm]]:
        found: list[tuple[int, Alarm]] = []
        at = 0
        for row, outliers in block.outliers.items():
            if any(outlier.strong for outlier in outliers):
                self._since += row - at
                found.extend(self.update_rows(block, (row,)))
                at = row + 1
        self._since += len(block) - at
        return found


DETECTOR = BatchStatistics
