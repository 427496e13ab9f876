"""The tables of a run as blocks of steps: columns all the way, no object a row.

What does not fit into a block comes as single records: steps that a rank of the attempt lacks or has twice, rows of a
rank that has no scalars, and integers beyond 64 signed bits or of the second column of a signal.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from runhealth.storage.blocks import BatchColumns, Bools, Column, Ints, LayerColumns, StepBlock
from runhealth.storage.records import Record
from runhealth.storage.rows import OTHERS, ROWS, Names, build_sorted
from runhealth.storage.schema import RECORD_TABLES
from runhealth.storage.tail import order
from runhealth.storage.view import View

STEPS_A_BLOCK = 4096
_CELLS_A_CHUNK = 4_000_000  # values that are held at once, 8 bytes each


def blocks_of(view: View) -> Iterator[StepBlock | Record]:
    """Everything that `view.records()` yields, in that order."""
    names = view.signal_names()
    widths = {table.name: len(table.fixed) + len(names.get(table.name, {})) for table in RECORD_TABLES}
    ranks: dict[int, list[int]] = {}
    for attempt, rank in view.connection.execute("SELECT DISTINCT attempt, rank FROM steps ORDER BY ALL").fetchall():
        ranks.setdefault(attempt, []).append(rank)
    for chunk in view.chunks(_CELLS_A_CHUNK, widths):
        frames = view.frames(chunk, renew=True)
        yield from _Chunk(chunk[0], tuple(ranks.get(chunk[0], ())), frames, names).blocks()


class _Rows:
    """The rows of one table, sorted as records are, with its signals as columns."""

    def __init__(self, frame: pl.DataFrame, names: Names, within: Sequence[str]) -> None:
        self.frame = frame.sort("step", "rank", *within, maintain_order=True)
        self.step: Ints = self.frame["step"].to_numpy()
        self.rank: Ints = self.frame["rank"].cast(pl.Int64).to_numpy()
        self.ts_ns: Ints = self.frame["ts_ns"].to_numpy()
        self.columns: dict[str, Column] = {}
        self.odd: Bools = np.zeros(len(frame), dtype=np.bool_)  # rows whose values no block can hold
        held: dict[str, list[pl.Series]] = {}
        for column, name in names.items():
            series = self.frame[column]
            if series.null_count() < len(series):
                held.setdefault(name, []).append(series)
        for name, all_of_it in held.items():
            main, *second = sorted(all_of_it, key=pl.Series.null_count)
            self.columns[name] = self._column(main)
            for series in second:  # what the type of the main column does not hold
                self.odd |= series.is_not_null().to_numpy()

    def _column(self, series: pl.Series) -> Column:
        given = series
        if not series.dtype.is_float():
            series = series.cast(pl.Int64, strict=False)
            if series.null_count() > given.null_count():
                self.odd |= (series.is_null() & given.is_not_null()).to_numpy()
        if not series.null_count():
            return Column(values=series.to_numpy())
        return Column(values=series.fill_null(0).to_numpy(), present=series.is_not_null().to_numpy())


class _Chunk:
    """Some steps of one attempt. `ranks` are those that log scalars in the whole attempt."""

    def __init__(
        self, attempt: int, ranks: tuple[int, ...], frames: Mapping[str, pl.DataFrame], names: Mapping[str, Names]
    ) -> None:
        self._attempt = attempt
        self._ranks = ranks
        self._rows = {
            name: _Rows(frames[name], names.get(name, {}), within)
            for name, _, within in ROWS if not frames[name].is_empty()
        }  # fmt: skip
        self._steps: Ints = np.zeros(0, dtype=np.int64)
        self._columns: dict[str, Column] = {}
        self._place()
        self._singles = self._single_records(names)
        self._others = build_sorted(OTHERS, frames, names)
        self._batches = self._batch_columns()
        self._layers = self._layer_columns()

    def _place(self) -> None:
        """Find the steps that fit into blocks, and their scalars as (steps, ranks)."""
        found, width = self._rows.get("steps"), len(self._ranks)
        if found is None:
            return
        starts = np.flatnonzero(np.diff(found.step, prepend=found.step[0] - 1))
        starts = starts[np.diff(starts, append=len(found.step)) == width]
        at = starts[:, None] + np.arange(width)
        fits = (found.rank[at] == np.array(self._ranks)).all(axis=1)
        unfit = [rows.step[rows.odd | ~np.isin(rows.rank, self._ranks)] for rows in self._rows.values()]
        fits &= ~np.isin(found.step[starts], np.concatenate(unfit))
        at = at[fits]
        self._steps = found.step[at[:, 0]]
        whole = at.size == len(found.step)  # then the rows are in place already
        self._columns = {
            name: Column(
                values=_shaped(column.values, at, whole),
                present=None if column.present is None else _shaped(column.present, at, whole),
            )
            for name, column in found.columns.items()
        }
        self._ts_ns = _shaped(found.ts_ns, at, whole)

    def _single_records(self, names: Mapping[str, Names]) -> list[Record]:
        left = {name: rows.frame.filter(~np.isin(rows.step, self._steps)) for name, rows in self._rows.items()}
        return build_sorted(ROWS, left, names)

    def blocks(self) -> Iterator[StepBlock | Record]:
        singles, others = self._singles, self._others
        apart = np.searchsorted(self._steps, np.array(sorted({record.step for record in singles}), dtype=np.int64))
        cuts = sorted({0, *apart.tolist(), *range(0, len(self._steps), STEPS_A_BLOCK), len(self._steps)})
        done, told = 0, 0  # of singles and of others
        for a, b in pairwise(cuts):
            before = done
            while done < len(singles) and singles[done].step < self._steps[a]:
                done += 1
            if done > before:
                n = told
                while n < len(others) and others[n].step <= singles[done - 1].step:
                    n += 1
                yield from sorted(others[told:n] + singles[before:done], key=order)
                told = n
            n = told
            while n < len(others) and others[n].step <= self._steps[b - 1]:
                n += 1
            yield self._block(a, b, others[told:n])
            told = n
        yield from sorted(others[told:] + singles[done:], key=order)

    def _block(self, a: int, b: int, others: Sequence[Record]) -> StepBlock:
        steps = self._steps[a:b]
        places = np.searchsorted(steps, np.array([record.step for record in others], dtype=np.int64))
        return StepBlock(
            attempt=self._attempt, ranks=self._ranks, steps=steps, ts_ns=self._ts_ns[a:b],
            columns=_slices(self._columns, a, b),
            batches=_cut_batches(self._batches, a, b), layers=_cut_layers(self._layers, a, b),
            others=tuple(zip(places.tolist(), others, strict=True)),
        )  # fmt: skip

    def _in_blocks(self, table: str) -> tuple[_Rows, Ints, slice | Bools] | None:
        """Rows of a table, the step that each is of (an index), and which of the rows are of steps in blocks."""
        rows = self._rows.get(table)
        if rows is None or not len(self._steps):
            return None
        row = np.searchsorted(self._steps, rows.step)
        kept: Bools = self._steps[np.minimum(row, len(self._steps) - 1)] == rows.step
        if kept.all():
            return rows, row, slice(None)
        return rows, row[kept], kept

    def _batch_columns(self) -> BatchColumns | None:
        found = self._in_blocks("batches")
        if found is None:
            return None
        rows, row, kept = found
        frame = rows.frame if isinstance(kept, slice) else rows.frame.filter(kept)
        shards, names = _indexed(frame["shard"])
        return BatchColumns(
            row=row, rank=rows.rank[kept], ts_ns=rows.ts_ns[kept], shards=shards, shard_names=names,
            micro_batch=frame["micro_batch"].to_numpy(), samples=frame["samples"].to_numpy(),
            first_sample=frame["first_sample"].to_numpy(), last_sample=frame["last_sample"].to_numpy(),
            content_hash=frame["content_hash"].to_list(), shard_hash=frame["shard_hash"].to_list(),
            manifest_hash=frame["manifest_hash"].to_list(), columns=_taken(rows.columns, kept),
        )  # fmt: skip

    def _layer_columns(self) -> LayerColumns | None:
        found = self._in_blocks("layers")
        if found is None:
            return None
        rows, row, kept = found
        layers, names = _indexed(rows.frame["layer"])
        return LayerColumns(
            row=row, rank=rows.rank[kept], ts_ns=rows.ts_ns[kept], layers=layers[kept], layer_names=names,
            columns=_taken(rows.columns, kept),
        )  # fmt: skip


def _shaped(values: npt.NDArray[Any], at: Ints, whole: bool) -> npt.NDArray[Any]:
    return values.reshape(at.shape) if whole else values[at]


def _indexed(series: pl.Series) -> tuple[Ints, tuple[str, ...]]:
    """Index of each string in the sorted distinct strings, and these."""
    names = series.unique().sort()
    index = series.replace_strict(names, np.arange(len(names)), return_dtype=pl.Int64)
    return index.to_numpy(), tuple(names.to_list())


def _taken(columns: Mapping[str, Column], kept: slice | Bools) -> dict[str, Column]:
    return {
        name: Column(values=column.values[kept], present=None if column.present is None else column.present[kept])
        for name, column in columns.items()
    }


def _slices(columns: Mapping[str, Column], a: int, b: int) -> dict[str, Column]:
    """Columns without those that have no value in a:b."""
    sliced = {}
    for name, column in columns.items():
        present = None if column.present is None else column.present[a:b]
        if present is None or present.all():
            sliced[name] = Column(values=column.values[a:b])
        elif present.any():
            sliced[name] = Column(values=column.values[a:b], present=present)
    return sliced


def _cut_batches(batches: BatchColumns | None, a: int, b: int) -> BatchColumns | None:
    if batches is None:
        return None
    c, d = np.searchsorted(batches.row, (a, b)).tolist()
    if c == d:
        return None
    return BatchColumns(
        row=batches.row[c:d] - a, rank=batches.rank[c:d], micro_batch=batches.micro_batch[c:d],
        ts_ns=batches.ts_ns[c:d], shard_names=batches.shard_names, shards=batches.shards[c:d],
        first_sample=batches.first_sample[c:d], last_sample=batches.last_sample[c:d], samples=batches.samples[c:d],
        content_hash=batches.content_hash[c:d], shard_hash=batches.shard_hash[c:d],
        manifest_hash=batches.manifest_hash[c:d], columns=_slices(batches.columns, c, d),
    )  # fmt: skip


def _cut_layers(layers: LayerColumns | None, a: int, b: int) -> LayerColumns | None:
    if layers is None:
        return None
    c, d = np.searchsorted(layers.row, (a, b)).tolist()
    if c == d:
        return None
    return LayerColumns(
        row=layers.row[c:d] - a, rank=layers.rank[c:d], ts_ns=layers.ts_ns[c:d], layer_names=layers.layer_names,
        layers=layers.layers[c:d], columns=_slices(layers.columns, c, d),
    )  # fmt: skip
