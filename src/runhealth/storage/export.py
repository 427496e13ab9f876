"""export: the tables of a run as Parquet or CSV files, for tools that know nothing of this store."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import duckdb

from runhealth.storage.errors import StoreError
from runhealth.storage.schema import ATTEMPTS, RECORD_TABLES, SIGNALS
from runhealth.storage.store import RunInfo
from runhealth.storage.view import View


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    file: str
    rows: int


def export(run: RunInfo, target: str, kind: Literal["parquet", "csv"] = "parquet") -> list[Exported]:
    """Write `<target>/<table>.<kind>` for each table that has rows, live tail included, ordered by attempt, step, rank.

    Nothing that exists is overwritten. Empty cells of CSV mean not measured; NaN is written as nan. Raises StoreError.
    """
    folder = Path(target)
    how = "FORMAT parquet, COMPRESSION zstd" if kind == "parquet" else "FORMAT csv, HEADER"
    written = []
    view = View(run)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for table in (*RECORD_TABLES, ATTEMPTS, SIGNALS):
            ((rows,),) = view.connection.execute(f"SELECT count(*) FROM {table.name}").fetchall()
            if not rows:
                continue
            file = folder / f"{table.name}.{kind}"
            if file.exists():
                raise StoreError(f"{file} exists already; remove it or export into another folder")
            temporary = folder / f".{file.name}.tmp"
            order = " ORDER BY attempt, step, rank" if table in RECORD_TABLES else ""
            name = str(temporary).replace("'", "''")
            view.connection.execute(f"COPY (SELECT * FROM {table.name}{order}) TO '{name}' ({how})")
            temporary.replace(file)
            written.append(Exported(file=str(file), rows=rows))
    except duckdb.Error as err:
        raise StoreError(f"cannot export {run.path} to {folder}: {str(err).splitlines()[0]}") from err
    except OSError as err:
        if isinstance(err, StoreError):
            raise
        raise StoreError(f"cannot export {run.path} to {folder}: {err.strerror} ({err.filename})") from err
    finally:
        view.close()
    return written
