"""Removing rank log segments that parts cover."""

import time
from collections.abc import Callable
from pathlib import Path

from runhealth.storage.durable import sync_folder
from runhealth.storage.parts import Manifest


def retire_logs(run: Path, last: Manifest, retention_s: float, clock: Callable[[], float] = time.time) -> int:
    """Remove the segments that were read to their end, are wholly covered by the parts up to `last`, and were not
    written to for `retention_s`; returns how many. A damaged segment stays, as evidence.

    A follower that is so far behind that it has not read a removed segment gets a StoreError and can open anew.
    """
    now = clock()
    retired = 0
    folders = set()
    for name, offset, state, _ in last.progress:
        file = run / name
        if state != "ended":
            continue
        try:
            stat = file.stat()
            if stat.st_size != offset or now - stat.st_mtime < retention_s:
                continue
            file.unlink()
        except FileNotFoundError:
            continue
        retired += 1
        folders.add(file.parent)
    for folder in folders:
        sync_folder(folder)
    return retired
