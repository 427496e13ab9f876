"""The node's agent: what it acknowledged is in its log, of every rank, whoever dies."""

import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runhealth.storage.agent import Agent, AgentLog, NodeLog
from runhealth.storage.codec import Encoder, end_frame, ranked_frame, segment_frame
from runhealth.storage.errors import StoreError
from runhealth.storage.publish import Publisher
from runhealth.storage.reader import RunReader
from runhealth.storage.records import Record, StepRecord
from runhealth.storage.store import RunInfo, Store
from runhealth.storage.tail import RunTail, SegmentTail, order

OneStep = Callable[..., list[Record]]


@pytest.fixture
def agent(store: Store, run: RunInfo, tmp_path: Path) -> Iterator[Agent]:
    log = NodeLog.open(store.claim_attempt(run, "first").path, 3, segment_bytes=5000)
    agent, stop = Agent(lambda _: log, str(tmp_path / "agent.sock")), threading.Event()
    thread = threading.Thread(target=agent.serve, args=(stop, 0.02))
    thread.start()
    yield agent
    stop.set()
    thread.join(30)
    agent.close()


def step(number: int, rank: int = 0, **values: float) -> StepRecord:
    return StepRecord(attempt=0, step=number, rank=rank, values=values or {"loss": float(number)})


def test_ranks_share_one_log_and_keep_every_value(
    agent: Agent, run: RunInfo, one_step: OneStep, one_step_of: OneStep
) -> None:
    ranks = [AgentLog(agent.path, 0, rank) for rank in range(4)]
    wanted: list[Record] = []
    for number in range(20):
        for rank, log in enumerate(ranks):
            log.append(one_step(number, rank))
        wanted += one_step_of(number, 4)
    assert agent.batches == 80
    folders = [folder.name for folder in Path(run.path, "log", "a000").iterdir() if folder.is_dir()]
    assert folders == ["n00003"]
    assert len(list(Path(run.path, "log", "a000", "n00003").iterdir())) > 3  # segments, each with all its schemas
    reader = RunReader.open(run.path)
    assert list(reader.records()) == wanted
    half = RunTail(run.path)
    half.read(20_000)
    later = RunTail(run.path, half.offsets()).read()
    assert sorted((record for record in later if record.rank == 2), key=order)[-8:] == one_step(19, 2)
    Publisher(run.path).publish()
    assert list(RunReader.open(run.path).records()) == wanted
    for log in ranks:
        log.close()


def test_a_rank_that_comes_again_numbers_its_schemas_anew(agent: Agent, run: RunInfo) -> None:
    with AgentLog(agent.path, 0, 0) as log:
        log.append([step(0, loss=1.0)])
        with pytest.raises(StoreError, match="rank 0 writes over another"):
            AgentLog(agent.path, 0, 0)
    deadline = time.monotonic() + 30
    while True:
        try:
            with AgentLog(agent.path, 0, 0) as log:
                log.append([step(1, lr=2.0, loss=3.0)])
            break
        except StoreError:  # the agent has not seen the first one go
            assert time.monotonic() < deadline
            time.sleep(0.02)
    assert [dict(record.values) for record in RunTail(run.path).read() if isinstance(record, StepRecord)] == [
        {"loss": 1.0}, {"lr": 2.0, "loss": 3.0},
    ]  # fmt: skip


def test_what_is_no_frame_is_refused_and_disturbs_nobody(agent: Agent, run: RunInfo) -> None:
    with AgentLog(agent.path, 0, 0) as good:
        good.append([step(0)])
        hello = struct.pack("<4sIiI", b"RHAH", 0, 1, 0)
        garbage = struct.pack("<4sIiI", b"RHAG", 7, 1, 1) + b"garbage"
        for message in (b"GET / HTTP/1.1\r\n\r\n", garbage, hello + garbage):
            with socket.socket(socket.AF_UNIX) as other:
                other.settimeout(30)
                other.connect(agent.path)
                other.sendall(message)
                if message.startswith(hello):
                    assert other.recv(8) == struct.pack("<II", 0, 0)
                answer = other.recv(1000)
                assert answer == b"" if not message.startswith(hello) else b"expected a frame" in answer
        good.append([step(1)])
    assert [record.step for record in RunTail(run.path).read()] == [0, 1]
    assert RunTail(run.path).rejected() == []


def test_mistakes_are_named(agent: Agent, tmp_path: Path, store: Store, run: RunInfo) -> None:
    with pytest.raises(StoreError, match=r"no agent answers at .*nobody\.sock"):
        AgentLog(str(tmp_path / "nobody.sock"), 0, 0)
    with AgentLog(agent.path, 0, 1) as log, pytest.raises(StoreError, match="met attempt 0, rank 0"):
        log.append([step(0)])
    with pytest.raises(StoreError, match="node 3 of attempt 0 is already claimed"):
        NodeLog.open(store.claim_attempt(run, "first").path, 3)


