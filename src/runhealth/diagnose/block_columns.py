"""The columns of a block over the ranks: what `Frame` says of one step, computed for all of them and kept."""

import itertools
import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from runhealth.diagnose.batches import BatchOutlier
from runhealth.diagnose.frames import Frame
from runhealth.storage.blocks import Bools, Column, Floats, Ints, StepBlock, batch_record, layer_sample
from runhealth.storage.records import BatchRecord, LayerSample, Scalar

AHEAD_ROWS = 64  # that are turned into Python numbers at once


class Signal(NamedTuple):
    """`values` as float64 (int64 is exact up to 2^53), NaN where not `present`; a NaN that is present was measured.
    Both are (n,), of `per_rank` (n, R). To read only: they may be shared."""

    values: Floats
    present: Bools

    def last(self, start: int, stop: int) -> float | None:
        """The last value of a signal of one column in the rows from `start` to before `stop`; None if there is none."""
        rows = np.flatnonzero(self.present[start:stop])
        return float(self.values[start + rows[-1]]) if len(rows) else None


class BlockColumns:
    """A block and what was computed from it so far."""

    def __init__(self, block: StepBlock) -> None:
        self.block = block
        self.outliers: dict[int, tuple[BatchOutlier, ...]] = {}
        self.frames: dict[int, Frame] = {}  # those that somebody asked for
        self._chunk: _Chunk | None = None
        self._asked = -1
        self._lowest: dict[str, Signal | None] = {}
        self._largest: dict[str, Signal | None] = {}
        self._total: dict[str, Signal | None] = {}
        self._lists: dict[tuple[str, str], list[Scalar | None]] = {}
        self._firsts: dict[str, tuple[int, int | None]] = {}

    # -- over the ranks ---------------------------------------------------------------------------------------------

    def per_rank(self, name: str) -> Signal | None:
        column = self.block.columns.get(name)
        if column is None:
            return None
        present = _present(column)
        values = column.values.astype(np.float64, copy=False)
        if column.present is not None and not present.all():
            values = np.where(present, values, np.nan)
        return Signal(values, present) if present.any() else None

    def lowest(self, name: str) -> Signal | None:
        if name not in self._lowest:
            self._lowest[name] = self._find_lowest(name)
        return self._lowest[name]

    def _find_lowest(self, name: str) -> Signal | None:
        column = self.block.columns.get(name)
        if column is None or not column.values.size:
            return None
        values, present = column.values, column.present
        if present is None or present[:, 0].all():
            return Signal(np.ascontiguousarray(values[:, 0], dtype=np.float64), np.ones(len(values), dtype=np.bool_))
        rows = _some(present)
        if not rows.any():
            return None
        found = values[np.arange(len(values)), present.argmax(axis=1)].astype(np.float64)
        return Signal(np.where(rows, found, np.nan), rows)

    def largest(self, name: str) -> Signal | None:
        if name not in self._largest:
            signal = self.per_rank(name)
            if signal is not None:
                values = signal.values[:, 0] if len(self.block.ranks) == 1 else np.fmax.reduce(signal.values, axis=1)
                present = ~np.isnan(values)
                signal = Signal(values, present) if present.any() else None
            self._largest[name] = signal
        return self._largest[name]

    def total(self, name: str) -> Signal | None:
        if name not in self._total:
            signal = self.lowest(name)
            column = self.block.columns.get(name)
            if signal is not None and column is not None and len(self.block.ranks) > 1:
                present = _present(column)
                values = column.values if column.present is None else np.where(present, column.values, 0)
                whole = values.dtype.kind == "i" or bool((np.isfinite(values) & (values == np.floor(values))).all())
                if whole:  # exact in any order
                    sums = values.sum(axis=1).astype(np.float64)
                else:  # as Python adds them up
                    sums = np.array(
                        [
                            sum(v for v, there in zip(row, has, strict=True) if there)
                            for row, has in zip(column.values.tolist(), present.tolist(), strict=True)
                        ],
                        dtype=np.float64,
                    )
                signal = Signal(np.where(signal.present, sums, np.nan), signal.present)
            self._total[name] = signal
        return self._total[name]

    @cached_property
    def loss(self) -> Signal | None:
        signal = self.per_rank("loss")
        if signal is None:
            return None
        finite = np.isfinite(signal.values)
        if len(self.block.ranks) == 1:
            return Signal(np.where(finite[:, 0], signal.values[:, 0], np.nan), signal.present[:, 0])
        counts = finite.sum(axis=1)
        # cumsum adds in the order of the ranks, as `Frame.seal` does; sum would not
        totals = np.cumsum(np.where(finite, signal.values, 0.0), axis=1)[:, -1] + 0.0
        means = np.divide(totals, counts, out=np.full(len(totals), np.nan), where=counts > 0)
        return Signal(means, _some(signal.present))

    @cached_property
    def log_loss(self) -> Signal | None:
        if self.loss is None:
            return None
        chosen = self.loss.present & np.isfinite(self.loss.values) & (self.loss.values > 0)
        logs = np.full(len(chosen), np.nan)
        logs[chosen] = list(map(math.log, self.loss.values[chosen].tolist()))  # np.log differs in the last bit
        return Signal(logs, chosen) if chosen.any() else None

    @cached_property
    def ts_ns(self) -> Ints:
        block = self.block
        latest = np.maximum(block.ts_ns.max(axis=1), 0) if block.ts_ns.size else np.zeros(len(block), dtype=np.int64)
        for part in (block.batches, block.layers):
            if part is not None and len(part.row):
                np.maximum.at(latest, part.row, part.ts_ns)
        return latest

    # -- which signals there are ------------------------------------------------------------------------------------

    @cached_property
    def names(self) -> tuple[str, ...]:
        found = list(self.block.columns)
        if self.block.batches is not None:
            found.extend([*self.block.batches.columns, "shard", "shard_hash"])
        if self.block.layers is not None:
            found.extend(f"layer.{name}" for name in self.block.layers.columns)
        return tuple(dict.fromkeys(found))

    @cached_property
    def named(self) -> dict[str, Bools]:
        """Signal -> (N,): where the lowest rank has it."""
        return {name: _present(column)[:, 0] for name, column in self.block.columns.items()}

    def first(self, name: str, start: int) -> int | None:
        """The first row from `start` on that holds the signal."""
        known = self._firsts.get(name)
        if known is not None and known[0] <= start and (known[1] is None or known[1] >= start):
            return known[1]
        found = self._find_first(name, start)
        self._firsts[name] = (start, found)
        return found

    def _find_first(self, name: str, start: int) -> int | None:
        rows: list[int] = []
        column = self.block.columns.get(name)
        if column is not None:
            if column.present is None:
                return start if start < len(self.block) else None
            some = _some(column.present[start:])
            if some.any():
                rows.append(start + int(some.argmax()))
        batches, layers = self.block.batches, self.block.layers
        if batches is not None and (has := self._batches_with(name)) is not None:
            rows.extend(batches.row[has & (batches.row >= start)][:1].tolist())
        if layers is not None and name.startswith("layer."):
            sampled = layers.columns.get(name.removeprefix("layer."))
            if sampled is not None:
                rows.extend(layers.row[_present(sampled) & (layers.row >= start)][:1].tolist())
        return min(rows, default=None)

    def _batches_with(self, name: str) -> Bools | None:
        batches = self.block.batches
        assert batches is not None
        column = batches.columns.get(name)
        if column is not None:
            return _present(column)
        if name == "shard":
            named = np.array([bool(shard) for shard in batches.shard_names], dtype=np.bool_)
            return named[batches.shards] if len(named) else None
        if name == "shard_hash":
            return np.array([value is not None for value in batches.shard_hash], dtype=np.bool_)
        return None

    # -- one row ----------------------------------------------------------------------------------------------------

    def at(self, name: str, row: int) -> Scalar | None:
        """`Frame.get` of a row."""
        found = self._lists.get(("lowest", name))
        return found[row] if found is not None else self._list("lowest", name)[row]

    def largest_at(self, name: str, row: int) -> Scalar | None:
        """`Frame.largest` of a row."""
        found = self._lists.get(("largest", name))
        return found[row] if found is not None else self._list("largest", name)[row]

    def total_at(self, name: str, row: int) -> Scalar | None:
        """`Frame.total` of a row."""
        found = self._lists.get(("total", name))
        return found[row] if found is not None else self._list("total", name)[row]

    def per_rank_at(self, name: str, row: int) -> dict[int, Scalar]:
        """`Frame.per_rank` of a row."""
        column = self.block.columns.get(name)
        if column is None:
            return {}
        values = zip(self.block.ranks, column.values[row].tolist(), strict=True)
        if column.present is None:
            return dict(values)
        return dict(itertools.compress(values, column.present[row].tolist()))

    def _list(self, way: str, name: str) -> list[Scalar | None]:
        signal = {"lowest": self.lowest, "largest": self.largest, "total": self.total}[way](name)
        found = self._lists[way, name] = [None] * len(self.block) if signal is None else self._listed(way, name, signal)
        return found

    def _listed(self, way: str, name: str, signal: Signal) -> list[Scalar | None]:
        column = self.block.columns[name]
        values: list[Scalar]
        if column.values.dtype.kind == "i":  # ints stay ints, to the last digit
            there = _present(column)
            if way == "largest":
                values = np.where(there, column.values, np.iinfo(np.int64).min).max(axis=1).tolist()
            elif way == "total":
                values = np.where(there, column.values, 0).sum(axis=1).tolist()
            else:
                values = column.values[np.arange(len(there)), there.argmax(axis=1)].tolist()
        else:
            values = signal.values.tolist()
        if signal.present.all():
            return list(values)
        return [value if known else None for value, known in zip(values, signal.present.tolist(), strict=True)]

    def ranks_at(self, row: int) -> dict[int, Mapping[str, Scalar]]:
        """`Frame.ranks` of a row."""
        chunk = self._chunk
        if chunk is None or not chunk.start <= row < chunk.stop:
            # who asks for row after row gets more than asked for
            ahead = AHEAD_ROWS if self._asked == row - 1 else 1
            self._chunk = chunk = _Chunk(self.block, row, min(len(self.block), row + ahead))
        self._asked = row
        return chunk.ranks(row)

    def batches_at(self, row: int) -> list[BatchRecord]:
        batches = self.block.batches
        if batches is None:
            return []
        low, high = np.searchsorted(batches.row, (row, row + 1)).tolist()
        step = int(self.block.steps[row])
        return [batch_record(batches, k, self.block.attempt, step) for k in range(low, high)]

    def layers_at(self, row: int) -> list[LayerSample]:
        layers = self.block.layers
        if layers is None:
            return []
        low, high = np.searchsorted(layers.row, (row, row + 1)).tolist()
        step = int(self.block.steps[row])
        return [layer_sample(layers, k, self.block.attempt, step) for k in range(low, high)]


