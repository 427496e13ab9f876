"""The one-screen report: most important first, for a person at 3 in the morning."""

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
from runhealth.diagnose.report.plain import Style, safe

WIDTH = 118
FULL = 3  # findings shown in full; the others get a line each
LINES = 12
INDENT = "            "
WORDS = {
    "loss_spike": "loss spike",
    "loss_divergence": "loss divergence",
    "non_finite": "non-finite values",
}


def render(report: Report, style: Style, *, now_ns: int | None = None) -> str:
    """`now_ns` dates the last step ("14 s ago"); None leaves the age out."""
    lines = [_head(report, style, now_ns)]
    shown = list(report.findings)
    if not any(f.severity is not Severity.INFO for f in shown):
        lines.append(style.paint("✓" if style.unicode else "OK", "green") + " nothing at warning or above was found")
    full = [f for f in shown if f.severity is not Severity.INFO][:FULL]
    for finding in full:
        lines.extend(_finding(finding, report, style))
    rest = [f for f in shown if f not in full]
    for finding in rest[:LINES]:
        count = f" x{finding.count}" if finding.count > 1 and not finding.summary.startswith(str(finding.count)) else ""
        lines.append(
            _clip(
                f"{style.mark(finding.severity)} {finding.code} {safe(finding.kind)}{count}  {safe(finding.summary)}",
                style,
            )
        )
    if len(rest) > LINES:
        lines.append(f"  and {len(rest) - LINES} more: --format json has all")
    if report.missing:
        names = ", ".join(m.signal for m in report.missing)
        lines.append(_clip(f"  Not recorded: {names} (diagnose doctor says what each would tell)", style))
    if report.source.rows_rejected:
        first = report.source.rejected[0] if report.source.rejected else None
        where = f", first at line {first.line}: {safe(first.why)}" if first else ""
        lines.append(
            _clip(
                f"  {report.source.rows_rejected:,} of {report.source.rows_read:,} rows could not be read{where}", style
            )
        )
    if report.late_records:
        lines.append(f"  {report.late_records:,} records came too late to be judged")
    return "\n".join(lines) + "\n"


def _head(report: Report, style: Style, now_ns: int | None) -> str:
    parts = [style.paint(safe(report.source.name), "bold")]
    if len(report.attempts) > 1:
        parts.append(f"attempts {report.attempts[0].attempt}-{report.attempts[-1].attempt}")
    if report.first_step is not None:
        parts.append(f"steps {report.first_step:,}-{report.last_step:,}")
    if now_ns is not None and report.last_ts_ns > 0:
        parts.append(f"last step {age(max(0, now_ns - report.last_ts_ns) / 1e9)} ago")
    if report.source.format != "runhealth":
        parts.append(safe(report.source.format))
    return "  ".join(parts)


def _finding(finding: Finding, report: Report, style: Style) -> list[str]:
    name = WORDS.get(finding.kind, finding.kind.replace("_", " "))
    outcome = "" if finding.outcome is Outcome.NONE else finding.outcome.value.replace("_", "-") + " "
    count = f"  x{finding.count}" if finding.count > 1 else ""
    rise = _rise(finding)
    peak = f"  peak {finding.peak_step:,}" if finding.peak_step != finding.onset_step else ""
    title = f"{style.mark(finding.severity)} {finding.code} {outcome}{name}"
    lines = ["", f"{style.paint(title, 'bold')}   onset {finding.onset_step:,}{peak}{rise}{count}"]
    curves = finding.details.get("curves")
    if isinstance(curves, dict):
        drawn = [f"{signal:9} {style.bar([v for _, v in points])}" for signal, points in curves.items() if points]
        if drawn:
            lines.append("  " + "    ".join(drawn))
    if finding.suspects:
        lines.extend(_likely(finding, style))
        against = _against(finding)
        if against:
            lines.extend(_row("Against", against, style))
    else:
        lines.extend(_row("Fact", safe(finding.summary), style))
    if finding.missing:
        lines.extend(
            _row(
                "Missing",
                "; ".join(f"{m.signal} not recorded (would tell: {m.would_tell})" for m in finding.missing[:3]),
                style,
                most=2,
            )
        )
    healed = finding.details.get("healed_by_attempt")
    if healed is not None:
        lines.extend(_row("Healed", f"attempt {healed} passed these steps without it", style))
    else:
        lines.extend(_row("Next", _next(finding, report), style))
    return lines


