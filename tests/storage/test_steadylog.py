"""`runhealth agent` and ranks that outlive it, as processes of their own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from runhealth.storage.agent import AgentGoneError, AgentLog
from runhealth.storage.errors import StoreError
from runhealth.storage.publish import Publisher
from runhealth.storage.reader import RunReader
from runhealth.storage.records import RunEvent, StepRecord
from runhealth.storage.steadylog import EVENT, SteadyLog
from runhealth.storage.store import AttemptDir, RunInfo, Store
from runhealth.storage.writers import writers_of

RANK = """
import sys, time
from runhealth.storage.records import StepRecord
from runhealth.storage.steadylog import SteadyLog
socket, attempt_dir, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
log = SteadyLog(socket, attempt_dir, 0, rank)
for step in range(10_000):
    values = {"loss": step + 0.5, **({"grad_norm": 1.0} if step % 7 == rank else {})}
    log.append([StepRecord(attempt=0, step=step, rank=rank, ts_ns=time.time_ns(), values=values)])
    print(step, flush=True)
    time.sleep(0.002)
"""


def step(number: int, rank: int = 0) -> StepRecord:
    return StepRecord(attempt=0, step=number, rank=rank, values={"loss": float(number)})


@pytest.fixture
def socket_path(tmp_path: Path) -> str:
    return str(tmp_path / "agent.sock")


@pytest.fixture
def claim(store: Store, run: RunInfo) -> AttemptDir:
    return store.claim_attempt(run, "first")


@pytest.fixture
def start_agent(store: Store, socket_path: str) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(*more: str) -> subprocess.Popen[str]:
        command = [
            sys.executable,
            "-m",
            "runhealth.cli",
            "agent",
            "run-one",
            "--store",
            store.root,
            "--socket",
            socket_path,
        ]
        agent = subprocess.Popen([*command, *more], stdout=subprocess.PIPE, text=True)
        started.append(agent)
        assert agent.stdout is not None
        assert "listening" in agent.stdout.readline()
        return agent

    yield start
    for agent in started:
        agent.kill()
        agent.wait(30)
        if agent.stdout is not None:
            agent.stdout.close()


def read_lines(processes: Sequence[subprocess.Popen[str]], count: int) -> None:
    for process in processes:
        assert process.stdout is not None
        for _ in range(count):
            assert process.stdout.readline()


def test_ranks_go_on_when_the_agent_is_killed(
    start_agent: Callable[..., subprocess.Popen[str]], run: RunInfo, claim: AttemptDir, socket_path: str
) -> None:
    agent = start_agent("--node", "2")
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, socket_path, claim.path, str(rank)], stdout=subprocess.PIPE, text=True
        )
        for rank in range(3)
    ]
    try:
        read_lines(ranks, 20)
        assert sorted(entry.name for entry in Path(claim.path).iterdir() if entry.is_dir()) == ["n02000"]
        agent.kill()
        agent.wait(30)
        start_agent("--node", "2")  # comes too late for these ranks, and disturbs nothing
        read_lines(ranks, 60)
        writers = writers_of(run.path)
        assert writers is not None
        assert [(one.rank, one.dead) for one in writers.logs] == [(0, False), (1, False), (2, False)]
    finally:
        for process in ranks:
            process.kill()
    acknowledged = [20 + 60 + len(process.communicate()[0].splitlines()) for process in ranks]
    reader = RunReader.open(run.path)
    for _ in ("live", "published"):
        records = list(reader.records())
        for rank, count in enumerate(acknowledged):
            steps = [record.step for record in records if isinstance(record, StepRecord) and record.rank == rank]
            assert steps in (list(range(count)), list(range(count + 1)))  # the last one may not have been printed
        lost = [record for record in records if isinstance(record, RunEvent) and record.kind == EVENT]
        assert sorted(record.rank for record in lost) == [0, 1, 2]
        assert all("did not acknowledge" in record.message for record in lost)
        Publisher(run.path).publish()
    folders = {entry.name for entry in Path(claim.path).iterdir() if entry.is_dir()}
    assert folders == {"n02000", "r00000", "r00001", "r00002"}


def test_an_agent_ends_its_logs_when_it_is_asked_to_stop_and_its_successor_takes_another(
    start_agent: Callable[..., subprocess.Popen[str]], store: Store, run: RunInfo, claim: AttemptDir, socket_path: str
) -> None:
    agent = start_agent()
    second = store.claim_attempt(run, "second")
    with AgentLog(socket_path, 0, 0) as log, AgentLog(socket_path, 1, 0) as other:
        log.append([step(0)])
        other.append([StepRecord(attempt=1, step=5, rank=0)])
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(30) == 0
    start_agent()
    with AgentLog(socket_path, 0, 0) as log:
        log.append([step(1)])
    assert sorted(entry.name for entry in Path(claim.path).iterdir() if entry.is_dir()) == ["n00000", "n00001"]
    assert [entry.name for entry in Path(second.path).iterdir() if entry.is_dir()] == ["n00000"]
    assert [(r.attempt, r.step) for r in RunReader.open(run.path).records()] == [(0, 0), (0, 1), (1, 5)]
    progress = Publisher(run.path).publish()
    assert progress.rejected == ()
    ended = (
        RunReader.open(run.path).sql("SELECT file FROM progress WHERE state = 'ended' ORDER BY file")["file"].to_list()
    )
    assert ended == ["log/a000/n00000/000000.rlog", "log/a001/n00000/000000.rlog"]


def test_without_an_agent_a_rank_has_its_own_log_at_once(run: RunInfo, claim: AttemptDir, socket_path: str) -> None:
    log = SteadyLog(socket_path, claim.path, 0, 4)
    log.append([step(0, 4)])
    log.close()
    event, record = RunReader.open(run.path).records()
    assert isinstance(event, RunEvent)
    assert (event.kind, event.rank) == (EVENT, 4)
    assert "no agent answers" in event.message
    assert record == step(0, 4)


@pytest.mark.parametrize("written", [True, False])
def test_a_step_without_an_answer_is_written_once(
    start_agent: Callable[..., subprocess.Popen[str]], run: RunInfo, claim: AttemptDir, socket_path: str,
    monkeypatch: pytest.MonkeyPatch, written: bool,
) -> None:  # fmt: skip
    agent = start_agent()
    log = SteadyLog(socket_path, claim.path, 0, 0)
    log.append([step(0)])
    ask = AgentLog._ask

    def died(self: AgentLog, connection: object, message: bytes) -> str:
        if written:
            ask(self, connection, message)  # type: ignore[arg-type]
        agent.kill()
        agent.wait(30)
        raise ConnectionResetError(104, os.strerror(104))

    monkeypatch.setattr(AgentLog, "_ask", died)
    log.append([step(1)])
    log.append([step(2)])
    log.close()
    got = [record.step for record in RunReader.open(run.path).records() if isinstance(record, StepRecord)]
    assert got == [0, 1, 2]


@pytest.mark.usefixtures("claim")
def test_an_agent_that_hangs_costs_one_wait(
    start_agent: Callable[..., subprocess.Popen[str]], socket_path: str
) -> None:
    agent = start_agent()
    log = AgentLog(socket_path, 0, 0, timeout_s=0.2)
    log.append([step(0)])
    agent.send_signal(signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(StoreError, match="did not answer; this step may be lost"):
        log.append([step(1)])
    assert time.monotonic() - started >= 0.2
    agent.kill()
    agent.wait(30)
    with pytest.raises(AgentGoneError):
        log.append([step(2)])
    log.close()