class _Chunk:
    """The values of some rows as Python numbers, by rank."""

    def __init__(self, block: StepBlock, start: int, stop: int) -> None:
        self.start, self.stop = start, stop
        self._ranks = block.ranks
        whole: dict[str, list[tuple[str, Any]]] = {}
        self._partial: list[tuple[str, list[list[Scalar]], list[list[bool]]]] = []
        for name, column in block.columns.items():
            values = column.values[start:stop]
            present = None if column.present is None else column.present[start:stop]
            if present is None or present.all():
                whole.setdefault(column.values.dtype.kind, []).append((name, values))
            elif present.any():
                self._partial.append((name, values.tolist(), present.tolist()))
        # columns of one type are turned into numbers together
        self._whole = [
            (tuple(name for name, _ in named), np.stack([values for _, values in named], axis=-1).tolist())
            for named in whole.values()
        ]

    def ranks(self, row: int) -> dict[int, Mapping[str, Scalar]]:
        i = row - self.start
        found: dict[int, Mapping[str, Scalar]] = {}
        whole = [(names, values[i]) for names, values in self._whole]
        partial = [(name, values[i], present[i]) for name, values, present in self._partial if any(present[i])]
        for j, rank in enumerate(self._ranks):
            values: dict[str, Scalar] = {}
            for names, numbers in whole:
                values.update(zip(names, numbers[j], strict=True))
            for name, some, present in partial:
                if present[j]:
                    values[name] = some[j]
            found[rank] = values
        return found


