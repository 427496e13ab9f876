"""Two runs that write into one log without a name, each at a step of its own.

Their steps go back and forth: 105, 5, 106, 6, ... Taken for one run, each line would be a restart. A step that goes
back is therefore held until the next rows have shown whether the higher steps go on as well. If they do, the run that
is ahead is kept, and the lines of the other are rejected.
"""

from collections.abc import Iterable, Iterator

from runhealth.storage.importers.base import TRAINING, Item, Mark, Row, Rows, Tally

_HELD_ROWS = 8
_LEAST_TURNS = 4  # of them that go back or come forward again


class Lanes:
    """Feed it the items of a log; it yields those of one run."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._last: int | None = None  # of the run that is kept
        self._other: int | None = None  # of the other run, once there are two
        self._held: list[Item] = []
        self._rows = 0
        self._rejected = 0

    def run(self, items: Iterable[Item]) -> Iterator[Item]:
        """All items but the rows of the second run."""
        for item in items:
            if isinstance(item, Row) and item.series is TRAINING and not item.ranked and item.attempt is None:
                yield from self._row(item)
            elif isinstance(item, Rows) and not item.ranked:
                yield from self._rows_of(item)
            elif self._held and isinstance(item, Row | Mark):
                self._held.append(item)
            else:
                yield from self._release()
                yield item
        yield from self._release()
        if self._rejected:
            self._tally.note(
                f"{self._rejected} rows belong to a second run that writes into this log, at steps of its own; "
                "expected one run: the one that is ahead is read"
            )

    def _rows_of(self, rows: Rows) -> Iterator[Item]:
        """As many one by one as it takes, the rest as they are."""
        at = 0
        for at in range(len(rows)):
            step = int(rows.steps[at])
            if not self._held and self._other is None and (self._last is None or step >= self._last):
                break
            (row,) = rows.part(at, at + 1).rows()
            yield from self._row(row)
        else:
            return
        self._last = int(rows.steps[-1])
        yield rows.part(at, len(rows)) if at else rows

    def _row(self, row: Row) -> Iterator[Item]:
        if self._other is not None:
            yield from self._of_two(row)
        elif self._held:
            self._held.append(row)
            self._rows += 1
            if self._rows >= _HELD_ROWS:
                yield from self._release()
        elif self._last is not None and row.step < self._last:
            self._held, self._rows = [row], 1
        else:
            self._last = row.step
            yield row

    def _release(self) -> Iterator[Item]:
        """Decide about what is held."""
        held, self._held = self._held, []
        if not held:
            return
        steps = [item.step for item in held if isinstance(item, Row) and item.series is TRAINING]
        assert self._last is not None
        if self._alternate(self._last, steps):
            self._other = -1
            for item in held:
                if isinstance(item, Row) and item.series is TRAINING:
                    yield from self._of_two(item)
                else:
                    yield item
            return
        # A restart; what is held may go back again.
        self._last = steps[0]
        yield held[0]
        for at, item in enumerate(held[1:], 1):
            if isinstance(item, Row) and item.series is TRAINING:
                if item.step < self._last:
                    self._held = held[at:]
                    self._rows = sum(isinstance(one, Row) and one.series is TRAINING for one in self._held)
                    return
                self._last = item.step
            yield item

    @staticmethod
    def _alternate(last: int, steps: list[int]) -> bool:
        """Whether steps, the first of which is under `last`, are those of two runs that both go on."""
        high, low, turns, before = last, -1, 0, True
        for step in steps:
            above = step > high
            if above:
                if step > high + (high - low):
                    return False
                high = step
            elif step > low:
                low = step
            else:
                return False
            turns += above is not before
            before = above
        return turns >= _LEAST_TURNS

    def _of_two(self, row: Row) -> Iterator[Item]:
        assert self._last is not None
        assert self._other is not None
        if row.step >= self._last:
            self._last = row.step
            yield row
        elif row.step > self._other:
            self._other = row.step
            self._rejected += 1
            self._tally.rows_read += 1
            self._tally.reject(row.line, f"step {row.step} of a second run, between steps of the run at {self._last}")
        else:  # one of them begins again, and nothing says which
            self._other = None
            self._last = row.step
            yield row
