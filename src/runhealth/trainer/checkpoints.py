"""Checkpoints on disk: where they lie, what makes one complete, and how it is verified. Importable without torch.

A checkpoint is a folder of its own, never written twice: `step-00000100`, or `step-00000100-a001` when attempt 1 comes
to step 100 again. `MANIFEST.json` is written last, under a temporary name that is then renamed: a folder without it is
a save that did not finish. torch.distributed.checkpoint itself keeps no checksums and loads flipped bits and mixed
folders without a word, so every size and xxh3 hash is checked before a single byte is loaded.

They lie below a base: the run's folder, or a folder or URL of the run's name below `checkpoint.target` of its config.
"""

import json
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from runhealth.storage.errors import CheckpointError
from runhealth.storage.jsontext import parse_json
from runhealth.trainer.folders import Folder, join, open_folder

FOLDER = "checkpoints"
MANIFEST = "MANIFEST.json"
VERSION = 1
COMPLAINTS = 8  # damaged files that an error names
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


def base_of(target: str, run: str, run_path: str) -> str:
    """What a run's checkpoint paths are relative to."""
    return join(target, run) if target else run_path


def committed(base: str) -> list[CheckpointInfo]:
    """All checkpoints of a run that have a manifest, ordered by (step, attempt)."""
    found = []
    folder = join(base, FOLDER)
    for name in open_folder(folder).folders():
        match = _NAME.fullmatch(name)
        if match and open_folder(join(folder, name)).size(MANIFEST) >= 0:
            found.append(CheckpointInfo(step=int(match[1]), attempt=int(match[2] or 0), path=f"{FOLDER}/{name}"))
    return sorted(found, key=lambda info: (info.step, info.attempt))


def newest_verified(
    base: str, superseded: Iterable[str] = ()
) -> tuple[CheckpointInfo | None, list[tuple[CheckpointInfo, str]]]:
    """The newest checkpoint that passes verification, and those newer ones that did not, with the reason. Paths in
    `superseded` belong to a past that a rollback left and are not considered."""
    ignored = frozenset(superseded)
    failed = []
    for info in reversed(committed(base)):
        if info.path in ignored:
            continue
        try:
            verify(join(base, info.path))
        except CheckpointError as error:
            failed.append((info, str(error)))
        else:
            return info, failed
    return None, failed


def commit(
    folder: str, *, step: int, attempt: int, world: int, finite: bool, files: Sequence[FileEntry] | None = None
) -> CheckpointManifest:
    """Write the manifest, atomically and last. `files`: what was written, with the hashes of the bytes on their way to
    the disk; None: whatever lies in the folder, hashed as it is now."""
    target = open_folder(folder)
    entries = tuple(entries_of(target) if files is None else sorted(files, key=lambda entry: entry.name))
    manifest = CheckpointManifest(
        step=step, attempt=attempt, world=world, finite=finite, created_ns=time.time_ns(), files=entries
    )
    raw = {
        "version": VERSION,
        "step": step,
        "attempt": attempt,
        "world": world,
        "finite": finite,
        "created_ns": manifest.created_ns,
        "files": [{"name": f.name, "size_bytes": f.size_bytes, "xxh3_64": f.xxh3_64} for f in entries],
    }
    target.write_whole(MANIFEST, json.dumps({**raw, "xxh3_64": _own_hash(raw)}, indent=1).encode())
    return manifest


def entries_of(folder: Folder) -> list[FileEntry]:
    """Every plain file of a folder with the hash of its bytes."""
    return [FileEntry(name=name, size_bytes=folder.size(name), xxh3_64=folder.hash(name)) for name in folder.names()]


def read_manifest(folder: str) -> CheckpointManifest:
    """Parse a manifest. It may come from another machine, so nothing in it is trusted: names must be plain file names.

    Raises:
        CheckpointError: missing, not JSON, another version, a wrong type, a name that leaves the folder.
    """
    path = join(folder, MANIFEST)
    try:
        raw = parse_json(open_folder(folder).read(MANIFEST))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path}: missing; the checkpoint is no checkpoint, or its save did not finish"
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: expected a checkpoint manifest as JSON, met {error}") from error
    if not isinstance(raw, dict) or raw.get("version") != VERSION:
        met = raw.get("version") if isinstance(raw, dict) else type(raw).__name__
        raise CheckpointError(f"{path}: expected manifest version {VERSION}, met {met!r}")
    own = raw.pop("xxh3_64", None)
    if own is not None and own != _own_hash(raw):
        raise CheckpointError(f"{path}: expected xxh3 {own} over its content, met {_own_hash(raw)}; it was changed")
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


