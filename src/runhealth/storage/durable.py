"""Files that are whole or not there, and stay when the machine goes down."""

import os
import uuid
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_whole(target: Path, data: bytes) -> None:
    """Replace `target` by `data`, flushed; readers see the old file or the new one. A file that was there before lends
    its permissions. Raises OSError."""
    temporary = target.with_name(f".{target.name[:100]}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("xb") as file:
            if target.exists():
                temporary.chmod(target.stat().st_mode & 0o777)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(target.parent)
