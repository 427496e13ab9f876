"""A run that died or hangs writes nothing about it: what its logs, its processes and the clock tell."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runhealth.diagnose.findings import Report
from runhealth.diagnose.service import diagnose, verdict_hash
from runhealth.diagnose.told import Told
from runhealth.diagnose.watch import watch
from runhealth.storage.ranklog import RankLog
from runhealth.storage.reader import RunReader
from runhealth.storage.records import EventKind, RunEvent, SourceInfo, StepRecord
from runhealth.storage.store import RunInfo, Store

STEP_NS = 100_000_000
START_NS = 1_700_000_000 * 10**9
STEPS = 60
LAST_NS = START_NS + (STEPS - 1) * STEP_NS
MINUTE_NS = 60 * 10**9

WRITER = """
import sys, time
from runhealth.storage.ranklog import RankLog
from runhealth.storage.records import StepRecord
attempt, rank, steps, start, step_ns = sys.argv[1], *map(int, sys.argv[2:])
log = RankLog.create(attempt, rank)
for s in range(steps):
    values = {"loss": 3.0 - 0.01 * s + 0.001 * (s % 7)}
    log.append([StepRecord(attempt=0, step=s, rank=rank, ts_ns=start + s * step_ns, values=values)])
print("written", flush=True)
time.sleep(600)
"""


def report(run: RunInfo, now_ns: int, **more: int) -> Report:
    with RunReader(run) as reader:
        return diagnose(reader, clock=lambda: now_ns, **more)


def loud(found: Report) -> list[tuple[str, str, tuple[int, ...] | None]]:
    return [(f.kind, f.severity.value, f.ranks) for f in found.findings if f.severity.value != "info"]


@pytest.fixture
def live(tmp_path):
    """`live(steps of rank 0, steps of rank 1, step_ns)`: a run with two living writers, and their processes."""
    children: list[subprocess.Popen[str]] = []

    def start(*steps: int, step_ns: int = STEP_NS) -> tuple[RunInfo, list[subprocess.Popen[str]]]:
        store = Store(str(tmp_path))
        run = store.create_run("run")
        attempt = store.claim_attempt(run, "one")
        for rank, count in enumerate(steps):
            command = [sys.executable, "-c", WRITER, attempt.path, *map(str, (rank, count, START_NS, step_ns))]
            children.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline() == "written\n"
        return run, children

    yield start
    for child in children:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


def kill(*children: subprocess.Popen[str]) -> None:
    for child in children:
        child.kill()
        child.wait()


def test_a_live_run_is_quiet_while_it_is_fresh_and_hangs_when_it_is_silent(live):
    run, _ = live(STEPS, STEPS)
    assert loud(report(run, LAST_NS + MINUTE_NS)) == []
    late = report(run, LAST_NS + MINUTE_NS + 10**9)
    assert loud(late) == [("hang", "error", None)]
    (finding,) = [f for f in late.findings if f.kind == "hang"]
    assert finding.onset_step == STEPS - 1
    assert [missing.signal for missing in finding.missing] == ["stacks"]
    assert verdict_hash(late) == verdict_hash(
        report(run, LAST_NS + 100 * MINUTE_NS)
    )  # how long it has hung is not said
    assert loud(report(run, LAST_NS + 100 * MINUTE_NS, window=(0, 9))) == []


def test_slow_steps_get_five_of_them(live):
    run, _ = live(12, 12, step_ns=MINUTE_NS)
    last = START_NS + 11 * MINUTE_NS
    assert loud(report(run, last + 5 * MINUTE_NS)) == []
    assert loud(report(run, last + 5 * MINUTE_NS + 10**9)) == [("hang", "error", None)]


def test_the_rank_that_is_behind_is_named(live):
    run, _ = live(STEPS, STEPS - 1)
    assert loud(report(run, LAST_NS + 2 * MINUTE_NS)) == [("hang", "error", (1,))]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads the state of a process from /proc")
def test_a_suspended_rank_is_named(live):
    run, (first, _) = live(STEPS, STEPS)
    first.send_signal(signal.SIGSTOP)
    deadline = time.monotonic() + 10
    while Path(f"/proc/{first.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    found = report(run, LAST_NS + 2 * MINUTE_NS)
    assert loud(found) == [("hang", "error", (0,))]
    assert f"process {first.pid}" in next(f.summary for f in found.findings if f.kind == "hang")


def test_writers_that_are_gone_without_an_end_are_a_crash_at_once(live):
    run, children = live(STEPS, STEPS - 1)
    kill(*children)
    found = report(run, LAST_NS + 10**9)
    assert loud(found) == [("crash", "error", (1,))]
    assert verdict_hash(found) == verdict_hash(report(run, LAST_NS + 100 * MINUTE_NS))


def test_one_writer_that_is_gone_is_a_dead_rank(live):
    run, children = live(STEPS, STEPS)
    kill(children[1])
    assert loud(report(run, LAST_NS + 10**9)) == [("dead_rank", "error", (1,))]


def test_a_later_attempt_is_the_one_that_counts(live):
    run, children = live(STEPS, STEPS)
    kill(*children)
    write(run, "two", close=True)
    assert loud(report(run, LAST_NS + 100 * MINUTE_NS)) == []


def write(run: RunInfo, key: str, *, close: bool, failed: bool = False) -> RankLog:
    store = Store(str(Path(run.path).parent))
    claimed = store.claim_attempt(run, key)
    log = RankLog.create(claimed.path, 0)
    place = {"attempt": claimed.attempt, "rank": 0}
    for s in range(STEPS):
        loss = 3.0 - 0.01 * s + 0.001 * (s % 7)
        log.append([StepRecord(**place, step=s, ts_ns=START_NS + s * STEP_NS, values={"loss": loss})])
    if failed:
        error = RunEvent(**place, step=STEPS - 1, ts_ns=LAST_NS, kind=EventKind.EXCEPTION, message="ValueError: x")
        log.append([error])
    if close:
        log.close()
    return log


def test_a_run_that_was_closed_says_the_same_for_ever(tmp_path):
    run = Store(str(tmp_path)).create_run("run")
    write(run, "one", close=True)
    early, late = report(run, LAST_NS), report(run, LAST_NS + 10**6 * MINUTE_NS)
    assert loud(late) == []
    assert verdict_hash(early) == verdict_hash(late)


def test_an_exception_on_record_is_not_told_twice(tmp_path):
    run = Store(str(tmp_path)).create_run("run")
    log = write(run, "one", close=False, failed=True)
    assert [kind for kind, _, _ in loud(report(run, LAST_NS + 100 * MINUTE_NS))] == ["crash"]
    log.close()


def test_a_watch_tells_of_silence_though_nothing_is_new(live, tmp_path, capsys):
    run, children = live(STEPS, STEPS)
    info = SourceInfo(name=run.name, source=run.path, format="runhealth")
    now = [LAST_NS]
    sleeps = [0]

    def sleep(_seconds: float) -> None:
        sleeps[0] += 1
        now[0] += 20 * 10**9
        if sleeps[0] == 6:
            raise KeyboardInterrupt

    told = Told(str(tmp_path / "told.json"))
    with RunReader(run) as reader, pytest.raises(KeyboardInterrupt):
        watch(
            reader, info, told, hook=None, once=False, interval_s=1.0, fail_on="warning", sleep=sleep,
            clock=lambda: now[0],
        )  # fmt: skip
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1
    assert "RH405 hang new" in said[0]
    assert all(child.poll() is None for child in children)


def test_a_watch_of_a_run_that_goes_on_is_quiet(tmp_path, capsys):
    run = Store(str(tmp_path)).create_run("run")
    claimed = Store(str(tmp_path)).claim_attempt(run, "one")
    log = RankLog.create(claimed.path, 0)
    info = SourceInfo(name=run.name, source=run.path, format="runhealth")
    step, step_ns = [0], 20 * 10**9

    def go_on(_seconds: float = 0.0) -> None:
        step[0] += 1
        if step[0] == 40:
            raise KeyboardInterrupt
        values = {"loss": 3.0 - 0.01 * step[0]}
        log.append([StepRecord(attempt=0, step=step[0], rank=0, ts_ns=START_NS + step[0] * step_ns, values=values)])

    go_on()
    with RunReader(run) as reader, pytest.raises(KeyboardInterrupt):
        watch(
            reader, info, Told(str(tmp_path / "told.json")), hook=None, once=False, interval_s=1.0,
            fail_on="warning", sleep=go_on, clock=lambda: START_NS + step[0] * step_ns,
        )  # fmt: skip
    log.close()
    assert capsys.readouterr().out == ""


def test_exceptions_of_one_end_are_one_crash_with_the_first_line(list_source):
    nested = "RuntimeError: Got the following error when running the callback: RuntimeError: [x.cc:78] Timed out"
    stack = "\n\nAt:\n  /somewhere/ddp.py(132): arrived\n"
    steps = [
        StepRecord(attempt=0, step=s, rank=rank, ts_ns=START_NS + s * STEP_NS, values={"loss": 3.0 - 0.01 * s})
        for s in range(STEPS)
        for rank in (0, 1)
    ]

    def failed(rank: int, ts_ns: int, message: str, **data: object) -> RunEvent:
        step = STEPS - 1 if rank >= 0 else 0
        return RunEvent(
            attempt=0, step=step, rank=rank, ts_ns=ts_ns, kind=EventKind.EXCEPTION, message=message, data=data
        )

    ranks = [failed(rank, LAST_NS + 2 - rank, nested + stack, type="RuntimeError") for rank in (0, 1)]
    vague = failed(-1, LAST_NS + 9, "torchrun ended with exit code 1", exit_code=1)
    (crash,) = [f for f in diagnose(list_source([*steps, *ranks, vague])).findings if f.kind == "crash"]
    assert crash.ranks == (1,)  # the first to fail
    assert crash.summary == "attempt 0 ended with an exception: RuntimeError: [x.cc:78] Timed out"
    named = failed(-1, LAST_NS + 9, "rank 0 never joined the others", exit_code=1, ranks=[0])
    (crash,) = [f for f in diagnose(list_source([*steps, *ranks, named])).findings if f.kind == "crash"]
    assert crash.ranks == (0,)
    assert crash.summary == "attempt 0 ended: rank 0 never joined the others"
