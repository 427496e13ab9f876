"""A folder that may be local or on any fsspec file system, read-only. The few calls that reading a store needs."""

import posixpath
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from runhealth.storage.errors import StoreError


class Place(Protocol):
    """One folder. `path` is absolute or a URL; `name` its last part."""

    path: str
    name: str

    def child(self, name: str) -> "Place": ...

    def folders(self) -> list[str]: ...

    def files(self) -> list[str]: ...

    def exists(self, name: str) -> bool: ...

    def read_text(self, name: str) -> str | None:
        """Text of a file in this folder; None if there is none."""
        ...

    def version(self, name: str) -> str:
        """Changes whenever the file is replaced; empty if there is none."""
        ...

    def download(self, name: str, target: Path) -> None: ...


def is_remote(path: str) -> bool:
    return "://" in path and not path.startswith("file://")


def place_of(path: str) -> Place:
    return RemotePlace(path) if is_remote(path) else LocalPlace(path.removeprefix("file://"))


class LocalPlace:
    def __init__(self, path: str) -> None:
        self.path = path
        self.name = Path(path).name
        self._folder = Path(path)

    def child(self, name: str) -> "LocalPlace":
        return LocalPlace(str(self._folder / name))

    def folders(self) -> list[str]:
        return self._list(folders=True)

    def files(self) -> list[str]:
        return self._list(folders=False)

    def _list(self, *, folders: bool) -> list[str]:
        try:
            return sorted(entry.name for entry in self._folder.iterdir() if entry.is_dir() == folders)
        except FileNotFoundError:
            return []
        except OSError as err:
            raise StoreError(f"cannot list {self.path}: {err.strerror}") from err

    def exists(self, name: str) -> bool:
        return (self._folder / name).exists()

    def read_text(self, name: str) -> str | None:
        try:
            return (self._folder / name).read_text(errors="replace")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as err:
            raise StoreError(f"cannot read {self.path}/{name}: {err.strerror}") from err

    def version(self, name: str) -> str:
        try:
            stat = (self._folder / name).stat()
        except OSError:
            return ""
        return f"{stat.st_ino}-{stat.st_mtime_ns}-{stat.st_size}"

    def download(self, name: str, target: Path) -> None:
        target.write_bytes((self._folder / name).read_bytes())


class RemotePlace:
    """A folder behind an fsspec URL. Each file system raises its own kinds of errors; all become StoreErrors here."""

    def __init__(self, path: str) -> None:
        self.path = path.rstrip("/") if path.rstrip("/").count("/") > 2 else path
        self.name = posixpath.basename(path.rstrip("/"))

    def _fs(self) -> tuple[Any, str]:
        import fsspec  # here: the training process never needs it

        try:
            fs, _, paths = fsspec.get_fs_token_paths(self.path)
        except Exception as err:
            raise StoreError(f"cannot open the store {self.path}: {err}") from err
        return fs, paths[0].rstrip("/")

    def child(self, name: str) -> "RemotePlace":
        return RemotePlace(f"{self.path.rstrip('/')}/{name}")

    def folders(self) -> list[str]:
        return self._list("directory")

    def files(self) -> list[str]:
        return self._list("file")

    def _list(self, kind: str) -> list[str]:
        fs, path = self._fs()
        try:
            entries = fs.ls(path, detail=True)
        except FileNotFoundError:
            return []
        except Exception as err:
            raise StoreError(f"cannot list {self.path}: {err}") from err
        names = {posixpath.basename(entry["name"].rstrip("/")) for entry in entries if entry["type"] == kind}
        return sorted(name for name in names if name)

    def exists(self, name: str) -> bool:
        fs, path = self._fs()
        return bool(fs.exists(f"{path}/{name}"))

    def read_text(self, name: str) -> str | None:
        fs, path = self._fs()
        try:
            data: bytes = fs.cat_file(f"{path}/{name}")
        except (FileNotFoundError, IsADirectoryError):
            return None
        except Exception as err:
            raise StoreError(f"cannot read {self.path}/{name}: {err}") from err
        return data.decode(errors="replace")

    def read_texts(self, names: Sequence[str]) -> dict[str, str]:
        """Several files at once, without those that are not there: one round trip where the file system can."""
        fs, path = self._fs()
        files = {f"{path}/{name}": name for name in names}
        try:
            found = fs.cat(list(files), on_error="omit") if files else {}
        except Exception as err:
            raise StoreError(f"cannot read the runs in {self.path}: {err}") from err
        return {files[file]: data.decode(errors="replace") for file, data in found.items() if file in files}

    def version(self, name: str) -> str:
        fs, path = self._fs()
        fs.invalidate_cache()
        try:
            return str(fs.ukey(f"{path}/{name}"))
        except FileNotFoundError:
            return ""

    def download(self, name: str, target: Path) -> None:
        fs, path = self._fs()
        try:
            fs.get_file(f"{path}/{name}", str(target))
        except Exception as err:
            raise StoreError(f"cannot fetch {self.path}/{name}: {err}") from err


def remote_path(connection: Any, url: str) -> str:
    """What a DuckDB connection calls the object at `url`, after it was taught the file system."""
    import fsspec  # here: the training process never needs it

    protocol = url.partition("://")[0]
    if not connection.filesystem_is_registered(protocol):
        connection.register_filesystem(fsspec.filesystem(protocol))
    return url
