"""Frames in columns: consecutive rows of one attempt as arrays, for detectors that look at many rows at once.

A `FrameBlock` says what the frames `frame(0) ... frame(n - 1)` say, in the words of `Frame`: `get(name)` of the block
holds `frame.get(name)` of every row. Frames themselves are made when somebody asks for one, and fill themselves when
somebody looks inside, so a quiet stretch costs no Python object a row.
"""

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from runhealth.diagnose.batches import BatchHabit, BatchOutlier
from runhealth.diagnose.block_columns import BlockColumns, RowFrame, Signal
from runhealth.diagnose.frames import Frame
from runhealth.storage.blocks import BatchColumns, Bools, Ints, LayerColumns, StepBlock
from runhealth.storage.records import BatchRecord, LayerSample, StepRecord

__all__ = ["FrameBlock", "Signal"]

Outliers = Mapping[int, tuple[BatchOutlier, ...]]


class FrameBlock:
    """n consecutive frames of one attempt, all with the same R ranks. None of them starts the attempt.

    `steps` and `ts_ns` (n,), the latter the latest time of any record of the frame. `outliers` maps rows to what
    `Frame.outliers` holds; rows without any are not in it.
    """

    def __init__(self, columns: BlockColumns, start: int, stop: int) -> None:
        self._columns, self._start, self._stop = columns, start, stop
        self.attempt, self.ranks = columns.block.attempt, columns.block.ranks
        self.steps: Ints = columns.block.steps[start:stop]

    @classmethod
    def of(cls, block: StepBlock) -> "FrameBlock":
        return cls(BlockColumns(block), 0, len(block))

    def __len__(self) -> int:
        return self._stop - self._start

    def part(self, start: int, stop: int | None = None) -> "FrameBlock":
        """The rows from `start` to before `stop`; what was computed for this block serves it too."""
        last = self._stop if stop is None else self._start + stop
        return FrameBlock(self._columns, self._start + start, last)

    @property
    def ts_ns(self) -> Ints:
        return self._columns.ts_ns[self._start : self._stop]

    @property
    def loss(self) -> Signal | None:
        """`Frame.loss` of each row: the mean over the ranks whose loss is finite, NaN where none is."""
        return self._cut(self._columns.loss)

    @property
    def log_loss(self) -> Signal | None:
        """`math.log` of `loss`, present where that is finite and positive."""
        return self._cut(self._columns.log_loss)

    def get(self, name: str) -> Signal | None:
        """`Frame.get`: the value of the lowest rank that has it. None if no row has it."""
        return self._cut(self._columns.lowest(name))

    def largest(self, name: str) -> Signal | None:
        """`Frame.largest`: the maximum over the ranks, NaN ignored; not present where all are NaN."""
        return self._cut(self._columns.largest(name))

    def total(self, name: str) -> Signal | None:
        """`Frame.total`: the sum over the ranks that have it."""
        return self._cut(self._columns.total(name))

    def per_rank(self, name: str) -> Signal | None:
        """`Frame.per_rank`: (n, R), columns in the order of `ranks`."""
        return self._cut(self._columns.per_rank(name))

    def judge_batches(self, habit: BatchHabit) -> None:
        """Hold the batches of these rows against the habit of those before, for `outliers`."""
        batches = self._columns.block.batches
        if batches is not None:
            found = habit.judge_columns(batches, self._columns.block, self._start, self._stop)
            self._columns.outliers.update(found)

    def batches(self) -> tuple[BatchColumns, list[int]] | None:
        """The batches of the whole block, and where in them those of each row begin, (n + 1): those of row i are
        `starts[i]` to before `starts[i + 1]`. None if there are none."""
        batches = self._columns.block.batches
        if batches is None:
            return None
        return batches, np.searchsorted(batches.row, np.arange(self._start, self._stop + 1)).tolist()

    def layers(self) -> tuple[LayerColumns, list[int]] | None:
        """The same of the layer samples."""
        layers = self._columns.block.layers
        if layers is None:
            return None
        return layers, np.searchsorted(layers.row, np.arange(self._start, self._stop + 1)).tolist()

    @property
    def outliers(self) -> Outliers:
        start, stop = self._start, self._stop
        return {row - start: found for row, found in self._columns.outliers.items() if start <= row < stop}

    def pairs(self, signal: Signal, most: int) -> list[tuple[int, float]]:
        """(step, value) of the last rows that have the signal, at most so many."""
        rows = np.flatnonzero(signal.present)[-most:]
        return list(zip(self.steps[rows].tolist(), signal.values[rows].tolist(), strict=True))

    def names(self, *, but: str = "") -> tuple[str, ...]:
        """The signals that the lowest rank has in some row of the whole block, `but` one."""
        return tuple(name for name in self._columns.named if name != but)

    def named(self, *, but: str = "") -> Bools:
        """(n, len(names)): which of `names` the lowest rank has in which row."""
        columns = [present[self._start : self._stop] for name, present in self._columns.named.items() if name != but]
        return np.stack(columns, axis=1) if columns else np.zeros((len(self), 0), dtype=np.bool_)

    def frame(self, i: int) -> Frame:
        """The frame of row i, as `FrameAssembler` would have sealed it."""
        row = self._start + i
        frame = self._columns.frames.get(row)
        if frame is None:
            frame = self._columns.frames[row] = RowFrame(self._columns, row)
        return frame

    def unshared_frame(self, i: int) -> Frame:
        """The same, not kept here: for who keeps frames longer than blocks. Frames refer to the block, and a block
        that refers to its frames is only freed by the garbage collector, which may be off."""
        row = self._start + i
        return self._columns.frames.get(row) or RowFrame(self._columns, row)

    def forget_frames(self) -> None:
        """Keep no frames any longer; see `unshared_frame`."""
        self._columns.frames.clear()

    def opened(self, i: int) -> Frame:
        """The frame of row i before it is sealed: more may be added to it."""
        columns, row = self._columns, self._start + i
        frame = Frame(self.attempt, int(self.steps[i]))
        frame.ts_ns = int(columns.ts_ns[row])
        frame.ranks, frame.batches, frame.layers = (
            columns.ranks_at(row),
            columns.batches_at(row),
            columns.layers_at(row),
        )
        return frame

    def records(self, i: int) -> Iterator[StepRecord | BatchRecord | LayerSample]:
        """The records of row i, as `StepBlock.records` orders them."""
        columns, row = self._columns, self._start + i
        batches, layers = columns.batches_at(row), columns.layers_at(row)
        times = columns.block.ts_ns[row].tolist()
        for (rank, values), ts_ns in zip(columns.ranks_at(row).items(), times, strict=True):
            yield StepRecord(attempt=self.attempt, step=int(self.steps[i]), rank=rank, ts_ns=ts_ns, values=values)
            yield from (batch for batch in batches if batch.rank == rank)
            yield from (sample for sample in layers if sample.rank == rank)

    def first(self, names: Iterable[str]) -> int | None:
        """The first row in which one of the signals is met; None if there is none. Signals of batches and layers are
        named as `History.signals` names them."""
        rows = [row for name in names if (row := self._columns.first(name, self._start)) is not None]
        found = min(rows, default=self._stop)
        return found - self._start if found < self._stop else None

    def unknown(self, known: set[str]) -> list[str]:
        """Signals met in these rows that are not among the `known`, as `History.signals` names them."""
        return [name for name in self._columns.names if name not in known and self.first((name,)) is not None]

    def _cut(self, signal: Signal | None) -> Signal | None:
        if signal is None or (self._start == 0 and self._stop == len(self._columns.block)):
            return signal
        present = signal.present[self._start : self._stop]
        return Signal(signal.values[self._start : self._stop], present) if present.any() else None
