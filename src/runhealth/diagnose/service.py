"""One call for a post-mortem: everything a source holds, in, and a report, out."""

from runhealth.diagnose.engine import Engine, verdict_hash
from runhealth.diagnose.findings import Report
from runhealth.storage.errors import NoUsableDataError
from runhealth.storage.source import RecordSource

__all__ = ["diagnose", "verdict_hash"]


def diagnose(source: RecordSource, *, window: tuple[int, int] | None = None, attempt: int | None = None) -> Report:
    """Diagnose a run of the store or an imported log.

    `window` = (first, last) restricts what is judged to these steps; `attempt` reads that attempt only.

    Raises:
        NoUsableDataError: not a single step was read.
    """
    engine = Engine(window=window)
    feed = engine.feed_quietly
    for record in source.records():
        if attempt is None or record.attempt == attempt:
            feed(record)
    engine.finish()
    info = source.describe()
    report = engine.report(info)
    if report.first_step is None:
        of = f" of attempt {attempt}" if attempt is not None else ""
        raise NoUsableDataError(f"{info.source}: expected at least one training step{of}, met none")
    return report
