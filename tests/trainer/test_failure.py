"""Who is at fault: from exit codes, exceptions and places in the sequence of collectives; and the restarts after it."""

import errno
from pathlib import Path

import pytest

from runhealth.storage.records import RunEvent
from runhealth.storage.store import Store
from runhealth.storage.tail import RunTail
from runhealth.trainer import failure, journal
from runhealth.trainer.attempt import Attempt
from runhealth.trainer.failure import Failure, RankExit, failure_of, read_errors, write_error
from runhealth.trainer.flight_recorder import GroupState, RankTrace, behind, groups_of, read_traces, write_trace
from runhealth.trainer.journal import Journal
from runhealth.trainer.nodes import Report
from runhealth.trainer.restarts import RestartPolicy

GONE = RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:5")
LATE = RuntimeError("[/build/gloo/tcp/unbound_buffer.cc:78] Timed out waiting 60000ms for recv operation to complete")
SAID = "RuntimeError: [unbound_buffer.cc:78] Timed out waiting 60000ms for recv operation to complete"
S = 10**9


def ended(rank: int, code: int, at_s: float = 0.0, ordered: bool = False) -> RankExit:
    return RankExit(rank=rank, pid=100 + rank, code=code, ts_ns=int((1000 + at_s) * S), ordered=ordered)


@pytest.fixture
def launch(tmp_path: Path) -> Path:
    return tmp_path / "a000.json"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    now = [1000 * S]
    monkeypatch.setattr(failure.time, "time_ns", lambda: now[0])
    return now


def trace(rank: int, enqueued: int, *, waiting: bool = False, where: str = "", group: str = "0") -> RankTrace:
    state = GroupState(enqueued=enqueued, completed=enqueued - waiting, op="gloo:all_reduce", waiting=waiting)
    return RankTrace(rank=rank, ts_ns=1, step=7, where=where, groups={group: state})


@pytest.mark.usefixtures("clock")
def test_a_killed_rank_is_named_though_peers_speak_first_and_end_first(launch: Path):
    write_error(str(launch), 0, GONE)
    exits = [ended(0, 1, -0.2), ended(1, -9), ended(2, -15, 0.1, ordered=True)]
    found = failure_of(launch, 3, exits)
    assert (found.kind, found.message, found.ranks) == ("dead_rank", "rank 1 was killed (signal 9, SIGKILL)", (1,))


def test_a_signal_that_we_sent_accuses_nobody(launch: Path):
    found = failure_of(launch, 2, [ended(0, -9, ordered=True), ended(1, 3)])
    assert found.message == "rank 1 ended with exit code 3 and without a word"
    assert (found.kind, found.ranks) == ("crash", (1,))


def test_an_abort_after_the_first_death_is_an_echo(launch: Path):
    found = failure_of(launch, 3, [ended(2, -6, 0.4), ended(1, -11)])
    assert found.message == "rank 1 was killed (signal 11, SIGSEGV)"


@pytest.mark.usefixtures("clock")
def test_an_exception_before_an_abort_is_the_cause(launch: Path):
    write_error(str(launch), 0, ValueError("shape [4] expected, met [5]"))
    found = failure_of(launch, 2, [ended(1, -6, 0.3), ended(0, 1, 0.4)])
    assert (found.kind, found.message) == ("crash", "rank 0: ValueError: shape [4] expected, met [5]")


def test_the_first_exception_that_is_no_echo_counts_by_its_first_line(launch: Path, clock: list[int]):
    write_error(str(launch), 0, GONE)
    clock[0] += S
    write_error(str(launch), 1, ValueError("bad shard\nAt: somewhere"))
    found = failure_of(launch, 2, [ended(0, 1), ended(1, 1)])
    assert (found.message, found.ranks) == ("rank 1: ValueError: bad shard", (1,))


def test_what_a_pipeline_wraps_is_looked_into(launch: Path):
    """Rank 0 only says that its stage failed; what it failed of is the time-out."""
    try:
        try:
            raise LATE
        except RuntimeError as inner:
            raise RuntimeError("[Stage 0] failed to run forward:\n  args: …") from inner
    except RuntimeError as outer:
        write_error(str(launch), 0, outer)
    found = failure_of(launch, 2, [ended(0, 1)])
    assert (found.kind, found.ranks) == ("hang", (1,))
    assert f"{SAID} (RuntimeError: [Stage 0] failed to run forward)" in found.message


@pytest.mark.usefixtures("clock")
def test_a_lost_node_is_named_with_its_ranks(launch: Path):
    write_error(str(launch), 0, GONE)
    found = failure_of(launch, 4, [ended(0, 1)], lost={"n1": (2, 3)})
    assert (found.kind, found.message, found.ranks) == ("dead_rank", "node n1 was lost with ranks 2, 3", (2, 3))


@pytest.mark.parametrize("late", [False, True])
def test_who_does_not_time_out_with_the_others_never_joined(launch: Path, clock: list[int], late: bool):
    wrapped = f"Got the following error when running the callback: RuntimeError: {LATE}"
    for rank in (0, 1, 3):
        write_error(str(launch), rank, RuntimeError(f"{wrapped}\n\nAt:\n  ddp.py(132): arrived"))
    if late:
        clock[0] += 10 * S
        write_error(str(launch), 2, RuntimeError(wrapped))
    found = failure_of(launch, 4, [ended(rank, 1) for rank in (0, 1, 3)])
    assert (found.kind, found.ranks) == ("hang", (2,))
    assert found.message == f"rank 2 never joined the others; rank 0: {SAID}"
    assert [error.rank for error in read_errors(launch, 4)] == [0, 1, 3, *([2] if late else [])]


