"""Logs that come through a pipe: kept in a temporary file, because a log is read more than once."""

import os
import select
import stat
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from runhealth.storage.blocks import StepBlock
from runhealth.storage.errors import NoUsableDataError
from runhealth.storage.importers import open_log
from runhealth.storage.records import Record, SourceInfo

STDIN = ("-", "/dev/stdin", "/dev/fd/0", "/proc/self/fd/0")
WRITER_WAIT_S = 10.0  # a writer that opens the pipe together with us needs far less
_CHUNK_BYTES = 1 << 20


def needs_spool(path: str) -> bool:
    """Whether `path` can be read only once: `-`, a named pipe, or stdin that is no regular file."""
    if path == "-":
        return True
    try:
        mode = Path(path).stat().st_mode
    except (OSError, ValueError):
        return False
    return stat.S_ISFIFO(mode) or (path in STDIN and not stat.S_ISREG(mode) and not stat.S_ISDIR(mode))


class SpooledLog:
    """A foreign log out of a pipe. The temporary file goes away with `close`, at the latest with the process.

    Raises NoUsableDataError: nobody writes, the pipe is empty, or the disk is full; and what `open_log` raises.
    """

    def __init__(self, path: str, mapping: Mapping[str, str], wait_s: float = WRITER_WAIT_S) -> None:
        self._path = path
        self._shown = "stdin" if path in STDIN else path
        self._file = tempfile.NamedTemporaryFile(prefix="runhealth-pipe-")  # noqa: SIM115 - lives as long as the log
        try:
            self._fill(path, wait_s)
            self._log = open_log(self._file.name, mapping=mapping)
        except NoUsableDataError as error:
            self._file.close()
            raise self._renamed(error) from None
        except BaseException:
            self._file.close()
            raise

    def _fill(self, path: str, wait_s: float) -> None:
        try:
            descriptor = os.dup(0) if path in STDIN else _open_pipe(path, wait_s)
        except OSError as error:
            raise NoUsableDataError(f"cannot read {self._shown}: {error.strerror}") from error
        try:
            while chunk := os.read(descriptor, _CHUNK_BYTES):
                self._file.write(chunk)
            self._file.flush()
        except OSError as error:
            raise NoUsableDataError(
                f"cannot keep {self._shown} in {tempfile.gettempdir()}: {error.strerror}; write the log to a file first"
            ) from error
        finally:
            os.close(descriptor)

    def records(self) -> Iterator[Record]:
        try:
            yield from self._log.records()
        except NoUsableDataError as error:
            raise self._renamed(error) from None

    def blocks(self) -> Iterator[StepBlock | Record]:
        try:
            yield from self._log.blocks()
        except NoUsableDataError as error:
            raise self._renamed(error) from None

    def line_of(self, attempt: int, step: int) -> int | None:
        """The line of the log on which a step begins, where it is known."""
        return self._log.line_of(attempt, step)

    def describe(self) -> SourceInfo:
        return replace(self._log.describe(), name=self._shown.rsplit("/", 1)[-1], source=self._path)

    def close(self) -> None:
        self._file.close()

    def _renamed(self, error: NoUsableDataError) -> NoUsableDataError:
        return type(error)(str(error).replace(self._file.name, self._shown))


def _open_pipe(path: str, wait_s: float) -> int:
    """Opened without waiting for a writer, which may never come; then it is waited for, for so long."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN | select.POLLHUP)
        if not poll.poll(wait_s * 1000):
            try:
                alone = not os.read(descriptor, 1)
            except BlockingIOError:
                alone = False  # a writer is there, and slow
            if alone:
                raise NoUsableDataError(f"{path} is a pipe that no process writes to (waited {wait_s:g} s)")
        os.set_blocking(descriptor, True)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
