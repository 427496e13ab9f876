"""One signal over all steps of a run, for curves: of one rank, or the mean over the ranks.

Parts never change, so what a part holds of a series is read once and kept; rows that are in no part are read again.
"""

from collections import OrderedDict
from collections.abc import Sequence

import polars as pl

from runhealth.storage.errors import NoUsableDataError
from runhealth.storage.parts import PartFile, union_sql
from runhealth.storage.schema import STEPS, quoted
from runhealth.storage.view import View

_KEPT_BYTES = 256 * 1024 * 1024
_KEY = ["attempt", "step"]
_MEAN = "sum(value) AS total, count(*) AS count"


class SeriesCache:
    """Series of the immutable parts of one run; the least recently used go first."""

    def __init__(self) -> None:
        self._pieces: OrderedDict[tuple[str, int, str, int | None], pl.DataFrame] = OrderedDict()
        self._size_bytes = 0

    def series(self, view: View, signal: str, rank: int | None) -> pl.DataFrame:
        """`attempt`, `step`, `value` (float64), ordered by attempt and step; NaN and infinities included, steps without
        a value left out. With `rank` None the value is the mean over the ranks that have one. A rank that logged a
        step twice has two rows there. Raises NoUsableDataError for a signal that no step has."""
        columns = [
            column
            for column, name in view.signal_names().get(STEPS.name, {}).items()
            if name == signal
        ]  # fmt: skip
        if not columns:
            raise NoUsableDataError(f"no step of the run has a signal {signal!r}")
        parts = [(part, path) for part, path in view.parts if part.table_name == STEPS.name]
        pieces = [self._piece(view, part, path, signal, columns, rank) for part, path in parts]
        rest = f"{view.recent[STEPS.name]} UNION ALL BY NAME SELECT * FROM tail.steps" if parts else "FROM steps"
        pieces.append(_read(view, rest, columns, rank))
        frame = _in_order(pl.concat(pieces))
        if rank is None:
            frame = _added_up(frame).select(*_KEY, (pl.col("total") / pl.col("count")).alias("value"))
        return frame

    def _piece(
        self, view: View, part: PartFile, path: str, signal: str, columns: Sequence[str], rank: int | None
    ) -> pl.DataFrame:
        key = (path, part.xxh3_64, signal, rank)
        if key not in self._pieces:
            source = union_sql(view.connection, [path], {})
            held = {name for name, *_ in view.connection.execute(f"DESCRIBE {source}").fetchall()}
            self._pieces[key] = _read(view, source, [column for column in columns if column in held], rank)
            self._size_bytes += int(self._pieces[key].estimated_size())
        self._pieces.move_to_end(key)
        piece = self._pieces[key]
        while self._size_bytes > _KEPT_BYTES:
            self._size_bytes -= int(self._pieces.popitem(last=False)[1].estimated_size())
        return piece


def _read(view: View, source: str, columns: Sequence[str], rank: int | None) -> pl.DataFrame:
    values = ", ".join(f"CAST({quoted(column)} AS DOUBLE)" for column in columns)
    rows = f"SELECT attempt, step, rank, {f'coalesce({values})' if columns else 'CAST(NULL AS DOUBLE)'} AS value"
    rows = f"SELECT * FROM ({rows} FROM ({source})) WHERE value IS NOT NULL"
    if rank is None:
        return _in_order(view.query(f"SELECT attempt, step, {_MEAN} FROM ({rows}) GROUP BY ALL"))
    return _in_order(view.query(f"SELECT attempt, step, value FROM ({rows}) WHERE rank = ?", [rank]))


def _in_order(frame: pl.DataFrame) -> pl.DataFrame:
    """Sorted by attempt and step, which most often it is."""
    attempt, step = frame["attempt"], frame["step"]
    falls = (attempt < attempt.shift(1)) | ((attempt == attempt.shift(1)) & (step < step.shift(1)))
    return frame.sort(_KEY, maintain_order=True) if falls.any() else frame


def _added_up(frame: pl.DataFrame) -> pl.DataFrame:
    """One row a step: the ranks of a step may be in several parts."""
    again = ((frame["attempt"] == frame["attempt"].shift(1)) & (frame["step"] == frame["step"].shift(1))).fill_null(
        False
    )
    if not again.any():
        return frame
    several = again | again.shift(-1, fill_value=False)
    summed = frame.filter(several).group_by(_KEY).agg(pl.col("total").sum(), pl.col("count").sum())
    return pl.concat([frame.filter(~several), summed]).sort(_KEY)
