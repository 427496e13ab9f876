"""Which batches are unlike the others: token statistics and shard hashes, judged one batch at a time.

The habit of each statistic is the median and the robust sigma over the last 512 batches of all ranks. Batches that are
outliers do not enter it, unless nothing but outliers came for a while: then the data have changed for good.
"""

import copy
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from runhealth.diagnose.robust import Baseline
from runhealth.storage.records import BatchRecord

# statistic -> smallest sigma that is believed, in its own unit (bits, shares)
SIGMA_FLOORS: Mapping[str, float] = {
    "token_entropy": 0.05,
    "token_unique_share": 0.01,
    "token_repeat_share": 0.01,
    "label_mismatch_share": 0.005,
}
Z_EXTENT = 4.0  # for the extent of bad data around an outlier
Z_OUTLIER = 6.0  # for an outlier that stands by itself
RELEARN_BATCHES = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """A statistic of one batch against the habit. `z` is signed, in robust sigma."""

    signal: str
    value: float
    baseline: float
    z: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOutlier:
    """A batch unlike the others: statistics beyond `Z_EXTENT`, or a shard whose hash is not the manifest's."""

    batch: BatchRecord
    deviations: tuple[Deviation, ...]
    hash_mismatch: bool

    @property
    def strong(self) -> bool:
        return self.hash_mismatch or any(abs(d.z) >= Z_OUTLIER for d in self.deviations)

    @property
    def largest(self) -> Deviation | None:
        return max(self.deviations, key=lambda d: abs(d.z), default=None)


class BatchHabit:
    """Judges the batches of each frame against those before."""

    def __init__(self) -> None:
        self._habits: dict[str, Baseline] = {}
        self._outlying: dict[str, int] = {}

    def judge(self, batches: Iterable[BatchRecord]) -> tuple[BatchOutlier, ...]:
        found = []
        for batch in batches:
            deviations: list[Deviation] = []
            for signal, floor in SIGMA_FLOORS.items():
                value = batch.values.get(signal)
                if value is None or not math.isfinite(value):
                    continue
                habit = self._habits.get(signal)
                if habit is None:
                    habit = self._habits[signal] = Baseline(512, least=16, every=64, floor=floor, floor_share=0.005)
                if not habit.ready:
                    habit.push(value)
                    continue
                z = habit.z(value)
                if abs(z) >= Z_EXTENT:
                    deviations.append(Deviation(signal=signal, value=float(value), baseline=habit.center, z=z))
                if abs(z) < Z_OUTLIER:
                    habit.push(value)
                    self._outlying[signal] = 0
                else:
                    self._outlying[signal] = self._outlying.get(signal, 0) + 1
                    if self._outlying[signal] >= RELEARN_BATCHES:
                        del self._habits[signal]
            mismatch = (
                batch.shard_hash is not None
                and batch.manifest_hash is not None
                and batch.shard_hash != batch.manifest_hash
            )
            if deviations or mismatch:
                found.append(BatchOutlier(batch=batch, deviations=tuple(deviations), hash_mismatch=mismatch))
        return tuple(found)

    def state_dict(self) -> dict[str, Any]:
        return copy.deepcopy(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        vars(self).update(copy.deepcopy(dict(state)))
