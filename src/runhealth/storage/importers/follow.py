"""Follow a log that another process is still writing.

Logs that only grow (console text, JSONL, CSV, event files) are read on from where the last poll ended: the importer
runs in a thread of its own and waits inside its stream for the next whole line. Anything else (a JSON file that is
written anew, a database, a folder) is read again when it has changed, and what is new is told apart by attempt, step
and rank.

The newest step comes out once the next one begins: until then its line may gain an evaluation.
"""

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO, cast

from runhealth.storage.errors import NoUsableDataError
from runhealth.storage.importers.open import ImportedLog, open_log
from runhealth.storage.importers.streams import is_plain, peek
from runhealth.storage.importers.tracks import FilePart, Track
from runhealth.storage.records import Record, RunEvent, SourceInfo, StepRecord

_CHUNK_BYTES = 1 << 18
_GROWING = frozenset({"csv", "jsonl", "megatron", "nanogpt", "text", "tfevents", "torchtitan"})


class Follower:
    """What is new in a log since the last poll. Not for use from several threads."""

    def __init__(self, path: str, mapping: Mapping[str, str] | None = None) -> None:
        self._path = path
        self._mapping = dict(mapping or {})
        self._log: ImportedLog | None = None
        self._pump: _Pump | None = None
        self._reader: _Rereader | None = None
        self.waiting_for: str | None = None  # why there is nothing to read yet

    def poll(self) -> list[Record]:
        """The records that are new, in order; none while the file is missing, empty or not recognised yet."""
        if self._log is None and not self._opened():
            return []
        if self._pump is not None:
            return self._pump.poll()
        assert self._reader is not None
        return self._reader.poll()

    def describe(self) -> SourceInfo:
        """What was read so far."""
        if self._log is None:
            return SourceInfo(name=Path(self._path).name, source=self._path, format="")
        return self._log.describe()

    def close(self) -> list[Record]:
        """End the reading; the records that were still held back, such as the newest step."""
        if self._pump is not None:
            return self._pump.close()
        return self._reader.poll(final=True) if self._reader is not None else []

    def __enter__(self) -> "Follower":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _opened(self) -> bool:
        try:
            log = open_log(self._path, mapping=self._mapping)
        except NoUsableDataError as error:
            self.waiting_for = str(error)
            return False
        self._log, self.waiting_for = log, None
        part = log.tracks[0].parts[0] if len(log.tracks) == 1 and isinstance(log.tracks[0], Track) else None
        if isinstance(part, FilePart) and part.path == self._path and _only_grows(part):
            stream = _GrowingStream(self._path, binary=part.format == "tfevents")
            track = Track(log.tracks[0].name, [_StreamPart(part, stream)])
            self._log = ImportedLog(self._path, [track], self._mapping)
            self._pump = _Pump(self._log, stream)
        else:
            self._reader = _Rereader(self._path, self._mapping, self._adopt)
        return True

    def _adopt(self, log: ImportedLog) -> None:
        self._log = log


def _only_grows(part: FilePart) -> bool:
    if part.format not in _GROWING or not is_plain(part.path):
        return False
    if part.format != "jsonl":
        return True
    with open(part.path, "rb") as stream:
        return not peek(stream).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")


