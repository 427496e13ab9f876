"""From the rows of a file to records: attempts, merging and order.

Attempts: a step that goes back within its own series and rank begins a new attempt; so does another planned number of
steps, a line that says the run resumes, and a change of the attempt number that the log itself writes. Rows of one step
and rank become one StepRecord, evaluation rows included. A row that repeats a step with other values begins an attempt
if the steps before it came once each; if steps come twice from the start, several processes write into one log and the
second value is rejected, with its line.

Order: records leave sorted by (attempt, step, rank) as long as ranks lag by fewer than 256 steps behind each other;
what comes later than that is kept, out of order, and noted.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from runhealth.storage.importers.base import EXTRA, TRAINING, Item, Mark, Row, Rows, Tally
from runhealth.storage.records import (
    CheckpointRecord,
    CheckpointStatus,
    EventKind,
    Record,
    RunEvent,
    Scalar,
    StepRecord,
)

_ENDS = (EventKind.EXCEPTION, EventKind.ATTEMPT_END, "hang", "dead_rank", "out_of_memory")
_MAX_PENDING_STEPS = 256
_SETTLE_STEPS = 8  # how long to wait at the start of an attempt for ranks that write late
_SINGLE_BEFORE_REPEAT = 3


@dataclass(slots=True)
class _Pending:
    values: dict[str, Scalar]
    line: int
    ts_ns: int
    series: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows that are complete, and their attempt: as many StepRecords of rank 0."""

    attempt: int
    rows: Rows


