"""Publisher: rank logs into `run.duckdb`, which any DuckDB client can open at any moment of a live run.

Rows and the offsets they came from (`progress`) are committed together into a private database. Then it is
checkpointed and closed, and a copy replaces `run.duckdb` by rename. The database is never copied while this process has
it open: DuckDB's lock is an fcntl lock, and closing any other descriptor of the file would drop it.
"""

import os
import re
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import duckdb

from runhealth.storage.database import (
    build_successor,
    connect,
    enter_parts,
    fill_from_manifests,
    make_views,
    open_tables,
    undo_views,
)
from runhealth.storage.durable import sync_folder
from runhealth.storage.errors import CorruptDataError, StoreError
from runhealth.storage.lease import lease
from runhealth.storage.merge import merge, remove_pieces, to_merge
from runhealth.storage.parts import (
    Manifest,
    PartFile,
    following,
    is_whole,
    manifest_name,
    problem_of,
    read_manifests,
    union_sql,
    write_part,
)
from runhealth.storage.places import is_remote
from runhealth.storage.records import Record, Rejected
from runhealth.storage.retention import retire_logs
from runhealth.storage.sink import Sink, read_claims
from runhealth.storage.tail import RetiredLogError, RunTail, SegmentTail, rejected_of

_CHUNK_BYTES = 16 * 1024 * 1024  # of rank logs in one transaction
PART_BYTES = 64 * 1024 * 1024  # of rank logs; beyond the last part, run.duckdb holds about as much
RETENTION_S = 900.0  # how long a rank log stays after a part covers it, and a part after a merge: for readers
_SUCCESSOR = "successor.duckdb"
_LAST_WAIT_S = 10.0  # for somebody who compacts just when the run ends
# Trouble of the machine, not of the database: building it anew would not help.
_ENVIRONMENT = re.compile(
    r"no space left|permission denied|read-only|file too large|could not set lock|quota|cannot open file", re.IGNORECASE
)
_DUTY = 10.0  # publish at most this fraction of the time: 1 / _DUTY


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishResult:
    """What one `publish()` did. `replaced` is False if run.duckdb was up to date already."""

    path: str
    records: int
    replaced: bool
    seconds: float
    rejected: tuple[Rejected, ...] = ()
    parts: int = 0  # that the run has now
    retired: int = 0  # rank log segments that were removed because parts cover them