@pytest.mark.usefixtures("clock")
def test_the_lowest_collective_names_the_rank_when_all_give_up_together(launch: Path):
    for rank, enqueued in ((0, 42), (1, 41), (2, 42)):
        write_error(str(launch), rank, LATE)
        write_trace(launch, trace(rank, enqueued, where="loader.py:9 read" if rank == 1 else "ddp.py:1 wait"))
    found = failure_of(launch, 3, [ended(rank, 1) for rank in range(3)])
    assert (found.kind, found.ranks, found.step) == ("hang", (1,), 7)
    assert "at collective 41 of group 0, the others wait in 42: all_reduce" in found.message
    assert "rank 1 is in loader.py:9 read" in found.message
    assert "ddp.py" not in found.message


@pytest.mark.usefixtures("clock")
def test_of_two_absent_ranks_the_one_that_waits_for_the_other_is_spared(launch: Path):
    """Rank 0 timed out on rank 1, which waits for rank 2 in another group and has not given up yet."""
    write_error(str(launch), 0, LATE)
    write_trace(launch, trace(0, 5, waiting=True, group="a"))
    groups = {"a": GroupState(enqueued=4, completed=4), "b": GroupState(enqueued=9, completed=8, waiting=True)}
    write_trace(launch, RankTrace(rank=1, ts_ns=1, groups=groups))
    write_trace(launch, trace(2, 8, group="b", where="pause.py:3 hang"))
    found = failure_of(launch, 3, [ended(0, 1)])
    assert (found.kind, found.ranks) == ("hang", (2,))
    assert "rank 2 is in pause.py:3 hang" in found.message


@pytest.mark.usefixtures("clock")
def test_a_suspended_rank_is_named(launch: Path):
    write_error(str(launch), 0, LATE)
    found = failure_of(launch, 2, [ended(0, 1), ended(1, -9, ordered=True)], stopped={1: 5})
    assert (found.kind, found.ranks) == ("hang", (1,))
    assert found.message.startswith("rank 1 is suspended (SIGSTOP); rank 0: RuntimeError")


def test_files_that_are_half_written_count_as_none(launch: Path):
    launch.with_name("a000.r00000.error.json").write_text('{"rank": 0,')
    launch.with_name("a000.r00000.trace.json").write_text('{"rank": 0, "groups": 7}')
    assert read_errors(launch, 2) == []
    assert read_traces(launch, 2) == []
    assert failure_of(launch, 2, []).ranks == ()


def test_a_dump_of_gloo_s_flight_recorder_is_read():
    entry = {"process_group": ["0", "default_pg"], "profiling_name": "gloo:all_reduce", "input_sizes": [[4]]}
    dump = {
        "pg_status": {"0": {"last_enqueued_collective": "4", "last_completed_collective": "3"}},
        "entries": [
            {**entry, "collective_seq_id": 4, "record_id": 9, "retired": False},
            {**entry, "collective_seq_id": 3, "record_id": 8, "retired": True},
        ],
    }
    assert groups_of(dump) == {
        "0": GroupState(enqueued=4, completed=3, op="gloo:all_reduce", sizes="[[4]]", waiting=True)
    }
    assert groups_of({}) == {}


def test_nobody_is_behind_when_all_came_as_far():
    assert behind([trace(0, 4), trace(1, 4)]).ranks == ()
    assert behind([]).ranks == ()


# ------------------------------------------------------------------------------------------------------------ restarts


def crash(step: int, message: str = "rank 1: ValueError: bad") -> Failure:
    return Failure(kind="crash", message=message, ranks=(1,), step=step)


def test_the_same_failure_three_times_ends_the_run_whatever_the_limit():
    policy = RestartPolicy(max_restarts=100)
    assert [policy.give_up(crash(60), 50) for _ in range(2)] == ["", ""]
    assert policy.give_up(crash(60), 50).startswith("the same failure came 3 times at step 60")


def test_pids_and_times_in_a_message_make_no_other_failure():
    policy = RestartPolicy(max_restarts=100)
    said = [policy.give_up(crash(5, f"pid {pid} timed out after {pid * 7} ms"), 0) for pid in (11, 12, 13)]
    assert said[2]


def test_progress_gives_new_restarts_and_another_failure_breaks_the_row():
    policy = RestartPolicy(max_restarts=1)
    assert [policy.give_up(crash(step), step - 10) for step in (20, 40, 60, 80, 100)] == [""] * 5
    assert "without a new checkpoint" in policy.give_up(crash(101), 90)


# ------------------------------------------------------------------------------------------------ the supervisor's disk


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


def test_a_suspended_rank_is_not_given_up_because_the_wall_clock_jumped(tmp_path: Path) -> None:
    class OneRank:
        """A node whose rank was suspended just now, by a wall clock that has jumped an hour since."""

        living = frozenset({0})

        def __init__(self) -> None:
            self.pids = {0: 1}
            self.reports = [Report(node="n0", kind="stopped", rank=0, ts_ns=1)]

        def poll(self, _wait_s: float) -> list[Report]:
            found, self.reports = self.reports, []
            return found

    attempt = Attempt(OneRank(), tmp_path / "a000.json", 1, 60.0, lambda _line: None)  # type: ignore[arg-type]
    for _ in range(3):
        attempt.look(0.0)
    assert not attempt.failed
    assert list(attempt.stopped) == [0]
