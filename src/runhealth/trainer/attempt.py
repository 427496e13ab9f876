"""One attempt from its start to its end: watch the ranks, and when one fails find out why before all are ended.

Importable without torch.
"""

import contextlib
import json
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from runhealth.trainer.failure import Failure, RankExit, failure_of
from runhealth.trainer.flight_recorder import trace_file
from runhealth.trainer.launch import PROGRESS_PREFIX
from runhealth.trainer.nodes import Nodes, Report

OUTPUT_TAIL_LINES = 40
SETTLE_S = 0.5  # peers of a failed rank write what they saw
TRACES_S = 3.0  # at most, for ranks that live on to say where they are
END_S = 10.0
STOPPED_SLACK_S = 2.0  # a suspended rank is given up so long after the group time-out


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    attempt: int
    step: int
    stop_step: int
    loss: float


Listener = Callable[[Progress], None]


class Output:
    """What the ranks print: progress goes to the listener, what is meant for people is said, all else goes into the
    attempt's log file and its tail."""

    def __init__(self, on_progress: Listener | None, say: Callable[[str], None]) -> None:
        self._on_progress, self._say = on_progress, say
        self._file: IO[bytes] | None = None
        self.tail: deque[str] = deque(maxlen=OUTPUT_TAIL_LINES)
        self.last: Progress | None = None

    def begin(self, file: IO[bytes]) -> None:
        self._file, self.last = file, None
        self.tail.clear()

    def end(self) -> None:
        self._file = None

    def line(self, text: str) -> None:
        if text.startswith(PROGRESS_PREFIX):
            self._progress(text.removeprefix(PROGRESS_PREFIX))
            return
        self.tail.append(text)
        file = self._file
        if file is not None:
            with contextlib.suppress(OSError, ValueError):  # a full disk: the pipe is read on, or ranks would block
                file.write(text.encode())

    def _progress(self, text: str) -> None:
        try:
            raw = json.loads(text)
            if "say" in raw:
                self._say(str(raw["say"]))
                return
            progress = Progress(attempt=raw["attempt"], step=raw["step"], stop_step=raw["stop"], loss=raw["loss"])
        except (ValueError, KeyError, TypeError):
            return
        self.last = progress
        if self._on_progress is not None:
            self._on_progress(progress)


class Attempt:
    """The ranks of one launch file on the supervisor's nodes. Start it, `look` until `over`, then `stop` or
    `post_mortem`."""

    def __init__(self, nodes: Nodes, launch: Path, world: int, timeout_s: float, say: Callable[[str], None]) -> None:
        self._nodes, self._launch, self._world = nodes, launch, world
        self._timeout_s, self._say = timeout_s, say
        self.exits: list[RankExit] = []
        self.stopped: dict[int, int] = {}  # rank -> when it was suspended, ns
        self._stopped_s: dict[int, float] = {}  # the same on a clock that does not jump, of when we were told
        self.lost: dict[str, tuple[int, ...]] = {}
        self.detected_ns = 0
        self.named_ns = 0

    def start(self) -> list[str]:
        """Returns the nodes that took the place of lost ones."""
        return self._nodes.start(self._launch, self._world)

    @property
    def failed(self) -> bool:
        return self.detected_ns > 0

    @property
    def over(self) -> bool:
        return self.failed or not self._nodes.living

    @property
    def code(self) -> int:
        """The first exit code that is not 0 and was not ordered; 1 for a lost node; 0 if all went well."""
        codes = [e.code for e in self.exits if e.code != 0 and not e.ordered]
        return codes[0] if codes else int(self.failed)

    def facts(self, failure: Failure, output: str) -> dict[str, object]:
        """What the event of a failure holds."""
        return {
            "exit_code": self.code,
            "output": output[-4000:],
            "ranks": list(failure.ranks),
            "cause": failure.kind,
            "exits": {str(e.rank): e.code for e in self.exits if not e.ordered},
            "detected_ns": self.detected_ns,
            "named_ns": self.named_ns,
        }

    def look(self, wait_s: float) -> bool:
        """Take in what the nodes report; returns whether a rank was started."""
        reports = self._nodes.poll(wait_s)
        for report in reports:
            self._take(report)
        latest_s = time.monotonic() - (self._timeout_s + STOPPED_SLACK_S)
        if not self.failed and any(self._stopped_s[rank] < latest_s for rank in self.stopped):
            self.detected_ns = time.time_ns()
        return any(report.kind == "started" for report in reports)

    def post_mortem(self) -> Failure:
        """Let the ranks that live say where they are, end them, and name the failure."""
        self._nodes.ask_for_traces()
        settled, deadline = time.monotonic() + SETTLE_S, time.monotonic() + TRACES_S
        while self._nodes.living and time.monotonic() < deadline:
            silent = [
                rank
                for rank in self._nodes.living
                if rank not in self.stopped and not trace_file(self._launch, rank).exists()
            ]
            if not silent and time.monotonic() >= settled:
                break
            self.look(0.02)
        self._end(signal.SIGKILL)
        self._nodes.wait_for_output()
        found = failure_of(self._launch, self._world, self.exits, self.stopped, self.lost)
        self.named_ns = time.time_ns()
        return found

    def stop(self, grace_s: float) -> None:
        """Ask the ranks to stop where they agree to; after `grace_s` end them."""
        self._nodes.end_loading()
        self._nodes.end(signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while self._nodes.living and time.monotonic() < deadline:
            self.look(0.05)
        self._end(signal.SIGKILL)
        self._nodes.wait_for_output()

    def _end(self, number: signal.Signals) -> None:
        if self._nodes.living:
            self._nodes.end(number)
        deadline = time.monotonic() + END_S
        while self._nodes.living and time.monotonic() < deadline:
            self.look(0.05)

    def _take(self, report: Report) -> None:
        if report.kind == "exit":
            if not report.ordered:
                self.stopped.pop(report.rank, None)
            self.exits.append(
                RankExit(
                    rank=report.rank,
                    pid=report.pid,
                    code=report.code,
                    ts_ns=report.ts_ns,
                    ordered=report.ordered,
                )
            )
            if report.code != 0 and not report.ordered:
                self.detected_ns = self.detected_ns or time.time_ns()
        elif report.kind == "stopped":
            self.stopped[report.rank] = report.ts_ns
            self._stopped_s[report.rank] = time.monotonic()
            pid = self._nodes.pids.get(report.rank)
            self._say(f"rank {report.rank} is suspended (SIGSTOP); kill -CONT {pid} lets it go on")
        elif report.kind == "continued":
            self.stopped.pop(report.rank, None)
            self._say(f"rank {report.rank} goes on")
        elif report.kind == "silent":
            self._say(
                f"waiting for node {report.node} (process {report.pid}), which does not answer; it counts as lost in"
                f" {report.left_s:.0f} s"
            )
        elif report.kind == "answers":
            self._say(f"node {report.node} answers again")
        elif report.kind == "lost":
            ranks = self._nodes.drop(report.node)
            if ranks:
                self.lost[report.node] = ranks
                self.detected_ns = self.detected_ns or time.time_ns()
            else:
                self._say(f"spare node {report.node} is gone (exit code {report.code})")
