"""A lower bump inside trouble that never ended is no second thing to look at."""

import dataclasses

import pytest

from runhealth.diagnose.findings import UNDETERMINED, Finding, Outcome, Severity, Status, SuspectResult
from runhealth.diagnose.verdicts import merge


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
