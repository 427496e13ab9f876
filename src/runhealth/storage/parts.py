"""Parts: what a run measured up to some moment, as immutable Parquet files.

The publisher's database holds what was logged last. When that grows over a limit, its rows become the next part:
`parts/000003-steps.parquet` and so on, one file a table, in the order of arrival, and `parts/000003.json`, which says
what is in them and how far the rank logs are covered. So a publication costs the same however long the run is, and
a rank log that is covered by parts is not needed any more.

Value columns carry no min/max statistics: DuckDB trusts them and would hide NaN.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from runhealth.storage.durable import sync_folder, write_whole
from runhealth.storage.errors import CorruptDataError
from runhealth.storage.schema import RECORD_TABLES, Table, quoted

MANIFEST_FORMAT_VERSION = 1
_CELLS_A_GROUP = 4_000_000  # of one row group: bounds the memory of whoever writes or reads it
_GROUP_ROWS = (8_192, 122_880)
_KEYS = ("attempt", "step", "rank")
_HASH_CHUNK = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class PartFile:
    """One Parquet file. `file` is relative to the run folder; `first_row` counts the table's rows in earlier parts."""

    number: int
    table_name: str
    file: str
    rows: int
    first_row: int
    size_bytes: int
    xxh3_64: int
    first_step: int
    last_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """`parts/<number>.json`: the files of one part, the signals known by then, and the bytes covered of each log."""

    number: int
    files: tuple[PartFile, ...]
    signals: tuple[tuple[Any, ...], ...]
    progress: tuple[tuple[Any, ...], ...]


def manifest_name(number: int) -> str:
    return f"parts/{number:06d}.json"


def write_part(
    connection: duckdb.DuckDBPyConnection, run: Path, number: int, first_rows: Mapping[str, int]
) -> Manifest | None:
    """Write the rows of all record tables of `connection` as part `number`; None if there are none.

    Everything is flushed to disk when this returns, the manifest last. Files of an unfinished part of this number are
    replaced. Raises OSError or duckdb.Error.
    """
    folder = run / "parts"
    folder.mkdir(exist_ok=True)
    (run / manifest_name(number)).unlink(missing_ok=True)  # it must never describe files that are written anew
    files = []
    for table in RECORD_TABLES:
        found = connection.execute(f"SELECT count(*), min(step), max(step) FROM {table.name}").fetchall()
        ((rows, first_step, last_step),) = found
        if rows:
            target = run / f"parts/{number:06d}-{table.name}.parquet"
            _write_table(connection, table, target)
            files.append(
                PartFile(
                    number=number, table_name=table.name, file=f"parts/{target.name}", rows=rows,
                    first_row=first_rows.get(table.name, 0), size_bytes=target.stat().st_size,
                    xxh3_64=_hash(target), first_step=first_step, last_step=last_step,
                )
            )  # fmt: skip
    if not files:
        return None
    manifest = Manifest(
        number=number,
        files=tuple(files),
        signals=tuple(connection.execute("SELECT * FROM signals ORDER BY rowid").fetchall()),
        progress=tuple(connection.execute("SELECT * FROM progress ORDER BY file").fetchall()),
    )
    body = json.dumps({"format_version": MANIFEST_FORMAT_VERSION, **asdict(manifest)}, indent=0)
    write_whole(run / manifest_name(number), body.encode())
    return manifest


def read_manifests(run: Path) -> list[Manifest]:
    """The parts of a local run, complete from the first on. Raises CorruptDataError if one cannot be read."""
    manifests: list[Manifest] = []
    while (run / manifest_name(len(manifests))).exists():
        file = run / manifest_name(len(manifests))
        try:
            body = json.loads(file.read_text())
            version = body.pop("format_version")
            if version > MANIFEST_FORMAT_VERSION:
                raise CorruptDataError(
                    f"{file} has format {version}; this release reads up to {MANIFEST_FORMAT_VERSION}"
                )
            manifests.append(
                Manifest(
                    number=body["number"],
                    files=tuple(PartFile(**one) for one in body["files"]),
                    signals=tuple(map(tuple, body["signals"])),
                    progress=tuple(map(tuple, body["progress"])),
                )
            )
        except (ValueError, KeyError, TypeError) as err:
            if isinstance(err, CorruptDataError):
                raise
            raise CorruptDataError(f"{file} cannot be read ({err!r}): restore it from a copy of the run") from err
    return manifests