class _GrowingStream:
    """A file as a stream without end: a read that finds nothing waits for `grant` or `end`.

    Text is handed out in whole lines. A file that was replaced or cut is read from its start, as one more piece.
    """

    def __init__(self, path: str, *, binary: bool) -> None:
        self._path = path
        self._binary = binary
        self._file: BinaryIO | None = None
        self._identity = (0, 0)
        self._buffer = b""  # read from the file
        self._ready = 0  # bytes of it that may be handed out
        self._condition = threading.Condition()
        self._asked = 0  # looks at the file that were asked for
        self._answered = 0  # the last of them after which nothing was left to read
        self._ended = False
        self._over = False

    def read1(self, size: int) -> bytes:
        """Up to `size` bytes, at least one; b"" only at the end."""
        while not self._ready and self._fill():
            pass
        size = min(size, self._ready)
        data, self._buffer = self._buffer[:size], self._buffer[size:]
        self._ready -= size
        return data

    def read(self, size: int) -> bytes:
        """Exactly `size` bytes; less only at the end."""
        while self._ready < size and self._fill():
            pass
        return self.read1(size) if self._ready else b""

    def peek(self, size: int) -> bytes:
        """The bytes that come next."""
        while not self._ready and self._fill():
            pass
        return self._buffer[: min(size, self._ready)]

    def __enter__(self) -> "_GrowingStream":
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def grant(self) -> None:
        """Let the reader look again; returns when it has looked since and read what is there, or ended."""
        with self._condition:
            self._asked += 1
            mine = self._asked
            self._condition.notify_all()
            self._condition.wait_for(lambda: self._answered >= mine or self._over)

    def end(self) -> None:
        """What is in the file now is all."""
        with self._condition:
            self._ended = True
            self._asked += 1
            self._condition.notify_all()

    def rest(self) -> None:
        """The reader is done for now, or for good."""
        with self._condition:
            self._over = True
            self._condition.notify_all()

    def _fill(self) -> bool:
        """Read more, or wait for it; False at the end."""
        while True:
            with self._condition:
                looking = self._asked  # a look that began before it was asked for is no answer
            data = self._next()
            if data:
                self._buffer += data
                self._ready = len(self._buffer) if self._binary else self._buffer.rfind(b"\n") + 1
                if len(self._buffer) - self._ready > 2 * _CHUNK_BYTES * 8:
                    self._ready = len(self._buffer)  # a line without end: let the reader reject it
                return True
            with self._condition:
                if self._ended and looking == self._asked:
                    more = self._ready < len(self._buffer)
                    self._ready = len(self._buffer)
                    return more
                self._answered = looking
                self._condition.notify_all()
                while self._asked <= looking:
                    self._condition.wait()

    def _next(self) -> bytes:
        try:
            status = Path(self._path).stat()
        except OSError:
            return self._file.read(_CHUNK_BYTES) if self._file is not None else b""
        identity = (status.st_dev, status.st_ino)
        if self._file is not None:
            data = self._file.read(_CHUNK_BYTES)
            if data or (identity == self._identity and status.st_size >= self._file.tell()):
                return data
            self._file.close()
        try:
            self._file = open(self._path, "rb")  # noqa: SIM115 - open as long as the stream is
        except OSError:
            self._file = None
            return b""
        self._identity = identity
        return self._file.read(_CHUNK_BYTES)


class _StreamPart:
    """A file part whose bytes come from a stream that waits."""

    def __init__(self, part: FilePart, stream: _GrowingStream) -> None:
        self._part = part
        self._stream = stream

    @property
    def path(self) -> str:
        return self._part.path

    @property
    def format(self) -> str:
        return self._part.format

    def items(self, tally, mapping):  # type: ignore[no-untyped-def]
        return self._part.items_of(cast(BinaryIO, self._stream), tally, mapping)


class _Pump:
    """Runs the reading of a log in a thread that stops whenever its stream has nothing left."""

    def __init__(self, log: ImportedLog, stream: _GrowingStream) -> None:
        self._stream = stream
        self._records: list[Record] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(log,), name="follow-log", daemon=True)
        self._started = False

    def poll(self) -> list[Record]:
        if not self._started:
            self._started = True
            self._thread.start()
        if self._thread.is_alive():
            self._stream.grant()
        return self._taken()

    def close(self) -> list[Record]:
        if self._started:
            self._stream.end()
            self._thread.join()
        if isinstance(self._error, NoUsableDataError):
            self._error = None  # said at the end of a reading without signals; it is the caller who ends it
        return self._taken()

    def _taken(self) -> list[Record]:
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        records, self._records = self._records, []
        return records

    def _run(self, log: ImportedLog) -> None:
        try:
            with self._stream:
                for record in log.records():
                    self._records.append(record)
        except BaseException as error:  # noqa: BLE001 - it belongs to whoever polls
            self._error = error
        finally:
            self._stream.rest()


class _Rereader:
    """Reads a log from the start whenever its files have changed."""

    def __init__(self, path: str, mapping: Mapping[str, str], adopt: Callable[[ImportedLog], None]) -> None:
        self._path = path
        self._mapping = mapping
        self._adopt = adopt
        self._state: object = None
        self._told: set[tuple[object, ...]] = set()

    def poll(self, *, final: bool = False) -> list[Record]:
        state = _state_of(self._path)
        if state == self._state and not final:
            return []
        try:
            log = open_log(self._path, mapping=self._mapping)
            records = list(log.records())
        except NoUsableDataError:
            return []  # in the middle of being written
        self._state = state
        self._adopt(log)
        newest = max(((r.attempt, r.step) for r in records if isinstance(r, StepRecord)), default=(0, 0))
        new: list[Record] = []
        for record in records:
            key = _key(record)
            if key in self._told or (not final and (record.attempt, record.step) >= newest):
                continue
            self._told.add(key)
            new.append(record)
        return new


def _key(record: Record) -> tuple[object, ...]:
    what = (record.kind, record.message) if isinstance(record, RunEvent) else getattr(record, "status", None)
    return type(record).__name__, record.attempt, record.step, record.rank, what


def _state_of(path: str) -> object:
    place = Path(path.split("#", 1)[0] if not Path(path).exists() else path)
    files = sorted(place.rglob("*")) if place.is_dir() else [place]
    state = []
    for file in files:
        try:
            status = file.stat()
        except OSError:
            continue
        state.append((str(file), status.st_size, status.st_mtime_ns))
    return state
