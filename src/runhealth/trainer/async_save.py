"""Saving with torch.distributed.checkpoint, in the background if wanted: training stands still for a copy only.

`Saver.start` copies this rank's tensors to host memory (the blocking part); a thread then writes them, through a
process group of its own, while training goes on. Each rank writes its own file and hashes the bytes on their way out;
rank 0 collects the hashes and writes the manifest last; then each rank reads its file back and holds it against its
hash. Only then is the checkpoint verified. One save at most is under way. Nothing here raises into training: a save
that fails is reported, and the next one is tried.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded
from torch.distributed.tensor import DTensor

from runhealth.storage.errors import CheckpointError
from runhealth.trainer import checkpoints
from runhealth.trainer.checkpoints import FileEntry
from runhealth.trainer.dcp import SafeReader, first_line
from runhealth.trainer.folders import Folder, is_url, join, open_folder

WRITE_TIMEOUT_FACTOR = 10.0  # files take longer than collectives do


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOutcome:
    """What became of one save on this rank. `error` is empty if it went well; rank 0 alone knows `verified` and sizes.

    `blocking_s` was lost to training, `write_s` went by in the background until the checkpoint was verified."""

    path: str  # relative to the base of the run's checkpoints
    step: int
    blocking_s: float
    write_s: float = 0.0
    size_bytes: int = 0
    verified: bool = False
    error: str = ""

    @property
    def seconds(self) -> float:
        return self.blocking_s + self.write_s


class Saver:
    """The saves of one rank in one attempt. Every method but `poll` is collective."""

    def __init__(self, base: str, *, attempt: int, background: bool, timeout_s: float) -> None:
        self._base, self._attempt, self._background = base, attempt, background
        # collectives of a second thread need a group of their own
        timeout = timedelta(seconds=timeout_s * WRITE_TIMEOUT_FACTOR)
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._thread: threading.Thread | None = None
        self._done: SaveOutcome | None = None

    def start(self, state: Mapping[str, Tensor], step: int) -> SaveOutcome | None:
        """Save `state`. Returns the outcome of the save before, if it was not polled yet. The caller may change the
        tensors as soon as this returns."""
        started = time.perf_counter()
        before = self.wait()  # a save that is slower than the interval holds training up, and is seen to
        relative = checkpoints.relative_path(step, self._attempt)
        writer = _writer(join(self._base, relative))
        staged: dict[str, Tensor] = writer.stage(dict(state)) if self._background else dict(state)
        blocking_s = time.perf_counter() - started
        if not self._background:
            self._write(writer, staged, step, relative, blocking_s)
            return before
        arguments = (writer, staged, step, relative, blocking_s)
        self._thread = threading.Thread(target=self._write, args=arguments, name="checkpoint", daemon=True)
        self._thread.start()
        return before

    def poll(self) -> SaveOutcome | None:
        """The outcome of the save that ended since the last call."""
        if self._thread is not None and self._thread.is_alive():
            return None
        self._thread = None
        done, self._done = self._done, None
        return done

    def wait(self) -> SaveOutcome | None:
        """Like `poll`, once the save that is under way has ended."""
        if self._thread is not None:
            self._thread.join()
        return self.poll()

    def _write(
        self, writer: FileSystemWriter, state: dict[str, Tensor], step: int, relative: str, blocking_s: float
    ) -> None:
        started = time.perf_counter()
        try:
            outcome = write_checkpoint(
                self._base, relative, writer, state, step=step, attempt=self._attempt, group=self._group
            )
        except BaseException as error:  # noqa: BLE001  CheckpointException is a BaseException; a thread has no caller
            outcome = SaveOutcome(path=relative, step=step, blocking_s=0.0, error=first_line(error))
        elapsed_s = time.perf_counter() - started
        self._done = SaveOutcome(
            path=relative,
            step=step,
            blocking_s=blocking_s + (0.0 if self._background else elapsed_s),
            write_s=elapsed_s if self._background else 0.0,
            size_bytes=outcome.size_bytes,
            verified=outcome.verified,
            error=outcome.error,
        )


def save(base: str, state: Mapping[str, Tensor], *, step: int, attempt: int) -> SaveOutcome:
    """Write one checkpoint now, through the group of the world; collective. A failure is reported, never raised."""
    started = time.perf_counter()
    relative = checkpoints.relative_path(step, attempt)
    writer = _writer(join(base, relative))
    outcome = write_checkpoint(base, relative, writer, dict(state), step=step, attempt=attempt, group=None)
    return SaveOutcome(
        path=relative,
        step=step,
        blocking_s=time.perf_counter() - started,
        size_bytes=outcome.size_bytes,
        verified=outcome.verified,
        error=outcome.error,
    )


def write_checkpoint(
    base: str,
    relative: str,
    writer: FileSystemWriter,
    state: dict[str, Tensor],
    *,
    step: int,
    attempt: int,
    group: dist.ProcessGroup | None,
) -> SaveOutcome:
    """A fresh folder, the shards, the manifest, the reading back: in this order, all ranks together."""
    url = join(base, relative)
    leader, world = dist.get_rank() == 0, dist.get_world_size()
    folder: Folder | None = None
    error = ""
    try:
        folder = open_folder(url)
        if leader:
            folder.make()
    except (OSError, CheckpointError) as problem:
        error = f"{url}: cannot be created: {getattr(problem, 'strerror', None) or problem}"
    error = _first(_gather((error, True, ()), world, group))[0]
    if error or folder is None:
        return SaveOutcome(path=relative, step=step, blocking_s=0.0, error=error)
    hashing = _Hashing(writer.fs)
    writer.fs = hashing  # type: ignore[assignment]
    try:
        save_sharded(state, storage_writer=writer, process_group=group)
    except (CheckpointException, OSError, RuntimeError) as problem:  # CheckpointException is a BaseException
        error = f"{url}: {first_line(problem)}"
    finite = all(_is_finite(value) for value in state.values())
    error, finite, written = _first(_gather((error, finite, tuple(hashing.written())), world, group))
    if error:  # what the disk said, if it said something: torch reports a short write by its own bookkeeping
        said = f"{url}: rank {dist.get_rank()}: {hashing.trouble}" if hashing.trouble else ""
        error = _first(_gather((said, True, ()), world, group))[0] or error
        if leader:
            folder.remove_all()  # half a checkpoint is none, and a full disk needs its room
        return SaveOutcome(path=relative, step=step, blocking_s=0.0, error=error)
    size = 0
    if leader:
        try:
            manifest = checkpoints.commit(url, step=step, attempt=attempt, world=world, finite=finite, files=written)
            size = manifest.size_bytes
        except OSError as problem:
            error = f"{url}: the manifest cannot be written: {problem}"
            folder.remove_all()
    error = _first(_gather((error, True, ()), world, group))[0]
    if not error:
        error = _first(_gather((_read_back(folder, hashing.written(), leader), True, ()), world, group))[0]
    if not error and not finite:
        error = f"{url}: holds NaN or Inf; it cannot be trained from"
    return SaveOutcome(path=relative, step=step, blocking_s=0.0, size_bytes=size, verified=not error, error=error)


Said = tuple[str, bool, tuple[FileEntry, ...]]


def _gather(mine: Said, world: int, group: dist.ProcessGroup | None) -> list[Said]:
    """Error, whether all values are finite, files written: of every rank."""
    said: list[Any] = [None] * world
    dist.all_gather_object(said, mine, group=group)
    return said


def _first(said: list[Said]) -> Said:
    """The first error of any rank, finite only if all are, all files."""
    return (
        next((error for error, _, _ in said if error), ""),
        all(finite for _, finite, _ in said),
        tuple(entry for _, _, entries in said for entry in entries),
    )


def _read_back(folder: Folder, written: list[FileEntry], leader: bool) -> str:
    """Hold what this rank wrote against what now lies there."""
    try:
        for entry in written:
            checkpoints.check_file(folder, entry)
        if leader:
            SafeReader(folder.url).read_metadata()
    except (CheckpointError, OSError) as problem:
        return str(problem)
    return ""


def _is_finite(value: Tensor) -> bool:
    mine = value.to_local() if isinstance(value, DTensor) else value
    return bool(torch.isfinite(mine).all())


def _writer(url: str) -> FileSystemWriter:
    """One file a rank. It also stages: it copies tensors to the host without pinned memory, which torch's own default
    stager insists on and a machine without an accelerator does not have."""
    return FsspecWriter(url) if is_url(url) else FileSystemWriter(url)


class _Hashing:
    """torch's file system of a writer, with the bytes hashed as they are handed over."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._entries: dict[str, FileEntry] = {}
        self.trouble = ""  # the first error of the storage

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def written(self) -> list[FileEntry]:
        return list(self._entries.values())

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        try:
            with self._inner.create_stream(path, mode) as stream:
                if "w" not in mode:
                    yield stream
                    return
                hashing = _HashingStream(stream, self._note)
                yield hashing
        except OSError as error:
            self._note(error)
            raise
        name = os.fspath(path).rpartition("/")[2]
        self._entries[name] = FileEntry(name=name, size_bytes=hashing.size_bytes, xxh3_64=hashing.digest.hexdigest())

    def _note(self, error: OSError) -> None:
        self.trouble = self.trouble or f"{error.strerror or error}"

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        self._inner.rename(path, new_path)
        old, new = (os.fspath(one).rpartition("/")[2] for one in (path, new_path))
        entry = self._entries.pop(old)
        self._entries[new] = FileEntry(name=new, size_bytes=entry.size_bytes, xxh3_64=entry.xxh3_64)


class _HashingStream:
    """Writing only, from the front to the end. `on_error` hears of a write that fails before torch does."""

    def __init__(self, stream: Any, on_error: Callable[[OSError], None]) -> None:
        self._stream, self._on_error = stream, on_error
        self.digest = xxhash.xxh3_64()
        self.size_bytes = 0

    def write(self, block: Any) -> int:
        view = memoryview(block).cast("B")
        self.digest.update(view)
        self.size_bytes += len(view)
        try:
            done = self._stream.write(block)
        except OSError as error:
            self._on_error(error)
            raise
        return len(view) if done is None else int(done)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
