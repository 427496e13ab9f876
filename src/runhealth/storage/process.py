"""Is the process that wrote a log still alive?"""

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def start_ticks(pid: int) -> int:
    """Start time of a process in clock ticks since boot, so that a reused pid is told apart. 0 where /proc lacks it."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[19])  # field 22 of proc(5), counted after the name


def is_dead(writer: Mapping[str, Any]) -> bool:
    """True if the writer named by a segment header is known to be gone; False on another host, where nobody can say."""
    if writer.get("host") != socket.gethostname():
        return False
    pid = int(writer.get("pid", 0))
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return start_ticks(pid) != int(writer.get("pid_start", 0))
