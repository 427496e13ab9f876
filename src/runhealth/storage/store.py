"""Store: where runs live, how they are named, created and found.

A store is a folder of run folders. A local root can be written; any fsspec URL (`s3://…`, `memory://…`) can be read.
"""

import difflib
import json
import os
import socket
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

from runhealth.storage.errors import AmbiguousRunError, RunNotFoundError, StoreError
from runhealth.storage.index import run_bodies
from runhealth.storage.jsontext import parse_json
from runhealth.storage.places import Place, RemotePlace, is_remote, place_of

RUN_FORMAT_VERSION = 1
_MAX_NAME = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """One run of a store. `problem` says why its run.json cannot be read; `bundled`: shipped inside the package."""

    name: str
    path: str
    created_ns: int = 0
    config: Mapping[str, object] = field(default_factory=dict)
    bundled: bool = False
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptDir:
    """A claimed attempt; `path` is what `RankLog.create` takes."""

    attempt: int
    path: str


def check_run_name(name: str) -> str:
    """The name itself, or StoreError saying what is wrong with it."""
    if not name or len(name) > _MAX_NAME:
        raise StoreError(f"a run name has 1 to {_MAX_NAME} characters, met {len(name)}: {name[:40]!r}")
    if name.startswith(".") or name == "latest" or any(c in "/\\" or not c.isprintable() for c in name):
        raise StoreError(
            f"a run name has no slash, backslash or control character, does not begin with a dot and is not 'latest', "
            f"met {name!r}"
        )
    return name


class Store:
    """Runs under `root`; None takes $RUNHEALTH_STORE, else ./runs. Runs bundled with the package come last."""

    def __init__(self, root: str | None = None) -> None:
        self.root = root or os.environ.get("RUNHEALTH_STORE") or "runs"
        if not is_remote(self.root):
            self.root = str(Path(self.root.removeprefix("file://")).expanduser().absolute())
        self._place = place_of(self.root)

    def runs(self) -> list[RunInfo]:
        """All runs, oldest first, then the bundled ones that no run of the store hides. Raises StoreError."""
        own = sorted(self._own_runs(), key=lambda run: (run.created_ns, run.name))
        names = {run.name for run in own}
        return own + [run for run in _bundled_runs() if run.name not in names]

    def resolve(self, name: str) -> RunInfo:
        """The run meant by an exact name, a path to a run folder, `latest`, or a unique prefix, tried in this order.

        `latest` is the run of the store with the newest activity; a bundled run only if the store has none. A prefix
        is looked for in the store first and among the bundled runs only if nothing fits there.
        Raises RunNotFoundError (with the nearest names), AmbiguousRunError or StoreError.
        """
        if name == "latest":
            return self._latest()
        found = self._exact(name)
        if found is not None:
            return found
        runs = self.runs()
        for bundled in (False, True):
            matches = [run for run in runs if run.bundled is bundled and name and run.name.startswith(name)]
            if len(matches) == 1:
                return matches[0]
            if matches:
                names = ", ".join(run.name for run in matches[:10])
                raise AmbiguousRunError(f"{name!r} fits {len(matches)} runs in {self.root}: {names}")
        nearest = tuple(difflib.get_close_matches(name, [run.name for run in runs], n=3, cutoff=0.5))
        hint = f"; did you mean {', '.join(nearest)}?" if nearest else ""
        if not runs:
            hint = "; it holds no runs"
        raise RunNotFoundError(f"no run {name!r} in {self.root} nor among the bundled runs{hint}", nearest)

    def create_run(self, name: str, config: Mapping[str, object] | None = None) -> RunInfo:
        """Create the run, or return it unchanged if it is there already. Raises StoreError."""
        check_run_name(name)
        folder = self._writable() / name
        body = {
            "format_version": RUN_FORMAT_VERSION, "name": name, "created_ns": time.time_ns(),
            "config": dict(config or {}),
        }  # fmt: skip
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _write_exclusive(folder / "run.json", body)
        except OSError as err:
            raise StoreError(f"cannot create run {name!r} in {self.root}: {err.strerror} ({err.filename})") from err
        run = _read_run(place_of(str(folder)))
        if run is None or run.problem:
            raise StoreError(f"{folder}/run.json cannot be read: {run.problem if run else 'it is gone'}")
        return run

    def claim_attempt(self, run: RunInfo, launch_key: str) -> AttemptDir:
        """The attempt of this launch: all callers with one key share it, another key gets the next number.

        Safe against racing processes: the claim is the rename of a prepared folder. Raises StoreError.
        """
        if is_remote(run.path) or run.bundled:
            raise StoreError(f"a live log is written to a local store; {run.path} is read-only")
        log = Path(run.path) / "log"
        prepared = log / f".claim-{uuid.uuid4().hex}"
        try:
            prepared.mkdir(parents=True)
            attempt = 0
            while True:
                folder = log / f"a{attempt:03d}"
                claim = _read_claim(folder)
                if claim is None:
                    body = {
                        "format_version": RUN_FORMAT_VERSION, "attempt": attempt, "launch_key": launch_key,
                        "created_ns": time.time_ns(), "host": socket.gethostname(), "pid": os.getpid(),
                    }  # fmt: skip
                    (prepared / "claim.json").write_text(json.dumps(body))
                    try:
                        prepared.rename(folder)
                    except OSError:
                        claim = _read_claim(folder)
                        if claim is None:
                            raise
                    else:
                        return AttemptDir(attempt=attempt, path=str(folder))
                if claim.get("launch_key") == launch_key:
                    return AttemptDir(attempt=attempt, path=str(folder))
                attempt += 1
        except OSError as err:
            raise StoreError(f"cannot claim an attempt in {log}: {err.strerror} ({err.filename})") from err
        finally:
            if prepared.exists():
                (prepared / "claim.json").unlink(missing_ok=True)
                prepared.rmdir()

    def _writable(self) -> Path:
        if is_remote(self.root):
            raise StoreError(
                f"a live run is written to a local store; {self.root} is remote and can only be read. "
                "Write to a local folder and copy the published run there"
            )
        return Path(self.root)

    def _own_runs(self) -> list[RunInfo]:
        if not is_remote(self.root):
            return self._local_runs()
        place = RemotePlace(self.root)
        names = [name for name in place.folders() if not name.startswith(".")]
        texts = place.read_texts([f"{name}/run.json" for name in names])
        runs = (_read_run(place.child(name), texts.get(f"{name}/run.json")) for name in names)
        return [run for run in runs if run is not None]

    def _local_runs(self) -> list[RunInfo]:
        def read(name: str) -> dict[str, Any] | None:
            run = _read_run(self._place.child(name))
            return {"created_ns": run.created_ns, "config": run.config} if run and not run.problem else None

        runs = []
        for name, body in run_bodies(self.root, read).items():
            if body is None:
                run = _read_run(self._place.child(name))
            else:
                run = RunInfo(name=name, path=f"{self.root}/{name}", **body)
            if run is not None:
                runs.append(run)
        return runs

    def _exact(self, name: str) -> RunInfo | None:
        if name and not name.startswith(".") and "/" not in name:
            run = _read_run(self._place.child(name))
            if run is not None:
                return run
            bundled = [run for run in _bundled_runs() if run.name == name]
            if bundled:
                return bundled[0]
        if is_remote(name) or (name and Path(name).is_dir()):
            return read_run(name)
        return None

    def _latest(self) -> RunInfo:
        own = self._own_runs()
        if own:
            return max(own, key=lambda run: (_last_activity_ns(run), run.name))
        bundled = _bundled_runs()
        if bundled:
            return bundled[-1]
        raise RunNotFoundError(f"no 'latest' run: {self.root} holds no runs")


