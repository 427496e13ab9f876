"""The tables of `run.duckdb`: what the publisher writes, the reader serves and `parts/*.parquet` mirror.

Signal columns are added as signals appear. A column is named like its signal unless that clashes (DuckDB's names ignore
case) with another column; the `signals` table has the mapping, so names are never guessed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from runhealth.storage.records import Scalar
from runhealth.storage.signals import BATCH_SIGNALS, LAYER_SIGNALS, STEP_SIGNALS, Dtype, Signal

DATABASE_FORMAT_VERSION = 2

_KEY = (("attempt", "INTEGER"), ("step", "BIGINT"), ("rank", "INTEGER"), ("ts_ns", "BIGINT"))


@dataclass(frozen=True, slots=True)
class Table:
    """`fixed` columns with their SQL types; `catalogue` describes the signals that may come on top, if any."""

    name: str
    fixed: tuple[tuple[str, str], ...]
    catalogue: Mapping[str, Signal] | None = None


STEPS = Table("steps", _KEY, STEP_SIGNALS)
LAYERS = Table("layers", (*_KEY, ("layer", "VARCHAR")), LAYER_SIGNALS)
BATCHES = Table(
    "batches",
    (
        *_KEY,
        ("micro_batch", "BIGINT"),
        ("shard", "VARCHAR"),
        ("first_sample", "BIGINT"),
        ("last_sample", "BIGINT"),
        ("samples", "BIGINT"),
        ("content_hash", "UBIGINT"),
        ("shard_hash", "UBIGINT"),
        ("manifest_hash", "UBIGINT"),
    ),
    BATCH_SIGNALS,
)
CHECKPOINTS = Table(
    "checkpoints",
    (
        *_KEY,
        ("path", "VARCHAR"),
        ("status", "VARCHAR"),
        ("seconds", "DOUBLE"),
        ("size_bytes", "BIGINT"),
        ("reason", "VARCHAR"),
    ),
)
EVENTS = Table("events", (*_KEY, ("kind", "VARCHAR"), ("message", "VARCHAR"), ("data", "VARCHAR")))
RECORD_TABLES = (STEPS, LAYERS, BATCHES, CHECKPOINTS, EVENTS)

ATTEMPTS = Table(
    "attempts",
    (
        ("attempt", "INTEGER"),
        ("launch_key", "VARCHAR"),
        ("created_ns", "BIGINT"),
        ("host", "VARCHAR"),
        ("pid", "BIGINT"),
    ),
)
SIGNALS = Table(
    "signals",
    (
        ("table_name", "VARCHAR"),
        ("name", "VARCHAR"),
        ("column_name", "VARCHAR"),
        ("column_type", "VARCHAR"),
        ("unit", "VARCHAR"),
        ("scope", "VARCHAR"),
        ("meaning", "VARCHAR"),
    ),
)
PROGRESS = Table(
    "progress", (("file", "VARCHAR"), ("offset_bytes", "BIGINT"), ("state", "VARCHAR"), ("message", "VARCHAR"))
)
PARTS = Table(
    "parts",
    (
        ("number", "INTEGER"),
        ("table_name", "VARCHAR"),
        ("file", "VARCHAR"),
        ("rows", "BIGINT"),
        ("first_row", "BIGINT"),
        ("size_bytes", "BIGINT"),
        ("xxh3_64", "UBIGINT"),
        ("first_step", "BIGINT"),
        ("last_step", "BIGINT"),
    ),
)
MIGRATIONS = Table("migrations", (("number", "INTEGER"), ("name", "VARCHAR"), ("applied_ns", "BIGINT")))
META = Table("meta", (("key", "VARCHAR"), ("value", "VARCHAR")))
BOOKKEEPING = (PROGRESS, PARTS, MIGRATIONS, META)  # of the published database; a live tail adds nothing to them
ALL_TABLES = (*RECORD_TABLES, ATTEMPTS, SIGNALS, *BOOKKEEPING)

# Wide enough for everything a signal of this catalogue type usually holds; widened when something else arrives.
COLUMN_TYPES: Mapping[Dtype, str] = MappingProxyType(
    {Dtype.F32: "DOUBLE", Dtype.F64: "DOUBLE", Dtype.I64: "BIGINT", Dtype.U64: "UBIGINT"}
)
_I64_MAX = 2**63 - 1
EXACT_INTEGER = 2**53  # integers up to here are exact in a double
BOTH_INTEGERS = "DECIMAL(20,0)"  # holds every i64 and every u64


def column_type(current: str | None, values: Sequence[Scalar | None]) -> str:
    """The type that holds what the column held so far (`current`) and `values`. Integers stay integers, exactly,
    until the signal meets a float."""
    kinds = set(map(type, values)) - {type(None)}
    if current == "DOUBLE" or kinds - {int}:
        return "DOUBLE"
    if not kinds:
        return current or "DOUBLE"
    present = [value for value in values if value is not None]
    low, high = min(present), max(present)
    if current is None:
        current = "UBIGINT" if high > _I64_MAX else "BIGINT"
    if (current == "BIGINT" and high > _I64_MAX) or (current == "UBIGINT" and low < 0):
        return BOTH_INTEGERS
    return current


def quoted(identifier: str) -> str:
    """An SQL identifier."""
    return '"' + identifier.replace('"', '""') + '"'


def recent(table: Table) -> str:
    """Where run.duckdb keeps the rows that are in no part yet, once the run has parts: the table's own name is then a
    view over both."""
    return f"{table.name}_recent"


def create_sql(table: Table, schema: str) -> str:
    columns = ", ".join(f"{quoted(name)} {kind}" for name, kind in table.fixed)
    return f"CREATE TABLE IF NOT EXISTS {schema}.{table.name} ({columns})"
