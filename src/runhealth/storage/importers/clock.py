"""Step times from what a log has instead of them, because the mean that a log prints hides the slow step."""

from collections.abc import Iterable, Iterator

from runhealth.storage.importers.base import TRAINING, Item, Row, Tally


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
            if isinstance(item, Row):
                self.feed(item)
            yield item
        self.finish()

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
