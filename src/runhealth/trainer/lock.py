"""One supervisor a run: a lock on a file of it, which the system gives back however its owner ends."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runhealth.storage.errors import ConfigError
from runhealth.storage.jsontext import parse_json


@contextmanager
def owned(run: str, run_path: str) -> Iterator[None]:
    """Hold the run. Raises ConfigError that names the process which has it."""
    with open(Path(run_path) / "supervisor.lock", "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f"run {run!r} is already being trained by {_owner(run_path)}; stop it first, or hand it a plan"
                f" with `diagnose rollback apply`"
            ) from error
        yield


def _owner(run_path: str) -> str:
    try:
        return f"process {parse_json((Path(run_path) / 'supervisor.json').read_text())['pid']}"
    except (OSError, ValueError, KeyError):
        return "another supervisor"
