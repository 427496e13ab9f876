"""A rank's log where its node has an agent, and goes on without it when the agent dies.

A step that the agent did not acknowledge is looked for in the agent's log: if it is there it counts as written, if not
it goes into the rank's own log, which takes all that follows. So it is never lost and never there twice.
"""

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from runhealth.storage.agent import AgentGoneError, AgentLog
from runhealth.storage.codec import ranked_of
from runhealth.storage.errors import CorruptDataError, StoreError
from runhealth.storage.frame import FrameKind, decode_frame, find_frame
from runhealth.storage.ranklog import RankLog
from runhealth.storage.records import Record, RunEvent

EVENT = "agent_lost"


class SteadyLog:
    """Writes through the agent at `socket_path` as long as there is one, else to a `RankLog` of its own.

    Has the methods of both. Safe to use from several threads.
    """

    def __init__(
        self, socket_path: str, attempt_dir: str, attempt: int, rank: int, *, clock: Callable[[], int] = time.time_ns
    ) -> None:
        """Raises StoreError only if neither an agent nor a log of the rank's own can be had."""
        self._attempt_dir = attempt_dir
        self._attempt = attempt
        self._rank = rank
        self._clock = clock
        self._lock = threading.Lock()
        self._log: AgentLog | RankLog
        try:
            self._log = AgentLog(socket_path, attempt, rank)
        except StoreError as err:
            self._log = self._own_log(err, 0)

    def append(self, records: Sequence[Record]) -> None:
        """Write the records; when this returns they survive the death of this process. Raises StoreError if they may
        be lost: an agent that refuses them, or hangs."""
        with self._lock:
            log = self._log
            if isinstance(log, RankLog):
                log.append(records)
                return
            try:
                log.append(records)
            except AgentGoneError as err:
                log.close()
                self._log = self._own_log(err, records[0].step if records else 0)
                if not self._is_in_a_node_log(err.frames):
                    self._log.append(records)

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            self._log.close()

    def _own_log(self, why: StoreError, step: int) -> RankLog:
        log = RankLog.create(self._attempt_dir, self._rank)
        event = RunEvent(
            attempt=self._attempt, step=step, rank=self._rank, kind=EVENT, ts_ns=self._clock(),
            message=f"this rank writes a log of its own: {why}",
        )  # fmt: skip
        log.append([event])
        return log

    def _is_in_a_node_log(self, frames: bytes) -> bool:
        """Did an agent write these frames of this rank before it went? They can only be at the end of its log."""
        folders = Path(self._attempt_dir).glob("n[0-9]*")
        newest = [file for folder in folders for file in sorted(folder.glob("*.rlog"))[-1:]]
        return any(frames in self._of_this_rank(file) for file in newest)

    def _of_this_rank(self, file: Path) -> list[bytes]:
        try:
            data = file.read_bytes()
        except OSError:
            return []
        found, position = [], 0
        while 0 <= position < len(data):
            try:
                frame = decode_frame(data, position)
            except CorruptDataError:
                frame = None
            if frame is None:
                position = find_frame(data, position + 1)
                continue
            if frame.kind == FrameKind.RANKED:
                rank, inner = ranked_of(frame)
                if rank == self._rank:
                    found.append(inner)
            position = frame.end
        return found
