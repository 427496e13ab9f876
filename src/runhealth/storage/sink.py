"""Sink: records into the tables of a DuckDB connection, by prebuilt Arrow batches.

Used by the publisher for its private database and by the reader for the live tail, so both give a signal the same
column and the same type.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from runhealth.storage.jsontext import parse_json
from runhealth.storage.ranklog import attempt_folders
from runhealth.storage.records import (
    BatchRecord,
    CheckpointRecord,
    LayerSample,
    Record,
    RunEvent,
    Scalar,
    StepRecord,
)
from runhealth.storage.schema import (
    ALL_TABLES,
    ATTEMPTS,
    BATCHES,
    BOTH_INTEGERS,
    CHECKPOINTS,
    COLUMN_TYPES,
    EVENTS,
    EXACT_INTEGER,
    LAYERS,
    SIGNALS,
    STEPS,
    Table,
    column_type,
    create_sql,
    quoted,
)

_ARROW = {
    "INTEGER": pa.int32(),
    "BIGINT": pa.int64(),
    "UBIGINT": pa.uint64(),
    "DOUBLE": pa.float64(),
    "VARCHAR": pa.string(),
    BOTH_INTEGERS: pa.decimal128(20, 0),
}
_SMALL_TABLE_ROWS = 100_000
TABLE_OF: Mapping[type, Table] = {
    StepRecord: STEPS, LayerSample: LAYERS, BatchRecord: BATCHES, CheckpointRecord: CHECKPOINTS, RunEvent: EVENTS,
}  # fmt: skip


class Sink:
    """Writes records into `schema` of `connection`, inside whatever transaction is open there.

    `elsewhere` names, for a table, SQL that selects the rows of the run that are not in this schema.
    """

    def __init__(
        self, connection: duckdb.DuckDBPyConnection, schema: str = "main", *,
        elsewhere: Callable[[str], str | None] = lambda _: None,
    ) -> None:  # fmt: skip
        self._connection = connection
        self._schema = schema
        self._elsewhere = elsewhere
        self.shape = 0  # grows when a column is added or widened
        for table in ALL_TABLES:
            connection.execute(create_sql(table, schema))
        # (table, signal) -> column and type; a second one where no single type holds all values exactly
        self._columns: dict[tuple[str, str], list[tuple[str, str]]] = {}
        self._taken: dict[str, set[str]] = {
            table.name: {name for name, _ in table.fixed} for table in (STEPS, LAYERS, BATCHES)
        }
        rows = connection.execute(
            f"SELECT table_name, name, column_name, column_type FROM {schema}.signals ORDER BY rowid"
        ).fetchall()
        for table_name, name, column, kind in rows:
            self._columns.setdefault((table_name, name), []).append((column, kind))
            self._taken[table_name].add(column.lower())

    def write(self, records: Iterable[Record]) -> None:
        """Insert records of any kinds. Raises duckdb.Error."""
        groups: dict[type, list[Any]] = {}
        for record in records:
            groups.setdefault(type(record), []).append(record)
        for kind, group in groups.items():
            table = TABLE_OF[kind]
            columns = {
                name: pa.array(self._fixed(name, group), type=_ARROW[sql_type]) for name, sql_type in table.fixed
            }
            if table.catalogue is not None:
                columns.update(self._signals(table, [record.values for record in group]))
            self._insert(table, pa.table(columns))

    def write_attempts(self, claims: Sequence[Mapping[str, Any]]) -> None:
        """Replace the attempts by these claims."""
        self._connection.execute(f"DELETE FROM {self._schema}.attempts")
        columns = {
            name: pa.array([claim.get(name) for claim in claims], type=_ARROW[sql_type])
            for name, sql_type in ATTEMPTS.fixed
        }
        self._insert(ATTEMPTS, pa.table(columns))

    def _fixed(self, name: str, group: Sequence[Any]) -> list[Any]:
        if name == "data":
            return [json.dumps(dict(record.data), ensure_ascii=False) for record in group]
        return [getattr(record, name) for record in group]

    def _signals(self, table: Table, rows: Sequence[Mapping[str, Scalar]]) -> dict[str, Any]:
        """Arrow columns of all signals in `rows`, after the table was given columns for them."""
        names = dict.fromkeys(name for keys in dict.fromkeys(map(tuple, rows)) for name in keys)
        values = {name: [row.get(name) for row in rows] for name in names}
        self._add(
            table,
            {
                name: column_type(_declared(table, name), column)
                for name, column in values.items()
                if (table.name, name) not in self._columns
            },
        )
        arrays = {}
        rest: dict[str, list[Scalar | None]] = {}
        for name, column_values in values.items():
            kind = self._widen(table, name, 0, column_values)
            column = self._columns[table.name, name][0][0]
            fitting, others = _split(column_values, kind)
            arrays[column] = pa.array(fitting, type=_ARROW[kind])
            if others is not None:
                rest[name] = others
        second = {
            name: column_type(None, others) for name, others in rest.items() if len(self._columns[table.name, name]) < 2
        }
        self._add(table, second)
        for name, others in rest.items():
            kind = self._widen(table, name, 1, others)
            arrays[self._columns[table.name, name][1][0]] = pa.array(others, type=_ARROW[kind])
        return arrays

    def _widen(self, table: Table, name: str, which: int, values: Sequence[Scalar | None]) -> str:
        """The type of the signal's column after it was made wide enough for `values`, as far as that loses nothing."""
        column, old = self._columns[table.name, name][which]
        kind = column_type(old, values)
        if kind == "DOUBLE" and old != "DOUBLE" and not self._fits_double(table, column):
            kind = column_type(old, [value for value in values if isinstance(value, int)])
        if kind != old:
            where = f"{self._schema}.{table.name}"
            self._connection.execute(f"ALTER TABLE {where} ALTER COLUMN {quoted(column)} SET DATA TYPE {kind}")
            self._connection.execute(
                f"UPDATE {self._schema}.signals SET column_type = ? WHERE table_name = ? AND column_name = ?",
                (kind, table.name, column),
            )
            self._columns[table.name, name][which] = (column, kind)
            self.shape += 1
        return kind

    def _fits_double(self, table: Table, column: str) -> bool:
        """Does a double hold every integer that the run has in this column?"""
        sources = [f"SELECT {quoted(column)} FROM {self._schema}.{table.name}"]
        elsewhere = self._elsewhere(table.name)
        if elsewhere is not None:
            held = {name for name, *_ in self._connection.execute(f"DESCRIBE {elsewhere}").fetchall()}
            if column in held:
                sources.append(f"SELECT {quoted(column)} FROM ({elsewhere})")
        found = self._connection.execute(
            f"SELECT max(abs(CAST(value AS HUGEINT))) FROM ({' UNION ALL '.join(sources)}) AS held(value)"
        ).fetchall()
        return found[0][0] is None or bool(found[0][0] <= EXACT_INTEGER)

    def _add(self, table: Table, kinds: Mapping[str, str]) -> None:
        """One more column for each of these signals, of these types."""
        if not kinds:
            return
        rows = []
        for name, kind in kinds.items():
            signal = table.catalogue.get(name) if table.catalogue else None
            column, n = name or "_", 2
            while column.lower() in self._taken[table.name]:
                column, n = f"{name}_{n}", n + 1
            self._taken[table.name].add(column.lower())
            self._columns.setdefault((table.name, name), []).append((column, kind))
            described = (signal.unit, str(signal.scope), signal.meaning) if signal else ("", "", "")
            rows.append((table.name, name, column, kind, *described))
        where = f"{self._schema}.{table.name}"
        count = self._connection.execute(f"SELECT count(*) FROM {where}").fetchone()
        if len(rows) > 1 and count is not None and count[0] <= _SMALL_TABLE_ROWS:
            # ALTER TABLE costs some milliseconds a column and a run begins with many new ones.
            added = ", ".join(f"CAST(NULL AS {kind}) AS {quoted(column)}" for _, _, column, kind, *_ in rows)
            self._connection.execute(f"CREATE OR REPLACE TABLE {where} AS SELECT *, {added} FROM {where}")
        else:
            for _, _, column, kind, *_ in rows:
                self._connection.execute(f"ALTER TABLE {where} ADD COLUMN {quoted(column)} {kind}")
        columns = zip(SIGNALS.fixed, zip(*rows, strict=True), strict=True)
        self._insert(SIGNALS, pa.table({name: pa.array(column, type=pa.string()) for (name, _), column in columns}))
        self.shape += 1

    def _insert(self, table: Table, rows: pa.Table) -> None:
        self._connection.register("incoming", rows)
        try:
            self._connection.execute(f"INSERT INTO {self._schema}.{table.name} BY NAME SELECT * FROM incoming")
        finally:
            self._connection.unregister("incoming")


