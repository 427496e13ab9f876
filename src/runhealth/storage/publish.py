"""Publisher: rank logs into `run.duckdb`, which any DuckDB client can open at any moment of a live run.

Rows and the offsets they came from (`progress`) are committed together into a private database. Then it is
checkpointed and closed, and a copy replaces `run.duckdb` by rename. The database is never copied while this process has
it open: DuckDB's lock is an fcntl lock, and closing any other descriptor of the file would drop it.
"""

import errno
import fcntl
import os
import re
import shutil
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb

from runhealth.storage.errors import StoreError
from runhealth.storage.places import is_remote
from runhealth.storage.records import Record, Rejected
from runhealth.storage.schema import DATABASE_FORMAT_VERSION
from runhealth.storage.sink import Sink, read_claims
from runhealth.storage.tail import RunTail

_CHUNK_BYTES = 16 * 1024 * 1024  # of rank logs in one transaction
_CONFIG: dict[str, str | bool | int | float | list[str]] = {
    "memory_limit": "512MB", "threads": 2, "autoinstall_known_extensions": False,
    "default_block_size": "131072",  # a column takes at least one block: small runs stay small
    "storage_compatibility_version": "v1.2.0",  # files of DuckDB 2 are unreadable for 1.x unless asked for
}  # fmt: skip
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


class Publisher:
    """Publishes one run. One publisher at a time works on a run; others get a StoreError."""

    def __init__(self, run_path: str) -> None:
        if is_remote(run_path):
            raise StoreError(f"a publisher works on a local run folder; {run_path} is remote")
        self._run = Path(run_path)
        self._folder = self._run / ".publish"
        self._private = self._folder / "private.duckdb"
        self._target = self._run / "run.duckdb"
        self._marker = self._folder / "published"
        self._tail: RunTail | None = None
        self._committed: dict[str, int] = {}
        self._claims: list[dict[str, Any]] = []
        self.last_error: StoreError | None = None

    def publish(self) -> PublishResult:
        """Take in what the rank logs gained and replace run.duckdb. Idempotent. Raises StoreError with the path."""
        started = time.monotonic()
        try:
            with self._locked():
                try:
                    records, replaced = self._publish()
                except duckdb.Error as err:
                    if _ENVIRONMENT.search(str(err)):
                        raise
                    self._discard()  # damaged: the rank logs hold everything
                    records, replaced = self._publish(rebuild=True)
        except duckdb.Error as err:
            self._tail = None
            raise StoreError(f"cannot publish {self._target}: {str(err).splitlines()[0]}") from err
        except StoreError:
            self._tail = None
            raise
        except OSError as err:
            self._tail = None
            raise StoreError(f"cannot publish {self._target}: {err.strerror} ({err.filename})") from err
        rejected = tuple(self._tail.rejected()) if self._tail else ()
        return PublishResult(
            path=str(self._target), records=records, replaced=replaced, seconds=time.monotonic() - started,
            rejected=rejected,
        )  # fmt: skip

    def run_forever(self, stop: threading.Event, interval_s: float = 1.0) -> None:
        """Publish again and again until `stop` is set, then once more. Survives failures: see `last_error`.

        Waits longer than `interval_s` when a publication takes long, so that it costs a tenth of one core at most.
        """
        while True:
            last = stop.is_set()
            started = time.monotonic()
            try:
                self.publish()
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
    def _locked(self) -> Iterator[None]:
        if not self._run.is_dir():
            raise StoreError(f"no run folder {self._run}")
        self._folder.mkdir(exist_ok=True)
        lock = self._folder / "lock"
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as err:
                if err.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise
                holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
                raise StoreError(f"another publisher (process {holder}) is at work: {lock} is held") from err
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
            try:
                yield
            finally:
                fcntl.flock(fd, fcntl.LOCK_UN)
        finally:
            os.close(fd)

    def _publish(self, *, rebuild: bool = False) -> tuple[int, bool]:
        if not rebuild and not self._private.exists() and not self._seed():
            return 0, False
        claims = read_claims(str(self._run))
        records: list[Record] = self._tail.read(_CHUNK_BYTES) if self._tail else []
        if self._tail and not records and not self._tail.more and claims == self._claims and self._up_to_date():
            return 0, False
        connection = duckdb.connect(str(self._private), config=_CONFIG)
        try:
            taken = self._take_in(connection, claims, records)
            generation = connection.execute("SELECT value FROM meta WHERE key = 'generation'").fetchone()
            connection.execute("CHECKPOINT")
        finally:
            connection.close()
        self._claims = claims
        assert generation is not None
        if self._up_to_date(generation[0]):
            return taken, False
        self._replace(generation[0])
        return taken, True

    def _take_in(
        self, connection: duckdb.DuckDBPyConnection, claims: list[dict[str, Any]], records: list[Record]
    ) -> int:
        sink = _open_tables(connection)
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
                state = "damaged" if tail.problem else "ended" if tail.ended else "open"
                connection.execute("DELETE FROM progress WHERE file = ?", (name,))
                connection.execute("INSERT INTO progress VALUES (?, ?, ?, ?)", (name, tail.offset, state, tail.problem))
                progress[name] = tail.offset
            connection.execute("UPDATE meta SET value = ? WHERE key = 'generation'", (uuid.uuid4().hex,))
            connection.execute("COMMIT")
            self._committed = dict(progress)
            taken, first = taken + len(records), False
            pending = self._tail.more
            records = self._tail.read(_CHUNK_BYTES) if pending else []
        return taken

    def _seed(self) -> bool:
        """Make sure there is a private database or something to build it from."""
        if self._target.exists():  # the private one was removed: continue from the published one
            self._copy(self._target, self._private)
            return True
        return next(self._run.glob("log/a*/r*/*.rlog"), None) is not None

    def _discard(self) -> None:
        self._tail = None
        for suffix in ("", ".wal"):
            Path(f"{self._private}{suffix}").unlink(missing_ok=True)
        if next(self._run.glob("log/a*/r*/*.rlog"), None) is None:
            raise StoreError(f"{self._private} is damaged and there are no rank logs to build it from")

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
        self._copy(self._private, self._target)
        stat = self._target.stat()
        self._marker.write_text(f"{generation} {stat.st_ino} {stat.st_mtime_ns}")

    def _copy(self, source: Path, target: Path) -> None:
        """A whole copy under the target's name, or none."""
        temporary = self._folder / f"{target.name}.tmp"
        try:
            shutil.copyfile(source, temporary)
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
            temporary.replace(target)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        fd = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _open_tables(connection: duckdb.DuckDBPyConnection) -> Sink:
    """Tables of the current format; a database of an unknown format counts as damaged and is built anew."""
    sink = Sink(connection)
    found = connection.execute("SELECT value FROM meta WHERE key = 'format_version'").fetchone()
    if found is None:
        connection.execute(
            "INSERT INTO meta VALUES ('format_version', ?), ('generation', '-')", (str(DATABASE_FORMAT_VERSION),)
        )
    elif found[0] != str(DATABASE_FORMAT_VERSION):
        raise duckdb.InvalidInputException(f"database format {found[0]}, expected {DATABASE_FORMAT_VERSION}")
    return sink
