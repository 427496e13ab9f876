"""Who writes a run: for each log of its newest attempt, whether it was closed, and whether its writer still lives."""

import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path

from runhealth.storage.codec import Decoder
from runhealth.storage.errors import CorruptDataError
from runhealth.storage.frame import HEADER_BYTES, FrameKind, decode_frame
from runhealth.storage.process import is_dead, is_stopped

_ATTEMPT = re.compile(r"a(\d{3,9})")
_WRITER = re.compile(r"([rn])(-?\d+)")
_HEAD_BYTES = 64 * 1024  # more than any segment header takes


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """One log. `rank` is None for the log that a node's agent writes for its ranks, -1 for a supervisor.

    `closed`: its end frame is there. `dead`: the process is known to be gone; `stopped`: it is suspended (SIGSTOP, a
    debugger). `here`: it ran on this host; on another one nobody can say what became of it.
    """

    rank: int | None
    closed: bool
    dead: bool
    stopped: bool
    here: bool
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Writers:
    """`touched_ns`: when a log was last written to, or the attempt was claimed."""

    attempt: int
    logs: tuple[Writer, ...]
    touched_ns: int


def writers_of(run_path: str) -> Writers | None:
    """The writers of the newest attempt of a local run; None if the run has no logs (it was packed, or lies elsewhere).

    A log whose segments were all removed had been closed: only ended segments are ever removed.
    """
    log = Path(run_path) / "log"
    attempts = [(int(m[1]), entry) for entry in _entries(log) if (m := _ATTEMPT.fullmatch(entry.name))]
    if "://" in run_path or not attempts:
        return None
    attempt, folder = max(attempts)
    touched = _modified_ns(folder / "claim.json")
    logs: list[tuple[Writer, object]] = []
    for entry in sorted(_entries(folder)):
        match = _WRITER.fullmatch(entry.name)
        segments = sorted(file for file in entry.glob("*.rlog") if file.is_file()) if match else []
        if match is None or not segments:
            continue
        logs.append(_writer(segments[-1], int(match[2]) if match[1] == "r" else None))
        touched = max(touched, _modified_ns(segments[-1]))
    hosts = {host for writer, host in logs if writer.rank is not None and writer.rank >= 0}
    # ranks whose agent died write logs of their own, so the one it left is of no concern
    still = tuple(w for w, host in logs if not (w.rank is None and w.dead and not w.closed and host in hosts))
    return Writers(attempt=attempt, logs=still, touched_ns=touched)


def _writer(segment: Path, rank: int | None) -> tuple[Writer, object]:
    """The writer of a log, and its host."""
    decoder, closed = Decoder(), False
    try:
        with segment.open("rb") as file:
            first = decode_frame(file.read(_HEAD_BYTES))
            if first is not None:
                decoder.structure(first)
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - HEADER_BYTES))
            last = decode_frame(file.read(HEADER_BYTES))
            closed = last is not None and last.kind == FrameKind.END
    except (OSError, CorruptDataError):
        pass  # an end that is no frame is no end frame; a header that cannot be read names nobody
    header = decoder.header
    writer = Writer(
        rank=rank,
        closed=closed,
        dead=bool(header) and is_dead(header),
        stopped=bool(header) and is_stopped(header),
        here=bool(header) and header.get("host") == socket.gethostname(),
        pid=int(header.get("pid", 0)) if header else 0,
    )
    return writer, header.get("host")


def _entries(folder: Path) -> list[Path]:
    try:
        return [entry for entry in folder.iterdir() if entry.is_dir()]
    except OSError:
        return []


def _modified_ns(file: Path) -> int:
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return 0
