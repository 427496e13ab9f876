"""The one-screen report: most important first, for a person at 3 in the morning."""

from runhealth.diagnose.findings import Finding, Report, Status, probability_text
from runhealth.diagnose.report import words
from runhealth.diagnose.report.plain import GLUE, Style, readable, safe
from runhealth.diagnose.report.words import age

__all__ = ["age", "render"]

SHORT = 3  # findings told in some lines each, the first of them in full; the others get one line each
LINES = 6
NOTES = 5  # minor findings that are told where nothing else is
LABEL = 12


def render(report: Report, style: Style, *, now_ns: int | None = None) -> str:
    """`now_ns` dates the last step ("14 s ago"); None leaves the age out."""
    lines = _head(report, style, now_ns)
    loud, quiet = words.loud(report), words.quiet(report)
    for position, finding in enumerate(loud[:SHORT]):
        lines += ["", *_finding(finding, report, style, full=position == 0)]
    if len(loud) > 1:
        lines += [""]
    for finding in loud[SHORT : SHORT + LINES]:
        lines += _one_line(finding, style)
    if len(loud) > SHORT + LINES:
        lines += style.wrap(f"  and {len(loud) - SHORT - LINES} more at warning or above", hanging=4)
    if not loud:
        lines += [style.paint("✓" if style.unicode else "OK", "green") + f" {words.NOTHING}"]
        for finding in quiet[:NOTES]:
            lines += _one_line(finding, style, most=2)
        quiet = quiet[NOTES:]
    lines += _folded(quiet, report, style)
    lines += _reading(report, style, asked=any(f.missing for f in loud[:1]))
    return "\n".join(lines) + "\n"


def _head(report: Report, style: Style, now_ns: int | None) -> list[str]:
    parts = []
    if len(report.attempts) > 1:
        parts.append(f"attempts {report.attempts[0].attempt}-{report.attempts[-1].attempt}")
    elif report.attempts and report.attempts[0].attempt:
        parts.append(f"attempt {report.attempts[0].attempt}")
    if report.first_step is not None:
        parts.append(f"steps {report.first_step:,}-{report.last_step:,}")
    parts.append(words.judged(report))
    parts.append(words.last_step(report, now_ns))
    if report.source.format != "runhealth":
        parts.append(f"read as {safe(report.source.format)}")
    name = safe(report.source.name)
    lines = _pieces([name, *parts], style, hanging=2)
    return [lines[0].replace(style.plain(name), style.paint(style.plain(name), "bold"), 1), *lines[1:]]


def _pieces(pieces: list[str], style: Style, hanging: int) -> list[str]:
    """Pieces beside each other; a line breaks between two of them."""
    glued = (piece.replace(" ", GLUE) for piece in pieces if piece)
    return style.wrap(f"{GLUE} ".join(glued), hanging=hanging)


def _finding(finding: Finding, report: Report, style: Style, *, full: bool) -> list[str]:
    lines = _title(finding, report, style)
    curves = finding.details.get("curves")
    if full and isinstance(curves, dict):
        lines += _curves(curves, style)
    if finding.suspects:
        lines += _likely(finding, style, full=full)
        if full:
            against = "; ".join(
                f"{words.suspect_name(result)}: {words.claim(evidence)}"
                for result, evidence in words.counter_evidence(finding)
            )
            if against:
                lines += _row("Against", against, style)
    else:
        lines += _row("Fact", words.facts(finding), style, most=3 if full else 2)
    for position, line in enumerate(words.replay_lines(finding) if full else ()):
        lines += _row("" if position else "Replayed", line, style)
    if full and finding.missing:
        asked = "; ".join(f"{safe(m.signal)} (would tell {safe(m.would_tell)})" for m in finding.missing[:3])
        lines += _row("Missing", f"not recorded: {asked}", style, most=2)
    return lines + _next(finding, report, style)


def _title(finding: Finding, report: Report, style: Style) -> list[str]:
    mark = style.mark(finding.severity)
    width = 2 if style.unicode else 6
    peak = f"peak {finding.peak_step:,}" if finding.peak_step != finding.onset_step else ""
    pieces = [
        words.title(finding),
        f"onset {finding.onset_step:,}",
        peak,
        words.loss_move(finding, words.loss_unit(report)),
        words.seen(finding) if finding.suspects else "",
    ]
    first, *rest = _pieces(["x" * (width - 1) + GLUE + pieces[0], *pieces[1:]], style, hanging=LABEL)
    return [f"{mark} {style.paint(first[width:], 'bold')}", *rest]


