"""One call for a post-mortem: everything a source holds, in, and a report, out."""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from runhealth.diagnose import against_plan, liveness, replays
from runhealth.diagnose.engine import Engine, verdict_hash
from runhealth.diagnose.experiments import with_replays
from runhealth.diagnose.findings import Report
from runhealth.diagnose.replay_words import attach
from runhealth.diagnose.replays import Replayed
from runhealth.diagnose.stretch import LineSource
from runhealth.diagnose.suspect import load_suspects
from runhealth.diagnose.verdicts import merge
from runhealth.storage.blocks import BlockSource, StepBlock
from runhealth.storage.errors import NoUsableDataError, StoreError
from runhealth.storage.source import RecordSource

__all__ = ["diagnose", "verdict_hash"]

WITHOUT_LINES = frozenset({"tfevents"})  # binary: they know offsets


def diagnose(
    source: RecordSource,
    *,
    window: tuple[int, int] | None = None,
    attempt: int | None = None,
    clock: Callable[[], int] = time.time_ns,
    results: Sequence[Replayed] | None = None,
) -> Report:
    """Diagnose a run of the store or an imported log.

    `window` = (first, last) restricts what is judged to these steps; `attempt` reads that attempt only. A run whose
    logs are here and were not closed is also held against its processes and the `clock` (ns): did it die or hang? What
    its replays showed is evidence like any other; `results` takes the place of the stored ones.

    Raises:
        NoUsableDataError: not a single step was read.
    """
    described = source.describe()
    notes: tuple[str, ...] = ()
    if results is None:
        results, notes = replays.read_all(described.source) if described.format == "runhealth" else ((), ())
    engine = Engine(window=window, suspects=with_replays(load_suspects(), results))
    with _without_gc():
        for item in source.blocks() if isinstance(source, BlockSource) else source.records():
            if not isinstance(item, StepBlock):
                if attempt is None or item.attempt == attempt:
                    engine.feed_quietly(item)
            elif attempt is None or item.attempt == attempt:
                engine.feed_block(item if attempt is None else _only(item, attempt))
            else:
                for _, record in item.others:
                    if record.attempt == attempt:
                        engine.feed_quietly(record)
        engine.finish()
    info = source.describe()
    info = replace(info, notes=(*info.notes, *notes))
    report = attach(_located(engine.report(info), source), tuple(results), whole=window is None and attempt is None)
    if report.first_step is None:
        of = f" of attempt {attempt}" if attempt is not None else ""
        raise NoUsableDataError(f"{info.source}: expected at least one training step{of}, met none")
    if info.format != "runhealth" or attempt is not None:
        return report
    return beyond_records(report, engine, clock(), window)


def beyond_records(report: Report, engine: Engine, now_ns: int, window: tuple[int, int] | None = None) -> Report:
    """The report of a run of the store, with what its processes and its plan add within the window (`liveness`,
    `against_plan`). A plan that cannot be read is a note: it says nothing about the run."""
    path = report.source.source
    found = [liveness.check(path, engine.history, now_ns)]
    try:
        found.append(against_plan.check(path, engine.history))
    except StoreError as error:
        report = replace(report, source=replace(report.source, notes=(*report.source.notes, str(error))))
    added = [f for f in found if f is not None and (window is None or window[0] <= f.onset_step <= window[1])]
    return replace(report, findings=tuple(merge([*report.findings, *added]))) if added else report


def _located(report: Report, source: RecordSource) -> Report:
    """The line of the log on which the onset of each finding begins, where the source knows its lines."""
    if not isinstance(source, LineSource) or report.source.format in WITHOUT_LINES:
        return report
    findings = []
    for finding in report.findings:
        line = None if "line" in finding.details else source.line_of(finding.attempt, finding.onset_step)
        details = finding.details if line is None else {**finding.details, "line": line}
        findings.append(replace(finding, details=details))
    return replace(report, findings=tuple(findings))


def _only(block: StepBlock, attempt: int) -> StepBlock:
    """The block without checkpoints and events of other attempts."""
    return replace(block, others=tuple((row, record) for row, record in block.others if record.attempt == attempt))


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
