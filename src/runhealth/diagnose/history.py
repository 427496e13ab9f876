"""What the engine remembers: a ring of recent frames, compact series of a few signals, checkpoints and events."""

import copy
import math
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from runhealth.diagnose.batches import BatchOutlier
from runhealth.diagnose.findings import AttemptSummary
from runhealth.diagnose.frames import Frame
from runhealth.storage.records import BatchRecord, CheckpointRecord, RunEvent

RING_FRAMES = 1024
CURVE_SIGNALS = ("loss", "grad_norm", "lr", "eval_loss", "t_step_s", "update_ratio")
CURVE_POINTS = 240
MAX_OUTLIERS = 20_000


class Series:
    """(step, value) pairs of one signal, in order."""

    __slots__ = ("steps", "values")

    def __init__(self) -> None:
        self.steps: array[int] = array("q")
        self.values: array[float] = array("d")

    def between(self, first: int, last: int) -> list[tuple[int, float]]:
        low, high = bisect_left(self.steps, first), bisect_left(self.steps, last + 1)
        return list(zip(self.steps[low:high], self.values[low:high], strict=True))


class History:
    """Bounded in frames, linear but small in series: 16 bytes a step and signal."""

    def __init__(self) -> None:
        self.frames: deque[Frame] = deque(maxlen=RING_FRAMES)
        self.series: dict[int, dict[str, Series]] = {}
        self.firsts: dict[int, int] = {}
        self.lasts: dict[int, int] = {}
        self.steps_seen: dict[int, array[int]] = {}
        self.checkpoints: list[CheckpointRecord] = []
        self.events: list[RunEvent] = []
        self.outliers: deque[BatchOutlier] = deque(maxlen=MAX_OUTLIERS)
        self.signals: set[str] = set()
        self.last_ts_ns = 0
        self.tokens_per_step = 0.0
        self._layer_signals: set[str] = set()

    def rewind(self, step: int) -> list[Frame]:
        """A new attempt starts at `step`: frames at or after it are superseded. Returns the frames that stay."""
        while self.frames and self.frames[-1].step >= step:
            self.frames.pop()
        return list(self.frames)

    def append(self, frame: Frame) -> None:
        self.frames.append(frame)
        attempt, step = frame.attempt, frame.step
        if attempt not in self.firsts:
            self.firsts[attempt] = step
            self.series[attempt] = {}
            self.steps_seen[attempt] = array("q")
        self.lasts[attempt] = step
        self.steps_seen[attempt].append(step)
        series = self.series[attempt]
        values = frame.values
        for name in CURVE_SIGNALS:
            if name in values:
                found = series.get(name)
                if found is None:
                    found = series[name] = Series()
                found.steps.append(step)
                found.values.append(values[name] if name != "loss" or frame.loss is None else frame.loss)
        if frame.outliers:
            self.outliers.extend(frame.outliers)
        if frame.ts_ns > self.last_ts_ns:
            self.last_ts_ns = frame.ts_ns
        tokens = frame.total("tokens")
        if tokens:
            self.tokens_per_step = float(tokens)
        self._note_signals(frame)

    def _note_signals(self, frame: Frame) -> None:
        signals = self.signals
        signals.update(frame.values)
        for batch in frame.batches:
            signals.update(batch.values)
            if batch.shard_hash is not None:
                signals.add("shard_hash")
            if batch.shard:
                signals.add("shard")
        for sample in frame.layers:
            for name in sample.values:
                if name not in self._layer_signals:
                    self._layer_signals.add(name)
                    self.signals.add(f"layer.{name}")

    def add_checkpoint(self, record: CheckpointRecord) -> None:
        self.checkpoints.append(record)
        self.last_ts_ns = max(self.last_ts_ns, record.ts_ns)

    def add_event(self, record: RunEvent) -> None:
        self.events.append(record)
        self.last_ts_ns = max(self.last_ts_ns, record.ts_ns)

    def attempts(self) -> tuple[AttemptSummary, ...]:
        """Per attempt: its steps, and how many of them a later attempt did again."""
        found = []
        for attempt in sorted(self.firsts):
            later = [self.firsts[n] for n in self.firsts if n > attempt]
            superseded = 0
            if later:
                steps = self.steps_seen[attempt]
                superseded = len(steps) - bisect_left(steps, min(later))
            found.append(
                AttemptSummary(
                    attempt=attempt,
                    first_step=self.firsts[attempt],
                    last_step=self.lasts[attempt],
                    superseded_steps=superseded,
                )
            )
        return tuple(found)

    def stitched(self, signal: str) -> Iterator[tuple[int, float]]:
        """The series without superseded steps, attempts joined."""
        attempts = sorted(self.series)
        for index, attempt in enumerate(attempts):
            until = min((self.firsts[n] for n in attempts[index + 1 :]), default=None)
            series = self.series[attempt].get(signal)
            if series is None:
                continue
            end = len(series.steps) if until is None else bisect_left(series.steps, until)
            yield from zip(series.steps[:end], series.values[:end], strict=True)

    def window(self, attempt: int, signal: str, first: int, last: int) -> list[tuple[int, float]]:
        series = self.series.get(attempt, {}).get(signal)
        return series.between(first, last) if series is not None else []

    def curves(self) -> dict[str, tuple[tuple[int, float], ...]]:
        return {name: decimate(points, CURVE_POINTS) for name in CURVE_SIGNALS if (points := list(self.stitched(name)))}

    def state_dict(self) -> dict[str, Any]:
        return copy.deepcopy(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        vars(self).update(copy.deepcopy(dict(state)))


def decimate(points: Sequence[tuple[int, float]], target: int) -> tuple[tuple[int, float], ...]:
    """At most about `target` points that keep the first and last, each bucket's minimum and maximum, and one NaN mark
    per bucket that holds a non-finite value."""
    if len(points) <= target:
        return tuple(points)
    buckets = max(1, target // 3)
    kept: dict[int, float] = {}
    size = len(points) / buckets
    for bucket in range(buckets):
        part = points[int(bucket * size) : int((bucket + 1) * size)]
        finite = [p for p in part if math.isfinite(p[1])]
        if finite:
            low, high = min(finite, key=lambda p: p[1]), max(finite, key=lambda p: p[1])
            kept[low[0]], kept[high[0]] = low[1], high[1]
        bad = next((p for p in part if not math.isfinite(p[1])), None)
        if bad:
            kept[bad[0]] = math.nan
    kept |= {points[0][0]: points[0][1], points[-1][0]: points[-1][1]}
    return tuple(sorted(kept.items()))


def batches_of(frames: Iterable[Frame], first: int, last: int) -> list[BatchRecord]:
    return [batch for frame in frames if first <= frame.step <= last for batch in frame.batches]
