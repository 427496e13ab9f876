"""A lower bump inside trouble that never ended is no second thing to look at."""

import dataclasses

import pytest

from runhealth.diagnose.explain import checked_kinds
from runhealth.diagnose.findings import UNDETERMINED, Finding, Outcome, Severity, Status, SuspectResult
from runhealth.diagnose.report.words import facts
from runhealth.diagnose.verdicts import healed_summary, merge


def finding(onset: int, peak: float, outcome: Outcome, severity: Severity, attempt: int = 0) -> Finding:
    return Finding(
        id=f"a{attempt}-s{onset}",
        code="RH101",
        kind="loss_spike",
        severity=severity,
        outcome=outcome,
        attempt=attempt,
        onset_step=onset,
        peak_step=onset + 2,
        end_step=None if outcome is Outcome.NON_RECOVERING else onset + 40,
        summary="the loss rose",
        suspects=(SuspectResult(suspect=UNDETERMINED, status=Status.INCONCLUSIVE, probability=1.0),),
        details={"loss_peak": peak, "loss_before": 1.4},
    )


TROUBLE = finding(1000, 8.0, Outcome.NON_RECOVERING, Severity.ERROR)


@pytest.mark.parametrize(
    ("later", "severity"),
    [
        (finding(1800, 4.0, Outcome.RECOVERING, Severity.WARNING), Severity.INFO),
        (finding(1800, 9.0, Outcome.RECOVERING, Severity.WARNING), Severity.WARNING),  # higher: news
        (finding(800, 4.0, Outcome.RECOVERING, Severity.WARNING), Severity.WARNING),  # before it
        (finding(1800, 4.0, Outcome.RECOVERING, Severity.WARNING, attempt=1), Severity.WARNING),
        (finding(1800, 4.0, Outcome.NON_RECOVERING, Severity.ERROR), Severity.ERROR),
    ],
)
def test_a_lower_bump_inside_lasting_trouble_is_a_note(later: Finding, severity: Severity) -> None:
    told = {f.id: f.severity for f in merge([TROUBLE, later])}
    assert told == {TROUBLE.id: Severity.ERROR, later.id: severity}


def test_after_trouble_that_ended_a_bump_counts() -> None:
    over = dataclasses.replace(TROUBLE, outcome=Outcome.RECOVERING, end_step=1500)
    later = finding(1800, 4.0, Outcome.RECOVERING, Severity.WARNING)
    assert {f.severity for f in merge([over, later]) if f.onset_step == 1800} == {Severity.WARNING}


def echo(kind: str, code: str, onset: int, signal: str, attempt: int = 0) -> Finding:
    return Finding(
        id=f"a{attempt}-s{onset}-{kind}",
        code=code,
        kind=kind,
        severity=Severity.WARNING,
        outcome=Outcome.NONE,
        attempt=attempt,
        onset_step=onset,
        peak_step=onset,
        end_step=None,
        summary="it moved",
        signals=(signal,),
    )


@pytest.mark.parametrize(
    ("later", "severity"),
    [
        (echo("scale_change", "RH205", 1001, "grad_norm"), Severity.INFO),
        (echo("scale_change", "RH205", 1001, "loss"), Severity.WARNING),  # the loss itself by an exact factor: news
        (echo("scale_change", "RH205", 1900, "grad_norm"), Severity.WARNING),  # long after
        (echo("scale_change", "RH205", 990, "grad_norm"), Severity.WARNING),  # before: a cause, perhaps
        (echo("not_learning", "RH108", 0, "loss"), Severity.INFO),
        (echo("not_learning", "RH108", 0, "loss", attempt=1), Severity.WARNING),
    ],
)
def test_what_lasting_trouble_brings_with_it_is_a_note(later: Finding, severity: Severity) -> None:
    told = {f.id: f.severity for f in merge([TROUBLE, later])}
    assert told == {TROUBLE.id: Severity.ERROR, later.id: severity}


def test_the_evaluation_of_weights_without_a_finite_loss_is_no_second_error() -> None:
    lost = dataclasses.replace(TROUBLE, kind="non_finite", code="RH103", signals=("loss",))
    evaluated = dataclasses.replace(lost, id="a0-s1250", onset_step=1250, signals=("eval_loss",))
    before = dataclasses.replace(evaluated, id="a0-s750", onset_step=750)
    told = {f.id: f.severity for f in merge([lost, evaluated, before])}
    assert told == {lost.id: Severity.ERROR, evaluated.id: Severity.INFO, before.id: Severity.ERROR}
    healed = dataclasses.replace(lost, outcome=Outcome.RECOVERING, end_step=1100)
    assert {f.severity for f in merge([healed, evaluated])} == {Severity.ERROR}


def test_a_healed_finding_does_not_ask_for_what_was_done() -> None:
    told = healed_summary("loss rose, and never came back; bad shard. To do: go back and skip them.", 1)
    assert told.count("To do") == 1
    assert "go back" not in told
    assert "Attempt 1 passed" in told
    assert facts(dataclasses.replace(TROUBLE, summary=told)) == told.replace(" To do: nothing.", "")


def test_what_event_facts_tell_is_looked_for() -> None:
    assert {"crash", "hang", "dead_rank", "out_of_memory"} <= set(checked_kinds())


OVERFITTING = echo("overfitting", "RH109", 150, "eval_loss")


@pytest.mark.parametrize(
    ("drifts", "severity"),
    [((170, 200), Severity.INFO), ((300,), Severity.WARNING), ((100,), Severity.WARNING)],
)
def test_a_climb_of_the_evaluation_is_told_once(drifts: tuple[int, ...], severity: Severity) -> None:
    told = merge([OVERFITTING, *(echo("eval_drift", "RH110", step, "eval_loss") for step in drifts)])
    assert {f.kind: f.severity for f in told} == {"overfitting": Severity.WARNING, "eval_drift": severity}


def test_a_loss_that_is_off_at_a_resume_is_told_once() -> None:
    jump = echo("resume_jump", "RH302", 1001, "loss")
    assert {f.kind: f.severity for f in merge([TROUBLE, jump])}["resume_jump"] is Severity.INFO
    over = finding(1000, 8.0, Outcome.RECOVERING, Severity.WARNING)
    told = {f.kind: f.severity for f in merge([over, jump])}
    assert told == {"loss_spike": Severity.INFO, "resume_jump": Severity.WARNING}
    later = finding(1300, 8.0, Outcome.RECOVERING, Severity.WARNING)
    assert {f.severity for f in merge([later, jump])} == {Severity.WARNING}
