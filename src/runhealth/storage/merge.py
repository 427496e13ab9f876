"""Merging parts: many small ones become one, so that a run that was compacted often is as quick to read as any other.

A merged part takes the place of its pieces in one rename: `parts/000003.json` then speaks of parts 3 to 10, and the
manifests of 4 to 10 are skipped. Whatever happens before that rename leaves the pieces as they were, and after it
everything else can be done again. The pieces stay for a while, for readers that opened the run before.
"""

import re
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

import duckdb

from runhealth.storage.durable import sync_folder
from runhealth.storage.errors import CorruptDataError
from runhealth.storage.parts import (
    Manifest,
    PartFile,
    describe_file,
    manifest_name,
    union_sql,
    write_manifest,
    write_table,
)
from runhealth.storage.schema import RECORD_TABLES

AT_ONCE = 8  # parts; fewer are not worth to be written again
MERGED_BYTES = 64 * 1024 * 1024  # a merged part is not larger, so one merge costs about a second
_NUMBERED = re.compile(r"(\d{6,})(-\d{6,})?(-\w+)?\.(json|parquet)")


def to_merge(manifests: Sequence[Manifest], apart: Collection[int] = ()) -> Sequence[Manifest]:
    """Neighbours that should become one part, or none. Parts with a number in `apart` are left alone.

    No part of them is larger than all the others together: each row is then written again only when it comes into a
    part of twice the size, and the number of parts grows with the logarithm of the rows.
    """
    sizes = [
        MERGED_BYTES + 1 if manifest.number in apart else sum(part.size_bytes for part in manifest.files)
        for manifest in manifests
    ]
    for first in range(len(sizes) - AT_ONCE + 1):
        end = first + AT_ONCE
        while end < len(sizes) and _fit(sizes[first : end + 1]):
            end += 1
        if _fit(sizes[first:end]):
            return manifests[first:end]
    return ()


def _fit(sizes: Sequence[int]) -> bool:
    return sum(sizes) <= MERGED_BYTES and 2 * max(sizes) <= sum(sizes)


def merge(connection: duckdb.DuckDBPyConnection, run: Path, pieces: Sequence[Manifest]) -> Manifest:
    """Write these parts as one and let it take their place on disk. `connection` has the run's tables, for their types.

    Raises OSError, duckdb.Error, or CorruptDataError if the pieces do not have the rows that they should.
    """
    number, last = pieces[0].number, pieces[-1].last
    files: list[PartFile] = []
    for table in RECORD_TABLES:
        held = [part for manifest in pieces for part in manifest.files if part.table_name == table.name]
        if len(held) == 1:
            files.append(replace(held[0], number=number))
        elif held:
            types = {name: kind for name, kind, *_ in connection.execute(f"DESCRIBE {table.name}").fetchall()}
            source = union_sql(connection, [str(run / part.file) for part in held], types)
            target = run / f"parts/{number:06d}-{last:06d}-{table.name}.parquet"
            rows = sum(part.rows for part in held)
            written = write_table(connection, table, source, target)
            if written != rows:
                raise CorruptDataError(f"{target} has {written} rows, expected {rows}: parts {number} to {last} differ")
            steps = min(part.first_step for part in held), max(part.last_step for part in held)
            files.append(describe_file(target, number, table, rows, held[0].first_row, steps))
    merged = Manifest(
        number=number, last=last, files=tuple(files), signals=pieces[-1].signals, progress=pieces[-1].progress
    )
    write_manifest(run, merged)
    return merged


def remove_pieces(
    run: Path, manifests: Sequence[Manifest], retention_s: float, clock: Callable[[], float] = time.time
) -> int:
    """Remove files of parts that were merged at least `retention_s` ago, and of merges that were not finished; returns
    how many. `manifests` must be what run.duckdb refers to."""
    if all(manifest.last == manifest.number for manifest in manifests):
        return 0
    now = clock()
    used = {manifest_name(manifest.number) for manifest in manifests}
    used |= {part.file for manifest in manifests for part in manifest.files}
    removed = 0
    for file in (run / "parts").iterdir():
        match = _NUMBERED.fullmatch(file.name)
        if match is None or f"parts/{file.name}" in used:
            continue
        owner = next((m for m in manifests if m.number <= int(match[1]) <= m.last), None)
        if owner is not None and now - (run / manifest_name(owner.number)).stat().st_mtime >= retention_s:
            file.unlink(missing_ok=True)
            removed += 1
    if removed:
        sync_folder(run / "parts")
    return removed
