"""Records and rows, packed into blocks: columns of many steps of one attempt."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from runhealth.storage.blocks import Bools, Column, StepBlock
from runhealth.storage.importers.assemble import Segment
from runhealth.storage.importers.base import Rows
from runhealth.storage.records import Record, StepRecord

BLOCK_STEPS = 1 << 14
_LEAST_STEPS = 4  # fewer are as good as records
_EXACT = 2**53  # ints up to there survive as doubles


def packed(records: Iterable[Record | Segment]) -> Iterator[StepBlock | Record]:
    """Yield blocks in place of the steps of one rank that ascend; what does not fit into one stays a record.

    A block holds the events and checkpoints between its steps. The values of a signal are ints where all of them in the
    block are, else doubles.
    """
    packer = _Packer()
    for record in records:
        if isinstance(record, Segment):
            yield from packer.rows(record.attempt, record.rows)
        elif isinstance(record, StepRecord):
            yield from packer.step(record)
        else:
            yield from packer.other(record)
    yield from packer.flush()


class _Packer:
    """Gathers what goes into the next block."""

    def __init__(self) -> None:
        self._begin(0, 0)

    def _begin(self, attempt: int, rank: int) -> None:
        self._attempt, self._rank = attempt, rank
        self._parts: list[Rows | list[StepRecord]] = []
        self._others: list[tuple[int, Record]] = []
        self._count = 0
        self._last = -1

    def rows(self, attempt: int, rows: Rows) -> Iterator[StepBlock | Record]:
        while len(rows):
            yield from self._fit(attempt, 0, int(rows.steps[0]))
            taken = rows.part(0, BLOCK_STEPS - self._count)
            self._parts.append(taken)
            self._count += len(taken)
            self._last = int(taken.steps[-1])
            rows = rows.part(len(taken), len(rows))

    def step(self, record: StepRecord) -> Iterator[StepBlock | Record]:
        yield from self._fit(record.attempt, record.rank, record.step)
        if not self._parts or isinstance(self._parts[-1], Rows):
            self._parts.append([])
        part = self._parts[-1]
        assert isinstance(part, list)
        part.append(record)
        self._count += 1
        self._last = record.step

    def other(self, record: Record) -> Iterator[StepBlock | Record]:
        if not self._count or len(self._others) >= BLOCK_STEPS:
            yield from self.flush()
            yield record
        else:
            self._others.append((self._count, record))

    def _fit(self, attempt: int, rank: int, step: int) -> Iterator[StepBlock | Record]:
        """Make room for a step."""
        if (attempt, rank) != (self._attempt, self._rank) or step <= self._last or self._count >= BLOCK_STEPS:
            yield from self.flush()
            self._begin(attempt, rank)

    def flush(self) -> Iterator[StepBlock | Record]:
        """Everything gathered."""
        columns = self._columns() if self._count >= _LEAST_STEPS else None
        if columns is None:
            yield from self._records()
        else:
            steps = np.empty(self._count, np.int64)
            ts_ns = np.empty((self._count, 1), np.int64)
            at = 0
            for part in self._parts:
                to = at + len(part)
                if isinstance(part, Rows):
                    steps[at:to], ts_ns[at:to, 0] = part.steps, part.ts_ns
                else:
                    steps[at:to] = [record.step for record in part]
                    ts_ns[at:to, 0] = [record.ts_ns for record in part]
                at = to
            yield StepBlock(
                attempt=self._attempt,
                ranks=(self._rank,),
                steps=steps,
                ts_ns=ts_ns,
                columns=columns,
                others=tuple(self._others),
            )
        self._begin(self._attempt, self._rank)

    def _columns(self) -> dict[str, Column] | None:
        """The columns of all parts; None if one of them cannot hold its values."""
        kept: dict[str, tuple[npt.NDArray[Any], Bools]] = {}
        at = 0
        for part in self._parts:
            for name, (values, present) in (_of_rows(part) if isinstance(part, Rows) else _of_records(part)).items():
                if values.dtype == object:
                    return None
                if name not in kept:
                    kept[name] = np.zeros(self._count, values.dtype), np.zeros(self._count, np.bool_)
                whole, there = kept[name]
                if whole.dtype != values.dtype:
                    if not (_exact(whole) and _exact(values)):
                        return None
                    whole = whole.astype(np.float64)
                whole[at : at + len(part)] = values
                there[at : at + len(part)] = True if present is None else present
                kept[name] = whole, there
            at += len(part)
        return {
            name: Column(values=values[:, None], present=None if present.all() else present[:, None])
            for name, (values, present) in kept.items()
        }

    def _records(self) -> Iterator[Record]:
        others = list(self._others)
        at = 0
        for part in self._parts:
            for step in _records_of(part, self._attempt) if isinstance(part, Rows) else part:
                while others and others[0][0] <= at:
                    yield others.pop(0)[1]
                yield step
                at += 1
        for _, record in others:
            yield record


def _of_rows(part: Rows) -> dict[str, tuple[npt.NDArray[Any], Bools | None]]:
    return {name: (column.values, column.present) for name, column in part.columns.items()}


def _of_records(part: list[StepRecord]) -> dict[str, tuple[npt.NDArray[Any], Bools | None]]:
    found: dict[str, tuple[npt.NDArray[Any], Bools | None]] = {}
    for name in {name: None for record in part for name in record.values}:
        values = [record.values.get(name) for record in part]
        present = None
        if None in values:
            present = np.array([value is not None for value in values], np.bool_)
            values = [0 if value is None else value for value in values]
        whole = present is None and all(type(value) is int for value in values)
        if not whole and present is not None:
            whole = all(type(record.values[name]) is int for record in part if name in record.values)
        limit = 2**63 - 1 if whole else _EXACT
        if any(type(value) is int and not -limit <= value <= limit for value in values):
            found[name] = np.empty(0, object), None
            continue
        found[name] = np.array(values, np.int64 if whole else np.float64), present
    return found


def _records_of(rows: Rows, attempt: int) -> Iterator[StepRecord]:
    for row in rows.rows():
        yield StepRecord(attempt=attempt, step=row.step, rank=0, ts_ns=row.ts_ns, values=row.values)


def _exact(values: npt.NDArray[Any]) -> bool:
    return values.dtype != np.int64 or bool((np.abs(values) <= _EXACT).all())
