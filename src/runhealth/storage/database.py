"""The database file of a run: how it is opened, seeded, emptied into parts, and given views for other clients."""

from collections.abc import Sequence
from pathlib import Path

import duckdb

from runhealth.storage.migrations import migrate
from runhealth.storage.parts import Manifest, PartFile, union_sql
from runhealth.storage.schema import (
    ALL_TABLES,
    DATABASE_FORMAT_VERSION,
    PARTS,
    RECORD_TABLES,
    create_sql,
    quoted,
    recent,
)

BLOCK_BYTES = 16384  # a column takes at least one block, and a young run has many columns and few rows
_CONFIG: dict[str, str | bool | int | float | list[str]] = {
    "memory_limit": "512MB", "threads": 2, "autoinstall_known_extensions": False,
    "default_block_size": str(BLOCK_BYTES),
    "storage_compatibility_version": "v1.2.0",  # files of DuckDB 2 are unreadable for 1.x unless asked for
}  # fmt: skip
_NAME = "run.duckdb"


def connect(file: Path) -> duckdb.DuckDBPyConnection:
    """Open or create a database of this store for writing."""
    return duckdb.connect(str(file), config=_CONFIG)


def open_tables(connection: duckdb.DuckDBPyConnection) -> None:
    """Create what is missing and bring an older format up to date. Raises StoreError for a newer one."""
    connection.execute("CREATE TABLE IF NOT EXISTS meta (key VARCHAR, value VARCHAR)")
    if connection.execute("SELECT 1 FROM meta WHERE key = 'format_version'").fetchone() is None:
        connection.execute(
            "INSERT INTO meta VALUES ('format_version', ?), ('generation', '-')", (str(DATABASE_FORMAT_VERSION),)
        )
    migrate(connection)
    for table in ALL_TABLES:
        connection.execute(create_sql(table, "main"))


def enter_parts(connection: duckdb.DuckDBPyConnection, files: Sequence[PartFile], schema: str = "main") -> None:
    for part in files:
        values = [getattr(part, name) for name, _ in PARTS.fixed]
        connection.execute(f"INSERT INTO {schema}.parts VALUES ({', '.join('?' * len(values))})", values)


def build_successor(connection: duckdb.DuckDBPyConnection, file: Path, manifest: Manifest) -> None:
    """A new database file with all of the open one but the rows of record tables, which are in `manifest` now.

    Deleting them in place would leave the file as big as it was.
    """
    temporary = file.with_name(f"{file.name}.tmp")
    temporary.unlink(missing_ok=True)
    connection.execute(f"ATTACH '{_literal(str(temporary))}' AS successor (BLOCK_SIZE {BLOCK_BYTES})")
    try:
        for table in ALL_TABLES:
            rows = " LIMIT 0" if table in RECORD_TABLES else ""
            connection.execute(f"CREATE TABLE successor.{table.name} AS SELECT * FROM main.{table.name}{rows}")
        enter_parts(connection, manifest.files, "successor")
        connection.execute("CHECKPOINT successor")
    finally:
        connection.execute("DETACH successor")
    temporary.replace(file)


def fill_from_manifests(connection: duckdb.DuckDBPyConnection, manifests: Sequence[Manifest]) -> None:
    """Tables of a run whose every row is in these parts."""
    open_tables(connection)
    last = manifests[-1]
    for signal in last.signals:
        connection.execute(f"INSERT INTO signals VALUES ({', '.join('?' * len(signal))})", signal)
    for table_name, _, column, kind, *_ in last.signals:
        connection.execute(f"ALTER TABLE {table_name} ADD COLUMN {quoted(column)} {kind}")
    for row in last.progress:
        connection.execute("INSERT INTO progress VALUES (?, ?, ?, ?)", row)
    for manifest in manifests:
        enter_parts(connection, manifest.files)
    connection.execute("CHECKPOINT")


def make_views(connection: duckdb.DuckDBPyConnection, *, run: Path, parts: Sequence[PartFile]) -> None:
    """Let the tables' own names stand for parts and recent rows together.

    DuckDB takes a path in a view relative to the working directory of whoever asks. The one setting that knows where
    the database file lies is `temp_directory`, so the views begin their paths there: they hold from any directory and
    for a folder that was moved. Where the file is attached to another database, they fall back to the path of now.
    """
    setting = "current_setting('temp_directory')"
    base = (
        f"CASE WHEN {setting} LIKE '%{_NAME}.tmp' THEN left({setting}, length({setting}) - {len(_NAME) + 4}) "
        f"ELSE '{_literal(str(run))}/' END || "
    )
    for table in RECORD_TABLES:
        files = [part.file for part in parts if part.table_name == table.name]
        if not files:
            continue
        types = {name: kind for name, kind, *_ in connection.execute(f"DESCRIBE {table.name}").fetchall()}
        connection.execute(f"ALTER TABLE {table.name} RENAME TO {recent(table)}")
        select = union_sql(connection, files, types, base)
        connection.execute(f"CREATE VIEW {table.name} AS {select} UNION ALL BY NAME SELECT * FROM {recent(table)}")


def undo_views(connection: duckdb.DuckDBPyConnection) -> None:
    """The tables as the publisher's private database has them."""
    found = connection.execute("SELECT view_name FROM duckdb_views() WHERE NOT internal").fetchall()
    for table in RECORD_TABLES:
        if (table.name,) in found:
            connection.execute(f"DROP VIEW {table.name}")
            connection.execute(f"ALTER TABLE {recent(table)} RENAME TO {table.name}")


def _literal(text: str) -> str:
    return text.replace("'", "''")
