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
from runhealth.storage.jsontext import parse_json
from runhealth.storage.schema import RECORD_TABLES, Table, quoted

MANIFEST_FORMAT_VERSION = 2  # 2: `last`, of merged parts
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
    """`parts/<number>.json`: the files of one part, the signals known by then, and the bytes covered of each log.

    Parts that were merged have one manifest, under the number of their first; `last` is the number of their last."""

    number: int
    last: int
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
            written = write_table(connection, table, table.name, target)
            if written != rows:
                raise CorruptDataError(f"{target} has {written} rows, expected {rows}")
            files.append(
                describe_file(target, number, table, rows, first_rows.get(table.name, 0), (first_step, last_step))
            )
    if not files:
        return None
    manifest = Manifest(
        number=number,
        last=number,
        files=tuple(files),
        signals=tuple(connection.execute("SELECT * FROM signals ORDER BY rowid").fetchall()),
        progress=tuple(connection.execute("SELECT * FROM progress ORDER BY file").fetchall()),
    )
    write_manifest(run, manifest)
    return manifest


def describe_file(file: Path, number: int, table: Table, rows: int, first_row: int, steps: tuple[int, int]) -> PartFile:
    """What a manifest says of a file that was just written."""
    return PartFile(
        number=number, table_name=table.name, file=f"parts/{file.name}", rows=rows, first_row=first_row,
        size_bytes=file.stat().st_size, xxh3_64=_hash(file), first_step=steps[0], last_step=steps[1],
    )  # fmt: skip


def write_manifest(run: Path, manifest: Manifest) -> None:
    """Replace `parts/<number>.json`, whole and flushed. Raises OSError."""
    body = json.dumps({"format_version": MANIFEST_FORMAT_VERSION, **asdict(manifest)}, indent=0)
    write_whole(run / manifest_name(manifest.number), body.encode())


def following(manifests: Sequence[Manifest]) -> int:
    """The number of the part that comes after these."""
    return manifests[-1].last + 1 if manifests else 0


def read_manifests(run: Path) -> list[Manifest]:
    """The parts of a local run, complete from the first on. Raises CorruptDataError if one cannot be read."""
    manifests: list[Manifest] = []
    while (run / manifest_name(following(manifests))).exists():
        file = run / manifest_name(following(manifests))
        try:
            body = parse_json(file.read_text())
            version = body.pop("format_version")
            if version > MANIFEST_FORMAT_VERSION:
                raise CorruptDataError(
                    f"{file} has format {version}; this release reads up to {MANIFEST_FORMAT_VERSION}"
                )
            manifests.append(
                Manifest(
                    number=body["number"],
                    last=body.get("last", body["number"]),
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


def is_whole(run: Path, part: PartFile) -> bool:
    """Is the file there, with the size that it should have? DuckDB refuses any query over a file that is not."""
    try:
        return (run / part.file).stat().st_size == part.size_bytes
    except OSError:
        return False


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
    listed = [f"{base}'{_literal(path)}'" for path in paths]
    selects = []
    for group in _compatible(connection, listed):
        source = f"read_parquet([{', '.join(group)}], union_by_name = true)"
        columns = []
        for name, kind, *_ in connection.execute(f"DESCRIBE SELECT * FROM {source}").fetchall():
            wanted = types.get(name, kind)
            columns.append(quoted(name) if wanted == kind else f"CAST({quoted(name)} AS {wanted}) AS {quoted(name)}")
        selects.append(f"SELECT {', '.join(columns)} FROM {source}")
    return " UNION ALL BY NAME ".join(selects)


def _compatible(connection: duckdb.DuckDBPyConnection, listed: Sequence[str]) -> list[list[str]]:
    """The files in runs that may be read as one: where a column is FLOAT in one file and an integer in another, DuckDB
    would take it to be FLOAT in all of them, which does not hold integers beyond 2^24."""
    rows = connection.execute(
        f"SELECT file_name, name, type = 'FLOAT' FROM parquet_schema([{', '.join(listed)}]) "
        "WHERE type IN ('FLOAT', 'INT32', 'INT64')"
    ).fetchall()
    kinds: dict[str, dict[str, bool]] = {}
    for file, name, is_float in rows:
        kinds.setdefault(file, {})[name] = is_float
    groups: list[list[str]] = []
    met: dict[str, bool] = {}
    for one, found in zip(listed, kinds.values(), strict=True):
        if not groups or any(met.get(name, is_float) != is_float for name, is_float in found.items()):
            groups.append([])
            met = {}
        groups[-1].append(one)
        met |= found
    return groups


def _literal(text: str) -> str:
    return text.replace("'", "''")


def write_table(connection: duckdb.DuckDBPyConnection, table: Table, source: str, target: Path) -> int:
    """Write the rows of `source` (a table's name or a SELECT) as `target`, flushed; returns how many they were."""
    source = source if source == table.name else f"({source})"
    columns = connection.execute(f"DESCRIBE SELECT * FROM {source}").fetchall()
    names = [(name, kind) for name, kind, *_ in columns]
    present = _present(connection, source, [name for name, _ in names])
    narrow = _single(connection, source, [name for name, kind in names if kind == "DOUBLE" and name in present])
    wanted = [name for name, _ in table.fixed] + [name for name, _ in names if name in present]
    chosen = list(dict.fromkeys(wanted))
    selected = ", ".join(
        f"CAST({quoted(name)} AS FLOAT) AS {quoted(name)}" if name in narrow else quoted(name) for name in chosen
    )
    low, high = _GROUP_ROWS
    group = max(low, min(high, _CELLS_A_GROUP // len(chosen)))
    reader = connection.sql(f"SELECT {selected} FROM {source}").to_arrow_reader(group)
    encodings = {field.name: encoding for field in reader.schema if (encoding := _encoding(field.name, field.type))}
    temporary = target.with_name(f".{target.name}.tmp")
    rows = 0
    try:
        with pq.ParquetWriter(
            temporary, reader.schema, compression="zstd", compression_level=3,
            use_dictionary=[name for name in reader.schema.names if name not in encodings],
            column_encoding=encodings or None,
            write_statistics=[name for name in reader.schema.names if name in _KEYS],
        ) as writer:  # fmt: skip
            for batch in reader:
                writer.write_batch(batch, row_group_size=group)
                rows += len(batch)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(target.parent)
    return rows


def _present(connection: duckdb.DuckDBPyConnection, source: str, names: Sequence[str]) -> set[str]:
    """Columns that hold any value."""
    counts = connection.execute(
        f"SELECT {', '.join(f'count({quoted(name)})' for name in names)} FROM {source}"
    ).fetchall()[0]
    return {name for name, count in zip(names, counts, strict=True) if count}


def _single(connection: duckdb.DuckDBPyConnection, source: str, names: Sequence[str]) -> set[str]:
    """DOUBLE columns whose values are all single precision, so half the bytes hold them exactly."""
    if not names:
        return set()
    checks = ", ".join(
        f"bool_and({c} IS NULL OR isnan({c}) OR coalesce(CAST(TRY_CAST({c} AS FLOAT) AS DOUBLE) = {c}, false))"
        for c in map(quoted, names)
    )
    row = connection.execute(f"SELECT {checks} FROM {source}").fetchall()[0]
    return {name for name, single in zip(names, row, strict=True) if single}


def _encoding(column: str, kind: pa.DataType) -> str | None:
    if column in ("attempt", "rank"):
        return None  # few values in a dictionary are found faster
    if column == "step":
        return "PLAIN"  # likewise, and zstd packs it as small
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
