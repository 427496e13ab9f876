"""From the monitor to the rank log: what happens when the store cannot be written.

A record that cannot be written is dropped and counted; it is not kept in memory, since an outage may last as long as
the job. After a failure the store is left alone for growing intervals.
"""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from runhealth.instrument import world
from runhealth.instrument.clock import Clock
from runhealth.instrument.guard import say
from runhealth.storage.errors import ConfigError, StoreError
from runhealth.storage.ranklog import RankLog
from runhealth.storage.records import Record
from runhealth.storage.steadylog import SteadyLog
from runhealth.storage.store import Store, check_run_name

AGENT_VARIABLE = "RUNHEALTH_AGENT"  # the socket of the node's agent
FIRST_RETRY_S = 1.0
LONGEST_RETRY_S = 60.0


class RecordLog(Protocol):
    """What the sink needs of `storage.RankLog`."""

    def append(self, records: Sequence[Record]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedLog:
    attempt: int
    log: RecordLog


LogOpener = Callable[[], OpenedLog]


def store_opener(
    *,
    run: str,
    store: str | None,
    config: Mapping[str, object] | None,
    rank: int,
    launch_key: str,
    attempt: int | None,
    agent: str | None = None,
) -> LogOpener:
    """Open this rank's log in the store, through the agent of its node if there is one: create the run if it is new,
    join or claim the attempt."""
    socket_path = agent or os.environ.get(AGENT_VARIABLE)

    def open_at(number: int, path: str) -> OpenedLog:
        if socket_path:
            return OpenedLog(attempt=number, log=SteadyLog(socket_path, path, number, rank))
        return OpenedLog(attempt=number, log=RankLog.create(path, rank))

    def open_log() -> OpenedLog:
        home = Store(store)
        info = home.create_run(run, config)
        if attempt is not None:
            return open_at(attempt, f"{info.path}/log/a{attempt:03d}")
        claimed = home.claim_attempt(info, launch_key)
        return open_at(claimed.attempt, claimed.path)

    return open_log


def open_in_store(
    *, run: str, store: str | None, config: Mapping[str, object] | None, rank: int, clock: Clock, who: str,
    agent: str | None = None,
) -> "Sink":  # fmt: skip
    """The sink of this rank's log in the store. Raises ConfigError for a name or an attempt that cannot be. In a
    process group this is a collective, unless a supervisor has set the attempt."""
    try:
        check_run_name(run)
    except StoreError as error:
        raise ConfigError(str(error)) from None
    attempt = world.preset_attempt()

    def open_with(key: str) -> Sink:
        opener = store_opener(
            run=run, store=store, config=config, rank=rank, launch_key=key, attempt=attempt, agent=agent
        )
        return Sink(opener, clock=clock, who=who)

    if attempt is not None:
        return open_with("")
    key = world.launch_key(run, store or "")
    if not world.in_group():
        return open_with(key)
    if rank == 0:  # it claims the attempt before the others hear of the key, so there is no race for it
        sink = open_with(key)
        world.share(key)
        return sink
    return open_with(world.share(key))


class Sink:
    """Writes records; never raises. Only the process that made it writes: a forked worker is ignored."""

    def __init__(self, opener: LogOpener, *, clock: Clock, who: str) -> None:
        self._opener = opener
        self._clock = clock
        self._who = who
        self._log: RecordLog | None = None
        self._lock = threading.Lock()
        self._forks = world.forks()
        self._wait_s = FIRST_RETRY_S
        self._next_try_s = 0.0
        self._down = False
        self._refused = False
        self._closed = False
        self.attempt = 0
        self.lost = 0
        self._open()

    @property
    def open(self) -> bool:
        return not self._closed and world.forks() == self._forks

    def write(self, build: Callable[[int], Sequence[Record]], count: int) -> bool:
        """Append what `build(attempt)` returns as one write. `count` records are counted as lost if it fails."""
        if not self.open:
            return False
        with self._lock:
            if self._down and self._clock.perf_s() < self._next_try_s:
                self.lost += count
                return False
            if self._log is None:
                self._open()
            if self._log is None:
                self.lost += count
                return False
            try:
                self._log.append(build(self.attempt))
            except OSError as error:
                self.lost += count
                self._fail(error)
                return False
            except Exception as error:  # noqa: BLE001  the store is well, these records are not
                self.lost += count
                self._refuse(error)
                return False
            if self._down:
                self._down = False
                self._wait_s = FIRST_RETRY_S
                say(f"{self._who}: telemetry is written again; {self.lost} records were lost so far")
        return True

    def close(self) -> None:
        if not self.open:
            return
        with self._lock:
            self._closed = True
            log, self._log = self._log, None
            try:
                if log is not None:
                    log.close()
            except Exception as error:  # noqa: BLE001  whatever a store raises, training goes on
                self._fail(error)
        if self.lost:
            say(f"{self._who}: {self.lost} telemetry records were lost")

    def _open(self) -> None:
        try:
            opened = self._opener()
        except Exception as error:  # noqa: BLE001  whatever a store raises, training goes on
            self._fail(error)
            return
        self._log, self.attempt = opened.log, opened.attempt

    def _refuse(self, error: Exception) -> None:
        if not self._refused:
            why = " ".join(f"{type(error).__name__}: {error}".split())
            say(f"{self._who}: records cannot be written: {why}; training goes on, further cases are counted only")
        self._refused = True

    def _fail(self, error: Exception) -> None:
        if not self._down:
            why = " ".join(f"{type(error).__name__}: {error}".split())
            say(f"{self._who}: telemetry is lost: {why}; training goes on, the store is tried again from time to time")
        self._down = True
        self._next_try_s = self._clock.perf_s() + self._wait_s
        self._wait_s = min(2 * self._wait_s, LONGEST_RETRY_S)