def test_a_socket_is_taken_over_only_from_an_agent_that_is_gone(
    agent: Agent, tmp_path: Path, store: Store, run: RunInfo
) -> None:
    log = NodeLog.open(store.claim_attempt(run, "first").path, 4)
    with pytest.raises(StoreError, match="another agent listens there"):
        Agent(lambda _: log, agent.path)
    with AgentLog(agent.path, 0, 0) as rank:  # the first one is as it was
        rank.append([step(0)])
    mine = tmp_path / "model.pt"
    mine.write_text("weights")
    with pytest.raises(StoreError, match="met something else; it was left alone"):
        Agent(lambda _: log, str(mine))
    assert mine.read_text() == "weights"
    dead = tmp_path / "dead.sock"
    with socket.socket(socket.AF_UNIX) as old:
        old.bind(str(dead))
    second = Agent(lambda _: log, str(dead))
    dead.unlink()
    dead.write_text("somebody else's")
    second.close()
    assert dead.read_text() == "somebody else's"


def test_a_full_disk_is_told_to_the_rank_and_survived(
    agent: Agent, run: RunInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    with AgentLog(agent.path, 0, 0) as log:
        log.append([step(0)])
        real = os.write

        def full(*_: object) -> int:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "write", full)
        with pytest.raises(StoreError, match=r"agent.*refused.*No space left"):
            log.append([step(1)])
        monkeypatch.setattr(os, "write", real)
        log.append([step(2)])
    assert [record.step for record in RunTail(run.path).read()] == [0, 2]


def a_node_segment() -> tuple[bytes, list[Record]]:
    """A small closed segment of an agent, with two ranks that use the same schema ids for different names."""
    data = segment_frame({"attempt": 0, "rank": -1, "node": 0}, 1, 2)
    wanted: list[Record] = []
    ranks = ((0, "loss", Encoder()), (1, "lr", Encoder()))
    for number in range(4):
        for rank, name, encoder in ranks:
            wanted.append(step(number, rank, **{name: float(number)}))
            data += ranked_frame(rank, rank + 1, b"".join(encoder.encode(wanted[-1:])), 2)
    return data + end_frame(3), wanted


@given(st.data())
@settings(deadline=None, max_examples=150)
def test_damage_to_a_node_log_is_noticed_and_never_misread(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    whole, wanted = a_node_segment()
    hurt = bytearray(whole)
    if data.draw(st.booleans()):
        for _ in range(data.draw(st.integers(1, 3))):
            hurt[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    else:
        first = data.draw(st.integers(0, len(whole) - 1))
        del hurt[first : data.draw(st.integers(first + 1, len(whole)))]
    file = tmp_path_factory.getbasetemp() / "node.rlog"
    file.write_bytes(hurt)
    tail = SegmentTail(file, "log/a000/n00000/000000.rlog")
    got = tail.read()
    rest = iter(wanted)
    assert all(any(record == one for one in rest) for record in got)
    if bytes(hurt) != whole and got != wanted:
        cut_clean = whole.startswith(bytes(hurt)) and not tail.pending_bytes and not tail.problem
        removed_whole = not tail.gaps and len(hurt) < len(whole)  # whole frames taken out leave no trace
        assert tail.gaps or tail.rejected(final=True) is not None or cut_clean or removed_whole


AGENT = """
import sys, threading
from runhealth.storage.agent import Agent, NodeLog
log = NodeLog.open(sys.argv[1], int(sys.argv[2]), segment_bytes=20_000)
Agent(lambda _: log, sys.argv[3]).serve(threading.Event())
"""


def test_an_agent_killed_anywhere_loses_nothing_it_acknowledged(store: Store, run: RunInfo, tmp_path: Path) -> None:
    claim, path = store.claim_attempt(run, "first"), str(tmp_path / "killed.sock")
    acked: list[tuple[int, int]] = []
    number = 0
    for life in range(3):
        Path(path).unlink(missing_ok=True)
        with subprocess.Popen([sys.executable, "-c", AGENT, claim.path, str(life), path]) as agent:
            deadline = time.monotonic() + 60
            logs: list[AgentLog] = []
            while len(logs) < 2:
                try:
                    logs.append(AgentLog(path, 0, len(logs)))
                except StoreError:
                    assert time.monotonic() < deadline
                    time.sleep(0.02)
            enough = len(acked) + 60 + 37 * life
            killer = threading.Timer(0.013, agent.kill)
            try:
                while True:
                    if len(acked) >= enough and not killer.is_alive() and agent.poll() is None:
                        killer.start()
                        enough = sys.maxsize
                    for rank, log in enumerate(logs):
                        log.append([step(number, rank)])
                        acked.append((number, rank))
                    number += 1
            except StoreError as err:
                assert "did not acknowledge" in str(err)  # noqa: PT017 - the loop has to end somehow
            killer.join()
            number += 1
            for log in logs:
                log.close()
    got = [(record.step, record.rank) for record in RunTail(run.path).read()]
    assert len(acked) > 150
    assert len(set(got)) == len(got)
    assert set(acked) <= set(got)
