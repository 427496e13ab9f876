"""What the engine remembers: a ring of recent frames, compact series of a few signals, checkpoints and events."""

import copy
import math
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from runhealth.diagnose.batches import BatchOutlier
from runhealth.diagnose.findings import AttemptSummary
from runhealth.diagnose.frame_block import FrameBlock
from runhealth.diagnose.frames import Frame
from runhealth.storage.blocks import Floats, Ints
from runhealth.storage.records import BatchRecord, CheckpointRecord, RunEvent

RING_FRAMES, LEAST_RING_FRAMES = 1024, 288  # suspects look back 192 frames and ahead 64
RING_RANK_ROWS = 1 << 18  # frames times ranks, where there are many ranks
CURVE_SIGNALS = ("loss", "grad_norm", "lr", "eval_loss", "t_step_s", "update_ratio")
CURVE_POINTS = 240
MAX_OUTLIERS = 20_000
LAYER_PREFIX = "layer."


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
        self._ring: deque[Frame] = deque()
        self._blocks: deque[FrameBlock] = deque()  # whose frames are not in the ring yet
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

    @property
    def frames(self) -> deque[Frame]:
        """The last frames."""
        while self._blocks:
            block = self._blocks.popleft()
            most = _ring_frames(len(block.ranks))
            self._ring.extend(map(block.unshared_frame, range(max(0, len(block) - most), len(block))))
            self._trim(most)
        return self._ring

    def _trim(self, most: int) -> None:
        while len(self._ring) > most:
            self._ring.popleft()

    def rewind(self, step: int) -> list[Frame]:
        """A new attempt starts at `step`: frames at or after it are superseded. Returns the frames that stay."""
        frames = self.frames
        while frames and frames[-1].step >= step:
            frames.pop()
        return list(frames)

    def extend(self, block: FrameBlock) -> None:
        """The same as `append` of each frame."""
        if not len(block):
            return
        self._blocks.append(block)
        kept = sum(map(len, self._blocks))
        while kept - len(self._blocks[0]) >= RING_FRAMES:
            kept -= len(self._blocks.popleft())
        attempt, steps = block.attempt, block.steps
        self._open(attempt, int(steps[0]))
        self.lasts[attempt] = int(steps[-1])
        self.steps_seen[attempt].frombytes(steps.tobytes())
        series = self.series[attempt]
        for name in CURVE_SIGNALS:
            signal = block.loss if name == "loss" else block.get(name)
            if signal is None:
                continue
            found = series.get(name)
            if found is None:
                found = series[name] = Series()
            every = bool(signal.present.all())
            found.steps.frombytes((steps if every else steps[signal.present]).tobytes())
            found.values.frombytes((signal.values if every else signal.values[signal.present]).tobytes())
        for outliers in block.outliers.values():
            self.outliers.extend(outliers)
        self.last_ts_ns = max(self.last_ts_ns, int(block.ts_ns.max()))
        tokens = block.total("tokens")
        if tokens is not None and len(rows := np.flatnonzero(tokens.present & (tokens.values != 0))):
            self.tokens_per_step = float(tokens.values[rows[-1]])
        for name in block.unknown(self.signals):
            self.signals.add(name)
            if name.startswith(LAYER_PREFIX):
                self._layer_signals.add(name.removeprefix(LAYER_PREFIX))

    def _open(self, attempt: int, step: int) -> None:
        if attempt not in self.firsts:
            self.firsts[attempt] = step
            self.series[attempt] = {}
            self.steps_seen[attempt] = array("q")

    def append(self, frame: Frame) -> None:
        self.frames.append(frame)
        self._trim(_ring_frames(len(frame.ranks)))
        attempt, step = frame.attempt, frame.step
        self._open(attempt, step)
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
                    self.signals.add(f"{LAYER_PREFIX}{name}")

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

    def _stitched(self, signal: str) -> Iterator[tuple[Ints, Floats]]:
        """Steps and values of each attempt, without superseded steps."""
        attempts = sorted(self.series)
        for index, attempt in enumerate(attempts):
            until = min((self.firsts[n] for n in attempts[index + 1 :]), default=None)
            series = self.series[attempt].get(signal)
            if series is not None:
                end = len(series.steps) if until is None else bisect_left(series.steps, until)
                yield np.array(series.steps[:end], dtype=np.int64), np.array(series.values[:end], dtype=np.float64)

    def window(self, attempt: int, signal: str, first: int, last: int) -> list[tuple[int, float]]:
        series = self.series.get(attempt, {}).get(signal)
        return series.between(first, last) if series is not None else []

    def curves(self) -> dict[str, tuple[tuple[int, float], ...]]:
        found = {}
        for name in CURVE_SIGNALS:
            parts = list(self._stitched(name))
            if parts:
                steps, values = (np.concatenate(of) for of in zip(*parts, strict=True))
                found[name] = _thinned(steps, values, CURVE_POINTS)
        return found

    def state_dict(self) -> dict[str, Any]:
        assert self.frames is self._ring  # takes in the blocks
        return copy.deepcopy(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        vars(self).update(copy.deepcopy(dict(state)))


def _ring_frames(ranks: int) -> int:
    """How many frames of so many ranks are kept."""
    return max(LEAST_RING_FRAMES, min(RING_FRAMES, RING_RANK_ROWS // max(1, ranks)))


def decimate(points: Sequence[tuple[int, float]], target: int) -> tuple[tuple[int, float], ...]:
    """At most about `target` points that keep the first and last, each bucket's minimum and maximum, and one NaN mark
    per bucket that holds a non-finite value."""
    steps, values = zip(*points, strict=True) if points else ((), ())
    return _thinned(np.array(steps, dtype=np.int64), np.array(values, dtype=np.float64), target)


def _thinned(steps: Ints, values: Floats, target: int) -> tuple[tuple[int, float], ...]:
    if len(steps) <= target:
        return tuple(zip(steps.tolist(), values.tolist(), strict=True))
    buckets = max(1, target // 3)
    kept: dict[int, float] = {}
    size = len(steps) / buckets
    finite = np.isfinite(values)
    for bucket in range(buckets):
        start, stop = int(bucket * size), int((bucket + 1) * size)
        rows = start + np.flatnonzero(finite[start:stop])
        if len(rows):
            low, high = rows[values[rows].argmin()], rows[values[rows].argmax()]
            kept[int(steps[low])], kept[int(steps[high])] = float(values[low]), float(values[high])
        if len(rows) < stop - start:
            kept[int(steps[start + int(finite[start:stop].argmin())])] = math.nan
    kept |= {int(steps[end]): float(values[end]) for end in (0, -1)}
    return tuple(sorted(kept.items()))


def batches_of(frames: Iterable[Frame], first: int, last: int) -> list[BatchRecord]:
    return [batch for frame in frames if first <= frame.step <= last for batch in frame.batches]
