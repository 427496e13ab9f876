"""Small files of a run's folder, which can come from anywhere: a pipe would hold a reader up for ever, a huge file
would eat its memory, a link could lead a writer out of the run."""

import errno
import os
import stat
from pathlib import Path

MOST_BYTES = 8_000_000  # plans and results of replays have a few kilobytes


def read_text(path: str | Path, most_bytes: int = MOST_BYTES) -> str:
    """The text of a plain file.

    Raises:
        OSError: it cannot be opened, or is no plain file. ValueError: it is larger than `most_bytes`, or no UTF-8.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "expected a plain file, met a folder, pipe or device", str(path))
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise ValueError(f"expected at most {most_bytes:,} bytes, met more")
    return data.decode()


def is_plain(path: Path) -> bool:
    """Whether it is a plain file, or a link to one."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError:
        return False


def inside(folder: Path, root: Path) -> bool:
    """Whether a folder, all links followed, lies in or below another one."""
    return folder.resolve().is_relative_to(root.resolve())
