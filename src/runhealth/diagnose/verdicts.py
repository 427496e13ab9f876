"""Findings out of incidents and facts: kind, severity, outcome, the sentence a person can act on, and merging."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from runhealth.diagnose.codes import CODES
from runhealth.diagnose.echoes import FOLD_STEPS, echoed
from runhealth.diagnose.findings import (
    UNDETERMINED,
    Alarm,
    Finding,
    Missing,
    Outcome,
    Remedy,
    Severity,
    SuspectResult,
)
from runhealth.diagnose.suspect import Suspect
from runhealth.diagnose.tracked import CAUSAL_KINDS, LOSS_KINDS, Tracked

HEADLINES = ("non_finite", "loss_scale_collapse")  # always findings of their own, even beside a loss spike
# findings only where the loss shows nothing
BURSTS = ("data_corrupt", "fp_overflow", "clip_breach", "update_jump", "gradient_spike")
FACT_SEVERITY: Mapping[str, Severity] = {
    "restart": Severity.INFO,
    "epoch_staircase": Severity.INFO,
    "short_accumulation_window": Severity.INFO,
    "placeholder_value": Severity.INFO,
    "no_training_signal": Severity.ERROR,
    "optimizer_not_stepping": Severity.ERROR,
    "crash": Severity.ERROR,
    "hang": Severity.ERROR,
    "dead_rank": Severity.ERROR,
    "out_of_memory": Severity.ERROR,
}
MANY_BURSTS, BURST_STEPS = 3, 500
TALL_BURST = 5.0  # x the median: lower ones occur in healthy runs and are told as info
MERGE_LEAST = 2
MOST_SHARDS = 8
LEAST_BAD_STEPS = 8
SMALL_RISE = math.log(1.1)


def findings_of(
    tracked: Tracked,
    suspects: tuple[SuspectResult, ...],
    verdict: str,
    known: Mapping[str, Suspect],
    details: Mapping[str, object],
    lasting: str = "",
) -> list[Finding]:
    """The findings of one incident: one a headline. `lasting` says that the cause is still at work, if it is."""
    kinds: list[tuple[str, tuple[str, ...]]] = []
    if tracked.of(*LOSS_KINDS) and not _data_are_the_news(tracked):
        kinds.append((tracked.loss_kind(), LOSS_KINDS))
    kinds.extend((kind, (kind,)) for kind in HEADLINES if tracked.of(kind))
    if not kinds:
        kinds.extend([(kind, (kind,)) for kind in BURSTS if tracked.of(kind)][:1])
    elif tracked.shard is not None and verdict != "bad_shard":
        kinds.append(("data_corrupt", ("data_corrupt",)))  # bad data that are not the cause are news of their own
    found = []
    for position, (kind, alarm_kinds) in enumerate(kinds):
        alarms = tracked.of(*alarm_kinds)
        outcome, end = _outcome(tracked, kind)
        severity = _severity(kind, outcome, tracked)
        if lasting and is_over(outcome, end):
            outcome, end = Outcome.RECOVERING, None
            severity = severity if severity is Severity.ERROR else Severity.WARNING
        count = sum(1 for a in alarms if a.signal == alarms[0].signal)
        count = max(count, tracked.count) if kind in LOSS_KINDS else count
        first = position == 0
        onset = tracked.onset_step if first else min(a.onset_step for a in alarms)
        moved = min(a.onset_step for a in alarms)
        remedy = _remedy(verdict, outcome, end, known)
        finding = Finding(
            id=tracked.id if first else f"{tracked.id}-{kind}",
            code=CODES[kind],
            kind=kind,
            severity=severity,
            outcome=outcome,
            attempt=tracked.attempt,
            onset_step=onset,
            peak_step=tracked.peak_step if kind in LOSS_KINDS else alarms[0].step,
            end_step=end,
            summary="",
            count=count,
            ranks=_ranks(tracked.alarms, verdict, suspects),
            signals=tuple(dict.fromkeys(a.signal for a in (*alarms, *tracked.alarms))),
            lead_steps=_leads(tracked.alarms, moved),
            suspects=suspects,
            verdict=verdict,
            remedy=remedy,
            missing=_missing(suspects),
            details={
                **details,
                **({"tall": _tall(tracked)} if kind == "gradient_spike" else {}),
                **({"cause_lasts": lasting} if lasting else {}),
                **({"small": True} if kind in LOSS_KINDS and _is_small(tracked) else {}),
                "incident": tracked.id,
                "points": tracked.points,
                "loss_before": None if kind == "data_corrupt" else _number(tracked.baseline),
                "loss_peak": None if kind == "data_corrupt" else _number(tracked.peak_value),
                "loss_moved_step": tracked.loss_onset_step,
            },
        )
        found.append(replace(finding, summary=summary(finding, alarms, known)))
    return found


def fact_of(alarm: Alarm) -> Finding:
    """A fact about the log or the run: no suspects."""
    severity = alarm.severity or FACT_SEVERITY.get(alarm.kind, Severity.WARNING)
    return Finding(
        id=f"a{alarm.attempt}-s{alarm.onset_step}-{alarm.kind}",
        code=CODES[alarm.kind],
        kind=alarm.kind,
        severity=severity,
        outcome=Outcome.NONE,
        attempt=alarm.attempt,
        onset_step=alarm.onset_step,
        peak_step=alarm.step,
        end_step=alarm.end_step,
        summary=alarm.message,
        ranks=alarm.ranks or None,
        signals=(alarm.signal,) if alarm.signal else (),
        remedy=Remedy(action="none" if severity is Severity.INFO else "investigate"),
        details=dict(alarm.details),
    )


def merge(findings: Sequence[Finding]) -> list[Finding]:
    """Many like bumps are one finding with a count: transient loss spikes and gradient bursts of one attempt with one
    verdict; facts of one kind, attempt and rank set."""
    findings = [_folded(finding, findings) for finding in findings]
    groups: dict[object, list[Finding]] = {}
    gone = [f for f in findings if f.kind in LOSS_KINDS and f.outcome is Outcome.TRANSIENT]
    for finding in findings:
        if _like_before(finding, gone) or _inside_another(finding, findings):
            finding = replace(finding, severity=Severity.INFO)
        groups.setdefault(_merge_key(finding), []).append(finding)
    many = [key for key in groups if isinstance(key, tuple) and key[0] == "data_corrupt"]
    if len(many) > MOST_SHARDS:  # not a bad shard each: the manifest, or what reads the data
        groups["data_corrupt"] = [f for key in many for f in groups.pop(key)]
    merged = []
    for group in groups.values():
        group.sort(key=lambda f: f.onset_step)
        if len(group) < MERGE_LEAST:
            merged.extend(group)
            continue
        last = group[-1]
        first = group[0] if group[0].kind in CAUSAL_KINDS else min(group, key=lambda f: (f.peak_step, f.onset_step))
        count = _occasions(group)
        severity = max((f.severity for f in group), key=lambda s: s.level)
        tall = [f.onset_step for f in group if f.details.get("tall")]
        if first.kind == "gradient_spike" and _frequent(tall):
            severity = Severity.WARNING
        biggest = max(group, key=lambda f: (_peak(f), -f.onset_step))
        merged.append(
            replace(
                first,
                count=count,
                severity=severity,
                peak_step=biggest.peak_step,
                end_step=last.end_step,
                summary=first.summary
                if count < MERGE_LEAST
                else f"{count} times between steps {first.onset_step:,} and {last.peak_step:,}, the first: "
                f"{first.summary}",
                signals=tuple(dict.fromkeys(signal for f in group for signal in f.signals)),
                details={**first.details, "steps": [f.onset_step for f in group][:50]},
            )
        )
    return sorted(merged, key=lambda f: (-f.severity.level, f.attempt, f.onset_step, f.code, f.id))


def _occasions(group: Sequence[Finding]) -> int:
    """How often it happened. An odd rank, or a reduce that is off, may show in several signals at a time."""
    counted: list[Finding] = []
    for finding in group:
        again = finding.kind == "rank_outlier" and any(
            finding.onset_step - other.onset_step <= FOLD_STEPS and finding.signals != other.signals
            for other in counted
        )
        if not again:
            counted.append(finding)
    return sum(f.count for f in counted)


def _folded(finding: Finding, findings: Sequence[Finding]) -> Finding:
    """An odd rank that an incident of the same time has explained is a note to it; so is what lasting trouble brings
    with it."""
    if finding.severity is not Severity.INFO and (cause := echoed(finding, findings)) is not None:
        return replace(finding, severity=Severity.INFO, details={**finding.details, "told_by": cause.id})
    if finding.kind != "rank_outlier" or finding.severity is Severity.INFO:
        return finding
    for other in findings:
        if (
            other.kind in CAUSAL_KINDS
            and other.attempt == finding.attempt
            and abs(finding.onset_step - other.onset_step) <= FOLD_STEPS
            and other.severity.level >= finding.severity.level
            and other.verdict != UNDETERMINED
        ):
            return replace(finding, severity=Severity.INFO, details={**finding.details, "told_by": other.id})
    return finding


def _inside_another(finding: Finding, findings: Sequence[Finding]) -> bool:
    """A bump that came back to the raised level of an incident that never did, and was lower: part of that trouble."""
    return (
        finding.kind in LOSS_KINDS
        and finding.severity is Severity.WARNING
        and finding.outcome in (Outcome.TRANSIENT, Outcome.RECOVERING)
        and any(
            other.kind in LOSS_KINDS
            and other.outcome is Outcome.NON_RECOVERING
            and other.attempt == finding.attempt
            and other.onset_step < finding.onset_step
            and _peak(other) > _peak(finding)
            for other in findings
        )
    )


def _merge_key(finding: Finding) -> object:
    if finding.kind in LOSS_KINDS and finding.outcome is Outcome.TRANSIENT and finding.severity is Severity.INFO:
        shard = finding.details.get("shard") if finding.verdict == "bad_shard" else None
        verdict = finding.verdict if finding.verdict not in ("benign", UNDETERMINED) else "none"
        return (finding.kind, finding.attempt, verdict, shard, _height(finding))
    if finding.details.get("small"):
        return (finding.kind, finding.attempt, finding.outcome)
    if finding.kind == "gradient_spike" or (finding.kind == "fp_overflow" and finding.severity is Severity.INFO):
        return (finding.kind, finding.attempt)
    if finding.kind == "data_corrupt":
        return (finding.kind, finding.attempt, finding.details.get("shard"), finding.verdict)
    if finding.kind == "restart":
        return finding.id
    if finding.kind == "slow_step":
        return finding.kind  # one a run: a noisy host has hundreds
    if finding.kind == "sustained_slowdown":
        return (finding.kind, finding.severity)
    if finding.kind not in CAUSAL_KINDS or not finding.suspects:  # a fact
        return (finding.kind, finding.attempt, finding.ranks, finding.verdict)
    return finding.id


def _like_before(finding: Finding, gone: Sequence[Finding]) -> bool:
    """The data end within a bump that looks like the earlier ones of this run, which were gone at once."""
    return (
        finding.outcome is Outcome.ONGOING
        and finding.severity is Severity.WARNING
        and finding.kind in LOSS_KINDS
        and finding.details.get("points", 0) in (0, 1, 2)
        and any(f.onset_step < finding.onset_step and _height(f) >= _height(finding) for f in gone)
    )


def _frequent(steps: Sequence[int]) -> bool:
    """As many bursts as make a pattern, close enough together."""
    return any(last - first <= BURST_STEPS for first, last in zip(steps, steps[MANY_BURSTS - 1 :], strict=False))


def _height(finding: Finding) -> int:
    """Doublings of the rise over 10 %: a bump that towers over the others is told by itself."""
    before, peak = finding.details.get("loss_before"), finding.details.get("loss_peak")
    if not isinstance(before, int | float) or not isinstance(peak, int | float) or before == 0 or peak <= before:
        return 0
    return max(0, int(math.log2(max((peak - before) / abs(before), 0.1) / 0.1)))


def _peak(finding: Finding) -> float:
    value = finding.details.get("loss_peak")
    return float(value) if isinstance(value, int | float) else -math.inf


def _outcome(tracked: Tracked, kind: str) -> tuple[Outcome, int | None]:
    if kind in LOSS_KINDS:
        return tracked.loss_outcome()
    if kind == "non_finite":
        return tracked.finite_outcome()
    if kind == "loss_scale_collapse":
        return tracked.scale_outcome()
    if kind == "data_corrupt":
        return tracked.data_outcome()
    return tracked.burst_outcome()


def _data_are_the_news(tracked: Tracked) -> bool:
    """A shard is proven bad, and the loss did no more than blink, or fell and came back up."""
    return tracked.shard is not None and (tracked.is_return or tracked.loss_outcome()[0] is Outcome.TRANSIENT)


def is_over(outcome: Outcome, end_step: int | None) -> bool:
    """Training came back by itself."""
    return outcome is Outcome.TRANSIENT or (outcome is Outcome.RECOVERING and end_step is not None)


def _severity(kind: str, outcome: Outcome, tracked: Tracked) -> Severity:
    if kind in LOSS_KINDS:
        if _is_small(tracked):
            return Severity.INFO
        if outcome is Outcome.ONGOING:
            doubled = tracked.recent and max(tracked.recent) >= math.log(2.0)
            return Severity.ERROR if doubled and tracked.points >= 3 else Severity.WARNING
        return {
            Outcome.TRANSIENT: Severity.INFO,
            Outcome.RECOVERING: Severity.WARNING,
        }.get(outcome, Severity.ERROR)
    if kind == "non_finite":
        return Severity.WARNING if outcome in (Outcome.TRANSIENT, Outcome.RECOVERING) else Severity.ERROR
    if kind == "loss_scale_collapse":
        return Severity.WARNING if outcome is Outcome.RECOVERING else Severity.ERROR
    if kind == "data_corrupt":
        many = tracked.bad_data_points >= LEAST_BAD_STEPS
        return Severity.ERROR if outcome is Outcome.ONGOING and many else Severity.WARNING
    if kind == "gradient_spike" and outcome is not Outcome.ONGOING:
        stays = any(a.severity is Severity.WARNING for a in tracked.of(kind))
        return Severity.WARNING if stays or _tall(tracked) >= MANY_BURSTS else Severity.INFO
    if kind == "fp_overflow" and outcome is Outcome.TRANSIENT:
        return Severity.INFO
    return Severity.WARNING


def _is_small(tracked: Tracked) -> bool:
    """The loss rose by less than 10 %, as it does with the mix of the data, and nothing else moved."""
    quiet = tracked.baseline > 0 and tracked.peak < SMALL_RISE
    return quiet and all(alarm.signal == "loss" for alarm in tracked.alarms)


def _tall(tracked: Tracked) -> int:
    """How many of its gradient bursts are tall. Those of the early descent do not count: they are how it goes."""
    return sum(
        a.value >= TALL_BURST * a.baseline for a in tracked.of("gradient_spike") if not a.details.get("early_descent")
    )


def _remedy(verdict: str, outcome: Outcome, end: int | None, known: Mapping[str, Suspect]) -> Remedy:
    suspect = known.get(verdict)
    if is_over(outcome, end):
        repair = "; write the bad shard again before it is read again" if verdict == "bad_shard" else ""
        return Remedy(action="continue", reason=f"training came back by itself{repair}")
    if suspect is None or suspect.action == "continue":
        return Remedy(action="investigate", reason="the evidence does not single out a cause")
    return Remedy(action=suspect.action, reason=suspect.remedy)


def _ranks(alarms: Sequence[Alarm], verdict: str, suspects: Sequence[SuspectResult]) -> tuple[int, ...] | None:
    """The culprit's ranks where its evidence names some; else those of the alarms, if they agree on less than all."""
    culprits = culprit_ranks(suspects, verdict)
    if culprits is not None:
        return culprits
    named = sorted({rank for alarm in alarms for rank in alarm.ranks})
    return tuple(named) or None


