"""Following a run through what is published of it, where its rank logs are out of reach: on object storage, say.

Rows have no number of their own. But each rank's rows are published in the order in which the rank logged them, however
often the database was built anew; so it is enough to count, for each table, attempt and rank, how many of the rows
that are in no part yet were given out.
"""

from collections import Counter
from collections.abc import Mapping

import polars as pl

from runhealth.storage.parts import union_sql
from runhealth.storage.records import Record
from runhealth.storage.rows import OTHERS, ROWS
from runhealth.storage.store import RunInfo
from runhealth.storage.tail import order
from runhealth.storage.view import View

_KEY = ["attempt", "rank"]
_GIVEN = {"attempt": pl.Int32, "rank": pl.Int32, "given": pl.Int64}


class PublishedFollower:
    """Gives out each record of a published run once. `read` looks for a newer publication."""

    def __init__(self, info: RunInfo, given: Mapping[tuple[str, int, int], int] | None = None) -> None:
        """`given`: how many rows of (table, attempt, rank) somebody has already who begins here."""
        self._info = info
        self._version: str | None = None
        self._in_parts: dict[str, int] = {}  # table -> rows given out that are in parts now: all up to some part
        self._given: dict[str, pl.DataFrame] = {}  # table -> attempt, rank, rows given out that were in no part
        for table, *_ in OTHERS + ROWS if given else ():
            rows = [(*key[1:], count) for key, count in (given or {}).items() if key[0] == table]
            self._given[table] = pl.DataFrame(rows, schema=_GIVEN, orient="row")
        self.offsets: dict[str, int] = {}  # bytes of each rank log that what was given out covers
        self.ahead: Counter[tuple[str, int, int]] = Counter()  # of `given`, what is not published yet

    def read(self) -> list[Record]:
        """Records that were published since the last call, ordered like `RunReader.records()`."""
        if self._version is not None and View.version_of(self._info) == self._version:
            return []
        view = View(self._info)
        try:
            if not view.version:  # packed: it does not grow
                records = list(view.records()) if self._version is None else []
            else:
                records = sorted(self._new(view), key=order)
            self._version = view.version
            self.offsets = view.published_offsets
        finally:
            view.close()
        return records

    def _new(self, view: View) -> list[Record]:
        names = view.signal_names()
        records: list[Record] = []
        for table, build, _ in OTHERS + ROWS:
            columns = view.query(view.recent[table] + " LIMIT 0")
            types = {
                name: kind for name, kind, *_ in view.connection.execute(f"DESCRIBE {view.recent[table]}").fetchall()
            }
            given = self._given.get(table)
            done = self._in_parts.get(table, 0)
            for part, path in view.parts:
                if part.table_name == table and part.first_row + part.rows > done:
                    frame = view.query(union_sql(view.connection, [path], types))
                    frame = pl.concat([columns, frame], how="diagonal")
                    # parts that were merged begin with rows that were in a part before
                    fresh, given = _beyond(frame.slice(max(0, done - part.first_row)), given)
                    records += build(fresh, names.get(table, {}))
                    done = part.first_row + part.rows
            self._in_parts[table] = done
            frame = view.query(view.recent[table])
            fresh, left = _beyond(frame, given)
            records += build(fresh, names.get(table, {}))
            if left is not None:
                self.ahead.update({(table, attempt, rank): count for attempt, rank, count in left.iter_rows() if count})
            self._given[table] = frame.group_by(_KEY).agg(pl.len().cast(pl.Int64).alias("given"))
        return records


def _beyond(frame: pl.DataFrame, given: pl.DataFrame | None) -> tuple[pl.DataFrame, pl.DataFrame | None]:
    """Rows of `frame` that were not given out, and how many of `given` are still to come after this frame."""
    if given is None or frame.is_empty():
        return frame, given
    numbered = frame.with_columns(pl.int_range(pl.len(), dtype=pl.Int64).over(_KEY).alias("\0n"))
    joined = numbered.join(given, on=_KEY, how="left", maintain_order="left")
    fresh = joined.filter(pl.col("\0n") >= pl.col("given").fill_null(0)).drop("\0n", "given")
    held = frame.group_by(_KEY).agg(pl.len().cast(pl.Int64).alias("held"))
    left = given.join(held, on=_KEY, how="left").select(
        *_KEY, (pl.col("given") - pl.col("held").fill_null(0)).clip(lower_bound=0).alias("given")
    )
    return fresh, left
