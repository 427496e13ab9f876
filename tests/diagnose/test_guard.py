"""When a watch may roll a run back by itself, and what it does then."""

import fcntl
import json
import os
from dataclasses import replace

import pytest

from runhealth.diagnose.auto_rollback import AutoRollback, Mode
from runhealth.diagnose.engine import Engine
from runhealth.diagnose.findings import UNDETERMINED, Outcome, Severity
from runhealth.diagnose.guard import Act, Guard
from runhealth.storage.records import SourceInfo

INFO = SourceInfo(name="made", source="made", format="runhealth")


@pytest.fixture
def judged(records_of):
    """The report of a run whose loss went off at step 300 and stayed, and its worst finding."""
    engine = Engine()
    for record in records_of(cause="bad_shard", seed=150):
        engine.feed_quietly(record)
    engine.finish()
    report = engine.report(INFO)
    finding = next(f for f in report.findings if f.remedy.plan is not None)
    assert finding.severity is Severity.ERROR
    return report, finding


def decide(judged, applied=(), pending=False, **changes):
    report, finding = judged
    plan = finding.remedy.plan
    if "probability" in changes:
        plan = replace(plan, probability=changes.pop("probability"))
    changed = replace(finding, remedy=replace(finding.remedy, plan=plan), **changes)
    return Guard().decide(changed, report, applied, pending=pending)


def test_a_named_cause_that_lasts_is_rolled_back(judged):
    assert decide(judged).act is Act.APPLY


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"probability": 0.89}, "0.89"),
        ({"verdict": UNDETERMINED}, "undetermined"),
        ({"details": {"second_opinion": {"agrees": False, "suspect": "lr_change"}}}, "disagrees"),
    ],
)
def test_what_is_not_sure_is_left_to_a_person(judged, changes, why):
    decision = decide(judged, **changes)
    assert decision.act is Act.ASK
    assert why in decision.why


def test_what_may_come_back_is_given_time(judged):
    report, finding = judged
    last = report.attempts[-1].last_step
    for age, act in ((3, Act.WAIT), (19, Act.WAIT), (20, Act.APPLY)):
        young = replace(finding, outcome=Outcome.ONGOING, onset_step=last - age, details={})
        assert Guard().decide(young, report, (), pending=False).act is act
    lasting = replace(finding, outcome=Outcome.ONGOING, onset_step=last - 3, details={"cause_lasts": "still off"})
    assert Guard().decide(lasting, report, (), pending=False).act is Act.APPLY


def test_never_the_same_incident_twice_nor_too_often_nor_too_soon(judged):
    plan = judged[1].remedy.plan
    before = plan.attempt - 1
    elsewhere = replace(plan, attempt=before, onset_step=plan.onset_step - 200, checkpoint_step=0)
    assert decide(judged, [elsewhere]).act is Act.APPLY
    assert "came back" in decide(judged, [replace(plan, attempt=before, onset_step=plan.onset_step + 4)]).why
    assert decide(judged, [plan]).act is Act.WAIT  # what it answered; the new attempt is still to come
    assert "3 rollbacks" in decide(judged, [elsewhere] * 3).why
    report, finding = judged
    newest = replace(report.attempts[-1], first_step=report.attempts[-1].last_step - 49)
    soon = replace(report, attempts=(newest,))
    assert "under 50" in Guard().decide(finding, soon, [elsewhere], pending=False).why
    assert decide(judged, pending=True).act is Act.WAIT


def test_nothing_is_done_about_a_past_attempt_or_a_minor_finding(judged):
    report, finding = judged
    assert decide(judged, severity=Severity.INFO).act is Act.LEAVE
    later = replace(report.attempts[-1], attempt=finding.attempt + 1)
    gone_on = replace(report, attempts=(*report.attempts, later))
    assert Guard().decide(finding, gone_on, (), pending=False).act is Act.LEAVE


@pytest.fixture
def run(tmp_path, judged):
    """A run's folder with the checkpoint that the plan goes to."""
    folder = tmp_path / "made"
    checkpoint = folder / judged[1].remedy.plan.checkpoint_path
    checkpoint.mkdir(parents=True)
    (checkpoint / "MANIFEST.json").write_text("{}")
    return folder


def plans(run):
    return sorted(path.name for path in (run / "plans").glob("*"))


def test_a_dry_run_writes_nothing(judged, run, capsys):
    watcher = AutoRollback(Mode.DRY_RUN, "made", str(run))
    for _ in range(2):
        watcher.look(judged[0])
    out = capsys.readouterr().out
    assert out.count("would be applied") == 1
    assert not (run / "plans").exists()


def test_ask_writes_the_plan_once_and_names_the_command(judged, run, capsys):
    watcher = AutoRollback(Mode.ASK, "made", str(run))
    for _ in range(2):
        watcher.look(judged[0])
    assert capsys.readouterr().out.count("diagnose rollback apply --run ") == 1
    assert plans(run) == [f"{judged[1].remedy.plan.incident}.json"]
    assert json.loads((run / "plans" / plans(run)[0]).read_text())["run"] == "made"