def problem_of(run: Path, part: PartFile) -> str:
    """Why the file of a part cannot be used, or an empty string.

    The hash of a file is compared once in a process, as long as it was not changed since.
    """
    path = run / part.file
    what = f"{part.rows} rows of {part.table_name}, steps {part.first_step} to {part.last_step}, are missing"
    remedy = "restore it from a copy of the run"
    try:
        stat = path.stat()
        stamp = (str(path), stat.st_ino, stat.st_mtime_ns, stat.st_size)
        if stat.st_size != part.size_bytes:
            return f"{path} has {stat.st_size} bytes, expected {part.size_bytes}; {what}: {remedy}"
        if stamp not in _verified:
            if _hash(path) != part.xxh3_64:
                return f"{path} is damaged: its xxh3_64 is not {part.xxh3_64:016x}; {what}: {remedy}"
            _verified.add(stamp)
    except OSError as err:
        return f"{path}: {err.strerror}; {what}: {remedy}"
    return ""


_verified: set[tuple[str, int, int, int]] = set()


def union_sql(
    connection: duckdb.DuckDBPyConnection, paths: Sequence[str], types: Mapping[str, str], base: str = "",
) -> str:  # fmt: skip
    """SELECT over the part files of one table, with the column types that the published table has (`types`).

    `base` is an SQL expression of the folder that `paths` begin with; `connection` must be able to evaluate it.
    """
    listed = ", ".join(f"{base}'{_literal(path)}'" for path in paths)
    source = f"read_parquet([{listed}], union_by_name = true)"
    columns = []
    for name, kind, *_ in connection.execute(f"DESCRIBE SELECT * FROM {source}").fetchall():
        wanted = types.get(name, kind)
        columns.append(quoted(name) if wanted == kind else f"CAST({quoted(name)} AS {wanted}) AS {quoted(name)}")
    return f"SELECT {', '.join(columns)} FROM {source}"


def _literal(text: str) -> str:
    return text.replace("'", "''")


def _write_table(connection: duckdb.DuckDBPyConnection, table: Table, target: Path) -> None:
    columns = connection.execute(f"DESCRIBE {table.name}").fetchall()
    names = [(name, kind) for name, kind, *_ in columns]
    present = _present(connection, table, [name for name, _ in names])
    narrow = _single(connection, table, [name for name, kind in names if kind == "DOUBLE" and name in present])
    wanted = [name for name, _ in table.fixed] + [name for name, _ in names if name in present]
    chosen = list(dict.fromkeys(wanted))
    selected = ", ".join(
        f"CAST({quoted(name)} AS FLOAT) AS {quoted(name)}" if name in narrow else quoted(name) for name in chosen
    )
    low, high = _GROUP_ROWS
    group = max(low, min(high, _CELLS_A_GROUP // len(chosen)))
    reader = connection.sql(f"SELECT {selected} FROM {table.name}").to_arrow_reader(group)
    encodings = {field.name: encoding for field in reader.schema if (encoding := _encoding(field.type))}
    temporary = target.with_name(f".{target.name}.tmp")
    try:
        with pq.ParquetWriter(
            temporary, reader.schema, compression="zstd", compression_level=3,
            use_dictionary=[name for name in reader.schema.names if name not in encodings],
            column_encoding=encodings or None,
            write_statistics=[name for name in reader.schema.names if name in _KEYS],
        ) as writer:  # fmt: skip
            for batch in reader:
                writer.write_batch(batch, row_group_size=group)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(target.parent)


def _present(connection: duckdb.DuckDBPyConnection, table: Table, names: Sequence[str]) -> set[str]:
    """Columns that hold any value."""
    counts = connection.execute(
        f"SELECT {', '.join(f'count({quoted(name)})' for name in names)} FROM {table.name}"
    ).fetchall()[0]
    return {name for name, count in zip(names, counts, strict=True) if count}


def _single(connection: duckdb.DuckDBPyConnection, table: Table, names: Sequence[str]) -> set[str]:
    """DOUBLE columns whose values are all single precision, so half the bytes hold them exactly."""
    if not names:
        return set()
    checks = ", ".join(
        f"bool_and({c} IS NULL OR isnan({c}) OR coalesce(CAST(TRY_CAST({c} AS FLOAT) AS DOUBLE) = {c}, false))"
        for c in map(quoted, names)
    )
    row = connection.execute(f"SELECT {checks} FROM {table.name}").fetchall()[0]
    return {name for name, single in zip(names, row, strict=True) if single}


def _encoding(kind: pa.DataType) -> str | None:
    if pa.types.is_floating(kind):
        return "BYTE_STREAM_SPLIT"
    if pa.types.is_integer(kind):
        return "DELTA_BINARY_PACKED"
    return None


def _hash(path: Path) -> int:
    state = xxhash.xxh3_64()
    with path.open("rb") as file:
        while chunk := file.read(_HASH_CHUNK):
            state.update(chunk)
    return int(state.intdigest())