class Publisher:
    """Publishes one run. One publisher at a time works on a run; others get a StoreError."""

    def __init__(self, run_path: str, *, part_bytes: int = PART_BYTES, retention_s: float = RETENTION_S) -> None:
        if is_remote(run_path):
            raise StoreError(f"a publisher works on a local run folder; {run_path} is remote")
        self._run = Path(run_path).absolute()
        self._part_bytes = part_bytes
        self._retention_s = retention_s
        self._folder = self._run / ".publish"
        self._private = self._folder / "private.duckdb"
        self._target = self._run / "run.duckdb"
        self._marker = self._folder / "published"
        self._tail: RunTail | None = None
        self._committed: dict[str, int] = {}
        self._claims: list[dict[str, Any]] = []
        self._manifests: list[Manifest] = []
        self.last_error: StoreError | None = None

    def publish(self, *, wait_s: float = 0.0, seal: bool = False) -> PublishResult:
        """Take in what the rank logs gained and replace run.duckdb. Idempotent. Raises StoreError with the path.

        Waits up to `wait_s` for another publisher. `seal` makes a part of all rows, however few they are, and merges
        all small parts that should be; otherwise one merge is done at most.
        """
        started = time.monotonic()
        retired = 0
        try:
            with self._locked(wait_s):
                try:
                    records, replaced = self._publish(seal=seal)
                except duckdb.Error as err:
                    if _ENVIRONMENT.search(str(err)):
                        raise
                    self._discard()  # damaged: parts and rank logs hold everything
                    records, replaced = self._publish(rebuild=True, seal=seal)
                if self._manifests:
                    retired = retire_logs(self._run, self._manifests[-1], self._retention_s)
                    remove_pieces(self._run, self._manifests, self._retention_s)
        except duckdb.Error as err:
            self._tail = None
            raise StoreError(f"cannot publish {self._target}: {str(err).splitlines()[0]}") from err
        except CorruptDataError as err:
            self._tail = None
            raise StoreError(f"cannot publish {self._target}: {err}") from err
        except StoreError:
            self._tail = None
            raise
        except OSError as err:
            self._tail = None
            raise StoreError(f"cannot publish {self._target}: {err.strerror} ({err.filename})") from err
        rejected = tuple(self._tail.rejected()) if self._tail else ()
        torn = [part for manifest in self._manifests for part in manifest.files if not is_whole(self._run, part)]
        rejected += tuple(Rejected(line=0, why=problem_of(self._run, part)) for part in torn)
        return PublishResult(
            path=str(self._target), records=records, replaced=replaced, seconds=time.monotonic() - started,
            rejected=rejected, parts=len(self._manifests), retired=retired,
        )  # fmt: skip

    def run_forever(self, stop: threading.Event, interval_s: float = 1.0) -> None:
        """Publish again and again until `stop` is set, then once more. Survives failures: see `last_error`.

        Waits longer than `interval_s` when a publication takes long, so that it costs a tenth of one core at most.
        """
        while True:
            last = stop.is_set()
            started = time.monotonic()
            try:
                self.publish(wait_s=_LAST_WAIT_S if last else 0.0)
                self.last_error = None
            except StoreError as err:
                self.last_error = err
            except Exception as err:  # noqa: BLE001 - the thread must outlive whatever goes wrong in one round
                self._tail = None
                self.last_error = StoreError(f"cannot publish {self._target}: {err!r}")
            if last:
                return
            stop.wait(max(interval_s, _DUTY * (time.monotonic() - started)))

    @contextmanager
    def exclusive(self, wait_s: float) -> Iterator[Path]:
        """Keep other publishers out and give the path of the private database, which may be replaced."""
        with self._locked(wait_s):
            yield self._private

    @contextmanager
    def _locked(self, wait_s: float) -> Iterator[None]:
        if not self._run.is_dir():
            raise StoreError(f"no run folder {self._run}")
        self._folder.mkdir(exist_ok=True)
        with lease(self._folder / "lock", "publisher", wait_s):
            yield

    def _publish(self, *, rebuild: bool = False, seal: bool = False) -> tuple[int, bool]:
        if not rebuild and not self._private.exists() and not self._seed():
            return 0, False
        claims = read_claims(str(self._run))
        records: list[Record] = []
        try:
            records = self._tail.read(_CHUNK_BYTES) if self._tail else []
        except RetiredLogError:  # another publisher was here meanwhile, and far ahead
            self._tail = None
        unchanged = self._tail and not records and not self._tail.more and claims == self._claims
        if unchanged and not seal and self._up_to_date():
            return 0, False
        taken, more = 0, True
        while more:
            connection = connect(self._private)
            try:
                self._open_tables(connection)
                chunk, more = self._take_in(connection, claims, records)
                taken, records = taken + chunk, []
                if more or seal or self._bytes_beyond_parts() >= self._part_bytes:
                    self._seal(connection)
                generation = connection.execute("SELECT value FROM meta WHERE key = 'generation'").fetchone()
                connection.execute("CHECKPOINT")
            finally:
                connection.close()
            successor = self._folder / _SUCCESSOR
            if successor.exists():
                successor.replace(self._private)
        self._claims = claims
        assert generation is not None
        current = self._merge(generation[0], all_of_them=seal)
        if self._up_to_date(current):
            return taken, False
        self._replace(current)
        return taken, True

    def _merge(self, generation: str, *, all_of_them: bool) -> str:
        """Merge small parts; returns the generation of the private database then."""
        damaged: set[int] = set()
        while pieces := to_merge(self._manifests, damaged):
            bad = {m.number for m in pieces if any(problem_of(self._run, part) for part in m.files)}
            if bad:
                damaged |= bad
                continue
            connection = connect(self._private)
            try:
                merged = merge(connection, self._run, pieces)
                at = self._manifests.index(pieces[0])
                self._manifests = [*self._manifests[:at], merged, *self._manifests[at + len(pieces) :]]
                generation = self._list_parts(connection)
                connection.execute("CHECKPOINT")
            finally:
                connection.close()
            if not all_of_them:
                break
        return generation

    def _list_parts(self, connection: duckdb.DuckDBPyConnection) -> str:
        """Make the database say what the manifests say; returns its generation."""
        generation = uuid.uuid4().hex
        connection.execute("BEGIN")
        connection.execute("DELETE FROM parts")
        enter_parts(connection, [part for manifest in self._manifests for part in manifest.files])
        connection.execute("UPDATE meta SET value = ? WHERE key = 'generation'", (generation,))
        connection.execute("COMMIT")
        return generation

    def _open_tables(self, connection: duckdb.DuckDBPyConnection) -> None:
        """Tables of the current format, and what they say of parts; a database that contradicts the parts on disk
        counts as damaged and is built anew."""
        (self._folder / _SUCCESSOR).unlink(missing_ok=True)
        open_tables(connection)
        listed: dict[int, set[str]] = {}
        for number, file in connection.execute("SELECT number, file FROM parts").fetchall():
            listed.setdefault(number, set()).add(file)
        newest = max(listed, default=-1)
        manifests = read_manifests(self._run)
        if newest >= following(manifests):
            raise CorruptDataError(
                f"{self._run / manifest_name(following(manifests))} is missing, but run.duckdb needs "
                f"{newest + 1} parts: restore it from a copy of the run"
            )
        # A part that was written but not entered belongs to a publisher that died: its rows are still in the tables.
        self._manifests = [manifest for manifest in manifests if manifest.number <= newest]
        merged = [m for m in self._manifests if listed.get(m.number) != {part.file for part in m.files}]
        if any(manifest.last > newest for manifest in merged):
            raise duckdb.InvalidInputException("the database is older than its merged parts")
        if merged:  # by a publisher that died before it had entered them
            for manifest in merged:
                os.utime(self._run / manifest_name(manifest.number))  # their pieces are still in use
            self._list_parts(connection)

    def _bytes_beyond_parts(self) -> int:
        covered = sum(offset for _, offset, *_ in self._manifests[-1].progress) if self._manifests else 0
        return sum(self._committed.values()) - covered

    def _seal(self, connection: duckdb.DuckDBPyConnection) -> None:
        """Make the next part of all rows and prepare the successor of the private database, without them."""
        rows = connection.execute("SELECT table_name, sum(rows)::BIGINT FROM parts GROUP BY table_name").fetchall()
        manifest = write_part(connection, self._run, following(self._manifests), dict(rows))
        if manifest is None:
            return
        connection.execute("UPDATE meta SET value = ? WHERE key = 'generation'", (uuid.uuid4().hex,))
        self._manifests.append(manifest)
        build_successor(connection, self._folder / _SUCCESSOR, manifest)

    def _take_in(
        self, connection: duckdb.DuckDBPyConnection, claims: list[dict[str, Any]], records: list[Record]
    ) -> tuple[int, bool]:
        """Commit what the logs gained, up to a part's worth; returns the records taken and whether there are more."""
        sink = Sink(connection, elsewhere=self._in_parts(connection))
        progress = dict(connection.execute("SELECT file, offset_bytes FROM progress").fetchall())
        if self._tail is None or progress != self._committed:  # or another publisher was here meanwhile
            self._tail = RunTail(str(self._run), progress)
            records = self._tail.read(_CHUNK_BYTES)
        taken = 0
        known = connection.execute("SELECT count(*) FROM attempts").fetchone()
        first = claims != self._claims or known != (len(claims),)
        pending = first or bool(records) or self._tail.more
        while pending:
            connection.execute("BEGIN")
            if records:
                sink.write(records)
            if first and claims:
                sink.write_attempts(claims)
            moved = {t.name: t for t in self._tail.segments() if progress.get(t.name) != t.offset or t.problem}
            for name, tail in moved.items():
                before = connection.execute(
                    "SELECT offset_bytes, message FROM progress WHERE file = ?", (name,)
                ).fetchone()
                message = _message(tail, *(before or (0, "")))
                state = "damaged" if message else "ended" if tail.ended else "open"
                connection.execute("DELETE FROM progress WHERE file = ?", (name,))
                connection.execute("INSERT INTO progress VALUES (?, ?, ?, ?)", (name, tail.offset, state, message))
                progress[name] = tail.offset
            connection.execute("UPDATE meta SET value = ? WHERE key = 'generation'", (uuid.uuid4().hex,))
            connection.execute("COMMIT")
            self._committed = dict(progress)
            taken, first = taken + len(records), False
            pending = self._tail.more
            if pending and self._bytes_beyond_parts() >= self._part_bytes:
                return taken, True
            records = self._tail.read(_CHUNK_BYTES) if pending else []
        return taken, False

    def _whole_parts(self) -> list[PartFile]:
        """Files that queries may read; without the others, so that one torn file does not stop all publishing."""
        return [part for manifest in self._manifests for part in manifest.files if is_whole(self._run, part)]

    def _in_parts(self, connection: duckdb.DuckDBPyConnection) -> Callable[[str], str | None]:
        def select(table_name: str) -> str | None:
            files = [str(self._run / part.file) for part in self._whole_parts() if part.table_name == table_name]
            return union_sql(connection, files, {}) if files else None

        return select

    def _seed(self) -> bool:
        """Make sure there is a private database or something to build it from."""
        if self._target.exists():  # the private one was removed: continue from the published one
            self._copy(self._target, self._private, undo_views)
            return True
        manifests = read_manifests(self._run)
        if manifests:
            self._copy_of_parts(manifests)
            return True
        return self._has_logs()

    def _has_logs(self) -> bool:
        return next(self._run.glob("log/a*/[rn]*/*.rlog"), None) is not None

    def _discard(self) -> None:
        """Forget the private database; parts and rank logs have everything that it had."""
        self._tail, self._committed = None, {}
        for suffix in ("", ".wal"):
            Path(f"{self._private}{suffix}").unlink(missing_ok=True)
        manifests = read_manifests(self._run)
        if manifests:
            self._copy_of_parts(manifests)
        elif not self._has_logs():
            if self._target.exists():  # pruned, or the logs were removed by hand: run.duckdb is all there is
                self._copy(self._target, self._private, undo_views)
                return
            raise StoreError(f"{self._private} is damaged and there are no rank logs to build it from")

    def _copy_of_parts(self, manifests: list[Manifest]) -> None:
        temporary = self._folder / "from-parts.tmp"
        temporary.unlink(missing_ok=True)
        connection = connect(temporary)
        try:
            fill_from_manifests(connection, manifests)
        finally:
            connection.close()
        temporary.replace(self._private)

    def _up_to_date(self, generation: str | None = None) -> bool:
        """Is run.duckdb the file that was published last, with this generation if one is given?"""
        try:
            published, *stamp = self._marker.read_text().split()
            stat = self._target.stat()
        except (OSError, ValueError):
            return False
        return stamp == [str(stat.st_ino), str(stat.st_mtime_ns)] and generation in (None, published)

    def _replace(self, generation: str) -> None:
        wal = Path(f"{self._private}.wal")
        if wal.exists():
            raise StoreError(f"{wal} is left after the database was closed: not published")
        parts = self._whole_parts()
        self._copy(self._private, self._target, partial(make_views, run=self._run, parts=parts) if parts else None)
        stat = self._target.stat()
        self._marker.write_text(f"{generation} {stat.st_ino} {stat.st_mtime_ns}")

    def _copy(
        self, source: Path, target: Path, change: Callable[[duckdb.DuckDBPyConnection], None] | None = None
    ) -> None:
        """A whole copy, changed, under the target's name, or none."""
        temporary = self._folder / f"{target.name}.tmp"
        Path(f"{temporary}.wal").unlink(missing_ok=True)
        try:
            shutil.copyfile(source, temporary)
            if change is not None:
                connection = connect(temporary)
                try:
                    change(connection)
                    connection.execute("CHECKPOINT")
                finally:
                    connection.close()
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
            temporary.replace(target)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(target.parent)


def _message(tail: SegmentTail, offset: int, before: str) -> str:
    """What could not be read of a segment: what an earlier publication skipped (it is before its `offset`), what was
    skipped now, and what reading stops at. One line each, as `rejected_of` takes them apart."""
    lines = {one.line: one.why for one in rejected_of(tail.name, offset, before) if one.line < offset}
    lines |= {gap.line: gap.why for gap in tail.gaps}
    end = tail.rejected(final=False)
    if end is not None:
        lines[end.line] = end.why
    return "\n".join(lines[line].removeprefix(f"{tail.name}: ") for line in sorted(lines))
