"""The wording that all forms of the report share: titles, likely causes, what to do next."""

import re
import shlex
import time
from dataclasses import dataclass

from runhealth.diagnose import experiments
from runhealth.diagnose.explain import EXPLANATIONS
from runhealth.diagnose.findings import (
    UNDETERMINED,
    Evidence,
    Finding,
    Outcome,
    Report,
    Severity,
    Status,
    SuspectResult,
)
from runhealth.diagnose.report.plain import readable, safe, short_number

NAMES = {
    "non_finite": "non-finite values (NaN or Inf)",
    "masked_non_finite": "masked non-finite values",
    "fp_overflow": "fp8/fp16 overflow",
    "lr_discontinuity": "learning-rate jump at a resume",
    "low_mfu": "low utilisation (MFU)",
}
SUSPECT_NAMES = {"lr_change": "learning-rate change", "fp_overflow": "fp8/fp16 overflow", "benign": "nothing wrong"}
_TO_DO = re.compile(r" To do: [^.]*\.")
NOTHING = "nothing at warning or above was found"
DATED_AFTER_S = 14 * 86400.0


def kind_name(kind: str) -> str:
    return NAMES.get(kind, kind.replace("_", " "))


def title(finding: Finding) -> str:
    """`RH101 non-recovering loss spike`."""
    outcome = "" if finding.outcome is Outcome.NONE else finding.outcome.value.replace("_", "-") + " "
    return safe(f"{finding.code} {outcome}{kind_name(finding.kind)}")


def loss_move(finding: Finding, unit: str) -> str:
    """`loss 1.38 → 4.01 (+2.63 nats)`; empty where the loss did not move or is not finite."""
    before, peak = finding.details.get("loss_before"), finding.details.get("loss_peak")
    if not isinstance(before, int | float) or not isinstance(peak, int | float):
        return ""
    rise = peak - before
    return f"loss {short_number(before)} → {short_number(peak)} ({'+' if rise >= 0 else ''}{short_number(rise)}{unit})"


def loss_unit(report: Report) -> str:
    """A log of someone else does not say what its loss is measured in."""
    return " nats" if report.source.format == "runhealth" else ""


def facts(finding: Finding) -> str:
    """What happened and why; what to do is said by `next_step`."""
    return readable(safe(_TO_DO.sub("", finding.summary)))


def claims(result: SuspectResult, *, against: bool, most: int) -> list[Evidence]:
    """The strongest evidence of a suspect, for it or against it."""
    chosen = [e for e in result.evidence if (e.weight_nats < 0) == against and e.weight_nats != 0]
    return sorted(chosen, key=lambda e: -abs(e.weight_nats))[:most]


def claim(evidence: Evidence) -> str:
    return readable(safe(evidence.claim))


def suspect_name(result: SuspectResult) -> str:
    return SUSPECT_NAMES.get(result.suspect, safe(result.suspect).replace("_", " "))


def ranked(finding: Finding) -> list[SuspectResult]:
    """The suspects that could look, the likeliest first."""
    return [s for s in finding.suspects if s.status not in (Status.NOT_OBSERVED, Status.CRASHED)]


def why(result: SuspectResult) -> str:
    """What speaks for a suspect."""
    if result.suspect == UNDETERMINED:
        return "the evidence does not single out one of the suspects"
    return "; ".join(claim(e) for e in claims(result, against=False, most=2))


def counter_evidence(finding: Finding, most: int = 3) -> list[tuple[SuspectResult, Evidence]]:
    """The strongest counter-evidence of up to `most` suspects that are out; what replays say is told beside it."""
    found: list[tuple[float, SuspectResult, Evidence]] = []
    for result in finding.suspects:
        speaking = [e for e in claims(result, against=True, most=3) if not e.claim.startswith(experiments.REPLAYED)]
        if speaking and result.suspect != finding.verdict:
            found.append((speaking[0].weight_nats, result, speaking[0]))
    found.sort(key=lambda item: (item[0], item[1].suspect))
    return [(result, evidence) for _, result, evidence in found[:most]]


