"""What a supervisor keeps on disk beside the ranks' telemetry: its log of an attempt, its status, its output file.

None of these writes may end a run. One that fails is said once and made again later; records wait until then.
"""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from runhealth.storage.errors import StoreError
from runhealth.storage.ranklog import RankLog, rank_folder
from runhealth.storage.records import CheckpointRecord, CheckpointStatus, Record, RunEvent
from runhealth.trainer.launch import write_json

RETRY_S = 5.0
SUPERVISOR_RANK = -1


class Journal:
    """Use `begin` for each attempt, `retry` now and then, `end` when the attempt is over."""

    def __init__(self, run_path: str, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._status_file = Path(run_path) / "supervisor.json"
        self._say = say
        self._clock = clock
        self._folder = ""
        self._log: RankLog | None = None
        self._waiting: list[Record] = []
        self._status: Mapping[str, object] | None = None  # one that could not be written
        self._retry_at_s = 0.0
        self._troubled = False

    def begin(self, attempt_path: str) -> None:
        self._folder = attempt_path
        self._write()

    def append(self, records: Sequence[Record]) -> None:
        self._waiting.extend(records)
        self._write()

    def event(self, attempt: int, step: int, kind: str, message: str, data: Mapping[str, Any]) -> None:
        """An event of the supervisor, now."""
        self.append(
            [
                RunEvent(
                    attempt=attempt,
                    step=step,
                    rank=SUPERVISOR_RANK,
                    ts_ns=time.time_ns(),
                    kind=kind,
                    message=message,
                    data=data,
                )
            ]
        )

    def status(self, body: Mapping[str, object]) -> None:
        self._status = body
        self._write()

    def retry(self) -> None:
        """Make the writes that failed again, at most every `RETRY_S`."""
        if (self._status is not None or self._waiting) and self._clock() >= self._retry_at_s:
            self._write()

    def end(self) -> None:
        """Close the log of the attempt. What could not be written is lost, and said to be."""
        self._write()
        if self._waiting:
            self._say(f"{len(self._waiting)} records of the supervisor are lost: the disk did not take them")
            self._waiting = []
        log, self._log, self._folder = self._log, None, ""
        if log is not None:
            with contextlib.suppress(StoreError):  # its end frame; a log without one is read to its last frame
                log.close()

    def _write(self) -> None:
        trouble: OSError | None = None  # a StoreError is one
        for write in (self._write_status, self._write_log):
            try:
                write()
            except OSError as error:
                trouble = error
        if trouble is not None:
            self._retry_at_s = self._clock() + RETRY_S
            if not self._troubled:
                self._say(f"cannot write the supervisor's own records, training goes on: {trouble}")
        elif self._troubled:
            self._say("the supervisor's own records are written again")
        self._troubled = trouble is not None

    def _write_status(self) -> None:
        if self._status is not None:
            write_json(self._status_file, self._status)
            self._status = None

    def _write_log(self) -> None:
        if self._folder and self._log is None:
            try:
                self._log = RankLog.create(self._folder, SUPERVISOR_RANK)
            except StoreError:
                with contextlib.suppress(OSError):  # an empty folder would be taken for the log of somebody else
                    (Path(self._folder) / rank_folder(SUPERVISOR_RANK)).rmdir()
                raise
        if self._log is not None and self._waiting:
            self._log.append(self._waiting)
            self._waiting = []


def failed_record(attempt: int, step: int, path: str, reason: str) -> CheckpointRecord:
    """A checkpoint that was not resumed from, and why."""
    return CheckpointRecord(
        attempt=attempt,
        step=step,
        rank=SUPERVISOR_RANK,
        ts_ns=time.time_ns(),
        path=path,
        status=CheckpointStatus.FAILED,
        reason=reason,
    )
