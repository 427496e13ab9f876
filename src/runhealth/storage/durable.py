"""Files that are whole or not there, and stay when the machine goes down."""

import os
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_whole(target: Path, data: bytes) -> None:
    """Replace `target` by `data`, flushed; readers see the old file or the new one. Raises OSError."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(target.parent)
