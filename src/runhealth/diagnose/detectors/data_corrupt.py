"""Batches that prove, or all but prove, a damaged shard, whatever the loss does.

Two ways: the shard's hash is not that of the data manifest; or the token statistics of one shard are degenerate in at
least 8 batches of one visit. Degenerate is far more than unusual: another language or code moves an entropy by a
fifth, repeated or zeroed tokens move it to a half or to nothing. One alarm a visit of a shard; a visit is over after 8
frames without a bad batch of it.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

from runhealth.diagnose.batches import Z_OUTLIER, BatchOutlier, Deviation
from runhealth.diagnose.detector import Detector
from runhealth.diagnose.findings import Alarm
from runhealth.diagnose.frame_block import FrameBlock
from runhealth.diagnose.frames import Frame

LEAST_BATCHES = 8
GAP_FRAMES = 8
ENTROPY_SHARE = 0.5  # of the normal entropy
UNIQUE_FACTOR = 3.0  # times fewer, or more, distinct tokens than normal
REPEAT_SHARE = 0.5
LABEL_SHARE = 0.25


@dataclass(slots=True)
class _Visit:
    """A stretch of bad batches of one shard."""

    first_step: int
    last_index: int
    batches: int = 0
    told: bool = False


class DataCorrupt(Detector):
    name: ClassVar[str] = "data_corrupt"
    kinds: ClassVar[tuple[str, ...]] = ("data_corrupt",)

    def __init__(self) -> None:
        self._index = 0
        self._visits: dict[str, _Visit] = {}

    def update(self, frame: Frame) -> list[Alarm]:
        self._index += 1
        if frame.new_attempt:
            self._visits.clear()
        if not frame.outliers:
            return []
        bad: dict[str, list[BatchOutlier]] = {}
        for outlier in frame.outliers:
            if outlier.hash_mismatch or degenerate(outlier):
                bad.setdefault(outlier.batch.shard, []).append(outlier)
        alarms = []
        for shard, outliers in bad.items():
            visit = self._visits.get(shard)
            if visit is None or self._index - visit.last_index > GAP_FRAMES:
                visit = self._visits[shard] = _Visit(frame.step, self._index)
            visit.last_index = self._index
            visit.batches += len(outliers)
            proven = any(o.hash_mismatch for o in outliers)
            if not visit.told and (proven or (shard and visit.batches >= LEAST_BATCHES)):
                visit.told = True
                alarms.append(self._alarm(frame, shard, outliers, visit.first_step, proven))
        return alarms

    def update_block(self, block: FrameBlock) -> list[tuple[int, Alarm]]:
        found: list[tuple[int, Alarm]] = []
        at = 0
        for row in block.outliers:
            self._index += row - at
            found.extend(self.update_rows(block, (row,)))
            at = row + 1
        self._index += len(block) - at
        return found

    def _alarm(self, frame: Frame, shard: str, outliers: list[BatchOutlier], onset_step: int, proven: bool) -> Alarm:
        deviation = outliers[0].largest
        if proven:
            what = "its bytes are not those of the data manifest"
        else:
            assert deviation is not None
            what = (
                f"degenerate data, {deviation.signal.replace('_', ' ')} {deviation.value:.3g} "
                f"(normal {deviation.baseline:.3g})"
            )
        return Alarm(
            detector=self.name,
            kind="data_corrupt",
            signal="shard_hash" if proven or deviation is None else deviation.signal,
            attempt=frame.attempt,
            step=frame.step,
            onset_step=onset_step,
            score=abs(deviation.z) if deviation else math.inf,
            value=deviation.value if deviation else math.nan,
            baseline=deviation.baseline if deviation else math.nan,
            ranks=tuple(sorted({o.batch.rank for o in outliers})),
            message=f"shard {shard or '(unnamed)'}: {what}",
            details={"shard": shard, "proven": proven},
        )


def degenerate(outlier: BatchOutlier) -> bool:
    """Whether a statistic is what no honest text has."""
    return any(_degenerate(deviation) for deviation in outlier.deviations if abs(deviation.z) >= Z_OUTLIER)


def _degenerate(deviation: Deviation) -> bool:
    value, normal = deviation.value, deviation.baseline
    if deviation.signal == "token_entropy":
        return value <= ENTROPY_SHARE * normal
    if deviation.signal == "token_unique_share":
        return value <= normal / UNIQUE_FACTOR or value >= normal * UNIQUE_FACTOR
    if deviation.signal == "token_repeat_share":
        return value >= max(REPEAT_SHARE, 5 * normal)
    return deviation.signal == "label_mismatch_share" and value >= max(LABEL_SHARE, 5 * normal)


DETECTOR = DataCorrupt
