"""One call for a post-mortem: everything a source holds, in, and a report, out."""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from runhealth.diagnose import liveness
from runhealth.diagnose.engine import Engine, verdict_hash
from runhealth.diagnose.findings import Report
from runhealth.diagnose.verdicts import merge
from runhealth.storage.errors import NoUsableDataError
from runhealth.storage.source import RecordSource

__all__ = ["diagnose", "verdict_hash"]


def diagnose(
    source: RecordSource,
    *,
    window: tuple[int, int] | None = None,
    attempt: int | None = None,
    clock: Callable[[], int] = time.time_ns,
) -> Report:
    """Diagnose a run of the store or an imported log.

    `window` = (first, last) restricts what is judged to these steps; `attempt` reads that attempt only. A run whose
    logs are here and were not closed is also held against its processes and the `clock` (ns): did it die or hang?

    Raises:
        NoUsableDataError: not a single step was read.
    """
    engine = Engine(window=window)
    feed = engine.feed_quietly
    with _without_gc():
        for record in source.records():
            if attempt is None or record.attempt == attempt:
                feed(record)
        engine.finish()
    info = source.describe()
    report = engine.report(info)
    if report.first_step is None:
        of = f" of attempt {attempt}" if attempt is not None else ""
        raise NoUsableDataError(f"{info.source}: expected at least one training step{of}, met none")
    if info.format != "runhealth" or attempt is not None:
        return report
    return with_liveness(report, engine, clock(), window)


def with_liveness(report: Report, engine: Engine, now_ns: int, window: tuple[int, int] | None = None) -> Report:
    """The report of a run of the store, with the finding of `liveness.check` if there is one within the window."""
    found = liveness.check(report.source.source, engine.history, now_ns)
    if found is None or (window is not None and not window[0] <= found.onset_step <= window[1]):
        return report
    return replace(report, findings=tuple(merge([*report.findings, found])))


@contextmanager
def _without_gc() -> Iterator[None]:
    """Records and frames hold no cycles and the engine keeps a bounded number of them, so looking for cycles every few
    hundred objects is a third of the time for nothing."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