def replay_lines(finding: Finding) -> list[str]:
    """What `diagnose replay` showed: the control, how exact it is, and each change."""
    result = finding.replay
    if result is None:
        return []
    lines = [f"{experiments.outcome(result, result.tried[0])}; {experiments.fidelity(result)}"]
    lines += [experiments.outcome(result, one) for one in result.tried[1:] if one.change != "as_is"]
    lines[-1] += f" ({len(result.tried)} replay{'s' if len(result.tried) > 1 else ''}, {result.steps:,} steps in all)"
    return [readable(safe(line)) for line in lines]


@dataclass(frozen=True, slots=True, kw_only=True)
class Next:
    """What to do: a command to type, or a sentence; `note` says more about it."""

    command: str = ""
    sentence: str = ""
    note: str = ""


def next_step(finding: Finding, report: Report) -> Next:
    healed = finding.details.get("healed_by_attempt")
    if healed is not None:
        return Next(sentence=f"Nothing: attempt {healed} passed these steps without it")
    plan = finding.remedy.plan
    if plan is not None:
        parts = [f"checkpoint {plan.checkpoint_step:,}"]
        if plan.skip:
            parts.append(f"skip {plan.cost.samples_skipped:,} samples")
        if plan.repairs:
            parts.append(f"repair: {', '.join(sorted({r.kind.replace('_', ' ') for r in plan.repairs}))}")
        lost = age(plan.cost.seconds) if plan.cost.seconds is not None else f"{plan.cost.steps:,} steps"
        parts.append(f"{lost} lost")
        return Next(command=f"diagnose rollback plan --run {word(report.source.name)}", note=safe(", ".join(parts)))
    action, reason = finding.remedy.action.replace("_", " "), finding.remedy.reason
    if finding.remedy.action == "continue":
        sentence = f"continue: {reason}" if reason else "continue"
    elif finding.kind in ("loss_spike", "loss_divergence") and finding.verdict == UNDETERMINED:
        sentence = f"go back to a checkpoint before step {finding.onset_step:,}"
        if finding.missing:
            sentence += f"; to learn the cause next time, record {', '.join(m.signal for m in finding.missing[:3])}"
    elif finding.suspects and finding.verdict != UNDETERMINED:
        sentence = f"{action}: {reason}" if reason else action
    else:
        sentence = EXPLANATIONS[finding.kind].do if finding.kind in EXPLANATIONS else action
    no_plan = finding.details.get("no_plan")
    if no_plan:
        sentence = f"{sentence.rstrip('.')} (no rollback plan: {no_plan})"
    sentence = sentence[:1].upper() + sentence[1:]
    return Next(sentence=readable(safe(sentence)), note=f"diagnose explain {finding.code}")


def command(report: Report, prefix: str = "diagnose") -> str:
    """The command that shows this source again."""
    if report.source.format == "runhealth":
        return f"{prefix} --run {word(report.source.name)}"
    return f"{prefix} {word(report.source.source)}"


def word(text: str) -> str:
    """One word of a command line, whatever a name holds."""
    return shlex.quote(safe(text))


def judged(report: Report) -> str:
    """Which stretch was judged, if not everything."""
    if report.window is not None:
        return f"judged: steps {report.window[0]:,}-{report.window[1]:,}"
    return ""


def loud(report: Report) -> list[Finding]:
    return [f for f in report.findings if f.severity is not Severity.INFO]


def quiet(report: Report) -> list[Finding]:
    return [f for f in report.findings if f.severity is Severity.INFO]


def seen(finding: Finding) -> str:
    """How often: separate incidents that are told together, or bursts within one incident."""
    if finding.count <= 1:
        return ""
    together = finding.summary.startswith(f"{finding.count} times")
    return f"seen {finding.count:,} times" if together else f"in {finding.count:,} bursts"


def last_step(report: Report, now_ns: int | None) -> str:
    """`last step 14 s ago`, or a date if that is long ago; empty if it is not known."""
    if now_ns is None or report.last_ts_ns <= 0:
        return ""
    passed_s = max(0, now_ns - report.last_ts_ns) / 1e9
    if passed_s > DATED_AFTER_S:
        return f"last step on {time.strftime('%Y-%m-%d', time.gmtime(report.last_ts_ns / 1e9))}"
    return f"last step {age(passed_s)} ago"


def age(seconds: float) -> str:
    """A duration in the unit a person would choose."""
    for limit, unit, size in ((120, "s", 1), (7200, "min", 60), (172800, "h", 3600)):
        if seconds < limit:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86400:.0f} days"
