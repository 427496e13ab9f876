"""A lease on a local file: one holder at a time, given back by the kernel however the holder ends; no clock is used."""

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runhealth.storage.errors import StoreError

_POLL_S = 0.02


@contextmanager
def lease(file: Path, who: str, wait_s: float = 0.0) -> Iterator[None]:
    """Hold `file`, waiting up to `wait_s` for another holder. Raises StoreError naming that one (`who` it is)."""
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    deadline = time.monotonic() + wait_s
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as err:
                if err.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise
                if time.monotonic() >= deadline:
                    holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
                    raise StoreError(
                        f"another {who} (process {holder}) is at work: {file} is held. "
                        "It does the same work itself; if it hangs, end that process"
                    ) from err
            time.sleep(_POLL_S)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        try:
            yield
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)
    finally:
        os.close(fd)
