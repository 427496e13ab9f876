"""One run that pages look at: a reader, what was read last, and the diagnosis of it. Shared by all browser sessions."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import duckdb
import polars as pl

from runhealth.dashboard import queries
from runhealth.dashboard.diagnosis import Diagnoser, LiveDiagnosis
from runhealth.dashboard.queries import Progress
from runhealth.dashboard.views.curves import PANELS
from runhealth.dashboard.window import Span, Window
from runhealth.diagnose.engine import Engine
from runhealth.diagnose.findings import Report
from runhealth.storage.blocks import StepBlock
from runhealth.storage.errors import StoreError
from runhealth.storage.reader import RunReader

CURVE_BUCKETS = 600
HEAT_BUCKETS = 150
STRIP_BUCKETS = 300
KEPT = 16
DUTY = 10.0  # a view is read again only when it is this many times older than its reading took

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What the curves of one redraw need. `points` is keyed by signal and leaves out what has no value."""

    progress: Progress
    span: Span
    points: Mapping[str, pl.DataFrame]
    checkpoints: pl.DataFrame
    heat_metrics: tuple[str, ...]


class ReadCache:
    """What was read, by view. A view is read again when the run has moved on, but on a run so large that reading takes
    long, not more often than `DUTY` allows."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept: OrderedDict[object, tuple[Progress, float, float, Any]] = OrderedDict()

    def get(self, view: object, progress: Progress, read: Callable[[], T]) -> T:
        if view in self._kept:
            self._kept.move_to_end(view)
            seen, ended_at, cost_s, value = self._kept[view]
            if seen == progress or self._clock() - ended_at < DUTY * cost_s:
                kept: T = value
                return kept
        started_at = self._clock()
        fresh = read()
        ended_at = self._clock()
        self._kept[view] = (progress, ended_at, ended_at - started_at, fresh)
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return fresh


class EngineDiagnoser:
    """Feeds the engine what the run's records have grown by. A run that has ended when it is first looked at is read in
    columns, many times faster; should it go on, it is read once more."""

    def __init__(self, reader: RunReader) -> None:
        self._reader = reader
        self._engine: Engine | None = None

    def update(self, *, ended: bool) -> Report:
        if self._engine is None and ended:
            return self._whole()
        self._engine = self._engine or Engine()
        while records := self._reader.poll():
            for record in records:
                self._engine.feed_quietly(record)
        engine = self._engine
        if ended:  # on a copy: the run may go on with another attempt
            engine = Engine()
            engine.load_state_dict(self._engine.state_dict())
            engine.finish()
        return engine.report(self._reader.describe())

    def _whole(self) -> Report:
        engine = Engine()
        for item in self._reader.blocks():
            if isinstance(item, StepBlock):
                engine.feed_block(item)
            else:
                engine.feed_quietly(item)
        engine.finish()
        return engine.report(self._reader.describe())

    def close(self) -> None:
        self._reader.close()


class LiveRun:
    """Reads one run. Every method may be called from any thread.

    Raises:
        RunNotFoundError, StoreError, CorruptDataError: from the reader, by the constructor and by every method.
    """

    def __init__(
        self, name: str, store: str | None, *, make_diagnoser: Callable[[RunReader], Diagnoser] = EngineDiagnoser
    ) -> None:
        self.name = name
        self.diagnosis = LiveDiagnosis(lambda: make_diagnoser(RunReader.open(name, store)))
        self._lock = threading.Lock()
        self._reader = RunReader.open(name, store)
        self._cache = ReadCache()

    @contextmanager
    def _reading(self) -> Iterator[RunReader]:
        """One caller at a time; what DuckDB says of a damaged file becomes an error of the store."""
        with self._lock:
            try:
                yield self._reader
            except duckdb.Error as error:
                first = str(error).splitlines()[0]
                raise StoreError(f"expected a readable run.duckdb in {self._reader.info.path}, met: {first}") from error

    def progress(self) -> Progress | None:
        """How far the run is now; None before its first step."""
        with self._reading() as reader:
            return queries.progress(reader)

    def snapshot(self, progress: Progress, window: Window, attempt: int | None) -> Snapshot:
        """The curves. Asked again with nothing new, it returns the same object without a query."""
        with self._reading() as reader:
            return self._cache.get(
                ("curves", window, attempt), progress, lambda: _curves(reader, progress, window, attempt)
            )

    def heat(self, snapshot: Snapshot, metric: str, attempt: int | None) -> pl.DataFrame:
        """The ranks' deviations over the steps of `snapshot`."""
        with self._reading() as reader:
            return self._cache.get(
                ("heat", snapshot.span, metric, attempt), snapshot.progress,
                lambda: queries.heat(
                    reader, metric, snapshot.span, attempts=snapshot.progress.attempts, attempt=attempt,
                    buckets=HEAT_BUCKETS,
                ),
            )  # fmt: skip

    def strip(self, progress: Progress) -> pl.DataFrame | None:
        """The loss over the whole run for the overview; None when no loss is recorded."""
        with self._reading() as reader:
            if "loss" not in queries.signals(reader):
                return None
            return self._cache.get("strip", progress, lambda: _loss(reader, progress))

    def csv(self, span: Span, attempt: int | None) -> str:
        """Every recorded row of the window."""
        with self._reading() as reader:
            return queries.write_csv(queries.rows(reader, span, attempt=attempt))

    def close(self) -> None:
        with self._lock:
            self._reader.close()
        self.diagnosis.close()


def _curves(reader: RunReader, progress: Progress, window: Window, attempt: int | None) -> Snapshot:
    span = progress.shown(window, attempt)
    known = queries.signals(reader)
    points = {
        panel.signal: queries.curve(
            reader, panel.signal, span, attempts=progress.attempts, attempt=attempt, buckets=CURVE_BUCKETS
        )
        for panel in PANELS
        if panel.signal in known
    }
    return Snapshot(
        progress=progress,
        span=span,
        points={signal: frame for signal, frame in points.items() if frame.height},
        checkpoints=queries.checkpoints(reader, span, attempt=attempt),
        heat_metrics=queries.heat_metrics(known),
    )


def _loss(reader: RunReader, progress: Progress) -> pl.DataFrame:
    return queries.curve(reader, "loss", progress.span, attempts=progress.attempts, buckets=STRIP_BUCKETS)