class Assembler:
    """Feed it items in the order of the file; it yields records."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._attempt = 0
        self._label: int | None = None
        self._total: int | None = None
        self._last: dict[tuple[int, str], int] = {}
        self._pending: dict[int, dict[int, _Pending]] = {}
        self._newest = -1
        self._flushed = -1
        self._single_steps = 0
        self._repeated = 0
        self._late = 0
        self._restarts = 0
        self._started = False
        self._ranks_seen = False
        self._held: list[Mark] = []

    def run(self, items: Iterable[Item]) -> Iterator[Record | Segment]:
        """Yield the records of all items, those that `finish` yields included. Segments only if there are Rows."""
        pending, tally, signals = self._pending, self._tally, self._tally.signals
        shape: tuple[str, ...] = ()
        for item in items:
            # Almost every line of almost every log: the next training step of a run that names no ranks.
            if (
                isinstance(item, Row)
                and item.series is TRAINING
                and not item.ranked
                and not self._ranks_seen
                and not self._held
                and self._started
                and item.total == self._total
                and item.attempt == self._label
                and item.rank == 0
                and item.step > self._newest
                and len(pending) == 1
                and self._newest in pending
                and len(ranks := pending[self._newest]) == 1
                and 0 in ranks
            ):
                before = self._newest
                ready = ranks[0]
                del pending[before]
                self._flushed = before
                if shape != (keys := tuple(ready.values)):
                    shape = keys
                    signals.update(keys)
                tally.rows_read += 1
                tally.rows_kept += 1
                self._single_steps += 1
                self._newest = item.step
                self._last[(0, TRAINING)] = item.step
                pending[item.step] = {0: _Pending(item.values, item.line, item.ts_ns, {TRAINING})}
                tally.lines.add(self._attempt, before, ready.line)
                yield StepRecord(attempt=self._attempt, step=before, rank=0, ts_ns=ready.ts_ns, values=ready.values)
            elif isinstance(item, Rows):
                yield from self._feed_rows(item)
            else:
                yield from self.feed(item)
        yield from self.finish()

    def _feed_rows(self, rows: Rows) -> Iterator[Record | Segment]:
        """Take rows as a whole where nothing but the next steps comes, else as many one by one as it takes."""
        at, more = 0, 1
        while len(rows) - at > 1 and not self._is_next(rows, at):
            for row in rows.part(at, at + more).rows():
                yield from self.feed(row)
            at, more = min(len(rows), at + more), more * 2
        if at:
            rows = rows.part(at, len(rows))
        if len(rows) < 2 or not self._is_next(rows, 0):
            for row in rows.rows():
                yield from self.feed(row)
            return
        yield from self._flush(self._newest + 1)
        last = len(rows) - 1
        self._tally.rows_read += len(rows)
        self._tally.rows_kept += len(rows)
        self._tally.signals.update(name for name, column in rows.columns.items() if column.present is None)
        for name, column in rows.columns.items():
            if column.present is not None and column.present[:last].any():
                self._tally.signals.add(name)
        self._single_steps += len(rows)
        self._newest, self._flushed = int(rows.steps[-1]), int(rows.steps[-2])
        self._last[(0, TRAINING)] = self._newest
        complete = rows.part(0, last)
        self._tally.lines.extend(self._attempt, complete.steps, complete.lines)
        yield Segment(self._attempt, complete)
        for row in rows.part(last, last + 1).rows():  # may still gain an evaluation
            self._pending[row.step] = {0: _Pending(row.values, row.line, row.ts_ns, {TRAINING})}

    def _is_next(self, rows: Rows, at: int) -> bool:
        """Whether rows from `at` on are further training steps of a run of which no other rank was met."""
        ranked = self._ranks_seen or rows.ranked
        return (
            (not ranked or (self._ranks_seen and self._flushed >= 0 and all(rank == 0 for rank, _ in self._last)))
            and not self._held
            and self._started
            and rows.total == self._total
            and self._label is None
            and int(rows.steps[at]) > self._newest
            and all(step <= self._newest for step in self._pending)
        )

    def feed(self, item: Row | Mark) -> Iterator[Record]:
        """Take one item; yield what is complete."""
        if isinstance(item, Mark):
            if item.kind == EventKind.RESUME or item.status == CheckpointStatus.LOADED:
                self._held = [*self._held[-7:], item]  # it belongs to the attempt that the next row decides on
            else:
                yield from self._mark(item)
            return
        self._tally.rows_read += 1
        reason = self._restart_reason(item)
        if reason is not None:
            yield from self._open_attempt(item, reason)
        elif not self._started:
            self._begin(item)
        if self._held and item.series == TRAINING:
            yield from self._release()
        if not self._merge(item):
            return
        self._tally.rows_kept += 1
        key = (item.rank, item.series)
        self._last[key] = item.step
        self._ranks_seen = self._ranks_seen or item.ranked
        if item.series == TRAINING and item.step > self._newest:
            self._newest = item.step
            yield from self._flush(self._settled())
        elif len(self._pending) > _MAX_PENDING_STEPS:
            yield from self._flush(sorted(self._pending)[-_MAX_PENDING_STEPS])

    def finish(self) -> Iterator[Record]:
        """Yield what is left and write the notes."""
        yield from self._release()
        yield from self._flush(math.inf)
        if self._restarts:
            self._tally.note(f"{self._restarts + 1} attempts in this log")
        if self._repeated:
            self._tally.note(
                f"{self._repeated} rows repeat a step with other values: several processes seem to write into this log"
            )
        if self._late:
            self._tally.note(f"{self._late} records come later in the file than their steps and are out of order")

    def _restart_reason(self, row: Row) -> str | None:
        if row.attempt is not None and row.attempt != self._label and self._label is not None:
            return f"the log changes from attempt {self._label} to {row.attempt}"
        last = self._last.get((row.rank, row.series))
        if row.series == EXTRA or not self._started:
            return None
        if row.total is not None and self._total is not None and row.total != self._total:
            return f"the planned number of steps changes from {self._total} to {row.total}"
        if self._held and row.series == TRAINING and last is not None and row.step > last:
            return f"the log resumes on line {self._held[-1].line}"
        if last is None or row.step > last:
            return None
        if row.step < last:
            return f"the step goes back from {last} to {row.step}"
        pending = self._pending.get(row.step, {}).get(row.rank)
        if (
            pending is not None
            and row.series == TRAINING
            and self._single_steps >= _SINGLE_BEFORE_REPEAT
            and _conflict(pending.values, row.values) is not None
        ):
            return f"step {row.step} comes again with other values"
        return None

    def _begin(self, row: Row) -> None:
        self._started = True
        self._label, self._total = row.attempt, row.total
        if row.attempt is not None:
            self._attempt = row.attempt

    def _open_attempt(self, row: Row, reason: str) -> Iterator[Record]:
        yield from self._flush(math.inf)
        last = self._newest if self._newest >= 0 else self._flushed
        self._restarts += 1
        self._attempt = max(self._attempt + 1, row.attempt or 0)
        self._label, self._total = row.attempt, row.total
        self._last.clear()
        self._newest = self._flushed = -1
        self._single_steps = 0
        yield RunEvent(
            attempt=self._attempt,
            step=row.step,
            rank=row.rank,
            kind=EventKind.ATTEMPT_START,
            message=reason,
            ts_ns=row.ts_ns,
            data={"reason": reason, "line": row.line, "previous_step": last},
        )

    def _merge(self, row: Row) -> bool:
        ranks = self._pending.setdefault(row.step, {})
        pending = ranks.get(row.rank)
        if row.total is not None:
            self._total = row.total
        if pending is None:
            ranks[row.rank] = _Pending(row.values, row.line, row.ts_ns, {row.series})
            if row.series == TRAINING:
                self._single_steps += 1
            return True
        name = _conflict(pending.values, row.values)
        if name is None or row.series not in pending.series:
            # Another series of the same step: what is already there stays, the rest is added.
            for key, value in row.values.items():
                pending.values.setdefault(key, value)
        elif row.series == TRAINING:
            self._repeated += 1
            self._single_steps = -(2**30)
            self._tally.reject(
                row.line,
                f"step {row.step} was already on line {pending.line} with {name} {pending.values[name]!r}, "
                f"here {row.values[name]!r}",
            )
            return False
        else:
            pending.values.update(row.values)
            self._tally.note(f"step {row.step} is evaluated more than once, the last value is kept (line {row.line})")
        pending.series.add(row.series)
        pending.ts_ns = pending.ts_ns or row.ts_ns
        return True

    def _settled(self) -> float:
        """Steps below this one are complete."""
        if not self._ranks_seen:
            return self._newest
        slowest = min((step for (_, series), step in self._last.items() if series == TRAINING), default=-1)
        if self._flushed < 0 and len(self._pending) <= _SETTLE_STEPS:
            return -1
        return max(slowest, self._newest - _MAX_PENDING_STEPS)

    def _flush(self, before: float) -> Iterator[Record]:
        ready = [step for step in self._pending if step < before]
        ready.sort()
        for step in ready:
            ranks = self._pending.pop(step)
            if step <= self._flushed:
                self._late += len(ranks)
            else:
                self._flushed = step
            self._tally.lines.add(self._attempt, step, min(row.line for row in ranks.values()))
            for rank in sorted(ranks):
                row = ranks[rank]
                self._tally.signals.update(row.values)
                yield StepRecord(attempt=self._attempt, step=step, rank=rank, ts_ns=row.ts_ns, values=row.values)

    def _release(self) -> Iterator[Record]:
        held, self._held = self._held, []
        for mark in held:
            yield from self._mark(mark)

    def _mark(self, mark: Mark) -> Iterator[Record]:
        step = mark.step if mark.step is not None else max(self._newest, self._flushed, 0)
        if mark.kind in _ENDS:
            yield from self._flush(math.inf)
        elif step > self._newest:
            yield from self._flush(step)
        else:  # the newest step may still gain an evaluation
            yield from self._flush(min(self._settled(), step + 1))
        if mark.path is not None:
            yield CheckpointRecord(
                attempt=self._attempt,
                step=step,
                rank=0,
                path=mark.path,
                status=CheckpointStatus(mark.status or CheckpointStatus.SAVED),
            )
            return
        yield RunEvent(
            attempt=self._attempt,
            step=step,
            rank=mark.rank,
            kind=mark.kind,
            message=mark.message,
            data={**mark.data, "line": mark.line},
        )


def _conflict(old: dict[str, Scalar], new: dict[str, Scalar]) -> str | None:
    """The first name that both rows have with different values (NaN equals NaN)."""
    for name, value in new.items():
        if name in old:
            before = old[name]
            if before != value and not (before != before and value != value):
                return name
    return None
