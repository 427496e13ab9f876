"""One node: starts the ranks of every attempt, and says how each of them ended.

`python -m runhealth.trainer.agent`, started by the supervisor, with commands as JSON lines on stdin and reports as JSON
lines on the descriptor that `RUNHEALTH_REPORT_FD` names. It loads torch once and forks: a restart takes no import. A
spare is an agent without ranks. It is the ranks' own parent, so it knows their exit codes at first hand, in order, and
can tell a signal that it sent from one that somebody else did. It never touches a tensor, so no thread of torch's
exists when it forks.
"""

import contextlib
import errno
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from runhealth.trainer.launch import ENVIRONMENT
from runhealth.trainer.processes import die_with_parent

SUPERVISOR_PID = "RUNHEALTH_SUPERVISOR_PID"
AGENT_PID = "RUNHEALTH_AGENT_PID"
REPORT_FD = "RUNHEALTH_REPORT_FD"
END_MARK = "@runhealth-ranks-ended "  # printed behind everything that the ranks of an attempt printed
HOST = "127.0.0.1"
BACKLOG = 1024
STORE_TIMEOUT_S = 60.0
_TICK_S = 0.2  # a signal that arrives between two looks is seen then


@dataclass(slots=True)
class _Rank:
    pid: int
    requests: int  # write end of the pipe that its watch reads
    ordered: bool = False  # asked to end by us


class Agent:
    """Ranks of at most one attempt at a time."""

    def __init__(self, reports: int) -> None:
        self._reports = reports
        self._ranks: dict[int, _Rank] = {}
        self._attempt = ""
        self._stop = False
        self._commands = b""

    def serve(self) -> None:
        """Until stdin ends (the supervisor is gone) or SIGTERM arrives; no rank outlives it."""
        wake, wake_in = os.pipe()
        for fd in (wake, wake_in):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(wake_in, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._on_terminate)
        self._report(kind="ready", pid=os.getpid())
        while not self._stop:
            ready, _, _ = select.select([0, wake], [], [], _TICK_S if self._ranks else None)
            if wake in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(wake, 4096)
            self._reap()
            if 0 in ready and not self._read_commands():
                break
        self._end(signal.SIGKILL)

    def _read_commands(self) -> bool:
        """False at the end of stdin."""
        block = os.read(0, 65_536)
        *lines, self._commands = (self._commands + block).split(b"\n")
        for line in lines:
            command = json.loads(line)
            if command["do"] == "start":
                self._start(command)
            elif command["do"] == "ask":
                self._report(kind="here")
            elif command["do"] == "trace":
                self._ask_for_traces()
            elif command["do"] == "end":
                self._end(signal.Signals(command["signal"]))
        return bool(block)

    def _start(self, command: dict[str, Any]) -> None:
        """Fork the ranks. The node of rank 0 also listens for all others: the socket is bound here, so its port is
        known before anybody looks for it, and rank 0 inherits it."""
        ranks: list[int] = command["ranks"]
        self._attempt = command["launch"]
        listener: socket.socket | None = None
        address = command.get("address") or ""
        if 0 in ranks:
            listener = socket.create_server((HOST, 0), backlog=BACKLOG)
            address = f"{HOST}:{listener.getsockname()[1]}"
            self._report(kind="listening", address=address)
        for local, rank in enumerate(ranks):
            watched, requests = os.pipe()
            parent = os.getpid()
            pid = os.fork()
            if pid == 0:
                os.close(requests)
                if listener is not None and rank != 0:
                    listener.close()
                environment = {
                    ENVIRONMENT: self._attempt,
                    AGENT_PID: str(parent),
                    "RANK": str(rank),
                    "LOCAL_RANK": str(local),
                    "WORLD_SIZE": str(command["world"]),
                    "LOCAL_WORLD_SIZE": str(len(ranks)),
                }
                self._become_rank(environment, address, listener if rank == 0 else None, watched)
            os.close(watched)
            self._ranks[rank] = _Rank(pid=pid, requests=requests)
            self._report(kind="started", rank=rank, pid=pid)
        if listener is not None:
            listener.close()

    def _become_rank(
        self, environment: dict[str, str], address: str, listener: socket.socket | None, watched: int
    ) -> None:
        """The life of a forked rank. It leaves through os._exit: an interpreter that shuts down after an error keeps
        its connections open for seconds, in which the peers learn nothing."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            os.close(self._reports)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            for other in self._ranks.values():
                os.close(other.requests)
            die_with_parent(int(environment[AGENT_PID]))
            os.environ.update(environment)
            _run(environment, address, listener, watched)
            code = 0
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else 1
        except BaseException:  # noqa: BLE001  the last frame of this process: all there is to do is to print it
            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _reap(self) -> None:
        by_pid = {rank.pid: number for number, rank in self._ranks.items()}
        while self._ranks:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            except ChildProcessError:
                return
            if pid == 0:
                return
            number = by_pid[pid]
            if os.WIFSTOPPED(status):
                self._report(kind="stopped", rank=number)
            elif os.WIFCONTINUED(status):
                self._report(kind="continued", rank=number)
            else:
                rank = self._ranks.pop(number)
                os.close(rank.requests)
                code = os.waitstatus_to_exitcode(status)
                self._report(kind="exit", rank=number, pid=pid, code=code, ordered=rank.ordered)
                if not self._ranks:
                    sys.stdout.write(f"{END_MARK}{self._attempt}\n")
                    sys.stdout.flush()

    def _ask_for_traces(self) -> None:
        for rank in self._ranks.values():
            with contextlib.suppress(BrokenPipeError):
                os.write(rank.requests, b"t")

    def _end(self, number: signal.Signals) -> None:
        """Send a signal to all ranks; after SIGKILL also wait for them, which takes no time."""
        self._reap()
        for rank in self._ranks.values():
            rank.ordered = True
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, number)
        while number == signal.SIGKILL and self._ranks:
            self._reap()
            time.sleep(0.005)

    def _report(self, **body: object) -> None:
        line = json.dumps({**body, "ts_ns": time.time_ns()}).encode() + b"\n"
        try:
            os.write(self._reports, line)
        except OSError as error:
            if error.errno != errno.EPIPE:
                raise
            self._stop = True  # the supervisor is gone

    def _on_terminate(self, *_signal: object) -> None:
        self._stop = True


def _run(environment: dict[str, str], address: str, listener: socket.socket | None, watched: int) -> None:
    from torch._C._distributed_c10d import TCPStore

    from runhealth.trainer.worker import run_rank

    host, _, port = address.rpartition(":")
    world = int(environment["WORLD_SIZE"])
    timeout = timedelta(seconds=STORE_TIMEOUT_S)
    if listener is not None:
        store = TCPStore(
            host, int(port), world, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach()
        )
    else:
        store = TCPStore(host, int(port), world, False, timeout)
    run_rank(environment[ENVIRONMENT], int(environment["RANK"]), store, requests_fd=watched)


def main() -> None:
    die_with_parent(int(os.environ[SUPERVISOR_PID]))
    reports = int(os.environ.pop(REPORT_FD))
    import runhealth.trainer.worker  # noqa: F401  torch and the loop, once for all attempts

    Agent(reports).serve()
    os._exit(0)  # no rank is left and nothing to write: taking torch down costs seconds


if __name__ == "__main__":
    main()