def read_run(path: str) -> RunInfo | None:
    """The run in the folder or URL `path`; None if there is none."""
    return _read_run(place_of(path if is_remote(path) else str(Path(path.removeprefix("file://")).absolute())))


def _read_run(place: Place, text: str | None = None) -> RunInfo | None:
    """The run in a folder, or None if the folder holds none. A run.json that cannot be read is reported, not raised.
    `text` is what it says, if that is known already."""
    if text is None:
        try:
            text = place.read_text("run.json")
        except StoreError as err:
            if is_remote(place.path):
                raise  # the storage is away, not this run
            return RunInfo(name=place.name, path=place.path, problem=str(err))
    if text is None:
        if any(place.exists(part) for part in ("run.duckdb", "parts", "log")):
            return RunInfo(name=place.name, path=place.path, problem="run.json is missing")
        return None
    try:
        body: Any = parse_json(text)
        return RunInfo(
            name=place.name, path=place.path, created_ns=int(body["created_ns"]), config=dict(body.get("config") or {})
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as err:
        return RunInfo(name=place.name, path=place.path, problem=f"{place.path}/run.json is damaged: {err!r}")


def _bundled_runs() -> list[RunInfo]:
    """Runs shipped inside the package, by name."""
    folder = resources.files("runhealth") / "bundled"
    if not isinstance(folder, Path) or not folder.is_dir():
        return []
    found = (_read_run(place_of(str(entry))) for entry in sorted(folder.iterdir()) if entry.is_dir())
    return [replace(run, bundled=True) for run in found if run is not None]


def _last_activity_ns(run: RunInfo) -> int:
    """When the run was created, published or last appended to by a rank of its newest attempt."""
    times = [run.created_ns]
    if not is_remote(run.path):
        folder = Path(run.path)
        attempts = sorted(folder.glob("log/a*"), key=lambda attempt: (len(attempt.name), attempt.name))[-1:]
        files = [folder / "run.duckdb", *(file for attempt in attempts for file in attempt.glob("[rn]*/*.rlog"))]
        times += [file.stat().st_mtime_ns for file in files if file.exists()]
    return max(times)


def _read_claim(folder: Path) -> dict[str, Any] | None:
    """The claim of an attempt folder; None if the folder does not exist."""
    try:
        claim = parse_json((folder / "claim.json").read_text())
    except FileNotFoundError:
        if not folder.exists():
            return None
        # the folder comes with its claim in it, so it may have come since the first look
        try:
            claim = parse_json((folder / "claim.json").read_text())
        except (FileNotFoundError, ValueError):
            return {}
    except ValueError:
        return {}
    return claim if isinstance(claim, dict) else {}


def _write_exclusive(target: Path, body: Mapping[str, object]) -> None:
    """Create `target` whole, or leave the one that is there."""
    if target.exists():
        return
    temporary = target.with_name(f".{target.name}-{uuid.uuid4().hex}")
    try:
        with temporary.open("w") as file:
            json.dump(body, file, default=str, indent=1)
            file.flush()
            os.fsync(file.fileno())
        try:
            target.hardlink_to(temporary)
        except FileExistsError:
            return
        except OSError:  # a file system without hard links
            with target.open("x") as file:
                json.dump(body, file, default=str, indent=1)
    finally:
        temporary.unlink(missing_ok=True)
