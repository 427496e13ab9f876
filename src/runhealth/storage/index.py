"""The run index: what each run.json of a local store says, so that listing a thousand runs opens one file.

`<store>/.index.json` is only a memory: an entry holds for a run.json with the same inode, time and size, everything
else is read anew, and the file can be deleted at any time. A store that cannot be written has none.
"""

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runhealth.storage.durable import write_whole
from runhealth.storage.errors import StoreError
from runhealth.storage.jsontext import parse_json

_NAME = ".index.json"
_FORMAT_VERSION = 1
_WORTH_WRITING = 20  # runs; fewer are read as fast without an index


def run_bodies(root: str, read: Callable[[str], Any]) -> dict[str, Any]:
    """Run name -> body of its run.json for all folders of `root` that have one, from the index where that is current.

    `read` takes a run's name and returns its body, or None for one that must not be remembered. Raises StoreError.
    """
    folder = Path(root)
    known = _load(folder / _NAME)
    entries: dict[str, list[Any]] = {}
    bodies: dict[str, Any] = {}
    try:
        with os.scandir(folder) as listing:
            names = sorted(entry.name for entry in listing if not entry.name.startswith(".") and entry.is_dir())
    except FileNotFoundError:
        return {}
    except OSError as err:
        raise StoreError(f"cannot list {root}: {err.strerror}") from err
    for name in names:
        try:
            stat = os.stat(f"{root}/{name}/run.json")  # noqa: PTH116 - a third of the time, for each of many runs
        except OSError:
            bodies[name] = None
            continue
        stamp = [stat.st_ino, stat.st_mtime_ns, stat.st_size]
        entry = known.get(name)
        if entry is None or entry[0] != stamp:
            entry = [stamp, read(name)]
        bodies[name] = entry[1]
        if entry[1] is not None:
            entries[name] = entry
    if entries != known and len(entries) >= _WORTH_WRITING:
        with contextlib.suppress(OSError):
            write_whole(folder / _NAME, json.dumps({"format_version": _FORMAT_VERSION, "runs": entries}).encode())
    return bodies


def _load(file: Path) -> dict[str, list[Any]]:
    try:
        body = parse_json(file.read_bytes())
        if body["format_version"] != _FORMAT_VERSION:
            return {}
        runs: dict[str, list[Any]] = body["runs"]
        return {name: entry for name, entry in runs.items() if len(entry) == 2}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
