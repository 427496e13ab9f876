"""RunReader: a run of the store as records, as SQL tables, and as something that can be followed while it grows."""

import os
import threading
from collections import Counter
from collections.abc import Iterator, Sequence

import duckdb
import polars as pl

from runhealth.storage.blocks import StepBlock
from runhealth.storage.blockwise import blocks_of
from runhealth.storage.follow import PublishedFollower
from runhealth.storage.places import is_remote
from runhealth.storage.records import Record, Rejected, SourceInfo
from runhealth.storage.schema import RECORD_TABLES
from runhealth.storage.series import SeriesCache
from runhealth.storage.sink import TABLE_OF
from runhealth.storage.store import RunInfo, Store
from runhealth.storage.tail import RetiredLogError, RunTail, order, rejected_of
from runhealth.storage.view import View

_POLL_BYTES = 16 * 1024 * 1024
_SHOWN_REJECTS = 20


class RunReader:
    """Reads one run: what was published plus the live tail of the rank logs. Never blocks a writer or a publisher.

    A `RecordSource` and a `BlockSource`. Its methods may be called from several threads; each iterator belongs to one.
    """

    def __init__(self, info: RunInfo) -> None:
        self.info = info
        self._lock = threading.RLock()
        self._view: View | None = None
        self._followed: RunTail | None = None
        self._pid = os.getpid()
        self._polled = False
        self._given: Counter[tuple[str, int, int]] = Counter()  # table, attempt, rank -> records that poll() gave out
        self._ahead: Counter[tuple[str, int, int]] = Counter()  # of these, what the tail will say once more
        self._follower: PublishedFollower | None = None
        self._series = SeriesCache()

    @classmethod
    def open(cls, run: str, store: str | None = None) -> "RunReader":
        """Open a run as `Store.resolve` finds it. Raises RunNotFoundError, AmbiguousRunError, StoreError."""
        return cls(Store(store).resolve(run))

    def records(self) -> Iterator[Record]:
        """Every record there is now, ordered by attempt and step; within these events and checkpoints, then rank by
        rank its scalars, batches and layers. Memory stays bounded however long the run is."""
        view = View(self.info)
        try:
            yield from view.records(renew=True)
        finally:
            view.close()

    def blocks(self) -> Iterator[StepBlock | Record]:
        """The same as columns: blocks of at most 4,096 steps, and single records where a rank lacks the step, say."""
        view = View(self.info)
        try:
            yield from blocks_of(view)
        finally:
            view.close()

    def poll(self) -> list[Record]:
        """What is new since the last poll; the first returns all. Ordered like `records()` within one call.

        Costs a few file stats when nothing is new. At most about 16 MB of rank logs a call, so call it again at once
        while it returns something. A run elsewhere than on this disk grows when it is pushed there again. Whoever
        slept so long that rank logs were removed meanwhile gets what they held from the parts.
        """
        with self._lock:
            if is_remote(self.info.path):
                if self._follower is None:
                    self._follower = PublishedFollower(self.info)
                return self._follower.read()
            records = self._follow() if self._polled else self._first_poll()
            self._polled = True
            for record in records:
                self._given[_key(record)] += 1
            return records

    def _follow(self) -> list[Record]:
        if self._followed is None:
            return []
        try:
            return sorted(self._unsaid(self._followed.read(_POLL_BYTES)), key=order)
        except RetiredLogError:
            follower = PublishedFollower(self.info, self._given)
            records = follower.read()
            self._followed = RunTail(self.info.path, follower.offsets)
            self._ahead = follower.ahead
            return records

    def _unsaid(self, records: list[Record]) -> list[Record]:
        """Without those that were given out before the logs were followed anew: of each rank the first so many."""
        if not self._ahead:
            return records
        unsaid = []
        for record in records:
            key = _key(record)
            if self._ahead[key] > 0:
                self._ahead[key] -= 1
            else:
                unsaid.append(record)
        self._ahead = +self._ahead
        return unsaid

    def refresh(self) -> None:
        """Take in what was published and logged since; `sql` does so by itself."""
        with self._lock:
            self._current()

    def sql(self, query: str, parameters: Sequence[object] = ()) -> pl.DataFrame:
        """Result of a DuckDB query over the tables of docs/design.md, live tail included.

        Raises duckdb.Error for a query that is wrong.
        """
        with self._lock:
            view = self._current()
            try:
                return view.query(query, parameters)
            except duckdb.IOException:
                if not view.is_replaced():
                    raise
                view.close()  # the publisher merged its parts and removed the pieces
                self._view = None
                return self._current().query(query, parameters)

    def series(self, signal: str, rank: int | None = None) -> pl.DataFrame:
        """One signal over the whole run as `attempt`, `step`, `value`, in order: of `rank`, or the mean over the ranks
        that have it. Steps without a value are left out.

        Much faster than `sql` when it is asked again, for what the parts hold of it is kept (up to 256 MB). Raises
        NoUsableDataError for a signal that no step has.
        """
        with self._lock:
            view = self._current()
            try:
                return self._series.series(view, signal, rank)
            except duckdb.IOException:
                if not view.is_replaced():
                    raise
                view.close()
                self._view = None
                return self._series.series(self._current(), signal, rank)

    def describe(self) -> SourceInfo:
        """What the run holds at this moment, and which frames of its logs could not be read."""
        with self._lock:
            view = self._current()
            counts = " + ".join(f"(SELECT count(*) FROM {table.name})" for table in RECORD_TABLES)
            row = view.connection.execute(f"SELECT {counts}").fetchone()
            names = view.connection.execute(
                "SELECT name FROM tail.signals ORDER BY table_name = 'layers', table_name = 'batches', rowid"
            ).fetchall()
            rejected = self._rejected(view)
            kept = int(row[0]) if row is not None else 0
            notes = (*view.notes, *((self.info.problem,) if self.info.problem else ()))
        return SourceInfo(
            name=self.info.name, source=self.info.path, format="runhealth",
            signals=tuple(dict.fromkeys(name for (name,) in names)),
            rows_read=kept + len(rejected), rows_kept=kept, rows_rejected=len(rejected),
            rejected=tuple(rejected[:_SHOWN_REJECTS]), notes=notes,
        )  # fmt: skip

    def close(self) -> None:
        """Let go of files and memory. The reader may be used again; it opens them anew."""
        with self._lock:
            if self._view is not None:
                self._view.close()
                self._view = None

    def __enter__(self) -> "RunReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _first_poll(self) -> list[Record]:
        while True:
            view = View(self.info)
            try:
                records = list(view.records())
                if view.tail is not None:
                    self._followed = RunTail(self.info.path, view.published_offsets | view.tail.offsets())
                return records
            except duckdb.IOException:
                if not view.is_replaced():
                    raise
            finally:
                view.close()

    def _current(self) -> View:
        if self._view is not None and self._pid != os.getpid():
            self._view = None  # a forked child: the connection is its parent's, and using it may hang
        self._pid = os.getpid()
        if self._view is not None and self._view.is_stale():
            self._view.close()
            self._view = None
        if self._view is not None:
            try:
                self._view.sync()
            except RetiredLogError:  # the published run covers more than it did when this view was opened
                self._view.close()
                self._view = None
        if self._view is None:
            self._view = View(self.info)
        return self._view

    @staticmethod
    def _rejected(view: View) -> list[Rejected]:
        published = view.connection.execute(
            "SELECT file, offset_bytes, message FROM progress WHERE message <> '' ORDER BY file"
        ).fetchall()
        found = [one for file, offset, message in published for one in rejected_of(file, offset, message)]
        if view.tail is not None:
            # the end of a log may be a write under way, which only its tail can tell
            followed = {tail.name: tail.start for tail in view.tail.segments()}
            found = [
                one for one in found if one.line < followed.get(one.why.partition(": ")[0], one.line + 1)
            ] + view.tail.rejected()
        return found


def _key(record: Record) -> tuple[str, int, int]:
    return TABLE_OF[type(record)].name, record.attempt, record.rank
