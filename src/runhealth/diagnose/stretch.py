"""Whether there was anything to judge: an empty stretch, or a handful of steps, is no all-clear."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from runhealth.storage.blocks import BlockSource, StepBlock
from runhealth.storage.errors import NoUsableDataError
from runhealth.storage.records import Record, SourceInfo, StepRecord
from runhealth.storage.source import RecordSource

if TYPE_CHECKING:
    from runhealth.diagnose.findings import Report

LEAST_STEPS = 5  # fewer cannot show a trend, so that nothing was found says nothing


@runtime_checkable
class LineSource(Protocol):
    """A source that knows on which line of its log the record of a step begins, once that was read."""

    def line_of(self, attempt: int, step: int) -> int | None: ...


class Stretch:
    """A source that counts the steps that are to be judged, as far as `LEAST_STEPS` or the stretch need it.

    `window` = (first, last) and `attempt` as in `service.diagnose`; None: everything.
    """

    def __init__(self, source: RecordSource, *, window: tuple[int, int] | None, attempt: int | None) -> None:
        self._source, self._window, self._attempt = source, window, attempt
        self.steps = 0  # at least; counting ends early where nothing more depends on it

    def records(self) -> Iterator[Record]:
        """Raises NoUsableDataError at the end if the stretch or attempt holds no step."""
        records = self._source.records()
        if self._window is None and self._attempt is None:
            met: set[tuple[int, int]] = set()
            for record in records:
                if isinstance(record, StepRecord):
                    met.add((record.attempt, record.step))
                    self.steps = len(met)
                yield record
                if self.steps >= LEAST_STEPS:
                    break
            yield from records
            return
        yield from self._counted(records)

    def _counted(self, records: Iterator[Record]) -> Iterator[Record]:
        first, last = self._window or (0, 2**63)
        spans: dict[int, tuple[int, int]] = {}
        newest: tuple[int, int] | None = None
        for record in records:
            if isinstance(record, StepRecord):
                attempt, step = record.attempt, record.step
                low, high = spans.get(attempt, (step, step))
                spans[attempt] = min(low, step), max(high, step)
                wanted = self._attempt is None or attempt == self._attempt
                if wanted and first <= step <= last and (attempt, step) != newest:
                    newest = attempt, step
                    self.steps += 1
            yield record
        if spans and not self.steps:
            raise NoUsableDataError(self._nothing(spans))

    def blocks(self) -> Iterator[StepBlock | Record]:
        """`records` in columns, as far as the source offers them. Raises what `records` raises."""
        if not isinstance(self._source, BlockSource):
            yield from self.records()
            return
        first, last = self._window or (0, 2**63 - 1)
        spans: dict[int, tuple[int, int]] = {}
        newest: tuple[int, int] | None = None
        for item in self._source.blocks():
            if isinstance(item, StepBlock | StepRecord):
                attempt = item.attempt
                steps = item.steps if isinstance(item, StepBlock) else np.array([item.step])
                low, high = spans.get(attempt, (int(steps[0]), int(steps[0])))
                spans[attempt] = min(low, int(steps[0])), max(high, int(steps[-1]))
                if self._attempt is None or attempt == self._attempt:
                    again = newest == (attempt, int(steps[0])) and first <= int(steps[0]) <= last
                    self.steps += int(((first <= steps) & (steps <= last)).sum()) - again
                    newest = attempt, int(steps[-1])
            yield item
        if self._window is None and self._attempt is None:
            return
        if spans and not self.steps:
            raise NoUsableDataError(self._nothing(spans))

    def _nothing(self, spans: dict[int, tuple[int, int]]) -> str:
        name = self._source.describe().source
        if self._attempt is not None and self._attempt not in spans:
            low, high = min(spans), max(spans)
            has = f"attempts {low}-{high}" if high > low else f"attempt {low} only"
            return f"{name}: no attempt {self._attempt} there; the run has {has}"
        of = f"attempt {self._attempt}" if self._attempt is not None else "the run"
        mine = [spans[self._attempt]] if self._attempt is not None else list(spans.values())
        low, high = min(low for low, _ in mine), max(high for _, high in mine)
        first, last = self._window or (low, high)
        return f"{name}: no step there ({first:,} to {last:,}); {of} has steps {low:,}-{high:,}"

    def describe(self) -> SourceInfo:
        return self._source.describe()

    def line_of(self, attempt: int, step: int) -> int | None:
        """The line of the log on which a step begins, where the source knows it."""
        return self._source.line_of(attempt, step) if isinstance(self._source, LineSource) else None


def check_enough(report: "Report", judged: Stretch) -> None:
    """Raises NoUsableDataError if nothing was found among fewer than `LEAST_STEPS` steps. A stretch that the user chose
    may be shorter: it is judged by the steps before it."""
    if report.window is None and judged.steps < LEAST_STEPS and not report.findings:
        steps = f"{judged.steps} step{'s' if judged.steps != 1 else ''}"
        source = report.source
        text = f"{source.source}: {steps} read, too few to judge: expected at least {LEAST_STEPS}"
        if source.rejected:
            first = source.rejected[0]
            text += f"; {source.rows_rejected:,} rows could not be read, the first on line {first.line:,}: {first.why}"
        raise NoUsableDataError(text)
