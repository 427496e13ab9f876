"""Checkpoints on disk: where they lie, what makes one complete, and how it is verified. Importable without torch.

A checkpoint is a folder of its own, never written twice: `step-00000100`, or `step-00000100-a001` when attempt 1 comes
to step 100 again. `MANIFEST.json` is written last, under a temporary name that is then renamed: a folder without it is
a save that did not finish. torch.distributed.checkpoint itself keeps no checksums and loads flipped bits and mixed
folders without a word, so every size and xxh3 hash is checked before a single byte is loaded.
"""

import json
import os
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from runhealth.storage.errors import CheckpointError

FOLDER = "checkpoints"
MANIFEST = "MANIFEST.json"
VERSION = 1
_NAME = re.compile(r"step-(\d{8,})(?:-a(\d{3,}))?")


class UnloadableError(CheckpointError):
    """A checkpoint that passed verification, but could not be loaded into the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    name: str
    size_bytes: int
    xxh3_64: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointManifest:
    """`step` counts the optimizer steps that the checkpoint contains. `finite` says that every value was."""

    step: int
    attempt: int
    world: int
    finite: bool
    created_ns: int
    files: tuple[FileEntry, ...]

    @property
    def size_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.files)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """A committed checkpoint, not yet verified. `path` is relative to the run's folder."""

    step: int
    attempt: int
    path: str


def relative_path(step: int, attempt: int) -> str:
    suffix = f"-a{attempt:03d}" if attempt else ""
    return f"{FOLDER}/step-{step:08d}{suffix}"


def step_of(path: str) -> int:
    """The step of a checkpoint by its path; 0 for none."""
    match = _NAME.fullmatch(path.rpartition("/")[2])
    return int(match[1]) if match else 0


def committed(run_path: str) -> list[CheckpointInfo]:
    """All checkpoints of a run that have a manifest, ordered by (step, attempt)."""
    found = []
    folder = Path(run_path) / FOLDER
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match and (path / MANIFEST).is_file():
            found.append(CheckpointInfo(step=int(match[1]), attempt=int(match[2] or 0), path=f"{FOLDER}/{path.name}"))
    return sorted(found, key=lambda info: (info.step, info.attempt))


def newest_verified(
    run_path: str, superseded: Iterable[str] = ()
) -> tuple[CheckpointInfo | None, list[tuple[CheckpointInfo, str]]]:
    """The newest checkpoint that passes verification, and those newer ones that did not, with the reason. Paths in
    `superseded` belong to a past that a rollback left and are not considered."""
    ignored = frozenset(superseded)
    failed = []
    for info in reversed(committed(run_path)):
        if info.path in ignored:
            continue
        try:
            verify(str(Path(run_path) / info.path))
        except CheckpointError as error:
            failed.append((info, str(error)))
        else:
            return info, failed
    return None, failed


def hash_file(path: Path) -> str:
    """xxh3_64 of a file in hex, read in pieces of 4 MiB."""
    digest = xxhash.xxh3_64()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def commit(folder: str, *, step: int, attempt: int, world: int, finite: bool) -> CheckpointManifest:
    """Hash every file that lies in the folder and write the manifest, atomically and last."""
    target = Path(folder)
    files = tuple(
        FileEntry(name=path.name, size_bytes=path.stat().st_size, xxh3_64=hash_file(path))
        for path in sorted(target.iterdir())
        if path.is_file()
    )
    manifest = CheckpointManifest(
        step=step, attempt=attempt, world=world, finite=finite, created_ns=time.time_ns(), files=files
    )
    raw = {
        "version": VERSION,
        "step": step,
        "attempt": attempt,
        "world": world,
        "finite": finite,
        "created_ns": manifest.created_ns,
        "files": [{"name": f.name, "size_bytes": f.size_bytes, "xxh3_64": f.xxh3_64} for f in files],
    }
    temporary = target / f"{MANIFEST}.tmp"
    with open(temporary, "w") as file:
        json.dump(raw, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(target / MANIFEST)
    return manifest


def read_manifest(folder: str) -> CheckpointManifest:
    """Parse a manifest. It may come from another machine, so nothing in it is trusted: names must be plain file names.

    Raises:
        CheckpointError: missing, not JSON, another version, a wrong type, a name that leaves the folder.
    """
    path = Path(folder) / MANIFEST
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path}: missing; the checkpoint is no checkpoint, or its save did not finish"
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: expected a checkpoint manifest as JSON, met {error}") from error
    if not isinstance(raw, dict) or raw.get("version") != VERSION:
        met = raw.get("version") if isinstance(raw, dict) else type(raw).__name__
        raise CheckpointError(f"{path}: expected manifest version {VERSION}, met {met!r}")
    files = raw.get("files")
    if not isinstance(files, list) or not files:
        raise CheckpointError(f"{path}: expected a list of files, met {files!r}")
    return CheckpointManifest(
        step=_integer(raw, "step", path),
        attempt=_integer(raw, "attempt", path),
        world=_integer(raw, "world", path),
        finite=raw.get("finite") is True,
        created_ns=_integer(raw, "created_ns", path),
        files=tuple(_file_entry(item, path) for item in files),
    )


