"""The supervisor's side of its nodes: agents that hold ranks, and spares that wait for one to be lost.

Every node is a process of this machine with torch loaded. An attempt gives each active node a block of ranks. A node
whose agent ends takes its ranks with it; its place goes to a spare, which has loaded torch already, or to a new one.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runhealth.storage.errors import ConfigError
from runhealth.trainer.agent import END_MARK, REPORT_FD, SUPERVISOR_PID
from runhealth.trainer.processes import end_tree

OUTPUT_WAIT_S = 3.0
ASK_S = 1.0  # a node is asked so often whether it is there
QUIET_S = 3.0  # one that does not answer for so long is spoken of
LOST_AFTER_S = 60.0
LOAD_FACTOR = 10.0  # while it loads torch it may be silent for so many times as long
CLOSE_S = 2.0
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a node says: `ready`, `here`, `listening`, `started`, `exit`, `stopped`, `continued`; or what is said of it:
    `silent` when it does not answer and will count as lost in `left_s` seconds, `answers` when it does again, `lost`
    when it is gone."""

    node: str
    kind: str
    ts_ns: int = 0
    rank: int = -1
    pid: int = -1
    code: int = 0
    ordered: bool = False
    address: str = ""
    left_s: float = 0.0


class Node:
    """One agent and the threads that read it. Reports go to `inbox`, lines that its ranks print to `on_line`."""

    def __init__(
        self, name: str, environment: Mapping[str, str], inbox: "queue.Queue[Report]", on_line: Callable[[str], None]
    ) -> None:
        self.name = name
        self.ranks: tuple[int, ...] = ()
        self.ended_marks: set[str] = set()
        self.ready = False  # torch is loaded
        self.asked = False
        self.silent_s = 0.0  # since it was asked, as far as somebody looked
        self.spoken_of = False
        self._inbox, self._on_line = inbox, on_line
        read_end, write_end = os.pipe()
        try:
            # a session of its own: Ctrl-C reaches the supervisor only, which then ends the ranks in order
            self.process = subprocess.Popen(
                [sys.executable, "-m", "runhealth.trainer.agent"],
                env={**environment, REPORT_FD: str(write_end)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                pass_fds=(write_end,),
                start_new_session=True,
            )
        except OSError:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        self._readers = [
            threading.Thread(target=self._read_output, name=f"{name} output", daemon=True),
            threading.Thread(target=self._read_reports, args=(read_end,), name=f"{name} reports", daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def send(self, **command: object) -> None:
        """A node that is gone hears nothing; that it is lost arrives as a report."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self.process.stdin.write(f"{json.dumps(command)}\n")
            self.process.stdin.flush()

    def close(self, grace_s: float) -> None:
        """End the agent and all that descends from it."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()  # this alone makes it leave
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(grace_s)
        if self.process.poll() is None:
            end_tree(self.process.pid, grace_s)
        self.process.wait()
        for reader in self._readers:
            reader.join(grace_s)

    def _read_output(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout:
            for line in self.process.stdout:
                if line.startswith(END_MARK):
                    self.ended_marks.add(line.removeprefix(END_MARK).strip())
                else:
                    self._on_line(line)

    def _read_reports(self, read_end: int) -> None:
        with open(read_end, encoding="utf-8", errors="replace") as reports:
            for line in reports:
                with contextlib.suppress(ValueError, TypeError):  # half a line of an agent that was killed
                    self._inbox.put(Report(node=self.name, **json.loads(line)))
        code = self.process.wait()
        self._inbox.put(Report(node=self.name, kind="lost", code=code, ts_ns=time.time_ns()))


@dataclass(slots=True)
class _Attempt:
    launch: str
    world: int
    living: set[int] = field(default_factory=set)
    pids: dict[int, int] = field(default_factory=dict)


class Nodes:
    """`count` nodes at work and `spares` that wait. All ranks of an attempt are started and ended together."""

    def __init__(
        self,
        *,
        count: int,
        spares: int,
        environment: Mapping[str, str],
        on_line: Callable[[str], None],
        lost_after_s: float = LOST_AFTER_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if count < 1 or spares < 0:
            raise ConfigError(f"nodes: expected at least 1 node and 0 spares, met {count} and {spares}")
        self._environment = {**environment, SUPERVISOR_PID: str(os.getpid())}
        self._count, self._on_line = count, on_line
        self._inbox: queue.Queue[Report] = queue.Queue()
        self._lost_after_s, self._clock = lost_after_s, clock
        self._looked_s = clock()
        self._made = 0
        self._active: list[Node] = []
        self._spares: list[Node] = []
        self._attempt: _Attempt | None = None
        for _ in range(count):
            self._active.append(self._make())
        for _ in range(spares):
            self._spares.append(self._make())

    @property
    def pids(self) -> dict[int, int]:
        """Rank -> its process, of the ranks that were started in this attempt."""
        return dict(self._attempt.pids) if self._attempt else {}

    @property
    def living(self) -> frozenset[int]:
        """Ranks whose end was not reported yet."""
        return frozenset(self._attempt.living) if self._attempt else frozenset()

    @property
    def agent_pids(self) -> dict[str, int]:
        return {node.name: node.process.pid for node in (*self._active, *self._spares)}

    def start(self, launch: Path, world: int) -> list[str]:
        """Start an attempt on `count` nodes. Returns the names of the nodes that took a lost one's place."""
        joined = []
        self._count = min(self._count, world)
        self._give_up(self._active[self._count :])
        while len(self._active) < self._count:
            spare = self._spares.pop(0) if self._spares else self._make()
            self._active.append(spare)
            joined.append(spare.name)
        self._attempt = _Attempt(launch=str(launch), world=world, living=set(range(world)))
        for index, node in enumerate(self._active):
            node.ranks = tuple(range(world * index // self._count, world * (index + 1) // self._count))
        first = self._active[0]
        first.send(do="start", launch=str(launch), world=world, ranks=first.ranks)
        return joined

    def poll(self, timeout_s: float) -> list[Report]:
        """Reports since the last call; waits up to `timeout_s` for the first."""
        found = []
        with contextlib.suppress(queue.Empty):
            found.append(self._inbox.get(timeout=timeout_s))
            while True:
                found.append(self._inbox.get_nowait())
        known = {node.name for node in (*self._active, *self._spares)}
        found = [report for report in found if report.node in known]  # a node that was given up says that it ended
        for report in found:
            self._note(report)
        return found + self._ask(found)

    def _ask(self, found: Sequence[Report]) -> list[Report]:
        """Ask every node whether it is there; end one that was silent for too long, which is reported as lost then.
        Time in which nobody looked does not count: its answer may lie in a pipe that was not read."""
        now_s = self._clock()
        passed_s = min(now_s - self._looked_s, ASK_S)
        self._looked_s = now_s
        heard, said = {report.node for report in found if report.kind != "lost"}, []
        for node in (*self._active, *self._spares):
            if node.name in heard:
                if node.spoken_of:
                    said.append(Report(node=node.name, kind="answers", pid=node.process.pid))
                node.asked = node.spoken_of = False
                node.silent_s = 0.0
                continue
            node.silent_s += passed_s
            limit_s = self._lost_after_s * (1.0 if node.ready else LOAD_FACTOR)
            if not node.asked and node.silent_s >= ASK_S:
                node.asked = True
                node.send(do="ask")
            elif node.silent_s >= limit_s:
                node.process.kill()
            elif node.ready and node.silent_s >= QUIET_S and not node.spoken_of:
                node.spoken_of = True
                left_s = limit_s - node.silent_s
                said.append(Report(node=node.name, kind="silent", pid=node.process.pid, left_s=left_s))
        return said

    def ask_for_traces(self) -> None:
        for node in self._active:
            node.send(do="trace")

    def end(self, number: signal.Signals) -> None:
        """Send a signal to all ranks."""
        for node in self._active:
            node.send(do="end", signal=int(number))

    def end_loading(self) -> None:
        """Kill the nodes that load torch still: they hear nothing until they have."""
        for node in (*self._active, *self._spares):
            if not node.ready:
                node.process.kill()

    def wait_for_output(self) -> None:
        """Until everything that the ended ranks printed has been handed to `on_line`."""
        launch = self._attempt.launch if self._attempt else ""
        deadline = time.monotonic() + OUTPUT_WAIT_S
        waiting = [node for node in self._active if node.ranks]
        while any(launch not in node.ended_marks for node in waiting) and time.monotonic() < deadline:
            time.sleep(0.005)

    def close(self, grace_s: float) -> None:
        for node in (*self._active, *self._spares):
            node.close(grace_s)
        self._active, self._spares = [], []

    def swap(self, ranks: Collection[int]) -> list[str]:
        """Let spares take the places of the nodes that held these ranks; returns the names of the nodes that go, none
        where there are not enough spares."""
        bad = [node for node in self._active if not set(ranks).isdisjoint(node.ranks)]
        missing = self._count - len(self._active)
        if not bad or len(bad) + missing > len(self._spares):
            return []
        self._give_up(bad)
        return [node.name for node in bad]

    def leave_out(self, ranks: Collection[int]) -> int:
        """Give up the nodes that held these ranks, unless they are all there are; returns how many ranks of the last
        attempt the nodes that stay had, or, where all are at fault, how many others there were."""
        world = self._attempt.world if self._attempt else 0
        good = [node for node in self._active if set(ranks).isdisjoint(node.ranks)]
        if not good:
            return world - len(set(ranks))
        self._give_up([node for node in self._active if node not in good])
        self._count = len(good)
        return sum(len(node.ranks) for node in good)

    def _give_up(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            self._active.remove(node)
            node.close(CLOSE_S)

    def _make(self) -> Node:
        node = Node(f"n{self._made}", self._environment, self._inbox, self._on_line)
        self._made += 1
        return node

    def _note(self, report: Report) -> None:
        attempt = self._attempt
        if report.kind == "ready":
            for node in (*self._active, *self._spares):
                node.ready |= node.name == report.node
        elif report.kind == "listening" and attempt:
            for node in self._active[1:]:
                node.send(
                    do="start", launch=attempt.launch, world=attempt.world, ranks=node.ranks, address=report.address
                )
        elif report.kind == "started" and attempt:
            attempt.pids[report.rank] = report.pid
        elif report.kind == "exit" and attempt:
            attempt.living.discard(report.rank)

    def drop(self, name: str) -> tuple[int, ...]:
        """Take a lost node out; returns the ranks it held."""
        for group in (self._active, self._spares):
            for node in group:
                if node.name == name:
                    group.remove(node)
                    node.close(0.0)
                    if self._attempt and group is self._active:
                        self._attempt.living.difference_update(node.ranks)
                    return node.ranks if group is self._active else ()
        return ()


def environment_for(attempt_environment: Mapping[str, Any]) -> dict[str, str]:
    """What agents and ranks inherit."""
    return {
        **{key: str(value) for key, value in attempt_environment.items()},
        "OMP_NUM_THREADS": "1",  # more makes busy ranks spin against each other
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "TORCH_FR_BUFFER_SIZE": os.environ.get("TORCH_FR_BUFFER_SIZE", "2000"),
        "PYTHONUNBUFFERED": "1",
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", LOOPBACK),
    }