def test_auto_needs_a_supervisor_and_hands_over_once(judged, run, capsys):
    AutoRollback(Mode.AUTO, "made", str(run)).look(judged[0])
    assert "no supervisor" in capsys.readouterr().out
    (run / "supervisor.json").write_text(json.dumps({"pid": os.getpid()}))
    with open(run / "supervisor.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        watcher = AutoRollback(Mode.AUTO, "made", str(run))
        for _ in range(2):
            watcher.look(judged[0])
    assert capsys.readouterr().out.count("handed to the supervisor") == 1
    incident = judged[1].remedy.plan.incident
    assert plans(run) == [f"{incident}.apply.json", f"{incident}.json"]


def test_auto_does_not_act_on_a_checkpoint_that_is_gone(judged, run, capsys):
    (run / judged[1].remedy.plan.checkpoint_path / "MANIFEST.json").unlink()
    AutoRollback(Mode.AUTO, "made", str(run)).look(judged[0])
    assert "MANIFEST.json is missing" in capsys.readouterr().out
    assert plans(run) == [f"{judged[1].remedy.plan.incident}.json"]


def test_a_folder_that_cannot_be_written_is_said_once_and_does_not_end_the_watch(judged, run, capsys):
    (run / "plans").write_text("in the way")
    watcher = AutoRollback(Mode.ASK, "made", str(run))
    for _ in range(2):
        watcher.look(judged[0])
    assert capsys.readouterr().out.count("no rollback for") == 1


def test_the_same_rollback_is_not_made_again_after_it_was_applied(judged, run, capsys):
    plan = judged[1].remedy.plan
    (run / "plans").mkdir()
    made = replace(plan, run="made", attempt=plan.attempt - 1)
    (run / "plans" / f"{plan.incident}.applied.json").write_text(made.dumps())
    AutoRollback(Mode.AUTO, "made", str(run)).look(judged[0])
    out = capsys.readouterr().out
    assert "came back after the rollback" in out
    assert f"{plan.incident}.apply.json" not in plans(run)


@pytest.fixture
def supervised(run):
    """The run while a supervisor is at work."""
    (run / "supervisor.json").write_text(json.dumps({"pid": os.getpid()}))
    with open(run / "supervisor.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield run


def with_plan(judged, **changes):
    report, finding = judged
    plan = replace(finding.remedy.plan, **changes)
    other = replace(finding, remedy=replace(finding.remedy, plan=plan))
    return replace(report, findings=(other,))


def test_what_was_left_to_a_person_is_applied_once_the_cause_is_sure(judged, supervised, capsys):
    watcher = AutoRollback(Mode.AUTO, "made", str(supervised))
    watcher.look(with_plan(judged, probability=0.85))
    asked = capsys.readouterr().out
    assert "0.85 likely" in asked
    incident = judged[1].remedy.plan.incident
    assert f"diagnose replay --run {supervised} --incident {incident} to settle it" in asked
    assert f"diagnose rollback apply --run {supervised} {supervised}/plans/{incident}.json" in asked
    watcher.look(judged[0])
    assert "handed to the supervisor" in capsys.readouterr().out
    assert plans(supervised) == [f"{incident}.apply.json", f"{incident}.json"]


def test_a_watch_says_what_it_waits_for_and_what_became_of_it(judged, supervised, capsys):
    report, finding = judged
    plan = replace(finding.remedy.plan, run="made")
    young = replace(finding, outcome=Outcome.ONGOING, onset_step=report.attempts[-1].last_step - 3, details={})
    watcher = AutoRollback(Mode.AUTO, "made", str(supervised))
    for _ in range(2):
        assert watcher.look(replace(report, findings=(young,)))
    assert capsys.readouterr().out.count("waits: it may come back within 20 steps") == 1
    watcher.look(report)
    assert "handed to the supervisor" in capsys.readouterr().out
    folder = supervised / "plans"
    (folder / f"{plan.incident}.apply.json").rename(folder / f"{plan.incident}.applied.json")
    watcher.look(report)
    out = capsys.readouterr().out
    assert "a rollback of this attempt is under way" in out
    assert "was made" not in out
    newest = replace(report.attempts[-1], attempt=plan.attempt + 1, first_step=plan.checkpoint_step)
    for _ in range(2):
        watcher.look(replace(report, attempts=(*report.attempts, newest)))
    out = capsys.readouterr().out
    assert out.count("was made: attempt 1 begins at step") == 1


def test_a_plan_that_the_supervisor_refused_is_told_with_its_reason(judged, supervised, capsys):
    watcher = AutoRollback(Mode.AUTO, "made", str(supervised))
    watcher.look(judged[0])
    incident, folder = judged[1].remedy.plan.incident, supervised / "plans"
    (folder / f"{incident}.apply.json").rename(folder / f"{incident}.failed.json")
    (folder / f"{incident}.failed.txt").write_text("checkpoint \x1b[31mis damaged\n")
    capsys.readouterr()
    for _ in range(2):
        watcher.look(judged[0])
    assert capsys.readouterr().out.count("was refused by the supervisor: checkpoint \\x1b[31mis damaged") == 1


def test_a_plan_that_waits_for_nobody_names_the_command(judged, run, capsys):
    plan = replace(judged[1].remedy.plan, run="made")
    (run / "plans").mkdir()
    (run / "plans" / f"{plan.incident}.apply.json").write_text(plan.dumps())
    AutoRollback(Mode.AUTO, "made", str(run)).look(judged[0])
    assert "no supervisor is at work. Next: runhealth train --run made" in capsys.readouterr().out


def test_a_rollback_that_is_not_asked_for_any_more_is_taken_back(judged, run, capsys):
    watcher = AutoRollback(Mode.ASK, "made", str(run))
    watcher.look(judged[0])
    for _ in range(2):
        watcher.look(replace(judged[0], findings=()))
    assert capsys.readouterr().out.count("is not asked for any more") == 1
