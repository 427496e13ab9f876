"""A foreign log as a run of the store: once imported, it is diagnosed, queried and shown like one of our own."""

import hashlib
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path

from runhealth.storage.blocks import StepBlock
from runhealth.storage.durable import sync_folder
from runhealth.storage.errors import ConfigError, NoUsableDataError, StoreError
from runhealth.storage.importers.open import ImportedLog, open_log
from runhealth.storage.importers.tracks import Source, Track
from runhealth.storage.publish import Publisher
from runhealth.storage.ranklog import RankLog
from runhealth.storage.records import Record, RunEvent, SourceInfo
from runhealth.storage.store import RunInfo, Store, check_run_name, read_run

IMPORTED = "imported"  # key of run.json's config, and kind of the event that tells how the reading went
IMPORT_VERSION = 1  # a release that reads logs differently imports them anew
_BATCH_RECORDS = 8192
_MAX_RANK_LOGS = 400  # that are open at a time
_MAX_ATTEMPT = 999
_CHUNK_BYTES = 1 << 20
_REPLACED = ".replaced"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # fcntl.h, stdio.h of glibc


def import_log(path: str, name: str, store: Store, mapping: Mapping[str, str] | None = None) -> RunInfo:
    """Put the log (or folder) `path` into `store` as the run `name`; return the run.

    Values are kept as doubles, attempts and ranks as the log has them. Importing the same content again changes
    nothing; a log that has changed since is imported anew, and replaces the run as a whole once it is complete, as the
    next generation (`config["imported"]["generation"]`). Until then, and if the reading fails, the old run stays.

    Raises:
        ConfigError: the name belongs to a run that was measured, or was imported from another place.
        NoUsableDataError, StoreError: the log cannot be read, or the store not be written.
    """
    check_run_name(name)
    target = Path(store.root) / name
    _recover(target)
    log = open_log(path, mapping=mapping)
    digest, size_bytes = _fingerprint(log)
    source = path if "://" in path else str(Path(path).absolute())
    known = _known(target, name, source)
    if known is not None and known["hash"] == digest and known["mapping"] == dict(mapping or {}):
        run = read_run(str(target))
        assert run is not None
        return run
    config = {
        IMPORTED: {
            "source": source,
            "hash": digest,
            "bytes": size_bytes,
            "mapping": dict(mapping or {}),
            "version": IMPORT_VERSION,
            "generation": int(str(known["generation"])) + 1 if known is not None else 0,
        }
    }
    try:
        with _staging(Path(store.root)) as staged:
            _fill(log, Store(str(staged)), name, config)
            _swap(staged / name, target, staged)
    except OSError as error:
        if isinstance(error, StoreError):
            raise
        raise StoreError(f"cannot import into {target}: {error.strerror or error} ({error.filename})") from error
    run = read_run(str(target))
    assert run is not None
    return run


def _known(target: Path, name: str, source: str) -> Mapping[str, object] | None:
    """What the run was imported from, if it is there. ConfigError if it must not be replaced."""
    run = read_run(str(target)) if target.exists() else None
    if run is None:
        if target.exists():
            raise ConfigError(f"{target} exists and is no run: choose another name than {name!r}")
        return None
    imported = run.config.get(IMPORTED)
    if not isinstance(imported, Mapping):
        raise ConfigError(f"run {name!r} was measured, not imported: choose another name")
    if imported.get("source") != source:
        raise ConfigError(f"run {name!r} was imported from {imported.get('source')}: choose another name for {source}")
    return imported


def _fingerprint(log: ImportedLog) -> tuple[str, int]:
    """SHA-256 over version and content of all files of a log, and their size."""
    digest = hashlib.sha256(f"runhealth import {IMPORT_VERSION}\n".encode())
    size = 0
    for path in sorted(set(_files(log))):
        try:
            with _raw(path) as stream:
                while chunk := stream.read(_CHUNK_BYTES):
                    digest.update(chunk)
                    size += len(chunk)
        except OSError as error:
            raise NoUsableDataError(f"cannot read {path}: {error.strerror or error}") from error
        digest.update(b"\0end of file\0")
    return digest.hexdigest(), size


def _files(log: ImportedLog) -> Iterator[str]:
    for track in log.tracks:
        for path in _paths(track):
            if "://" not in path and Path(path).is_dir():
                yield from (str(file) for file in Path(path).rglob("*") if file.is_file())
            else:
                yield path


