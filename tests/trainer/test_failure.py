"""Why an attempt ended, and what a supervisor does when its own disk fails it."""

import errno
from pathlib import Path

import pytest

from runhealth.storage.records import RunEvent
from runhealth.storage.store import Store
from runhealth.storage.tail import RunTail
from runhealth.trainer import failure, journal
from runhealth.trainer.failure import failure_of, read_errors, write_error
from runhealth.trainer.journal import Journal

REPORT = """
Root Cause (first observed failure):
[0]:
  time      : 2026-01-01_00:00:00
  host      : localhost
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 123)  (SIGKILL)
  error_file: <N/A>
"""


def test_a_killed_rank_is_named_before_the_ones_that_lost_it(tmp_path: Path):
    launch = tmp_path / "a000.json"
    write_error(str(launch), 0, RuntimeError("Connection closed by peer"))
    found = failure_of(launch, 1, REPORT, 2)
    assert (found.message, found.ranks) == ("rank 1 was killed (signal 9)", (1,))


def test_without_any_word_the_exit_code_is_what_is_known(tmp_path: Path):
    launch = tmp_path / "a000.json"
    assert failure_of(launch, 3, "", 2).message == "torchrun ended with exit code 3"
    assert failure_of(launch, -9, "", 2).message == "torchrun, which runs the ranks, was killed (signal 9)"


def test_the_first_exception_counts_by_its_first_line(tmp_path: Path):
    launch = tmp_path / "a000.json"
    write_error(str(launch), 1, ValueError("bad shard\nAt: somewhere"))
    write_error(str(launch), 0, RuntimeError("Connection closed by peer"))
    found = failure_of(launch, 1, "", 2)
    assert (found.message, found.ranks) == ("rank 1: ValueError: bad shard", (1,))


@pytest.mark.parametrize("late", [False, True])
def test_who_does_not_time_out_with_the_others_never_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool
):
    launch = tmp_path / "a000.json"
    wrapped = "Got the following error when running the callback: RuntimeError: [x.cc:78] Timed out waiting 60000ms"
    now = [10**18]
    monkeypatch.setattr(failure.time, "time_ns", lambda: now[0])
    for rank in (0, 1, 3):
        write_error(str(launch), rank, RuntimeError(f"{wrapped}\n\nAt:\n  ddp.py(132): arrived"))
    if late:
        now[0] += 10 * 10**9
        write_error(str(launch), 2, RuntimeError(wrapped))
    found = failure_of(launch, 1, "", 4)
    assert found.ranks == (2,)
    assert found.message == (
        "rank 2 never joined the others; rank 0: RuntimeError: [x.cc:78] Timed out waiting 60000ms"
    )
    assert [error.rank for error in read_errors(launch, 4)] == [0, 1, 3, *([2] if late else [])]


def test_an_error_file_that_is_half_written_counts_as_none(tmp_path: Path):
    launch = tmp_path / "a000.json"
    (tmp_path / "a000.r00000.error.json").write_text('{"rank": 0,')
    assert read_errors(launch, 2) == []


def test_a_full_disk_is_said_once_and_what_waits_is_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = Store(str(tmp_path))
    run = store.create_run("run")
    claimed = store.claim_attempt(run, "one")
    said: list[str] = []
    now = [0.0]
    kept = Journal(run.path, said.append, clock=lambda: now[0])

    def full(*_arguments: object, **_more: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(journal, "write_json", full)
        patch.setattr("runhealth.storage.ranklog.os.write", full)
        kept.begin(claimed.path)
        kept.status({"pid": 1})
        kept.append([RunEvent(attempt=0, step=3, rank=-1, kind="note", message="kept")])
        now[0] = journal.RETRY_S
        kept.retry()
        assert len(said) == 1
        assert "No space left on device" in said[0]
    kept.retry()
    assert not (Path(run.path) / "supervisor.json").exists()  # not before its time
    now[0] = 3 * journal.RETRY_S
    kept.retry()
    kept.end()
    assert (Path(run.path) / "supervisor.json").exists()
    assert said[1:] == ["the supervisor's own records are written again"]
    assert [getattr(record, "message", "") for record in RunTail(run.path).read()] == ["kept"]


def test_a_rank_that_torchrun_ended_is_not_at_fault(tmp_path: Path):
    launch = tmp_path / "a000.json"
    ended = REPORT.replace("rank      : 1 (local_rank: 1)", "rank      : 0 (local_rank: 0)").replace("-9", "-15")
    assert failure_of(launch, 1, ended + REPORT, 2).ranks == (1,)
    found = failure_of(launch, 1, ended, 2)
    assert (found.message, found.ranks) == ("rank 1 ended without a word; torchrun then ended the others", (1,))
    write_error(str(launch), 1, ValueError("bad shard"))
    assert failure_of(launch, 1, ended, 2).message == "rank 1: ValueError: bad shard"
