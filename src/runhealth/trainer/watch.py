"""What a rank does about its own death: it says where it is when it is asked, when it fails, and when it stands still.

A thread of the rank waits on a pipe from its agent. A byte asks for a trace (step, stack, Flight Recorder); it answers
while the main thread hangs in a collective, a sleep or a read, though not while native code holds the interpreter. If
no step ends for `stall_s` seconds the thread ends the process itself: a run in which nobody waits for a peer (one rank,
or all of them stuck in the same read) has no collective that could time out. A save has time-outs of its own and is
left alone; before the first step, which loads and builds, ten times as long is allowed.
"""

import faulthandler
import json
import os
import select
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from torch._C import _distributed_c10d as c10d

from runhealth.trainer.failure import write_error
from runhealth.trainer.flight_recorder import GroupState, RankTrace, groups_of, write_trace

STALL_EXIT = 75
LOOK_S = 1.0
START_FACTOR = 10.0
STACK_FRAMES = 30


class StalledError(RuntimeError):
    """No step ended for too long."""


class RankWatch:
    """One for a process. `beat` is called by the loop and costs two assignments."""

    def __init__(self, launch: str, rank: int, *, stall_s: float, requests_fd: int = -1) -> None:
        self._launch, self._rank = launch, rank
        self._stall_s, self._fd = stall_s, requests_fd
        self._main = threading.main_thread().ident
        self._step = -1
        self._beat_s = time.monotonic()
        self._failed = False  # the place of the exception is on record: where its handling has come to is of no use

    def start(self) -> None:
        faulthandler.enable()  # a segmentation fault writes its Python stack into the attempt's log
        threading.Thread(target=self._run, name="rank watch", daemon=True).start()

    def beat(self, step: int) -> None:
        """The loop is alive and at this step."""
        self._step, self._beat_s = step, time.monotonic()

    def write(self, error: BaseException | None = None) -> None:
        """Leave a trace for the supervisor: of where the main thread is, or of where `error` was raised. Raises
        nothing."""
        if self._failed:
            return
        self._failed = error is not None
        try:
            write_trace(Path(self._launch), self.trace(error))
        except (OSError, ValueError, RuntimeError):
            return  # a full disk; the exception itself is what counts

    def trace(self, error: BaseException | None = None) -> RankTrace:
        if error is not None and error.__traceback__ is not None:
            stack = traceback.extract_tb(error.__traceback__)[-STACK_FRAMES:]
        else:
            current = sys._current_frames().get(self._main or 0)
            stack = traceback.extract_stack(current)[-STACK_FRAMES:] if current is not None else []
        return RankTrace(
            rank=self._rank,
            ts_ns=time.time_ns(),
            step=self._step,
            where=_where(stack),
            stack=tuple(f"{item.filename}:{item.lineno} {item.name}" for item in stack),
            groups=_groups(),
        )

    def _run(self) -> None:
        while True:
            if self._fd >= 0:
                ready, _, _ = select.select([self._fd], [], [], LOOK_S)
                if ready:
                    if not os.read(self._fd, 1):
                        self._fd = -1  # the agent is gone, and this process with it
                    self.write()
            else:
                time.sleep(LOOK_S)
            seconds = time.monotonic() - self._beat_s
            limit_s = self._stall_s if self._step >= 0 else self._stall_s * START_FACTOR
            if seconds > limit_s and not self._saving():
                self._give_up(seconds)

    def _saving(self) -> bool:
        frame = sys._current_frames().get(self._main or 0)
        return any(Path(one.f_code.co_filename).name == "async_save.py" for one, _ in traceback.walk_stack(frame))

    def _give_up(self, seconds: float) -> None:
        self.write()
        where = self.trace().where
        write_error(self._launch, self._rank, StalledError(f"no step ended for {seconds:.0f} s; in {where}"))
        faulthandler.dump_traceback(all_threads=True)
        os._exit(STALL_EXIT)


def _where(stack: Sequence[traceback.FrameSummary]) -> str:
    """File, line and function of the innermost frame outside torch."""
    for item in reversed(stack):
        if "/torch/" not in item.filename and not item.filename.startswith("<"):
            return f"{Path(item.filename).name}:{item.lineno} {item.name}"
    return ""


def _groups() -> dict[str, GroupState]:
    dump: Callable[[], bytes | str] | None = getattr(c10d, "_dump_fr_trace_json", None)
    if dump is None:  # a torch without the Flight Recorder
        return {}
    try:
        return groups_of(json.loads(dump()))
    except (ValueError, RuntimeError, TypeError):
        return {}
