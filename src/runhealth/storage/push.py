"""push: what is published of a run, copied to a store on any fsspec file system.

Parts are few, large and immutable, so each is uploaded once; `run.duckdb` comes last, whole, so a reader there sees
one publication or the next. The live rank log stays on the local disk.
"""

import json
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb

from runhealth.storage.errors import RunNotFoundError, StoreError
from runhealth.storage.jsontext import parse_json
from runhealth.storage.lease import lease
from runhealth.storage.parts import PartFile, problem_of
from runhealth.storage.places import is_remote
from runhealth.storage.schema import PARTS
from runhealth.storage.store import read_run

ORIGIN = "origin.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class PushResult:
    """Where the run is now, and what was uploaded to get it there."""

    url: str
    files: int
    size_bytes: int


def push(run_path: str, store_url: str, *, wait_s: float = 10.0) -> PushResult:
    """Bring `<store_url>/<name of the run>` up to date with the published local run. Idempotent.

    The first push claims the name there (create-exclusive), so two runs of one name never mix. Raises RunNotFoundError,
    or StoreError for an unpublished run, a damaged part, a claimed name or a file system that fails.
    """
    run = read_run(run_path)
    if run is None:
        raise RunNotFoundError(f"no run in {run_path}: expected run.json, run.duckdb or log there")
    if is_remote(run.path):
        raise StoreError(f"expected a local run to push, met {run.path}")
    folder = Path(run.path)
    if not (folder / "run.duckdb").exists():
        raise StoreError(f"{folder}/run.duckdb is missing: publish the run before it is pushed")
    (folder / ".publish").mkdir(exist_ok=True)
    url = f"{store_url.rstrip('/')}/{run.name}"
    with lease(folder / ".publish" / "push.lock", "push", wait_s):
        snapshot = folder / ".publish" / "pushed.duckdb"
        try:
            snapshot.unlink(missing_ok=True)
            os.link(folder / "run.duckdb", snapshot)  # the publisher replaces the name, not this file
            return _upload(folder, run.name, run.created_ns, snapshot, url)
        except OSError as err:
            if isinstance(err, StoreError):
                raise
            raise StoreError(f"cannot push {run.path} to {url}: {err}") from err
        finally:
            snapshot.unlink(missing_ok=True)


def _upload(folder: Path, name: str, created_ns: int, snapshot: Path, url: str) -> PushResult:
    import fsspec

    try:
        fs, target = fsspec.core.url_to_fs(url)
        _claim(fs, target, url, {"name": name, "created_ns": created_ns, "host": socket.gethostname()})
        files = size = 0
        fs.invalidate_cache()
        parts = _parts_of(snapshot)
        for part in parts:
            problem = problem_of(folder, part)
            if problem:
                raise StoreError(problem)
            remote = f"{target}/{part.file}"
            if not fs.exists(remote) or fs.size(remote) != part.size_bytes:
                fs.makedirs(f"{target}/parts", exist_ok=True)
                fs.put_file(str(folder / part.file), remote)
                files, size = files + 1, size + part.size_bytes
        for source, file in ((folder / "run.json", "run.json"), (snapshot, "run.duckdb")):
            if source.exists():
                fs.put_file(str(source), f"{target}/{file}")
                files, size = files + 1, size + source.stat().st_size
        _remove_merged(fs, target, folder, {part.file for part in parts})
    except StoreError:
        raise
    except Exception as err:
        raise StoreError(f"cannot push to {url}: {err}") from err
    return PushResult(url=url, files=files, size_bytes=size)


def _remove_merged(fs: Any, target: str, folder: Path, used: set[str]) -> None:
    """Remove parts that were merged into others; as here, some time after that, for readers that opened them before."""
    if not fs.exists(f"{target}/parts"):
        return
    for path in fs.ls(f"{target}/parts", detail=False):
        file = f"parts/{path.rpartition('/')[2]}"
        if file.endswith(".parquet") and file not in used and not (folder / file).exists():
            fs.rm_file(path)


def _claim(fs: Any, target: str, url: str, origin: dict[str, object]) -> None:
    fs.makedirs(target, exist_ok=True)
    try:
        fs.pipe_file(f"{target}/{ORIGIN}", json.dumps(origin).encode(), mode="create")
    except FileExistsError:
        try:
            found = parse_json(fs.cat_file(f"{target}/{ORIGIN}"))
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise StoreError(
                f"{url}/{ORIGIN}: expected what says whose run this is, met something else;"
                " push under another name or store"
            ) from None
        if found != origin:
            raise StoreError(
                f"{url} belongs to another run (created {found.get('created_ns')} on {found.get('host')}): "
                "push under another name or store"
            ) from None


def _parts_of(database: Path) -> list[PartFile]:
    columns = [name for name, _ in PARTS.fixed]
    with duckdb.connect(str(database), read_only=True) as connection:
        rows = connection.execute(f"SELECT {', '.join(columns)} FROM parts ORDER BY number").fetchall()
    return [PartFile(**dict(zip(columns, row, strict=True))) for row in rows]
