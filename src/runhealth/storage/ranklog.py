"""RankLog: what one rank of one attempt measured, appended step by step.

`append` is one `write()` of checksummed frames to a file opened for appending. When it has returned, the step survives
a kill -9 of the process; a thread calls `fdatasync` each second, so a crash of the whole machine loses about the last
second (`fsync="step"` loses nothing and costs a disk flush a step). A log is never reopened: a restart is a new
attempt in a new folder.
"""

import contextlib
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, Self

from runhealth.storage.codec import Encoder, end_frame, segment_frame
from runhealth.storage.durable import sync_folder
from runhealth.storage.errors import StoreError
from runhealth.storage.process import start_ticks
from runhealth.storage.records import Record

SEGMENT_BYTES = 4 * 1024 * 1024
SYNC_INTERVAL_S = 1.0
_ATTEMPT_FOLDER = re.compile(r"a(\d{3,9})", re.ASCII)  # beyond, it is no INTEGER of a table


def attempt_folders(run: Path) -> list[tuple[int, Path]]:
    """The attempts of a local run by number; what is named otherwise below `log/` is none of ours."""
    found = ((_ATTEMPT_FOLDER.fullmatch(folder.name), folder) for folder in run.glob("log/a[0-9]*"))
    return sorted((int(match[1]), folder) for match, folder in found if match)


def rank_folder(rank: int) -> str:
    """Folder of a rank inside an attempt. Rank -1 is for a supervisor, which writes events and checkpoints only."""
    return f"r{rank:05d}"


