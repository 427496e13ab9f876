"""MLflow: its SQLite store, and its file store (`metrics/<name>` with lines `timestamp value step`), without MLflow.

https://mlflow.org/docs/latest/self-hosting/architecture/backend-store. Times are milliseconds since 1970. The SQL store
keeps NaN as 0 with `is_nan` and infinities as the largest doubles; both are undone. Each metric has a history of its
own; where the steps of a metric go back, a new attempt begins for all metrics of the run by their times.
"""

import bisect
import sqlite3
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from runhealth.storage.errors import NoUsableDataError
from runhealth.storage.importers.base import Item, Mark, ReadContext, Row, Tally
from runhealth.storage.importers.lines import iter_lines
from runhealth.storage.importers.names import Names
from runhealth.storage.importers.values import checked_ns, to_number, to_step
from runhealth.storage.records import EventKind, Scalar

_MAGIC = b"SQLite format 3\0"
# sqlite3 decodes the messages about a damaged schema strictly, and they quote it.
_UNREADABLE = (sqlite3.Error, UnicodeDecodeError)
_MAX_POINTS = 2_000_000
_Point = tuple[str, int, int, Scalar]  # metric, time in ms, step, value


class _Mlflow:
    name = "mlflow"

    def sniff(self, name: str, head: bytes) -> float:  # noqa: ARG002
        return 0.9 if head.startswith(_MAGIC) else 0.0

    def read(self, stream: BinaryIO, context: ReadContext) -> Iterator[Item]:
        try:
            connection = _connect(stream)
        except (*_UNREADABLE, OSError) as error:
            context.tally.reject(0, f"the database cannot be opened: {error}")
            return
        try:
            run, status = _run(connection, context.run)
            yield from _rows(_stored(connection, run, context.tally), context)
        except _UNREADABLE as error:
            context.tally.reject(0, f"no readable MLflow store: {error}")
            return
        finally:
            connection.close()
        if status in ("FAILED", "KILLED"):
            kind = EventKind.EXCEPTION if status == "FAILED" else EventKind.ATTEMPT_END
            yield Mark(line=0, kind=kind, message=f"MLflow says that the run is {status.lower()}")


def read_folder(folder: Path, context: ReadContext) -> Iterator[Item]:
    """The items of one run of a file store: the folder that holds `metrics`."""
    yield from _rows(_filed(folder / "metrics", context.tally), context)


def is_run_folder(folder: Path) -> bool:
    """Whether a folder is a run of a file store."""
    return (folder / "metrics").is_dir() and (folder / "meta.yaml").is_file()


def _connect(stream: BinaryIO) -> sqlite3.Connection:
    path = getattr(stream, "name", None)
    if isinstance(path, str) and Path(path).is_file():
        connection = sqlite3.connect(f"{Path(path).absolute().as_uri()}?mode=ro", uri=True)
    else:
        connection = sqlite3.connect(":memory:")
        connection.deserialize(stream.read())
    connection.text_factory = lambda text: text.decode("utf-8", "replace")
    return connection


def _run(connection: sqlite3.Connection, wanted: str | None) -> tuple[str, str]:
    """Identity and status of the run; the one that is wanted, by identity, its beginning, or name."""
    columns = {row[1] for row in connection.execute("PRAGMA table_info(runs)")}
    name, status = ("name" if "name" in columns else "''"), ("status" if "status" in columns else "''")
    found = connection.execute(
        f"SELECT run_uuid, {name}, {status} FROM runs WHERE run_uuid IN (SELECT DISTINCT run_uuid FROM metrics)"
    ).fetchall()
    if wanted is not None:
        found = [row for row in found if row[0].startswith(wanted) or row[1] == wanted]
    if len(found) != 1:
        names = [f"{row[0]} ({row[1]})" if row[1] else str(row[0]) for row in found]
        shown = ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
        met = f"{len(names)} runs: {shown}" if names else f"no run with metrics{f' like {wanted!r}' if wanted else ''}"
        raise NoUsableDataError(f"an MLflow store with {met}; expected one: choose it as PATH#RUN")
    return str(found[0][0]), str(found[0][2] or "")


def _stored(connection: sqlite3.Connection, run: str, tally: Tally) -> Iterator[_Point]:
    cursor = connection.execute(
        "SELECT key, value, timestamp, step, is_nan FROM metrics WHERE run_uuid = ? ORDER BY timestamp, step", (run,)
    )
    for at, (key, value, timestamp, step, is_nan) in enumerate(cursor, 1):
        number, whole = to_number(value), to_step(step)
        if number is None or whole is None or not isinstance(key, str):
            tally.rows_read += 1
            tally.reject(at, f"expected a number and a step, met {value!r} and {step!r}")
            continue
        if is_nan:
            number = float("nan")
        elif abs(number) >= sys.float_info.max:
            number = float("inf") if number > 0 else float("-inf")
        yield key[:200], int(timestamp or 0), whole, number


def _filed(folder: Path, tally: Tally) -> Iterator[_Point]:
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        with path.open("rb") as stream:
            for line, text, _ in iter_lines(stream, tally):
                cells = text.split()
                if not cells:
                    continue
                time, number = to_number(cells[0]), to_number(cells[1]) if len(cells) > 1 else None
                step = to_step(cells[2]) if len(cells) > 2 else 0
                if not isinstance(time, int) or number is None or step is None:
                    tally.rows_read += 1
                    tally.reject(line, f"{name}: expected `timestamp value step`, met {text[:60]!r}")
                    continue
                yield name[:200], time, step, number


def _rows(points: Iterable[_Point], context: ReadContext) -> Iterator[Row]:
    """One row a step and attempt. All points are held: a store of metrics has no order across them."""
    tally = context.tally
    kept: list[_Point] = []
    last: dict[str, tuple[int, int]] = {}  # metric: time and step of its last point
    restarts: list[int] = []
    for point in points:
        if len(kept) >= _MAX_POINTS:
            tally.note(f"more than {_MAX_POINTS} points: the rest was left out")
            break
        name, time, step, _ = point
        if name in last and step < last[name][1] and not name.startswith("system/"):
            restarts.append(time)
        last[name] = (time, step)
        kept.append(point)
    begins = _begins(sorted(restarts), kept)
    names = Names(tally, context.mapping)
    grouped: dict[tuple[int, int], tuple[int, dict[str, Scalar]]] = {}
    for name, time, step, value in kept:
        if name.startswith("system/"):
            continue  # sampled by the clock, with a counter of its own
        key = (bisect.bisect_right(begins, time), step)
        begin, fields = grouped.get(key, (time, {}))
        fields[name] = value
        grouped[key] = min(begin, time), fields
    if any(name.startswith("system/") for name in last):
        tally.note("system metrics have a step counter of their own and were not read")
    for line, key in enumerate(sorted(grouped), 1):
        begin, fields = grouped[key]
        values, series = names.convert(fields)
        yield Row(line, key[1], values, series=series, attempt=key[0], ts_ns=checked_ns(begin * 1_000_000))
    names.finish()


def _begins(restarts: list[int], points: list[_Point]) -> list[int]:
    """The times at which attempts begin: metrics that go back within a few seconds do so together."""
    begins: list[int] = []
    if not restarts:
        return begins
    times = sorted({time for _, time, _, _ in points})
    gap = 5 * max(1, (times[-1] - times[0]) // max(1, len(times)))
    for time in restarts:
        if not begins or time - begins[-1] > gap:
            begins.append(time)
    return begins


IMPORTER = _Mlflow()
