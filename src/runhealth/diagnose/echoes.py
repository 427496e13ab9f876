"""Findings that only echo another one: two loud findings of one cause send people to two places."""

from collections.abc import Sequence

from runhealth.diagnose.findings import UNDETERMINED, Finding, Outcome, Severity
from runhealth.diagnose.tracked import LOSS_KINDS

FOLD_STEPS = 8
LAG_STEPS = 32


def echoed(finding: Finding, findings: Sequence[Finding]) -> Finding | None:
    """The finding that tells the same trouble better; None where there is none."""
    for other in findings:
        if _lags(finding, other):
            return other
        if other.id == finding.id or other.attempt != finding.attempt or other.severity is Severity.INFO:
            continue
        if _of_lasting(finding, other) or _at_the_resume(finding, other) or _of_overfitting(finding, other, findings):
            return other
    return None


def _lags(finding: Finding, other: Finding) -> bool:
    """An evaluation that comes some steps after the training loss left and was explained: it looks at the same weights
    later, and held-out data take longer to come back."""
    since = finding.onset_step - other.onset_step
    return (
        finding.kind == "eval_drift"
        and other.kind in LOSS_KINDS
        and other.attempt == finding.attempt
        and other.verdict not in (UNDETERMINED, "benign")
        and 0 <= since <= LAG_STEPS
    )


def _of_lasting(finding: Finding, other: Finding) -> bool:
    """An evaluation of weights whose training loss is no number, a gradient norm that changed its level while the loss
    rose, a loss that ends high because it never came back."""
    lasts = other.outcome in (Outcome.NON_RECOVERING, Outcome.ONGOING)
    if not lasts or other.severity is not Severity.ERROR:
        return False
    since = finding.onset_step - other.onset_step
    if finding.kind == other.kind == "non_finite":
        trained = {"loss", "grad_norm"}.intersection(other.signals)
        return since > 0 and bool(trained) and set(finding.signals) == {"eval_loss"}
    if other.kind not in LOSS_KINDS:
        return False
    if finding.kind == "scale_change" and finding.signals[:1] == ("grad_norm",):
        return 0 <= since <= max(other.peak_step - other.onset_step, FOLD_STEPS)
    return finding.kind == "not_learning"


def _at_the_resume(finding: Finding, other: Finding) -> bool:
    """The loss that is off at a resume is an incident too. Where it never came back, that tells how it went on and what
    to do; where it did, the jump tells what to check, and nothing asks to go on as if all were well."""
    if abs(finding.onset_step - other.onset_step) > FOLD_STEPS:
        return False
    if finding.kind == "resume_jump":
        return other.kind in LOSS_KINDS and other.severity is Severity.ERROR
    return finding.kind in LOSS_KINDS and finding.severity is Severity.WARNING and other.kind == "resume_jump"


def _of_overfitting(finding: Finding, other: Finding, findings: Sequence[Finding]) -> bool:
    """An evaluation loss that leaves its trend again and again climbs; one that is scored otherwise jumps once."""
    if finding.kind != "eval_drift" or other.kind != "overfitting" or finding.onset_step < other.onset_step:
        return False
    left = [f for f in findings if f.kind == "eval_drift" and f.attempt == other.attempt]
    return sum(f.onset_step >= other.onset_step for f in left) > 1