def culprit_ranks(suspects: Sequence[SuspectResult], verdict: str) -> tuple[int, ...] | None:
    """The ranks that the weightiest of the culprit's evidence names, of equal ones the first."""
    for result in suspects:
        if result.suspect == verdict:
            naming = [e for e in result.evidence if e.ranks and e.weight_nats > 0]
            return max(naming, key=lambda e: e.weight_nats).ranks if naming else None
    return None


def _leads(alarms: Sequence[Alarm], moved: int) -> dict[str, int]:
    leads: dict[str, int] = {}
    for alarm in sorted(alarms, key=lambda a: (a.onset_step, a.signal)):
        leads.setdefault(alarm.signal, moved - alarm.onset_step)
    return leads


def _missing(suspects: Sequence[SuspectResult]) -> tuple[Missing, ...]:
    found: dict[str, Missing] = {}
    for result in suspects:
        for missing in result.missing:
            found.setdefault(missing.signal, missing)
    return tuple(found.values())


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def healed_summary(told: str, attempt: int) -> str:
    """The summary of a finding that a later attempt did not have: what was to be done is done."""
    what, _, _ = told.partition(" To do: ")
    return f"{what} To do: nothing. Attempt {attempt} passed these steps without it."


def summary(finding: Finding, alarms: Sequence[Alarm], known: Mapping[str, Suspect]) -> str:
    """What happened, how it ended, why, and what to do: one sentence or two."""
    first = alarms[0]
    if finding.kind in LOSS_KINDS:
        before, peak = finding.details.get("loss_before"), finding.details.get("loss_peak")
        what = f"loss rose from {_short(before)} to {_short(peak)} at step {first.onset_step:,}"
    else:
        what = f"{first.message} at step {first.onset_step:,}"
    end = {
        Outcome.TRANSIENT: "gone at once",
        Outcome.RECOVERING: f"back at step {finding.end_step:,}"
        if finding.end_step is not None
        else "coming back slowly",
        Outcome.NON_RECOVERING: "and never came back",
        Outcome.ONGOING: "and the data end before it is over",
        Outcome.NONE: "",
    }[finding.outcome]
    if finding.outcome is Outcome.TRANSIENT and finding.end_step and finding.end_step - first.onset_step > 3:
        end = f"back at step {finding.end_step:,}"
    if finding.kind == "data_corrupt":
        end = "still being read" if finding.end_step is None else f"read until step {finding.end_step:,}"
    lasting = finding.details.get("cause_lasts")
    if lasting and finding.outcome is Outcome.RECOVERING:
        end = f"{end}, but {lasting}"
    suspect = known.get(finding.verdict)
    why = f"{suspect.title}: {suspect.explains}" if suspect is not None else "cause undetermined"
    other = finding.details.get("second_opinion")
    if isinstance(other, dict) and not other["agrees"]:
        why += f" (a model trained on the fault bench holds {other['suspect']} likelier: the two disagree, so replay)"
    act = finding.remedy.reason or finding.remedy.action
    if finding.remedy.action == "continue" and finding.remedy.reason:
        act = f"nothing, {finding.remedy.reason}"
    return f"{what}, {end}; {why}. To do: {act}." if end else f"{what}; {why}. To do: {act}."


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else "a non-finite value"