def _paths(track: Source) -> list[str]:
    if isinstance(track, Track):
        return [part.path for part in track.parts]
    return [str(getattr(track, "path", ""))]


def _raw(path: str):  # type: ignore[no-untyped-def]
    if "://" in path:
        import fsspec  # slow to import, and most logs are local

        return fsspec.open(path, "rb").open()
    return open(path, "rb")


@contextmanager
def _staging(root: Path) -> Iterator[Path]:
    """A folder beside the runs, in which a run is built; gone at the end whatever happens."""
    folder = root / f".import-{uuid.uuid4().hex}"
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _fill(log: ImportedLog, store: Store, name: str, config: Mapping[str, object]) -> None:
    run = store.create_run(name, config)
    with ExitStack() as stack:
        logs: dict[tuple[int, int], RankLog] = {}
        waiting: dict[tuple[int, int], list[Record]] = {}
        last: Record | None = None
        blocks = (block.records() if isinstance(block, StepBlock) else (block,) for block in log.blocks())
        for count, record in enumerate(chain.from_iterable(blocks), 1):
            if record.attempt > _MAX_ATTEMPT:
                raise NoUsableDataError(f"{log.path}: expected attempts up to {_MAX_ATTEMPT}, met {record.attempt}")
            waiting.setdefault((record.attempt, record.rank), []).append(record)
            last = record
            if count % _BATCH_RECORDS == 0:
                _write(store, run, logs, waiting, stack)
        if last is not None:
            told = _told(log.describe(), last)
            waiting.setdefault((told.attempt, told.rank), []).append(told)
        _write(store, run, logs, waiting, stack)
    Publisher(run.path).publish()


def _write(
    store: Store,
    run: RunInfo,
    logs: dict[tuple[int, int], RankLog],
    waiting: dict[tuple[int, int], list[Record]],
    stack: ExitStack,
) -> None:
    for key in sorted(waiting):
        if key not in logs:
            if len(logs) >= _MAX_RANK_LOGS:
                raise NoUsableDataError(f"expected at most {_MAX_RANK_LOGS} ranks and attempts, met more")
            logs[key] = stack.enter_context(_rank_log(store, run, *key))
        logs[key].append(waiting[key])
    waiting.clear()


def _rank_log(store: Store, run: RunInfo, attempt: int, rank: int) -> RankLog:
    # The store counts attempts without gaps: what the log leaves out is claimed too, and stays empty.
    for number in range(attempt + 1):
        claimed = store.claim_attempt(run, f"import-{number}")
    # a number out of a text is no measurement in single precision
    return RankLog.create(claimed.path, rank, fsync="step", doubles=True)


def _told(info: SourceInfo, last: Record) -> RunEvent:
    return RunEvent(
        attempt=last.attempt,
        step=last.step,
        rank=last.rank,
        kind=IMPORTED,
        message=f"imported as {info.format}: {info.rows_kept} of {info.rows_read} rows kept",
        data={
            "format": info.format,
            "rows_read": info.rows_read,
            "rows_kept": info.rows_kept,
            "rows_rejected": info.rows_rejected,
            "rejected": [{"line": one.line, "why": one.why} for one in info.rejected],
            "notes": list(info.notes),
        },
    )


def _swap(made: Path, target: Path, staged: Path) -> None:
    """Put the finished run in its place. Readers of the old one keep what they have open; it goes with `staged`."""
    if not target.exists():
        made.rename(target)
    elif not _exchanged(made, target):
        old = staged / _REPLACED / target.name
        old.parent.mkdir()
        target.rename(old)
        try:
            made.rename(target)
        except OSError:
            old.rename(target)
            raise
    sync_folder(target.parent)


def _exchanged(one: Path, other: Path) -> bool:
    """Exchange two folders in one step, as renameat2(2) of Linux does; False where the system cannot."""
    import ctypes  # few imports replace a run

    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    return bool(rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0)


def _recover(target: Path) -> None:
    """Where folders cannot be exchanged, a process that was killed between two renames leaves the old run aside."""
    if target.exists():
        return
    for place in sorted(target.parent.glob(f".import-*/{_REPLACED}/{target.name}")):
        place.rename(target)
        return
