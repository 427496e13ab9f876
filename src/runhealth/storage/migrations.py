"""What changed from one format of the published database to the next, and how an old one is brought up to date.

A migration is numbered by the format it leads to and is recorded in the `migrations` table. New signals need none: they
are rows of `signals` and columns of their own. Never change a migration that was released; add another.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import duckdb

from runhealth.storage.errors import StoreError
from runhealth.storage.schema import DATABASE_FORMAT_VERSION, MIGRATIONS, PARTS, create_sql


@dataclass(frozen=True, slots=True)
class Migration:
    number: int
    name: str
    apply: Callable[[duckdb.DuckDBPyConnection], object]


def _add_parts(connection: duckdb.DuckDBPyConnection) -> None:
    connection.execute(create_sql(PARTS, "main"))


ALL = (Migration(2, "the parts table: rows that moved into Parquet files", _add_parts),)


def format_of(connection: duckdb.DuckDBPyConnection, schema: str = "main") -> int:
    """Format version of the database; raises StoreError for one that is newer than this release."""
    found = connection.execute(f"SELECT value FROM {schema}.meta WHERE key = 'format_version'").fetchone()
    if found is None or not found[0].isdecimal():
        raise duckdb.InvalidInputException(f"no format version in {schema}.meta")
    version = int(found[0])
    if version > DATABASE_FORMAT_VERSION:
        raise StoreError(f"database format {version}; this release reads up to {DATABASE_FORMAT_VERSION}")
    return version


def migrate(connection: duckdb.DuckDBPyConnection, clock: Callable[[], int] = time.time_ns) -> list[int]:
    """Bring the database to the current format in one transaction; returns the numbers that were applied."""
    version = format_of(connection)
    due = [migration for migration in ALL if migration.number > version]
    if not due:
        return []
    connection.execute("BEGIN")
    try:
        connection.execute(create_sql(MIGRATIONS, "main"))
        for migration in due:
            migration.apply(connection)
            connection.execute("INSERT INTO migrations VALUES (?, ?, ?)", (migration.number, migration.name, clock()))
        connection.execute("UPDATE meta SET value = ? WHERE key = 'format_version'", (str(DATABASE_FORMAT_VERSION),))
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    return [migration.number for migration in due]