def _declared(table: Table, name: str) -> str | None:
    signal = table.catalogue.get(name) if table.catalogue else None
    return COLUMN_TYPES[signal.dtype] if signal else None


def _split(values: Sequence[Scalar | None], kind: str) -> tuple[Sequence[Scalar | None], list[Scalar | None] | None]:
    """The values that a column of this type holds exactly, and the others if there are any; None elsewhere in both."""
    if kind == "DOUBLE":
        if all(type(value) is not int or -EXACT_INTEGER <= value <= EXACT_INTEGER for value in values):
            return [None if value is None else float(value) for value in values], None
        fits = [type(value) is not int or -EXACT_INTEGER <= value <= EXACT_INTEGER for value in values]
    else:
        if all(type(value) is not float for value in values):
            return values, None
        fits = [type(value) is not float for value in values]
    convert: Callable[[Any], Scalar] = float if kind == "DOUBLE" else int
    fitting = [convert(value) if fit and value is not None else None for fit, value in zip(fits, values, strict=True)]
    return fitting, [None if fit else value for fit, value in zip(fits, values, strict=True)]


def _is_sound(key: str, value: object) -> bool:
    """Whether a value of a claim, which may come from anywhere, fits the column of its name."""
    if dict(ATTEMPTS.fixed).get(key) == "BIGINT":
        return isinstance(value, int) and -(2**63) <= value < 2**63
    return isinstance(value, str)


def read_claims(run_path: str) -> list[dict[str, Any]]:
    """What the attempts of a local run say of themselves, ordered by attempt; a damaged claim gives its number only."""
    claims = []
    for number, folder in attempt_folders(Path(run_path)):
        try:
            claim = parse_json((folder / "claim.json").read_text())
        except (OSError, ValueError):
            claim = {}
        sound = {key: value for key, value in claim.items() if _is_sound(key, value)} if isinstance(claim, dict) else {}
        claims.append({**sound, "attempt": number})
    return claims