def _likely(finding: Finding, style: Style) -> list[str]:
    lines = []
    ranked = [s for s in finding.suspects if s.status not in (Status.NOT_OBSERVED, Status.CRASHED)]
    for position, result in enumerate(ranked[:2], start=1):
        label = "Likely" if position == 1 else ""
        claims = [e for e in result.evidence if e.weight_nats > 0]
        claims.sort(key=lambda e: -e.weight_nats)
        text = f"{position} {result.suspect.replace('_', ' ')} {result.probability:.2f}"
        if position == 1 and claims:
            text += "   " + safe("; ".join(e.claim for e in claims[:2]))
        elif position == 1 and result.suspect == UNDETERMINED:
            text += "   no suspect is borne out by the evidence"
        lines.extend(_row(label, text, style, most=3))
    crashed = [s.suspect for s in finding.suspects if s.status is Status.CRASHED]
    if crashed:
        lines.extend(_row("", f"crashed while looking: {', '.join(crashed)} (see --format json)", style))
    return lines


def _against(finding: Finding) -> str:
    """The strongest counter-evidence of up to three suspects that are out."""
    found: list[tuple[float, SuspectResult, Evidence]] = []
    for result in finding.suspects:
        speaking = [e for e in result.evidence if e.weight_nats < 0]
        if speaking and result.suspect != finding.verdict:
            worst = min(speaking, key=lambda e: e.weight_nats)
            found.append((worst.weight_nats, result, worst))
    found.sort(key=lambda item: (item[0], item[1].suspect))
    return safe("; ".join(f"{r.suspect.replace('_', ' ')}: {e.claim}" for _, r, e in found[:3]))


def _next(finding: Finding, report: Report) -> str:
    plan, name = finding.remedy.plan, report.source.name
    if plan is not None:
        skip = f", skip {plan.cost.samples_skipped:,} samples" if plan.skip else ""
        repair = f", repair: {', '.join(sorted({r.kind for r in plan.repairs}))}" if plan.repairs else ""
        lost = (
            f", {age(plan.cost.seconds)} lost" if plan.cost.seconds is not None else f", {plan.cost.steps:,} steps lost"
        )
        return safe(f"diagnose rollback plan --run {name}   (checkpoint {plan.checkpoint_step:,}{skip}{repair}{lost})")
    why = finding.details.get("no_plan")
    action = finding.remedy.action.replace("_", " ")
    text = f"{action}: {finding.remedy.reason}" if finding.remedy.reason else action
    if why:
        text += f" (no rollback plan: {why})"
    return safe(f"{text}   (diagnose explain {finding.code})")


def _rise(finding: Finding) -> str:
    before, peak = finding.details.get("loss_before"), finding.details.get("loss_peak")
    if isinstance(before, int | float) and isinstance(peak, int | float):
        return f"  {peak - before:+.3g} nats"
    return ""


def _row(label: str, text: str, style: Style, most: int = 3) -> list[str]:
    """`label` and wrapped text, at most `most` lines."""
    lines: list[str] = []
    words = text.split(" ")
    current = ""
    for word in words:
        if current and len(current) + 1 + len(word) > WIDTH - len(INDENT):
            lines.append(current)
            current = word
        else:
            current = f"{current} {word}" if current else word
    lines.append(current)
    if len(lines) > most:
        lines = [*lines[: most - 1], lines[most - 1] + " …"]
    ascii_only = [_plain(line, style) for line in lines]
    return [f"  {style.paint(f'{label:9}', 'dim')} {ascii_only[0]}", *(f"{INDENT}{line}" for line in ascii_only[1:])]


def _plain(text: str, style: Style) -> str:
    return text if style.unicode else text.replace("…", "...").encode("ascii", "backslashreplace").decode()


def _clip(text: str, style: Style) -> str:
    text = _plain(text, style)
    return text if len(text) <= WIDTH + 12 else text[: WIDTH + 11] + ("…" if style.unicode else "...")


def age(seconds: float) -> str:
    """A duration in the unit a person would choose."""
    for limit, unit, size in ((120, "s", 1), (7200, "min", 60), (172800, "h", 3600)):
        if seconds < limit:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86400:.0f} days"