class RowFrame(Frame):
    """A row of a block. What is looked at rarely is filled when somebody does."""

    __slots__ = ("_columns", "_row")

    def __init__(self, columns: BlockColumns, row: int) -> None:
        block = columns.block
        self._columns, self._row = columns, row
        self.attempt = block.attempt
        self.step = int(block.steps[row])
        self.outliers = columns.outliers.get(row, ())
        self.new_attempt = False

    def get(self, name: str) -> Scalar | None:
        return self._columns.at(name, self._row)

    def largest(self, name: str) -> Scalar | None:
        return self._columns.largest_at(name, self._row)

    def total(self, name: str) -> Scalar | None:
        return self._columns.total_at(name, self._row)

    def per_rank(self, name: str) -> dict[int, Scalar]:
        return self._columns.per_rank_at(name, self._row)

    def __getattr__(self, name: str) -> Any:  # of the slots that were not filled
        columns, row = self._columns, self._row
        if name == "loss":
            signal = columns.loss
            self.loss = float(signal.values[row]) if signal is not None and signal.present[row] else None
        elif name == "ts_ns":
            self.ts_ns = int(columns.ts_ns[row])
        elif name == "batches":
            self.batches = columns.batches_at(row)
        elif name == "layers":
            self.layers = columns.layers_at(row)
        elif name == "ranks":
            self.ranks = columns.ranks_at(row)
        elif name == "values":
            self._merge()
        else:
            raise AttributeError(name)
        return getattr(self, name)

    def _merge(self) -> None:
        if len(self.ranks) == 1:
            (self.values,) = self.ranks.values()
            return
        merged: dict[str, Scalar] = {}
        for rank in reversed(self._columns.block.ranks):
            merged.update(self.ranks[rank])
        self.values = merged

    def plain(self) -> Frame:
        """The same without the block behind it."""
        frame = Frame(self.attempt, self.step)
        for name in Frame.__slots__:
            setattr(frame, name, getattr(self, name))
        return frame

    def __reduce__(self) -> tuple[Any, ...]:
        names = [name for name in Frame.__slots__ if name not in ("attempt", "step")]
        return Frame, (self.attempt, self.step), (None, {name: getattr(self, name) for name in names})


def _some(present: Bools) -> Bools:
    """(n, R) -> (n,): whether any rank has it."""
    found: Bools = np.any(present, axis=1)
    return found


def _present(column: Column) -> Bools:
    return column.present if column.present is not None else np.ones(column.values.shape, dtype=np.bool_)
