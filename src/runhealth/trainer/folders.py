"""A folder that checkpoints lie in, on this machine or behind an fsspec URL (`s3://…`, `gs://…`). Without torch.

What both have in common is all that a checkpoint needs: plain files, a list of names, and one file that appears as a
whole or not at all. Credentials and endpoints come from fsspec's own configuration and environment, never from a run.
"""

import os
import posixpath
import shutil
from pathlib import Path
from typing import Any, Protocol

import xxhash

from runhealth.storage.errors import CheckpointError

BLOCK_BYTES = 1 << 22


class Folder(Protocol):
    """`names` are those of plain files; a link is none. Everything raises OSError where the storage fails."""

    url: str

    def make(self) -> None:
        """Create it, with its parents. Raises FileExistsError if it is there already: it may hold another save."""

    def names(self) -> list[str]: ...

    def folders(self) -> list[str]: ...

    def size(self, name: str) -> int:
        """Bytes; -1 if there is no plain file of this name."""

    def read(self, name: str) -> bytes: ...

    def hash(self, name: str) -> str:
        """xxh3_64 of a file in hex, read in pieces."""

    def write_whole(self, name: str, body: bytes) -> None:
        """A reader sees all of it or nothing."""

    def remove(self, name: str) -> None: ...

    def remove_all(self) -> None:
        """The folder and what is in it. Raises nothing."""


def is_url(path: str) -> bool:
    return "://" in path


def join(base: str, relative: str) -> str:
    """A path below a folder or URL, with `/`; a path that is whole by itself stays as it is."""
    return relative if is_url(relative) else posixpath.join(base, relative)


def open_folder(path: str) -> Folder:
    """Raises CheckpointError for a URL whose protocol is not installed."""
    return _RemoteFolder(path) if is_url(path) else _LocalFolder(path)


class _LocalFolder:
    def __init__(self, path: str) -> None:
        self.url = path
        self._path = Path(path)

    def make(self) -> None:
        self._path.mkdir(parents=True)

    def names(self) -> list[str]:
        if not self._path.is_dir():
            return []
        return sorted(entry.name for entry in self._path.iterdir() if entry.is_file() and not entry.is_symlink())

    def folders(self) -> list[str]:
        return sorted(entry.name for entry in self._path.iterdir() if entry.is_dir()) if self._path.is_dir() else []

    def size(self, name: str) -> int:
        path = self._path / name
        return path.stat().st_size if path.is_file() and not path.is_symlink() else -1

    def read(self, name: str) -> bytes:
        return (self._path / name).read_bytes()

    def hash(self, name: str) -> str:
        with open(self._path / name, "rb") as file:
            return _hash(file)

    def write_whole(self, name: str, body: bytes) -> None:
        temporary = self._path / f"{name}.tmp"
        with open(temporary, "wb") as file:
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._path / name)

    def remove(self, name: str) -> None:
        (self._path / name).unlink()

    def remove_all(self) -> None:
        shutil.rmtree(self._path, ignore_errors=True)


class _RemoteFolder:
    def __init__(self, url: str) -> None:
        import fsspec

        self.url = url
        try:
            self._fs, self._path = fsspec.core.url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise CheckpointError(f"{url}: expected a URL that fsspec can open, met {error}") from error

    def make(self) -> None:
        self._fs.invalidate_cache()
        if self._fs.exists(self._path):
            raise FileExistsError(17, "exists", self.url)
        self._fs.makedirs(self._path, exist_ok=True)

    def names(self) -> list[str]:
        return self._list("file")

    def folders(self) -> list[str]:
        return self._list("directory")

    def size(self, name: str) -> int:
        try:
            info: dict[str, Any] = self._fs.info(self._at(name))
        except FileNotFoundError:
            return -1
        return int(info["size"]) if info["type"] == "file" else -1

    def read(self, name: str) -> bytes:
        body: bytes = self._fs.cat_file(self._at(name))
        return body

    def hash(self, name: str) -> str:
        with self._fs.open(self._at(name), "rb") as file:
            return _hash(file)

    def write_whole(self, name: str, body: bytes) -> None:
        temporary = self._at(f"{name}.tmp")
        self._fs.pipe_file(temporary, body)
        self._fs.mv(temporary, self._at(name))

    def remove(self, name: str) -> None:
        self._fs.rm_file(self._at(name))

    def remove_all(self) -> None:
        try:
            self._fs.rm(self._path, recursive=True)
        except OSError:
            return

    def _list(self, kind: str) -> list[str]:
        self._fs.invalidate_cache()  # another process may have written since
        try:
            found = self._fs.ls(self._path, detail=True)
        except FileNotFoundError:
            return []
        names = {posixpath.basename(entry["name"].rstrip("/")) for entry in found if entry["type"] == kind}
        return sorted(names - {"", posixpath.basename(self._path)} if kind == "file" else names - {""})

    def _at(self, name: str) -> str:
        return posixpath.join(self._path, name)


def _hash(file: Any) -> str:
    digest = xxhash.xxh3_64()
    while block := file.read(BLOCK_BYTES):
        digest.update(block)
    return digest.hexdigest()
