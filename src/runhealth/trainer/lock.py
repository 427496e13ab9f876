"""One supervisor a run: a lock on a file of it, which the system gives back however its owner ends."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runhealth.storage.errors import ConfigError, StoreError
from runhealth.storage.jsontext import parse_json

LOOKS, LOOK_S = 5, 0.05  # whoever asks whether a supervisor is at work holds the lock for a moment


@contextmanager
def owned(run: str, run_path: str) -> Iterator[None]:
    """Hold the run.

    Raises:
        ConfigError: another process has it; it is named. StoreError: the lock cannot be made.
    """
    path = Path(run_path) / "supervisor.lock"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise StoreError(f"{path}: cannot be written, so run {run!r} cannot be trained: {error.strerror}") from error
    try:
        for look in range(LOOKS):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if look + 1 == LOOKS:
                    raise ConfigError(
                        f"run {run!r} is already being trained by {_owner(run_path)}; stop it first, or hand it a plan"
                        f" with `diagnose rollback apply`"
                    ) from error
                time.sleep(LOOK_S)
        yield
    finally:
        os.close(descriptor)


def _owner(run_path: str) -> str:
    try:
        return f"process {parse_json((Path(run_path) / 'supervisor.json').read_text())['pid']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another supervisor"
