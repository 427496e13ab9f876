"""RankLog: one write a step, claims, rotation, fork, full disk, kill -9."""

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from runhealth.storage.errors import StoreError
from runhealth.storage.ranklog import RankLog
from runhealth.storage.records import Record, StepRecord
from runhealth.storage.store import RunInfo, Store
from runhealth.storage.tail import RunTail

LogFor = Callable[..., RankLog]


def step(number: int, **values: float) -> StepRecord:
    return StepRecord(attempt=0, step=number, rank=0, values=values or {"loss": float(number)})


def steps_in(run: RunInfo) -> list[int]:
    return [record.step for record in RunTail(run.path).read()]


def test_a_step_is_one_write(log_for: LogFor, one_step: Callable[..., list[Record]], monkeypatch: pytest.MonkeyPatch):
    log = log_for()
    writes: list[int] = []
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: writes.append(len(data)) or real(fd, data))
    log.append(one_step(0))
    log.append(one_step(1))
    assert len(writes) == 2
    log.close()


def test_a_rank_is_claimed_once(log_for: LogFor) -> None:
    with log_for(), pytest.raises(StoreError, match=r"rank 0 of attempt 0 is already claimed.*r00000"):
        log_for()
    with log_for(launch_key="restart") as log:
        assert log.attempt == 1


def test_records_of_another_rank_are_refused(log_for: LogFor) -> None:
    with log_for(rank=1) as log, pytest.raises(StoreError, match="met attempt 0, rank 0"):
        log.append([step(0)])


def test_rotation_keeps_every_step_and_each_segment_reads_alone(log_for: LogFor, run: RunInfo) -> None:
    with log_for(segment_bytes=2000) as log:
        for number in range(200):
            log.append([step(number)])
    files = sorted(Path(log.path).iterdir())
    assert len(files) > 3
    assert steps_in(run) == list(range(200))
    for file in files[:-1]:
        file.unlink()
    files[-1].rename(files[0])
    assert steps_in(run)[-1] == 199


def test_sync_each_step_and_close_twice(log_for: LogFor, run: RunInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    real = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda fd: synced.append(fd) or real(fd))
    log = log_for(fsync="step")
    log.append([step(0)])
    log.append([step(1)])
    assert len(synced) == 2
    log.close()
    log.close()
    with pytest.raises(StoreError, match="closed"):
        log.append([step(2)])
    assert steps_in(run) == [0, 1]


def test_short_writes_are_finished(log_for: LogFor, run: RunInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    log = log_for()
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:7]))
    log.append([step(0)])
    monkeypatch.undo()
    log.append([step(1)])
    log.close()
    assert steps_in(run) == [0, 1]


def test_a_full_disk_costs_the_step_and_no_more(log_for: LogFor, run: RunInfo) -> None:
    """RLIMIT_FSIZE makes write() fail like a full disk does, in the middle of a frame."""
    log = log_for()
    log.append([step(0)])
    size = next(Path(log.path).iterdir()).stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, before[1]))
    try:
        for number in range(1, 4):
            with pytest.raises(StoreError, match=r"cannot append to .*000000\.rlog.*telemetry is lost"):
                log.append([step(number)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    log.append([step(9)])
    log.append([step(10, other=1.0)])
    log.close()
    tail = RunTail(run.path)
    assert [record.step for record in tail.read()] == [0, 9, 10]
    assert tail.rejected() == []


def test_no_file_is_left_behind_when_a_segment_cannot_begin(log_for: LogFor, run: RunInfo) -> None:
    log = log_for(segment_bytes=300)
    while next(Path(log.path).iterdir()).stat().st_size < 300:
        log.append([step(0)])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        for _ in range(5):
            with pytest.raises(StoreError):
                log.append([step(1)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    log.append([step(2)])
    log.close()
    assert sorted(file.name for file in Path(log.path).iterdir()) == ["000000.rlog", "000001.rlog"]
    assert steps_in(run)[-1] == 2


def test_a_failed_flush_is_told_at_the_next_step(log_for: LogFor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runhealth.storage.ranklog.SYNC_INTERVAL_S", 0.01)

    def broken(_: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", broken)
    log = log_for()
    log.append([step(0)])
    deadline = time.monotonic() + 30
    while log._sync_error is None and time.monotonic() < deadline:  # set by the thread
        time.sleep(0.005)
    with pytest.raises(StoreError, match=r"may not be on disk.*Input/output error"):
        log.append([step(1)])
    log.append([step(2)])
    monkeypatch.undo()
    log.close()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_cannot_write_into_the_log(log_for: LogFor, run: RunInfo) -> None:
    log = log_for()
    log.append([step(0)])
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            log.append([step(1)])
        except StoreError as err:
            status = 0 if "forked child" in str(err) else 2
        log.close()
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    log.append([step(2)])
    log.close()
    assert steps_in(run) == [0, 2]


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_cannot_be_written_is_named(store: Store, run: RunInfo) -> None:
    claim = store.claim_attempt(run, "first")
    Path(claim.path).chmod(0o500)
    with pytest.raises(StoreError, match=claim.path):
        RankLog.create(claim.path, 0)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no-such"):
        RankLog.create(str(tmp_path / "no-such" / "a000"), 0)
    with pytest.raises(StoreError, match="expected an attempt folder"):
        RankLog.create(str(tmp_path), 0)


WRITER = """
import sys
import time
from runhealth.storage.ranklog import RankLog
from runhealth.storage.records import StepRecord
log = RankLog.create(sys.argv[1], 0, segment_bytes=100_000)
step = 0
while True:
    log.append([StepRecord(attempt=log.attempt, step=step, rank=0, values={f"m{i}": float(step) for i in range(40)})])
    sys.stdout.write(f"{step}\\n"); sys.stdout.flush()
    step += 1
"""


def test_kill_9_loses_no_step_that_was_acknowledged(store: Store, run: RunInfo) -> None:
    for kill in range(4):
        claim = store.claim_attempt(run, f"launch-{kill}")
        with subprocess.Popen([sys.executable, "-c", WRITER, claim.path], stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            for _ in range(300 + 217 * kill):
                writer.stdout.readline()
            writer.kill()
            acknowledged = sum(1 for _ in writer.stdout) + 300 + 217 * kill
        tail = RunTail(run.path)
        got = [record for record in tail.read() if record.attempt == claim.attempt]
        assert len(got) >= acknowledged
        assert [record.step for record in got] == list(range(len(got)))
        assert all(set(record.values.values()) == {float(record.step)} for record in got)
