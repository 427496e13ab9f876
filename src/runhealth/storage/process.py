"""Is the process that wrote a log still alive?"""

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def start_ticks(pid: int) -> int:
    """Start time of a process in clock ticks since boot, so that a reused pid is told apart. 0 where /proc lacks it."""
    fields = _stat(pid)
    return int(fields[19]) if fields else 0  # field 22 of proc(5), counted after the name


def is_here(writer: Mapping[str, Any]) -> bool:
    """Did the writer run on this host?"""
    return bool(writer.get("host") == socket.gethostname())


def is_dead(writer: Mapping[str, Any]) -> bool:
    """True if the writer named by a segment header is known to be gone; False on another host, where nobody can say.
    One that has ended and waits for its parent only (a zombie) is gone."""
    if not is_here(writer):
        return False
    pid = int(writer.get("pid", 0))
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return start_ticks(pid) != int(writer.get("pid_start", 0)) or _state(pid) in ("Z", "X")


def is_stopped(writer: Mapping[str, Any]) -> bool:
    """True if the writer lives on this host and is suspended: by SIGSTOP, or by a debugger."""
    pid = int(writer.get("pid", 0))
    return is_here(writer) and not is_dead(writer) and _state(pid) in ("T", "t")


def _state(pid: int) -> str:
    fields = _stat(pid)
    return fields[0] if fields else ""


def _stat(pid: int) -> list[str]:
    """Fields of /proc/<pid>/stat from the state on; empty where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