class RankLog:
    """The open log of one rank. Use `RankLog.create`. Safe to use from several threads, never from a forked child."""

    _format_version = 1

    def __init__(
        self, folder: Path, attempt: int, rank: int, *,
        fsync: Literal["background", "step"], segment_bytes: int, clock: Callable[[], int],
    ) -> None:  # fmt: skip
        self.path = str(folder)
        self.attempt = attempt
        self.rank = rank
        self._folder = folder
        self._fsync = fsync
        self._segment_bytes = segment_bytes
        self._clock = clock
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._encoder = Encoder()
        self._fd = -1
        self._size = 0
        self._sequence = -1
        self._file = ""
        self._dirty = False
        self._retired: list[int] = []  # ended segments that are not flushed yet
        self._sync_error: StoreError | None = None
        self._closed = threading.Event()
        self._open_segment()
        if fsync == "background":
            threading.Thread(target=self._sync_loop, name=f"ranklog-sync-{rank}", daemon=True).start()

    @classmethod
    def create(
        cls, attempt_dir: str, rank: int, *, fsync: Literal["background", "step"] = "background",
        segment_bytes: int = SEGMENT_BYTES, clock: Callable[[], int] = time.time_ns, doubles: bool = False,
    ) -> "RankLog":  # fmt: skip
        """Claim `<attempt_dir>/r<rank>` and open its first segment.

        `attempt_dir` is `AttemptDir.path` of `Store.claim_attempt`. Raises StoreError if the rank is already claimed in
        this attempt, or if the folder cannot be written. `doubles` keeps every float as a double, also where the
        catalogue calls a signal single precision: for values that were not measured so, such as parsed decimals.
        """
        log = cls._claim(attempt_dir, rank_folder(rank), rank, fsync=fsync, segment_bytes=segment_bytes, clock=clock)
        log._encoder = Encoder(doubles=doubles)
        return log

    @classmethod
    def _claim(
        cls, attempt_dir: str, name: str, rank: int, *, fsync: Literal["background", "step"], segment_bytes: int,
        clock: Callable[[], int],
    ) -> Self:  # fmt: skip
        """Make the folder `name` of the attempt, or fail if it is there, and begin the log in it."""
        parent = Path(attempt_dir)
        match = _ATTEMPT_FOLDER.fullmatch(parent.name)
        if match is None:
            raise StoreError(f"expected an attempt folder such as <run>/log/a000, met {attempt_dir}")
        if "://" in attempt_dir:
            raise StoreError(f"a rank log is written to a local disk; {attempt_dir} is remote")
        folder = parent / name
        try:
            folder.mkdir()
            sync_folder(parent)
        except FileExistsError as err:
            raise StoreError(
                f"{'rank' if name[0] == 'r' else 'node'} {int(name[1:])} of attempt {int(match[1])} "
                f"is already claimed: {folder} exists; "
                "a restart needs a new attempt (another launch key)"
            ) from err
        except OSError as err:
            raise StoreError(f"cannot create the rank log folder {folder}: {err.strerror}") from err
        return cls(folder, int(match[1]), rank, fsync=fsync, segment_bytes=segment_bytes, clock=clock)

    def append(self, records: Sequence[Record]) -> None:
        """Write the records with one `write()`; when it returns they survive the death of this process.

        Raises StoreError if they could not be written whole. Frames that did reach the file stay there, so do not
        send the same records again. Later calls may succeed (a disk that was full, say).
        """
        if os.getpid() != self._pid:
            raise StoreError(
                f"{self._file} belongs to process {self._pid}, this is its forked child {os.getpid()}: "
                "open a log of its own there, or use the spawn start method"
            )
        attempt, rank = self.attempt, self.rank
        for record in records:
            if record.attempt != attempt or record.rank != rank:
                raise StoreError(
                    f"{self.path} takes records of attempt {attempt}, rank {rank}; "
                    f"met attempt {record.attempt}, rank {record.rank}"
                )
        with self._lock:
            if self._closed.is_set():
                raise StoreError(f"{self.path} is closed")
            if self._sync_error is not None:
                err, self._sync_error = self._sync_error, None
                raise StoreError(f"the last seconds before this step may not be on disk: {err}") from err
            if self._fd < 0 or self._size >= self._segment_bytes:
                self._rotate()
            frames = self._encoder.encode(records)
            self._write(b"".join(frames), frames)
            self._dirty = True
            if self._fsync == "step":
                self._flush(self._fd)

    def close(self) -> None:
        """Write the end frame, flush and close. Idempotent; does nothing in a forked child."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
            retired, self._retired = self._retired, []
            try:
                if self._fd >= 0:
                    retired.append(self._write_end())
            finally:
                for fd in retired:
                    self._flush_and_close(fd)

    def __enter__(self) -> "RankLog":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, data: bytes, frames: Sequence[bytes]) -> None:
        """All of `data`, or whole frames only and StoreError."""
        written = 0
        try:
            while written < len(data):
                written += os.write(self._fd, data[written:] if written else data)
        except OSError as err:
            self._encoder.forget()
            whole = 0
            for frame in frames:
                if whole + len(frame) > written:
                    break
                whole += len(frame)
            lost = f"cannot append to {self._file}: {err.strerror}; this step's telemetry is lost"
            try:
                if written > whole:
                    os.ftruncate(self._fd, self._size + whole)
                self._size += whole
            except OSError:
                os.close(self._fd)
                self._fd = -1  # leave the torn end behind; the next append begins a new segment
            raise StoreError(lost) from err
        self._size += written

    def _identity(self) -> Mapping[str, object]:
        """What else the segment header says of this log."""
        return {}

    def _open_segment(self) -> None:
        file = self._folder / f"{self._sequence + 1:06d}.rlog"
        self._encoder.forget()
        header = {
            "attempt": self.attempt, "rank": self.rank, "sequence": self._sequence + 1,
            "host": socket.gethostname(), "pid": self._pid, "pid_start": start_ticks(self._pid), **self._identity(),
        }  # fmt: skip
        try:
            self._fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)
            self._sequence += 1
            self._file, self._size = str(file), 0
            sync_folder(self._folder)
        except OSError as err:
            raise StoreError(f"cannot create the rank log segment {file}: {err.strerror}") from err
        frame = segment_frame(header, self._clock(), self._format_version)
        try:
            self._write(frame, (frame,))
        except StoreError:  # a segment without a header is useless: take it back, the next append tries again
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
            with contextlib.suppress(OSError):
                file.unlink()
                self._sequence -= 1
            raise

    def _rotate(self) -> None:
        if self._fd >= 0:
            fd = self._write_end()
            if self._fsync == "background":
                self._retired.append(fd)  # the thread flushes and closes it: a flush takes milliseconds
            else:
                self._flush_and_close(fd)
        self._open_segment()

    def _write_end(self) -> int:
        """End the segment; its descriptor is the caller's to flush and close."""
        frame, fd = end_frame(self._clock()), self._fd
        try:
            self._write(frame, (frame,))
        except StoreError:
            if self._fd >= 0:
                os.close(fd)
            raise
        finally:
            self._fd = -1
        return fd

    def _flush_and_close(self, fd: int) -> None:
        try:
            self._flush(fd)
        finally:
            os.close(fd)

    def _flush(self, fd: int) -> None:
        try:
            os.fdatasync(fd)
        except OSError as err:
            raise StoreError(f"cannot flush {self._file} to disk: {err.strerror}") from err

    def _sync_loop(self) -> None:
        while not self._closed.wait(SYNC_INTERVAL_S):
            with self._lock:
                fds, self._retired = self._retired, []
                if self._dirty and self._fd >= 0:
                    fds.append(os.dup(self._fd))  # so that a rotation may retire the original meanwhile
                    self._dirty = False
            for fd in fds:
                try:
                    self._flush_and_close(fd)
                except StoreError as err:
                    self._sync_error = err