def _curves(curves: dict[str, list[list[float | None]]], style: Style) -> list[str]:
    bar_width = min(24, (style.width - 28) // 2)
    drawn = [
        f"{signal:9} {style.bar([point[1] for point in points], bar_width)}"
        for signal, points in curves.items()
        if points
    ]
    return [f"  {'    '.join(drawn)}"] if drawn else []


def _likely(finding: Finding, style: Style, *, full: bool) -> list[str]:
    lines = []
    for position, result in enumerate(words.ranked(finding)[: 2 if full else 1], start=1):
        text = f"{position} {words.suspect_name(result)} {probability_text(result.probability)}".replace(" ", GLUE)
        reason = words.why(result)
        if position == 1 and reason:
            text += f"{GLUE}{GLUE} {reason}"
        lines += _row("Likely" if position == 1 else "", text, style, most=3 if full else 2)
    crashed = [safe(s.suspect) for s in finding.suspects if s.status is Status.CRASHED]
    if crashed and full:
        lines += _row("", f"could not be judged, an error of ours: {', '.join(crashed)} (see --format json)", style)
    return lines


def _next(finding: Finding, report: Report, style: Style) -> list[str]:
    step = words.next_step(finding, report)
    if step.command:
        return _row("Next", f"{step.command.replace(' ', GLUE)}{GLUE}{GLUE} ({step.note})", style)
    note = f" ({step.note.replace(' ', GLUE)})" if step.note else ""
    return _row("Next", f"{step.sentence}{note}", style)


def _one_line(finding: Finding, style: Style, most: int = 1) -> list[str]:
    summary = words.facts(finding)
    if summary.startswith(f"{finding.count} times"):
        count = ""
    else:
        count = f" ({words.seen(finding)})" if finding.count > 1 else ""
    head = f"{finding.code} {words.kind_name(finding.kind)}{count}"
    width = 2 if style.unicode else 6
    first, *rest = style.wrap(f"{'x' * (width - 1)}{GLUE}{head}{GLUE} {summary}", hanging=width, most=most)
    return [f"{style.mark(finding.severity)} {first[width:]}", *rest]


def _folded(findings: list[Finding], report: Report, style: Style) -> list[str]:
    """Minor findings in one line: how many, of what kinds, how to see them."""
    if not findings:
        return []
    counts: dict[str, int] = {}
    for finding in findings:
        name = words.kind_name(finding.kind)
        counts[name] = counts.get(name, 0) + finding.count
    named = ", ".join(f"{name} ({count:,} times)" if count > 1 else name for name, count in counts.items())
    notes = f"{len(findings)} minor note{'s' if len(findings) > 1 else ''}"
    see = f"{words.command(report)} --format json".replace(" ", GLUE)
    return style.wrap(f"  and {notes}: {named}; all of them: {see}", hanging=2, most=4)


def _reading(report: Report, style: Style, *, asked: bool) -> list[str]:
    """How well the source could be read, and what it does not hold."""
    lines: list[str] = []
    if report.missing and not asked:
        names = ", ".join(safe(m.signal) for m in report.missing)
        doctor = words.command(report, "diagnose doctor").replace(" ", GLUE)
        lines += style.wrap(f"  Not recorded: {names}; what each would tell: {doctor}", hanging=4, most=3)
    source = report.source
    if source.rows_rejected:
        first = source.rejected[0] if source.rejected else None
        where = f", first at line {first.line:,}: {readable(safe(first.why))}" if first else ""
        lines += style.wrap(
            f"  {source.rows_rejected:,} of {source.rows_read:,} rows could not be read{where}", hanging=4, most=3
        )
    if report.late_records:
        lines += style.wrap(f"  {report.late_records:,} records came too late to be judged", hanging=4)
    return lines


def _row(label: str, text: str, style: Style, most: int = 3) -> list[str]:
    """`label` and wrapped text, at most `most` lines."""
    first, *rest = style.wrap(text, most=most, width=style.width - LABEL)
    return [f"  {style.paint(f'{label:9}', 'dim')} {first}", *(f"{'':{LABEL}}{line}" for line in rest)]