def verify(folder: str, part: int = 0, parts: int = 1) -> CheckpointManifest:
    """Check that the folder holds what its manifest says: every file, every size, every hash, finite values, and no
    shard that the manifest does not know. Ranks may share the hashing: this one hashes every `parts`-th file.

    Raises:
        CheckpointError: naming every file that is damaged, and what is wrong with it.
    """
    target = open_folder(folder)
    manifest = read_manifest(folder)
    if not manifest.finite:
        raise CheckpointError(f"{folder}: holds NaN or Inf, as its manifest says; it cannot be trained from")
    known = {entry.name for entry in manifest.files}
    if ".metadata" not in known:
        raise CheckpointError(
            f"{join(folder, MANIFEST)}: expected .metadata among the files, met {', '.join(sorted(known))}"
        )
    complaints = [
        f"{join(folder, name)}: a shard that the manifest does not list; the folder was written twice"
        for name in target.names()
        if name.endswith(".distcp") and name not in known
    ]
    for number, entry in enumerate(manifest.files):
        try:
            check_file(target, entry, hashed=number % parts == part)
        except CheckpointError as error:
            complaints.append(str(error))
    if complaints:
        more = f"; and {len(complaints) - COMPLAINTS} more" if len(complaints) > COMPLAINTS else ""
        raise CheckpointError("; ".join(complaints[:COMPLAINTS]) + more)
    return manifest


def check_file(folder: Folder, entry: FileEntry, *, hashed: bool = True) -> None:
    """Hold one file against what was written. Raises CheckpointError that names it."""
    path = join(folder.url, entry.name)
    try:
        size = folder.size(entry.name)
        if size < 0:
            raise CheckpointError(f"{path}: expected a file of {entry.size_bytes} bytes, met none")
        if size != entry.size_bytes:
            raise CheckpointError(f"{path}: expected {entry.size_bytes} bytes, met {size}")
        met = folder.hash(entry.name) if hashed else entry.xxh3_64
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    if met != entry.xxh3_64:
        raise CheckpointError(f"{path}: expected xxh3 {entry.xxh3_64}, met {met}; the file was changed or damaged")


def sweep(base: str) -> list[str]:
    """Remove what saves that were interrupted left behind: folders without a manifest and without `.metadata`, which
    is written when all shards are. Only while no rank runs. Returns their paths."""
    removed = []
    for name in open_folder(join(base, FOLDER)).folders():
        folder = open_folder(join(base, f"{FOLDER}/{name}"))
        if _NAME.fullmatch(name) and folder.size(MANIFEST) < 0 and folder.size(".metadata") < 0:
            folder.remove_all()
            removed.append(f"{FOLDER}/{name}")
    return removed


def retire(base: str, keep: int, needed: Sequence[str] = (), superseded: Sequence[str] = ()) -> list[str]:
    """Remove old checkpoints so that the `keep` newest with finite values stay (0: keep all). Those in `needed` are
    never removed; those in `superseded` are left alone and do not count, nor does one whose manifest is damaged.
    Returns the removed paths. The manifest goes first: a folder that is half gone is no checkpoint."""
    ours = [info for info in committed(base) if info.path not in superseded] if keep else []
    good = [info for info in ours if _is_finite(join(base, info.path))]
    if len(good) <= keep:
        return []
    removed = []
    for info in ours[: ours.index(good[-keep])]:
        if info.path in needed:
            continue
        folder = open_folder(join(base, info.path))
        folder.remove(MANIFEST)
        folder.remove_all()
        removed.append(info.path)
    return removed


def _is_finite(folder: str) -> bool:
    try:
        return read_manifest(folder).finite
    except CheckpointError:
        return False


def _own_hash(raw: dict[str, Any]) -> str:
    """Of a manifest's content, without its own hash: a flipped bit in it would else accuse a shard."""
    return xxhash.xxh3_64_hexdigest(json.dumps(raw, sort_keys=True).encode())


def _integer(raw: dict[str, Any], key: str, where: str) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise CheckpointError(f"{where}: expected {key} as a non-negative integer, met {value!r}")
    return value


def _file_entry(item: object, where: str) -> FileEntry:
    if not isinstance(item, dict):
        raise CheckpointError(f"{where}: expected an object a file, met {item!r}")
    name, digest = item.get("name"), item.get("xxh3_64")
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_.\-]+", name) or name in (".", ".."):
        raise CheckpointError(f"{where}: expected plain file names, met {name!r}")
    if not isinstance(digest, str):
        raise CheckpointError(f"{where}: expected xxh3_64 of {name}, met {digest!r}")
    return FileEntry(name=name, size_bytes=_integer(item, "size_bytes", where), xxh3_64=digest)
