"""View: one consistent look at a run, as tables of an in-memory DuckDB connection.

`pub` is what was published: `run.duckdb` attached read-only, or `parts/*.parquet`. `tail` holds what the rank logs have
beyond the published offsets. The tables of `storage.schema` are unions of the two. An attached file may be replaced by
the publisher at any time: the old one stays readable until it is detached.
"""

import ctypes
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import duckdb
import polars as pl

from runhealth.storage.errors import StoreError
from runhealth.storage.migrations import format_of
from runhealth.storage.parts import PartFile, problem_of, union_sql
from runhealth.storage.places import is_remote, place_of, remote_path
from runhealth.storage.records import Record
from runhealth.storage.rows import OTHERS, ROWS, build_sorted
from runhealth.storage.schema import (
    ALL_TABLES,
    BOOKKEEPING,
    PARTS,
    RECORD_TABLES,
    create_sql,
    quoted,
    recent,
)
from runhealth.storage.sink import Sink, read_claims
from runhealth.storage.store import RunInfo
from runhealth.storage.tail import RunTail

_CONFIG = {"memory_limit": "1GB", "threads": "2", "autoinstall_known_extensions": "false",
           "parquet_metadata_cache": "true"}  # fmt: skip
_TAIL_CHUNK_BYTES = 16 * 1024 * 1024
_ROWS_A_CHUNK = 50_000
_STALE_TAIL_ROWS = 10_000
_STALE_AGE_S = 60.0


