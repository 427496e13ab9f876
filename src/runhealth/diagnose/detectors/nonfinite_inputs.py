"""A batch brings inputs that are not finite where none did before: the data are damaged, whatever the loss does.

Which batches these are is judged with the other statistics of batches (`diagnose.batches`). Told of one shard once a
visit; a visit is over after 8 frames without such a batch of it.
"""

from collections.abc import Sequence
from typing import ClassVar

from runhealth.diagnose.batches import NONFINITE, BatchOutlier
from runhealth.diagnose.detector import Detector
from runhealth.diagnose.findings import Alarm, Severity
from runhealth.diagnose.frame_block import FrameBlock
from runhealth.diagnose.frames import Frame
from runhealth.storage.records import BatchRecord

GAP_FRAMES = 8


class NonfiniteInputs(Detector):
    name: ClassVar[str] = "nonfinite_inputs"
    kinds: ClassVar[tuple[str, ...]] = ("data_corrupt",)
    reads: ClassVar[tuple[str, ...]] = (NONFINITE,)

    def __init__(self) -> None:
        self._index = 0
        self._last: dict[str, int] = {}  # shard -> frame of its last such batch

    def update(self, frame: Frame) -> list[Alarm]:
        self._index += 1
        if frame.new_attempt:
            self._last.clear()
        bad: dict[str, list[BatchOutlier]] = {}
        for outlier in frame.outliers:
            if _share(outlier) > 0:
                bad.setdefault(outlier.batch.shard, []).append(outlier)
        alarms = []
        for shard, outliers in bad.items():
            last = self._last.get(shard)
            if last is None or self._index - last > GAP_FRAMES:
                alarms.append(self._alarm(frame, outliers))
            self._last[shard] = self._index
        return alarms

    def update_block(self, block: FrameBlock) -> list[tuple[int, Alarm]]:
        found: list[tuple[int, Alarm]] = []
        at = 0
        for row, outliers in block.outliers.items():
            if any(_share(outlier) > 0 for outlier in outliers):
                self._index += row - at
                found.extend(self.update_rows(block, (row,)))
                at = row + 1
        self._index += len(block) - at
        return found

    def _alarm(self, frame: Frame, outliers: Sequence[BatchOutlier]) -> Alarm:
        worst = max(outliers, key=_share)
        batch, share = worst.batch, _share(worst)
        loss = frame.ranks.get(batch.rank, {}).get("loss", 0.0)
        breaks = loss - loss != 0.0  # NaN and Inf less themselves are NaN
        samples = f", samples {batch.first_sample:,}-{batch.last_sample:,}" if batch.first_sample >= 0 else ""
        return Alarm(
            detector=self.name,
            kind="data_corrupt",
            signal=NONFINITE,
            attempt=frame.attempt,
            step=frame.step,
            onset_step=frame.step,
            score=1.0,
            value=share,
            baseline=0.0,
            ranks=tuple(sorted({o.batch.rank for o in outliers})),
            message=f"shard {batch.shard or '(unnamed)'}: {share:.2g} of the inputs of micro-batch {batch.micro_batch} "
            f"of rank {batch.rank}{samples} are not finite" + (", and neither is that rank's loss" if breaks else ""),
            severity=Severity.ERROR if breaks else Severity.WARNING,
            details={"shard": batch.shard, "proven": True, **_where(batch)},
        )


def _share(outlier: BatchOutlier) -> float:
    return next((d.value for d in outlier.deviations if d.signal == NONFINITE), 0.0)


def _where(batch: BatchRecord) -> dict[str, int]:
    return {"micro_batch": batch.micro_batch, "first_sample": batch.first_sample, "last_sample": batch.last_sample}


DETECTOR = NonfiniteInputs
