"""Leaving no process behind: an end in order, children that die with their parent, and ending a whole process tree."""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # prctl(2)


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent ends, however that ends (Linux; elsewhere the supervisor's
    own clean-up has to do). `parent` is the pid that is expected: if it is gone already, exit now."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def descendants(pid: int) -> list[int]:
    """All living descendants of a process, parents first. Empty where /proc does not exist."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*") if Path("/proc").is_dir() else ():
        try:
            after_name = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        children.setdefault(int(after_name[1]), []).append(int(entry.name))
    found, queue = [], [pid]
    while queue:
        for child in children.get(queue.pop(0), []):
            found.append(child)
            queue.append(child)
    return found


@contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """Until the supervisor takes over, and after it, SIGTERM is what Ctrl-C is: an end in order, with 130."""

    def interrupt(*_signal: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set a handler, and only it gets the signal
        return
    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def interrupt_group(pid: int) -> None:
    """SIGINT to a process and to those of its descendants that share its process group: what Ctrl-C would reach."""
    group = os.getpgid(pid)
    for member in (pid, *descendants(pid)):
        try:
            if os.getpgid(member) == group:
                _signal(member, signal.SIGINT)
        except ProcessLookupError:
            continue


def end_tree(pid: int, grace_s: float) -> None:
    """SIGTERM to a process, which passes it on; after `grace_s` SIGKILL to it and to all that descended from it."""
    family = [pid, *descendants(pid)]
    _signal(pid, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and any(_alive(member) for member in family):
        time.sleep(0.02)
    for member in family:
        if _alive(member):
            _signal(member, signal.SIGKILL)


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _alive(pid: int) -> bool:
    """A zombie counts as dead: it waits for its parent only."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        if Path("/proc").is_dir():
            return False
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        return True
    return state not in ("Z", "X")
