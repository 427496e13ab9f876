"""prune: what a finished run keeps. Raw rows stay around whatever happened; the others are thinned.

A stretch of `every` steps of one attempt and rank (and layer) becomes three rows: at its first step the minimum of each
signal, in its middle the mean (rounded where the signal is an integer), at its last step the maximum. Raw stay:
`around` steps on both sides of each event and checkpoint, the spans in `keep`, each row with a NaN or an infinity, and
stretches of three rows or fewer. Batches, checkpoints and events are never thinned. An event of kind `pruned` says what
was done.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import duckdb

from runhealth.storage import process
from runhealth.storage.database import BLOCK_BYTES
from runhealth.storage.errors import ConfigError, StoreError
from runhealth.storage.places import is_remote
from runhealth.storage.publish import Publisher
from runhealth.storage.schema import ALL_TABLES, LAYERS, PARTS, STEPS, Table, quoted
from runhealth.storage.store import RunInfo
from runhealth.storage.tail import RunTail
from runhealth.storage.view import View

Span = tuple[int, int]  # first and last step, inclusive


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneResult:
    """Rows of steps and layers, before and after."""

    rows_before: int
    rows_after: int


def parse_span(text: str) -> Span:
    """`FIRST:LAST` as two steps. Raises ConfigError."""
    first, _, last = text.partition(":")
    try:
        span = int(first), int(last)
    except ValueError:
        span = 0, -1
    if span[0] > span[1]:
        raise ConfigError(f"expected steps FIRST:LAST, such as 1200:1400, met {text!r}")
    return span


def prune(
    run: RunInfo, *, every: int = 100, around: int = 500, keep: Sequence[Span] = (),
    clock: Callable[[], int] = time.time_ns,
) -> PruneResult:  # fmt: skip
    """Thin a finished local run and remove the rank logs and parts that it replaces. There is no way back.

    Raises ConfigError for numbers that make no sense, StoreError for a run that is still written to or cannot be.
    """
    if every < 4 or around < 0:
        raise ConfigError(f"expected --every of at least 4 and --around of at least 0, met {every} and {around}")
    if is_remote(run.path) or run.bundled:
        raise StoreError(f"only a local run can be pruned; {run.path} is read-only")
    _refuse_live(run)
    folder = Path(run.path)
    publisher = Publisher(run.path)
    publisher.publish(wait_s=10.0)
    with publisher.exclusive(wait_s=10.0) as private:
        successor = private.with_name("pruned.duckdb")
        successor.unlink(missing_ok=True)
        try:
            result = _build(run, successor, every, around, keep, clock())
        except duckdb.Error as err:
            successor.unlink(missing_ok=True)
            raise StoreError(f"cannot prune {run.path}: {str(err).splitlines()[0]}") from err
        successor.replace(private)
    Publisher(run.path).publish(wait_s=10.0)
    for manifest in sorted(folder.glob("parts/*.json"), reverse=True):  # the last first: the rest is always a whole run
        manifest.unlink()
    for file in (*folder.glob("parts/*.parquet"), *folder.glob("log/a*/[rn]*/*.rlog")):
        file.unlink()
    return result


def _refuse_live(run: RunInfo) -> None:
    tail = RunTail(run.path)
    tail.read()
    newest: dict[str, bool] = {}
    for segment in tail.segments():
        alive = not segment.ended and bool(segment.decoder.header) and not process.is_dead(segment.decoder.header)
        newest[segment.name.rpartition("/")[0]] = alive
    writing = [name for name, alive in newest.items() if alive]
    if writing:
        raise StoreError(f"{run.path}/{writing[0]} is still written to: prune a run after it has ended")


def _build(run: RunInfo, file: Path, every: int, around: int, keep: Sequence[Span], now_ns: int) -> PruneResult:
    view = View(run)
    try:
        if view.notes:
            raise StoreError(f"cannot prune {run.path}: {view.notes[0]}")
        connection = view.connection
        name = str(file).replace("'", "''")
        connection.execute(f"ATTACH '{name}' AS pruned (STORAGE_VERSION 'v1.2.0', BLOCK_SIZE {BLOCK_BYTES})")
        connection.execute(
            f"CREATE TEMP TABLE keep AS SELECT attempt, step - {around} AS first, step + {around} AS last "
            "FROM (SELECT attempt, step FROM events UNION SELECT attempt, step FROM checkpoints)"
        )
        for first, last in keep:
            connection.execute("INSERT INTO keep VALUES (NULL, ?, ?)", (first, last))
        for table in ALL_TABLES:
            source = _thinned(connection, table, every) if table in (STEPS, LAYERS) else f"SELECT * FROM {table.name}"
            limit = " LIMIT 0" if table is PARTS else ""
            connection.execute(f"CREATE TABLE pruned.{table.name} AS {source}{limit}")
        counts = [
            sum(connection.execute(f"SELECT count(*) FROM {schema}{t.name}").fetchall()[0][0] for t in (STEPS, LAYERS))
            for schema in ("", "pruned.")
        ]
        data = json.dumps({"every": every, "around": around, "rows_before": counts[0], "rows_after": counts[1]})
        connection.execute(
            "INSERT INTO pruned.events BY NAME SELECT max(attempt) AS attempt, max(step) AS step, -1 AS rank, "
            "? AS ts_ns, 'pruned' AS kind, ? AS message, ? AS data FROM steps HAVING count(*) > 0",
            (now_ns, f"rows of steps and layers were thinned from {counts[0]} to {counts[1]}", data),
        )
        connection.execute("UPDATE pruned.meta SET value = ? WHERE key = 'generation'", (f"pruned-{now_ns}",))
        connection.execute("CHECKPOINT pruned")
        connection.execute("DETACH pruned")
    finally:
        view.close()
    return PruneResult(rows_before=counts[0], rows_after=counts[1])


def _thinned(connection: duckdb.DuckDBPyConnection, table: Table, every: int) -> str:
    """SELECT of what is kept of a table; makes a temporary table that marks its rows."""
    columns = [(name, kind) for name, kind, *_ in connection.execute(f"DESCRIBE {table.name}").fetchall()]
    fixed = [name for name, _ in table.fixed]
    keys = [name for name in fixed if name not in ("step", "ts_ns")]
    values = [(name, kind) for name, kind in columns if name not in fixed]
    odd = " OR ".join(f"NOT isfinite({quoted(name)})" for name, kind in values if kind == "DOUBLE") or "false"
    marked = f"marked_{table.name}"
    connection.execute(
        f"CREATE TEMP TABLE {marked} AS SELECT *, count(*) OVER (PARTITION BY {', '.join(keys)}, _stretch, _raw) AS _n "
        f"FROM (SELECT *, step // {every} AS _stretch, coalesce({odd}, false) OR EXISTS (SELECT 1 FROM keep "
        f"WHERE (keep.attempt IS NULL OR keep.attempt = t.attempt) AND t.step BETWEEN first AND last) AS _raw "
        f"FROM {table.name} AS t)"
    )
    selects = [f"SELECT * EXCLUDE (_stretch, _raw, _n) FROM {marked} WHERE _raw OR _n <= 3"]
    for at, of in (("min", "min"), ("avg", "avg"), ("max", "max")):
        cells = [f"CAST(round({at}(step)) AS BIGINT) AS step", f"CAST(round({at}(ts_ns)) AS BIGINT) AS ts_ns", *keys]
        for name, kind in values:
            value = f"{of}({quoted(name)})"
            if of == "avg" and kind != "DOUBLE":
                value = f"round({value})"
            cells.append(f"CAST({value} AS {kind}) AS {quoted(name)}")
        selects.append(
            f"SELECT {', '.join(cells)} FROM {marked} WHERE NOT _raw AND _n > 3 GROUP BY {', '.join(keys)}, _stretch"
        )
    return f"SELECT * FROM ({' UNION ALL BY NAME '.join(selects)}) ORDER BY attempt, step, rank"
