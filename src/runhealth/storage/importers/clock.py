"""Step times from what a log has instead of them, because the mean that a log prints hides the slow step."""

from collections.abc import Iterable, Iterator

import numpy as np

from runhealth.storage.blocks import Column
from runhealth.storage.importers.base import TRAINING, Item, Row, Rows, Tally


class StepClock:
    """Adds `t_step_s` to training rows that lack it.

    From `elapsed_s`: the difference of the clock over the difference of the steps, rank by rank. A clock that goes back
    was restarted: that row gets no step time, and the reading a note. An evaluation at the same step moves the clock,
    so that its time is not charged to the next training step.
    From `t_forward_s` and `t_wait_s`, if a row has both: their sum.
    """

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._last: dict[int, tuple[int, float]] = {}
        self._from_elapsed = False
        self._from_parts = False

    def run(self, items: Iterable[Item]) -> Iterator[Item]:
        """All items, the rows completed."""
        for item in items:
            if isinstance(item, Rows):
                yield from self.feed_rows(item)
                continue
            if isinstance(item, Row):
                self.feed(item)
            yield item
        self.finish()

    def feed_rows(self, rows: Rows) -> Iterator[Item]:
        """Complete many rows; they come back one by one where not all of them have the same."""
        columns = rows.columns
        names = ("t_wait_s", "t_forward_s", "elapsed_s", "t_step_s")
        if all(columns[name].present is None for name in names if name in columns) and self._completed(rows):
            yield rows
            return
        for row in rows.rows():
            self.feed(row)
            yield row

    def _completed(self, rows: Rows) -> bool:
        columns = rows.columns
        added: dict[str, Column] = {}
        if "t_wait_s" in columns and "t_forward_s" in columns and "t_step_s" not in columns:
            values = columns["t_forward_s"].values + columns["t_wait_s"].values
            added["t_step_s"] = Column(values=values)
        if "elapsed_s" in columns:
            elapsed = columns["elapsed_s"].values
            last = self._last.get(0)
            if last is not None and rows.steps[0] <= last[0]:
                return False
            before, since = (last[0], last[1]) if last is not None else (0, 0.0)
            spans = np.diff(elapsed, prepend=since) / np.diff(rows.steps, prepend=before if last is not None else -1)
            begin = 0 if last is not None else 1
            if np.isnan(elapsed).any() or not (spans[begin:] >= 0).all():
                return False
            self._last[0] = (int(rows.steps[-1]), float(elapsed[-1]))
            if "t_step_s" not in columns and "t_step_s" not in added and len(spans) > begin:
                present = None if begin == 0 else np.arange(len(spans)) > 0
                added["t_step_s"] = Column(values=spans, present=present)
                self._from_elapsed = True
        if "t_wait_s" in columns and "t_forward_s" in columns and "t_step_s" in added:
            self._from_parts = True
        columns.update(added)
        return True

    def feed(self, row: Row) -> None:
        """Complete one row in place."""
        values = row.values
        if row.series == TRAINING and "t_wait_s" in values and "t_forward_s" in values and "t_step_s" not in values:
            values["t_step_s"] = values["t_forward_s"] + values["t_wait_s"]
            self._from_parts = True
        elapsed = values.get("elapsed_s")
        if elapsed is None or elapsed != elapsed:
            return
        last = self._last.get(row.rank)
        if last is not None and row.series == TRAINING and row.step > last[0]:
            span = (elapsed - last[1]) / (row.step - last[0])
            if span < 0:
                self._tally.note(f"the clock of the log starts again at step {row.step} (line {row.line})")
            elif "t_step_s" not in values:
                values["t_step_s"] = span
                self._from_elapsed = True
        self._last[row.rank] = (row.step, float(elapsed))

    def finish(self) -> None:
        """Write the notes about derived times."""
        if self._from_elapsed:
            self._tally.note("t_step_s is derived from differences of the cumulative time")
        if self._from_parts:
            self._tally.note("t_step_s is derived as compute plus wait")
