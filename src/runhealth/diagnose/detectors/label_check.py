"""Labels that are not the next input token, on one rank: three batches of eight rows unlike all others in that respect.

Where documents are packed, a habit of some mismatches is normal; the habit is the batches' own (`diagnose.batches`).
"""

import math
from collections import deque
from typing import ClassVar

from runhealth.diagnose.batches import Z_OUTLIER, BatchOutlier
from runhealth.diagnose.detector import Detector
from runhealth.diagnose.findings import Alarm
from runhealth.diagnose.frame_block import FrameBlock
from runhealth.diagnose.frames import Frame

SIGNAL = "label_mismatch_share"
ROWS, LEAST = 8, 3
REARM_ROWS = 64


class LabelCheck(Detector):
    name: ClassVar[str] = "label_check"
    kinds: ClassVar[tuple[str, ...]] = ("data_corrupt",)
    reads: ClassVar[tuple[str, ...]] = (SIGNAL,)

    def __init__(self) -> None:
        self._row = 0
        self._wrong: dict[int, deque[tuple[int, int]]] = {}  # rank -> row and step of wrong batches
        self._told: dict[int, int] = {}  # rank -> row of the last wrong batch since it was told

    def update(self, frame: Frame) -> list[Alarm]:
        self._row += 1
        alarms = []
        for outlier in frame.outliers:
            if any(d.signal == SIGNAL and d.z >= Z_OUTLIER for d in outlier.deviations):
                alarms += self._note(frame, outlier)
        return alarms

    def update_block(self, block: FrameBlock) -> list[tuple[int, Alarm]]:
        found: list[tuple[int, Alarm]] = []
        at = 0
        for row in sorted(block.outliers):
            self._row += row - at
            found.extend(self.update_rows(block, (row,)))
            at = row + 1
        self._row += len(block) - at
        return found

    def _note(self, frame: Frame, outlier: BatchOutlier) -> list[Alarm]:
        rank = outlier.batch.rank
        wrong = self._wrong.setdefault(rank, deque(maxlen=LEAST))
        wrong.append((self._row, frame.step))
        told = self._told.get(rank)
        if told is not None:
            self._told[rank] = self._row
            if self._row - told < REARM_ROWS:
                return []
            del self._told[rank]
        if len(wrong) < LEAST or self._row - wrong[0][0] >= ROWS:
            return []
        self._told[rank] = self._row
        deviation = next(d for d in outlier.deviations if d.signal == SIGNAL)
        shard = outlier.batch.shard
        return [
            Alarm(
                detector=self.name,
                kind="data_corrupt",
                signal=SIGNAL,
                attempt=frame.attempt,
                step=frame.step,
                onset_step=wrong[0][1],
                score=abs(deviation.z),
                value=deviation.value,
                baseline=deviation.baseline if math.isfinite(deviation.baseline) else 0.0,
                ranks=(rank,),
                message=f"rank {rank} reads labels that are not the next token: {deviation.value:.0%} of them "
                f"(normal {deviation.baseline:.0%}), shard {shard or '(unnamed)'}",
                details={"shard": shard, "proven": False},
            )
        ]


DETECTOR = LabelCheck
