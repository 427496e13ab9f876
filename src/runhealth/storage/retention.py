"""Removing rank log segments that parts cover."""

import re
import time
from collections.abc import Callable
from pathlib import Path

from runhealth.storage import process
from runhealth.storage.codec import Decoder
from runhealth.storage.durable import sync_folder
from runhealth.storage.errors import CorruptDataError
from runhealth.storage.frame import decode_frame
from runhealth.storage.parts import Manifest
from runhealth.storage.ranklog import attempt_folders

_ATTEMPT = re.compile(r"log/a(\d{3,9})/")
_HEAD_BYTES = 64 * 1024  # more than any segment header takes
_ELSEWHERE_S = 86_400.0  # a writer of an old attempt on another host that was silent this long is taken to be gone


def retire_logs(run: Path, last: Manifest, retention_s: float, clock: Callable[[], float] = time.time) -> int:
    """Remove the segments that were read to their end, are wholly covered by the parts up to `last`, and were not
    written to for `retention_s`; returns how many. A damaged segment stays, as evidence.

    A segment without its end, of a writer that was killed, goes once a later attempt is there: until then it says that
    its writer did not end. A follower that has not read a removed segment takes from the parts what it missed.
    """
    now = clock()
    retired = 0
    folders = set()
    newest = max((number for number, _ in attempt_folders(run)), default=-1)
    for name, offset, state, _ in last.progress:
        file = run / name
        try:
            stat = file.stat()
            silent_s = now - stat.st_mtime
            if stat.st_size != offset or silent_s < retention_s:
                continue
            if state != "ended" and (state != "open" or not _given_up(file, name, newest, silent_s)):
                continue
            file.unlink()
        except FileNotFoundError:
            continue
        retired += 1
        folders.add(file.parent)
    for folder in folders:
        sync_folder(folder)
    return retired


def _given_up(file: Path, name: str, newest: int, silent_s: float) -> bool:
    """Was the segment left by a writer of an earlier attempt that is gone?"""
    match = _ATTEMPT.match(name)
    if match is None or int(match[1]) >= newest:
        return False
    decoder = Decoder()
    try:
        with file.open("rb") as handle:
            first = decode_frame(handle.read(_HEAD_BYTES))
        if first is None:
            return False
        decoder.structure(first)
    except (OSError, CorruptDataError):
        return False
    return process.is_dead(decoder.header) or (not process.is_here(decoder.header) and silent_s >= _ELSEWHERE_S)
