"""The background diagnosis: when it runs, what it keeps, how it fails."""

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest

from runhealth.dashboard.diagnosis import LiveDiagnosis
from runhealth.dashboard.live import EngineDiagnoser, LiveRun, ReadCache
from runhealth.diagnose.findings import Report
from runhealth.diagnose.service import diagnose, verdict_hash
from runhealth.storage.errors import StoreError
from runhealth.storage.reader import RunReader
from runhealth.storage.records import SourceInfo


class Counting:
    """A diagnoser whose report counts its updates in `last_step`."""

    def __init__(self, problem: Exception | None = None, gate: threading.Event | None = None) -> None:
        self.count = 0
        self.problem = problem
        self.gate = gate
        self.ended: list[bool] = []
        self.closed = False

    def update(self, *, ended: bool) -> Report:
        if self.gate is not None:
            assert self.gate.wait(10)
        if self.problem is not None:
            raise self.problem
        self.count += 1
        self.ended.append(ended)
        source = SourceInfo(name="r", source="", format="runhealth")
        return Report(source=source, attempts=(), findings=(), missing=(), first_step=0, last_step=self.count)

    def close(self) -> None:
        self.closed = True


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_it_runs_only_for_news_and_not_too_often() -> None:
    clock, diagnoser = Clock(), Counting()
    live = LiveDiagnosis(lambda: diagnoser, clock=clock, min_interval_s=3.0)
    live.request(1, wait_s=10)
    assert live.report is not None
    assert live.report.last_step == 1
    clock.now += 10
    live.request(1, wait_s=10)  # nothing new
    assert diagnoser.count == 1
    live.request(2, wait_s=10)
    assert diagnoser.count == 2
    clock.now += 1
    live.request(3, wait_s=10)  # too soon
    assert diagnoser.count == 2
    clock.now += 2
    live.request(3, wait_s=10)
    assert diagnoser.count == 3
    clock.now += 3
    live.request(3, ended=True, wait_s=10)  # the end of the run is news
    assert diagnoser.ended == [False, False, False, True]


def test_one_update_at_a_time_and_nobody_waits_for_it() -> None:
    gate = threading.Event()
    diagnoser = Counting(gate=gate)
    live = LiveDiagnosis(lambda: diagnoser, min_interval_s=0.0)
    live.request(1)
    live.request(2)
    assert live.busy
    assert live.report is None
    live.close()  # while it works: the reader is let go of afterwards
    assert not diagnoser.closed
    gate.set()
    live.request(3, wait_s=10)
    assert (diagnoser.count, diagnoser.closed) == (1, True)


@pytest.mark.parametrize("problem", [StoreError("disk gone"), ZeroDivisionError("bug")])
def test_a_failure_is_told_and_the_next_news_starts_over(problem: Exception) -> None:
    made = [Counting(problem), Counting()]
    todo = iter(made)
    live = LiveDiagnosis(lambda: next(todo), min_interval_s=0.0)
    live.request(1, wait_s=10)
    assert str(problem) in live.problem
    assert made[0].closed
    live.request(2, wait_s=10)
    assert live.problem == ""
    assert live.report is not None


def test_incremental_diagnosis_ends_like_a_post_mortem(new_run: Callable[..., Any]) -> None:
    run = new_run("grows")
    run.steps(0, 299)
    live = LiveRun("grows", None)
    live.diagnosis._min_interval_s = 0.0
    live.diagnosis.request(1, wait_s=60)
    assert live.diagnosis.problem == ""
    assert live.diagnosis.report is not None
    assert live.diagnosis.report.findings == ()
    run.steps(300, 399, dict.fromkeys(range(350, 400), math.nan))
    live.diagnosis.request(2, ended=True, wait_s=60)
    run.publish()
    with RunReader.open("grows") as reader:
        whole = diagnose(reader)
    assert "non_finite" in [f.kind for f in whole.findings]
    found = live.diagnosis.report.findings
    assert [(f.code, f.onset_step, f.severity) for f in found] == [
        (f.code, f.onset_step, f.severity) for f in whole.findings
    ]
    live.close()


def test_what_was_read_is_read_again_only_for_news_and_within_its_duty() -> None:
    clock = Clock()
    cache = ReadCache(clock)
    reads: list[str] = []

    def read(name: str, cost_s: float) -> Callable[[], str]:
        def go() -> str:
            clock.now += cost_s
            reads.append(name)
            return name

        return go

    one: Any = "progress 1"
    two: Any = "progress 2"
    assert cache.get("view", one, read("a", 0.5)) == "a"
    assert cache.get("view", one, read("b", 0.5)) == "a"
    assert cache.get("view", two, read("c", 0.5)) == "a"  # moved on, but reading took 0.5 s a moment ago
    clock.now += 5.0
    assert cache.get("view", two, read("d", 0.5)) == "d"
    assert cache.get("another", two, read("e", 0.5)) == "e"
    assert reads == ["a", "d", "e"]


def test_a_run_that_has_ended_is_judged_alike_in_columns_and_as_it_grew(new_run: Callable[..., Any]) -> None:
    made = new_run("spike", age_s=3600)
    made.steps(0, 599, {400: 9.0, 401: 8.0})
    made.event("attempt_end", step=599)
    made.publish()
    at_once, grown = (EngineDiagnoser(RunReader.open("spike")) for _ in range(2))
    grown.update(ended=False)
    reports = [diagnoser.update(ended=True) for diagnoser in (at_once, grown)]
    for diagnoser in (at_once, grown):
        diagnoser.close()
    assert reports[0].findings
    assert verdict_hash(reports[0]) == verdict_hash(reports[1])
