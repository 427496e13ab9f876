"""Which batches are unlike the others: token statistics and shard hashes, judged one batch at a time.

The habit of each statistic is the median and the robust sigma over the last 512 batches of all ranks. Batches that are
outliers do not enter it, unless nothing but outliers came for a while: then the data have changed for good. Inputs that
are not finite need no habit, unless they are one: some data mark with NaN what is not there.
"""

import copy
import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from runhealth.diagnose.robust import Baseline
from runhealth.diagnose.windows import Ahead, take
from runhealth.storage.blocks import BatchColumns, Floats, StepBlock, batch_record
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
MOST_AHEAD = 1 << 15  # batches whose habits are computed at once

NONFINITE = "nonfinite_share"
Z_NONFINITE = 100.0  # stands for a share that has no scatter: it was 0
KNOWN_BATCHES, YOUNG_BATCHES = 16, 64
YOUNG_SHARE, OLD_SHARE = 0.1, 0.5  # of the batches before, over which such inputs are the habit of a run


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
        self._nonfinite: deque[bool] = deque(maxlen=WINDOW_BATCHES)  # which of the last batches had such inputs
        self._nonfinite_usual = False

    def judge(self, batches: Iterable[BatchRecord]) -> tuple[BatchOutlier, ...]:
        found = []
        habits = self._habits
        for batch in batches:
            deviations: list[Deviation] = []
            values = batch.values
            for signal in SIGMA_FLOORS:
                number = values.get(signal)
                if number is None:
                    continue
                value = float(number)
                habit = habits.get(signal) or self._habit(signal)
                if habit.low < value < habit.high and habit.baseline.since < EVERY_BATCHES:
                    habit.baseline.push(value)
                    habit.outlying = 0
                elif math.isfinite(value):
                    deviation = self._closely(signal, habit, value)
                    if deviation is not None:
                        deviations.append(deviation)
            deviation = self._inputs(float(values.get(NONFINITE, 0.0)))
            if deviation is not None:
                deviations.append(deviation)
            shard_hash = batch.shard_hash
            mismatch = shard_hash != batch.manifest_hash and shard_hash is not None and batch.manifest_hash is not None
            if deviations or mismatch:
                found.append(BatchOutlier(batch=batch, deviations=tuple(deviations), hash_mismatch=mismatch))
        return tuple(found)

    def judge_columns(
        self, batches: BatchColumns, block: StepBlock, first: int, stop: int
    ) -> dict[int, tuple[BatchOutlier, ...]]:
        """`judge` of the rows from `first` to before `stop`; only rows with outliers are returned."""
        low, high = np.searchsorted(batches.row, (first, stop)).tolist()
        deviations: dict[int, list[Deviation]] = {}
        for signal in SIGMA_FLOORS:
            column = batches.columns.get(signal)
            if column is None:
                continue
            values, places = column.values[low:high].astype(np.float64), np.arange(low, high)
            if column.present is not None:
                there = column.present[low:high]
                values, places = values[there], places[there]
            for place, deviation in self._judge_values(signal, values):
                deviations.setdefault(int(places[place]), []).append(deviation)
        for place, deviation in self._judge_inputs(batches, low, high):
            deviations.setdefault(place, []).append(deviation)
        mismatches: set[int] = set()
        if batches.shard_hash[low:high] != batches.manifest_hash[low:high]:
            hashes = zip(batches.shard_hash[low:high], batches.manifest_hash[low:high], strict=True)
            mismatches = {
                low + place
                for place, (read, meant) in enumerate(hashes)
                if read != meant and read is not None and meant is not None
            }
        found: dict[int, list[BatchOutlier]] = {}
        for k in sorted(deviations.keys() | mismatches):
            row = int(batches.row[k])
            batch = batch_record(batches, k, block.attempt, int(block.steps[row]))
            outlier = BatchOutlier(batch=batch, deviations=tuple(deviations.get(k, ())), hash_mismatch=k in mismatches)
            found.setdefault(row, []).append(outlier)
        return {row: tuple(outliers) for row, outliers in found.items()}

    def _judge_values(self, signal: str, values: Floats) -> list[tuple[int, Deviation]]:
        """One statistic of many batches: what deviates, with its place."""
        found = []
        numbers = values.tolist()
        at = 0
        length = EVERY_BATCHES
        while at < len(numbers):
            habit = self._habit(signal)
            baseline = habit.baseline
            if not habit.low < numbers[at] < habit.high or baseline.since >= EVERY_BATCHES:
                deviation = self._closely(signal, habit, numbers[at]) if math.isfinite(numbers[at]) else None
                if deviation is not None:
                    found.append((at, deviation))
                    length = EVERY_BATCHES
                at += 1
                continue
            ahead = values[at : at + length]
            looks = Ahead(baseline, ahead)
            center, extent = looks.center(), Z_EXTENT * looks.sigma()
            low, high = center - extent, center + extent
            usual = (low < ahead) & (ahead < high)
            quiet = len(ahead) if usual.all() else int(usual.argmin())
            take(baseline, ahead[:quiet])
            habit.low, habit.high = float(low[quiet - 1]), float(high[quiet - 1])
            habit.outlying = 0
            at += quiet
            length = min(4 * length, MOST_AHEAD) if quiet == len(ahead) else EVERY_BATCHES
        return found

    def _judge_inputs(self, batches: BatchColumns, low: int, high: int) -> list[tuple[int, Deviation]]:
        """The same of inputs that are not finite; places are those in `batches`."""
        found: list[tuple[int, Deviation]] = []
        column = batches.columns.get(NONFINITE)
        if column is not None:
            shares = column.values[low:high].astype(np.float64)
            bad = shares > 0
            if column.present is not None:
                bad &= column.present[low:high]
            at = 0
            for place in np.flatnonzero(bad).tolist():
                self._nonfinite.extend([False] * min(place - at, WINDOW_BATCHES))
                deviation = self._inputs(float(shares[place]))
                if deviation is not None:
                    found.append((low + place, deviation))
                at = place + 1
            low += at
        self._nonfinite.extend([False] * min(high - low, WINDOW_BATCHES))
        return found

    def _inputs(self, share: float) -> Deviation | None:
        self._nonfinite.append(share > 0)
        if not share > 0:
            return None
        seen, before = len(self._nonfinite) - 1, sum(self._nonfinite) - 1
        usual = before > (YOUNG_SHARE if seen < YOUNG_BATCHES else OLD_SHARE) * seen
        self._nonfinite_usual = self._nonfinite_usual or usual
        if self._nonfinite_usual or seen < KNOWN_BATCHES:
            return None
        return Deviation(signal=NONFINITE, value=share, baseline=0.0, z=Z_NONFINITE)

    def _habit(self, signal: str) -> _Habit:
        habit = self._habits.get(signal)
        if habit is None:
            habit = self._habits[signal] = _Habit(SIGMA_FLOORS[signal])
        return habit

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