class View:
    """Open look at `run`; `sync` takes in what was logged since. Not safe to use from several threads at once."""

    def __init__(self, run: RunInfo) -> None:
        self._run = run
        self._place = place_of(run.path)
        self._pid = os.getpid()
        self._open()
        _open_views.add(self)

    def _open(self) -> None:
        self._claims: list[dict[str, Any]] = []
        self._opened = time.monotonic()
        self._tail_rows = 0
        self.tail: RunTail | None = None
        self.published_offsets: dict[str, int] = {}
        self._scratch = Path(tempfile.mkdtemp(prefix="runhealth-"))
        # also when nobody closes the view: on collection, and when the process ends
        self._remove_scratch = weakref.finalize(self, _remove, self._scratch, os.getpid())
        self.notes: list[str] = []
        self._sources: dict[str, str] = {}
        self.parts: list[tuple[PartFile, str]] = []  # that can be used, with what DuckDB calls the file
        self.recent: dict[str, str] = {}  # table -> SQL that selects the published rows that are in no part
        self.connection = duckdb.connect(":memory:", config={**_CONFIG, "temp_directory": str(self._scratch / "spill")})
        try:
            self.version = self._place.version("run.duckdb")
            self._published = self._attach()
            if self.notes and self.is_replaced():  # a part is missing because it was merged at this very moment
                self.close()
                self._open()
                return
            self._make_tail()
            self.sync()
        except BaseException:
            self.close()
            raise

    @staticmethod
    def version_of(run: RunInfo) -> str:
        """Changes with each publication; empty if there is none."""
        return place_of(run.path).version("run.duckdb")

    def close(self) -> None:
        if self._pid == os.getpid():
            self.connection.close()
            self._remove_scratch()

    def is_replaced(self) -> bool:
        """Another run.duckdb was published."""
        return self._place.version("run.duckdb") != self.version

    def is_stale(self) -> bool:
        """Another run.duckdb was published, and it is worth to begin anew with it.

        A short tail on the old one shows the same rows, and a live run is published each second.
        """
        if not self.is_replaced():
            return False
        if self.tail is None or not self._published:
            return True
        return self._tail_rows > _STALE_TAIL_ROWS or time.monotonic() - self._opened > _STALE_AGE_S

    def sync(self) -> None:
        """Take in what the rank logs gained."""
        if self.tail is None:
            return
        shape = self._sink.shape
        more = True
        while more:  # not until nothing is left: a fast writer would keep us here for ever
            records = self.tail.read(_TAIL_CHUNK_BYTES)
            more = self.tail.more
            self._sink.write(records)
            self._tail_rows += len(records)
        claims = read_claims(self._run.path)
        if claims and claims != self._claims:
            self._sink.write_attempts(claims)
            self._claims = claims
        if self._sink.shape != shape:
            self._make_views()

    def query(self, query: str, parameters: Sequence[object] = ()) -> pl.DataFrame:
        """Result of one SELECT. Arrow keeps NaN and NULL apart, other ways out of DuckDB do not."""
        relation = self.connection.sql(query, params=list(parameters))
        frame = pl.from_arrow(relation.to_arrow_table())
        assert isinstance(frame, pl.DataFrame)
        return frame

    def records(self, *, renew: bool = False) -> Iterator[Record]:
        """Every record, ordered as `tail.order` says. For `renew` see `frames`."""
        names = self.signal_names()
        for chunk in self.chunks(_ROWS_A_CHUNK, {table.name: 1 for table in RECORD_TABLES}):
            frames = self.frames(chunk, renew=renew)
            records = build_sorted(OTHERS, frames, names) + build_sorted(ROWS, frames, names)
            records.sort(key=attrgetter("step"))
            yield from records

    def chunks(self, limit: int, weights: Mapping[str, int]) -> list[tuple[int, int, int]]:
        """Attempt, first and last step of stretches whose rows, times the weights of their tables, come to about
        `limit`; in order."""
        keys = " UNION ALL ".join(
            f"SELECT attempt, step, {weights[table.name]} AS weight FROM {table.name}" for table in RECORD_TABLES
        )
        return self.connection.execute(
            f"""
            WITH sizes AS (SELECT attempt, step, sum(weight) AS n FROM ({keys}) GROUP BY ALL),
            buckets AS (
                SELECT attempt, step, sum(n) OVER (PARTITION BY attempt ORDER BY step) // {limit} AS bucket FROM sizes
            )
            SELECT attempt, min(step), max(step) FROM buckets GROUP BY attempt, bucket ORDER BY attempt, bucket
            """
        ).fetchall()

    def frames(self, chunk: tuple[int, int, int], *, renew: bool) -> dict[str, pl.DataFrame]:
        """Rows of the record tables in a stretch that `chunks` gave.

        Parts may be merged, and the pieces removed, while somebody takes his time over a long run: with `renew` this
        view then becomes one of the run as it is now, which has the same rows and perhaps more.
        """
        select = "SELECT * FROM {} WHERE attempt = ? AND step BETWEEN ? AND ?"
        try:
            return {table.name: self.query(select.format(table.name), chunk) for table in RECORD_TABLES}
        except duckdb.IOException:
            if not renew or not self.is_replaced():
                raise
        self.close()
        self._open()
        return self.frames(chunk, renew=renew)

    def signal_names(self) -> dict[str, dict[str, str]]:
        """Table -> column -> signal."""
        names: dict[str, dict[str, str]] = {}
        for table, name, column in self.connection.execute(
            "SELECT table_name, name, column_name FROM signals"
        ).fetchall():
            names.setdefault(table, {})[column] = name
        return names

    def _attach(self) -> bool:
        """Make `pub` out of what was published; False if nothing was."""
        if self.version:
            try:
                self._attach_database()
            except (duckdb.Error, StoreError) as err:
                if is_remote(self._run.path) or not self._place.exists("log"):
                    first = str(err).splitlines()[0]
                    raise StoreError(f"cannot read {self._run.path}/run.duckdb: {first}") from err
                self.notes.append(f"run.duckdb cannot be read, the rank logs were read instead: {err}".splitlines()[0])
                self.connection.execute("DETACH DATABASE IF EXISTS pub")
                return False
            return True
        if self._place.exists("parts/000000.json"):
            raise StoreError(
                f"{self._run.path}/run.duckdb is missing, but parts of it are there: "
                f"`runhealth compact {self._run.name}` makes it anew"
            )
        if self._place.exists("parts/meta.parquet"):
            self._attach_parts()
            self._sources = {table.name: f"SELECT * FROM pub.{table.name}" for table in ALL_TABLES}
            return True
        return False

    def _attach_database(self) -> None:
        if is_remote(self._run.path):
            file = self._scratch / "run.duckdb"
            self._place.download("run.duckdb", file)
        else:
            file = Path(self._run.path) / "run.duckdb"
        try:
            self._execute_attach(file)
        except duckdb.IOException as err:
            if "Could not set lock" not in str(err):
                raise
            copy = self._scratch / "run.duckdb"  # somebody has the file open for writing; a copy is not locked
            shutil.copyfile(file, copy)
            self._execute_attach(copy)
        format_of(self.connection, "pub")  # refuses a newer one; an older one merely lacks tables
        self._sources = self._published_sources()

    def _published_sources(self) -> dict[str, str]:
        """Table -> SQL that selects what was published of it. Parts that cannot be used are left out and noted."""
        held = {
            name for (name,) in self.connection.execute(
                "SELECT table_name FROM duckdb_tables() WHERE database_name = 'pub'"
            ).fetchall()
        }  # fmt: skip
        files: dict[str, list[str]] = {}
        if PARTS.name in held:
            columns = ", ".join(name for name, _ in PARTS.fixed)
            for row in self.connection.execute(f"SELECT {columns} FROM pub.parts ORDER BY number").fetchall():
                part = PartFile(**dict(zip((name for name, _ in PARTS.fixed), row, strict=True)))
                path = self._part_path(part)
                if path:
                    files.setdefault(part.table_name, []).append(path)
                    self.parts.append((part, path))
        sources = {}
        for table in ALL_TABLES:
            name = next((name for name in (recent(table), table.name) if name in held), None)
            if name is None:  # a database of an older format
                self.connection.execute(f"CREATE SCHEMA IF NOT EXISTS old; {create_sql(table, 'old')}")
                sources[table.name] = f"SELECT * FROM old.{table.name}"
                continue
            self.recent[table.name] = sources[table.name] = f"SELECT * FROM pub.{name}"
            if table.name in files:
                types = {
                    column: kind for column, kind, *_ in self.connection.execute(f"DESCRIBE pub.{name}").fetchall()
                }
                in_parts = union_sql(self.connection, files[table.name], types)
                sources[table.name] = f"{in_parts} UNION ALL BY NAME {sources[table.name]}"
        return sources

    def _part_path(self, part: PartFile) -> str | None:
        if is_remote(self._run.path):
            return remote_path(self.connection, f"{self._run.path.rstrip('/')}/{part.file}")
        problem = problem_of(Path(self._run.path), part)
        if problem:
            self.notes.append(problem)
            return None
        return str(Path(self._run.path) / part.file)

    def _execute_attach(self, file: Path) -> None:
        self.connection.execute(f"ATTACH '{_literal(str(file))}' AS pub (READ_ONLY)")

    def _attach_parts(self) -> None:
        """Views over `parts/<table>.parquet`, with the column types that the publisher would have given."""
        parts = self._place.child("parts")
        available = set(parts.files())
        self.connection.execute("CREATE SCHEMA pub")
        types: dict[tuple[str, str], str] = {}
        for table in sorted(ALL_TABLES, key=lambda table: table.name != "signals"):
            file = f"{table.name}.parquet"
            if file not in available:
                self.connection.execute(create_sql(table, "pub"))
                continue
            path = Path(parts.path) / file
            if is_remote(parts.path):
                path = self._scratch / file
                parts.download(file, path)
            source = f"read_parquet('{_literal(str(path))}')"
            try:
                described = self.connection.execute(f"DESCRIBE SELECT * FROM {source}").fetchall()
            except duckdb.Error as err:
                raise StoreError(f"cannot read {parts.path}/{file}: {str(err).splitlines()[0]}") from err
            fixed = dict(table.fixed)
            columns = ", ".join(
                f"CAST({quoted(name)} AS {fixed.get(name) or types.get((table.name, name), kind)}) AS {quoted(name)}"
                for name, kind, *_ in described
            )
            self.connection.execute(f"CREATE VIEW pub.{table.name} AS SELECT {columns} FROM {source}")
            if table.name == "signals":
                rows = self.connection.execute("SELECT table_name, column_name, column_type FROM pub.signals")
                types = {(name, column): kind for name, column, kind in rows.fetchall()}

    def _make_tail(self) -> None:
        self.connection.execute("CREATE SCHEMA tail")
        if self._published:
            for table in ALL_TABLES:
                limit = "" if table.name in ("signals", "attempts") else " LIMIT 0"
                source = self._sources[table.name]
                self.connection.execute(f"CREATE TABLE tail.{table.name} AS SELECT * FROM ({source}){limit}")
            self.published_offsets = dict(
                self.connection.execute(f"SELECT file, offset_bytes FROM ({self._sources['progress']})").fetchall()
            )
        self._sink = Sink(self.connection, "tail", elsewhere=self._sources.get)
        if not is_remote(self._run.path):
            self.tail = RunTail(self._run.path, self.published_offsets)
        self._make_views()

    def _make_views(self) -> None:
        for table in ALL_TABLES:
            if not self._published or table.name in ("signals", "attempts"):
                source = f"SELECT * FROM tail.{table.name}"
            elif table in BOOKKEEPING:
                source = self._sources[table.name]
            else:
                source = f"{self._sources[table.name]} UNION ALL BY NAME SELECT * FROM tail.{table.name}"
            self.connection.execute(f"CREATE OR REPLACE VIEW {table.name} AS {source}")


_open_views: weakref.WeakSet[View] = weakref.WeakSet()


def _keep_in_child() -> None:
    """A forked child has none of DuckDB's threads and dies when a connection of its parent is destroyed in it: keep
    them for good."""
    for view in list(_open_views):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(view.connection))


os.register_at_fork(after_in_child=_keep_in_child)


def _remove(scratch: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked child has the finalizer too, but not the folder
        shutil.rmtree(scratch, ignore_errors=True)


def _literal(text: str) -> str:
    return text.replace("'", "''")
