"""pack: a closed run as a few small Parquet files, exactly.

Each column gets the narrowest type that gives back every value bit for bit, and whichever Parquet encoding turns out
smallest for it. Value columns carry no min/max statistics: DuckDB trusts them and would hide NaN.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from runhealth.storage.errors import RunNotFoundError, StoreError
from runhealth.storage.schema import ALL_TABLES, META, MIGRATIONS, PARTS, PROGRESS, RECORD_TABLES
from runhealth.storage.store import read_run
from runhealth.storage.view import View

_ZSTD_LEVEL = 19
_KEYS = ["attempt", "step", "rank"]
_INTEGERS = (pa.int8(), pa.uint8(), pa.int16(), pa.uint16(), pa.int32(), pa.uint32(), pa.int64())


@dataclass(frozen=True, slots=True, kw_only=True)
class PackResult:
    """The packed run: its folder, and rows and bytes of each part."""

    path: str
    rows: dict[str, int]
    size_bytes: dict[str, int]


def pack(run_path: str, target_path: str) -> PackResult:
    """Write run.json and `parts/*.parquet` of the run at `run_path` into the folder `target_path`.

    Everything the run holds now is taken, live tail included; a run that still grows is packed as of now. Raises
    RunNotFoundError, or StoreError if `target_path` has parts already or cannot be written.
    """
    run = read_run(run_path)
    if run is None:
        raise RunNotFoundError(f"no run in {run_path}: expected run.json, run.duckdb, parts or log there")
    target = Path(target_path)
    parts, building = target / "parts", target / ".parts-building"
    if parts.exists():
        raise StoreError(f"{parts} exists already; remove it or pack into another folder")
    rows: dict[str, int] = {}
    sizes: dict[str, int] = {}
    view = View(run)
    try:
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir(parents=True)
        for table in ALL_TABLES:
            if table in (PROGRESS, PARTS, MIGRATIONS):  # all rows are here, and there are no rank logs to go on with
                continue
            source = "SELECT * FROM " + table.name
            if table is META:
                source += " WHERE key = 'format_version'"
            frame = view.query(source)
            if frame.is_empty() and table is not META:
                continue
            if table in RECORD_TABLES:  # one rank after the other: neighbours are alike and compress well
                frame = frame.sort("attempt", "rank", "step", maintain_order=True)
            file = building / f"{table.name}.parquet"
            _write(frame, file)
            rows[table.name], sizes[table.name] = len(frame), file.stat().st_size
        config = Path(run.path) / "run.json"
        if config.exists():
            shutil.copyfile(config, target / "run.json")
        building.rename(parts)
    except OSError as err:
        shutil.rmtree(building, ignore_errors=True)
        raise StoreError(f"cannot pack {run.path} into {target}: {err.strerror or err} ({err.filename})") from err
    finally:
        view.close()
    return PackResult(path=str(target), rows=rows, size_bytes=sizes)


def _write(frame: pl.DataFrame, file: Path) -> None:
    columns: dict[str, pa.Array] = {}
    options: dict[str, str | None] = {}
    for series in frame:
        column = _narrow(series)
        columns[series.name] = column
        options[series.name] = _smallest(column)
    pq.write_table(
        pa.table(columns), file, compression="zstd", compression_level=_ZSTD_LEVEL,
        row_group_size=1 << 20, data_page_size=1 << 23,
        use_dictionary=[name for name, encoding in options.items() if encoding is None],
        column_encoding={name: encoding for name, encoding in options.items() if encoding is not None} or None,
        write_statistics=[name for name in columns if name in _KEYS],
    )  # fmt: skip


def _narrow(series: pl.Series) -> pa.Array:
    """The column in the narrowest type that holds every value exactly, NaN included."""
    column = series.to_arrow()
    if series.dtype == pl.Float64:
        wide = series.fill_null(0.0).to_numpy()
        with np.errstate(over="ignore"):
            narrow = wide.astype(np.float32)
        if np.array_equal(narrow.astype(np.float64).view(np.uint64), wide.view(np.uint64)):
            return pa.array(narrow, mask=series.is_null().to_numpy())
    elif series.dtype.is_integer() and series.null_count() < len(series):
        low, high = series.min(), series.max()
        for kind in _INTEGERS:
            if _fits(kind, low, high):
                return column.cast(kind)
    elif series.dtype == pl.String:
        return column.cast(pa.string())
    return column


def _fits(kind: Any, low: Any, high: Any) -> bool:
    bounds = np.iinfo(kind.to_pandas_dtype())
    return bool(bounds.min <= low and high <= bounds.max)


def _smallest(column: pa.Array) -> str | None:
    """The encoding that packs this column best; None is the dictionary."""
    candidates: list[str | None] = [None, "PLAIN"]
    if pa.types.is_floating(column.type):
        candidates.append("BYTE_STREAM_SPLIT")
    elif pa.types.is_integer(column.type):
        candidates.append("DELTA_BINARY_PACKED")
    elif pa.types.is_string(column.type):
        candidates.append("DELTA_BYTE_ARRAY")
    table = pa.table({"x": column})

    def size(encoding: str | None) -> int:
        buffer = pa.BufferOutputStream()
        pq.write_table(
            table, buffer, compression="zstd", compression_level=_ZSTD_LEVEL, data_page_size=1 << 23,
            use_dictionary=encoding is None, column_encoding=None if encoding is None else {"x": encoding},
            write_statistics=False,
        )  # fmt: skip
        return int(buffer.getvalue().size)

    return min(candidates, key=size)