def verify(folder: str) -> CheckpointManifest:
    """Check that the folder holds what its manifest says: every file, every size, every hash, finite values, and no
    shard that the manifest does not know.

    Raises:
        CheckpointError: naming the file and what is wrong with it.
    """
    target = Path(folder)
    manifest = read_manifest(folder)
    if not manifest.finite:
        raise CheckpointError(f"{target}: holds NaN or Inf, as its manifest says; it cannot be trained from")
    known = {entry.name for entry in manifest.files}
    if ".metadata" not in known:
        raise CheckpointError(
            f"{target / MANIFEST}: expected .metadata among the files, met {', '.join(sorted(known))}"
        )
    for entry in manifest.files:
        path = target / entry.name
        if path.is_symlink() or not path.is_file():
            raise CheckpointError(f"{path}: expected a file of {entry.size_bytes} bytes, met none")
        size = path.stat().st_size
        if size != entry.size_bytes:
            raise CheckpointError(f"{path}: expected {entry.size_bytes} bytes, met {size}")
        met = hash_file(path)
        if met != entry.xxh3_64:
            raise CheckpointError(f"{path}: expected xxh3 {entry.xxh3_64}, met {met}; the file was changed or damaged")
    for path in target.glob("*.distcp"):
        if path.name not in known:
            raise CheckpointError(f"{path}: a shard that the manifest does not list; the folder was written twice")
    return manifest


def retire(run_path: str, keep: int, needed: Sequence[str] = (), superseded: Sequence[str] = ()) -> list[str]:
    """Remove old checkpoints so that the `keep` newest with finite values stay (0: keep all). Those in `needed` are
    never removed; those in `superseded` are left alone and do not count. Returns the removed paths. The manifest goes
    first: a folder that is half gone is no checkpoint."""
    ours = [info for info in committed(run_path) if info.path not in superseded] if keep else []
    good = [info for info in ours if read_manifest(str(Path(run_path) / info.path)).finite]
    if len(good) <= keep:
        return []
    removed = []
    for info in ours[: ours.index(good[-keep])]:
        if info.path in needed:
            continue
        folder = Path(run_path) / info.path
        (folder / MANIFEST).unlink()
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
        removed.append(info.path)
    return removed


def _integer(raw: dict[str, Any], key: str, where: Path) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise CheckpointError(f"{where}: expected {key} as a non-negative integer, met {value!r}")
    return value


def _file_entry(item: object, where: Path) -> FileEntry:
    if not isinstance(item, dict):
        raise CheckpointError(f"{where}: expected an object a file, met {item!r}")
    name, digest = item.get("name"), item.get("xxh3_64")
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_.\-]+", name) or name in (".", ".."):
        raise CheckpointError(f"{where}: expected plain file names, met {name!r}")
    if not isinstance(digest, str):
        raise CheckpointError(f"{where}: expected xxh3_64 of {name}, met {digest!r}")
    return FileEntry(name=name, size_bytes=_integer(item, "size_bytes", where), xxh3_64=digest)
