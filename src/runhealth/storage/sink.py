"""Sink: records into the tables of a DuckDB connection, by prebuilt Arrow batches.

Used by the publisher for its private database and by the reader for the live tail, so both give a signal the same
column and the same type.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

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
_TABLE_OF: Mapping[type, Table] = {
    StepRecord: STEPS, LayerSample: LAYERS, BatchRecord: BATCHES, CheckpointRecord: CHECKPOINTS, RunEvent: EVENTS,
}  # fmt: skip


class Sink:
    """Writes records into `schema` of `connection`, inside whatever transaction is open there."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, schema: str = "main") -> None:
        self._connection = connection
        self._schema = schema
        self.shape = 0  # grows when a column is added or widened
        for table in ALL_TABLES:
            connection.execute(create_sql(table, schema))
        self._columns: dict[tuple[str, str], tuple[str, str]] = {}
        self._taken: dict[str, set[str]] = {
            table.name: {name for name, _ in table.fixed} for table in (STEPS, LAYERS, BATCHES)
        }
        rows = connection.execute(f"SELECT table_name, name, column_name, column_type FROM {schema}.signals").fetchall()
        for table_name, name, column, kind in rows:
            self._columns[table_name, name] = (column, kind)
            self._taken[table_name].add(column.lower())

    def write(self, records: Iterable[Record]) -> None:
        """Insert records of any kinds. Raises duckdb.Error."""
        groups: dict[type, list[Any]] = {}
        for record in records:
            groups.setdefault(type(record), []).append(record)
        for kind, group in groups.items():
            table = _TABLE_OF[kind]
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
        self._widen(table, values)
        self._add(table, {name: column for name, column in values.items() if (table.name, name) not in self._columns})
        arrays = {}
        for name, column_values in values.items():
            column, kind = self._columns[table.name, name]
            if kind == "DOUBLE":
                column_values = [None if value is None else float(value) for value in column_values]
            arrays[column] = pa.array(column_values, type=_ARROW[kind])
        return arrays

    def _widen(self, table: Table, values: Mapping[str, Sequence[Scalar | None]]) -> None:
        for name, column_values in values.items():
            column, old = self._columns.get((table.name, name), ("", ""))
            kind = column_type(old, column_values) if old else old
            if kind != old:
                where = f"{self._schema}.{table.name}"
                self._connection.execute(f"ALTER TABLE {where} ALTER COLUMN {quoted(column)} SET DATA TYPE {kind}")
                self._connection.execute(
                    f"UPDATE {self._schema}.signals SET column_type = ? WHERE table_name = ? AND name = ?",
                    (kind, table.name, name),
                )
                self._columns[table.name, name] = (column, kind)
                self.shape += 1

    def _add(self, table: Table, values: Mapping[str, Sequence[Scalar | None]]) -> None:
        """Columns for signals that are new."""
        if not values:
            return
        rows = []
        for name, column_values in values.items():
            signal = table.catalogue.get(name) if table.catalogue else None
            kind = column_type(COLUMN_TYPES[signal.dtype] if signal else None, column_values)
            column, n = name or "_", 2
            while column.lower() in self._taken[table.name]:
                column, n = f"{name}_{n}", n + 1
            self._taken[table.name].add(column.lower())
            self._columns[table.name, name] = (column, kind)
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


def read_claims(run_path: str) -> list[dict[str, Any]]:
    """What the attempts of a local run say of themselves, ordered by attempt; a damaged claim gives its number only."""
    claims = []
    for folder in sorted(Path(run_path).glob("log/a[0-9]*"), key=lambda folder: int(folder.name[1:])):
        try:
            claim = json.loads((folder / "claim.json").read_text())
        except (OSError, ValueError):
            claim = {}
        claims.append({**(claim if isinstance(claim, dict) else {}), "attempt": int(folder.name[1:])})
    return claims
