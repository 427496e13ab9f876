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
WINDOW_BATCHES = 512
EVERY_BATCHES = 64  # batches between two computations of a habit
_FLOORS = tuple(SIGMA_FLOORS.items())


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


class _Habit:
    """Median and sigma of one statistic, and the range within which a value is no deviation."""

    __slots__ = ("baseline", "high", "low", "outlying")

    def __init__(self, floor: float) -> None:
        self.baseline = Baseline(WINDOW_BATCHES, least=16, every=EVERY_BATCHES, floor=floor, floor_share=0.005)
        self.low = self.high = math.nan  # NaN: look closely
        self.outlying = 0

    def look(self) -> None:
        baseline = self.baseline
        center, extent = baseline.center, Z_EXTENT * baseline.sigma
        settled = len(baseline.values) >= 2 * baseline.least
        self.low, self.high = (center - extent, center + extent) if settled else (math.nan, math.nan)


class BatchHabit:
    """Judges the batches of each frame against those before."""

    def __init__(self) -> None:
        self._habits: dict[str, _Habit] = {}

    def judge(self, batches: Iterable[BatchRecord]) -> tuple[BatchOutlier, ...]:
        found = []
        habits = self._habits
        for batch in batches:
            deviations: list[Deviation] = []
            values = batch.values
            for signal, floor in _FLOORS:
                value = values.get(signal)
                if value is None:
                    continue
                habit = habits.get(signal)
                if habit is None:
                    habit = habits[signal] = _Habit(floor)
                if habit.low < value < habit.high and habit.baseline.since < EVERY_BATCHES:
                    habit.baseline.push(value)
                    habit.outlying = 0
                elif math.isfinite(value):
                    deviation = self._closely(signal, habit, value)
                    if deviation is not None:
                        deviations.append(deviation)
            shard_hash = batch.shard_hash
            mismatch = shard_hash != batch.manifest_hash and shard_hash is not None and batch.manifest_hash is not None
            if deviations or mismatch:
                found.append(BatchOutlier(batch=batch, deviations=tuple(deviations), hash_mismatch=mismatch))
        return tuple(found)

    def _closely(self, signal: str, habit: _Habit, value: float) -> Deviation | None:
        baseline = habit.baseline
        if not baseline.ready:
            baseline.push(value)
            return None
        z = baseline.z(value)
        habit.look()
        deviation = None
        if abs(z) >= Z_EXTENT:
            deviation = Deviation(signal=signal, value=float(value), baseline=baseline.center, z=z)
        if abs(z) < Z_OUTLIER:
            baseline.push(value)
            habit.outlying = 0
        else:
            habit.outlying += 1
            if habit.outlying >= RELEARN_BATCHES:
                del self._habits[signal]
        return deviation

    def state_dict(self) -> dict[str, Any]:
        return copy.deepcopy(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        vars(self).update(copy.deepcopy(dict(state)))
