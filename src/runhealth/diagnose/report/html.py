"""The report as one HTML file: no script, nothing fetched, light and dark. All text in it is escaped."""

import html
from collections.abc import Sequence

from runhealth.diagnose.findings import (
    Evidence,
    Finding,
    Outcome,
    Report,
    Severity,
    Status,
    SuspectResult,
    probability_text,
)
from runhealth.diagnose.report import words
from runhealth.diagnose.report.plain import safe
from runhealth.diagnose.report.style_sheet import STYLE
from runhealth.diagnose.report.svg import Band, Point, chart

CURVES = ("loss", "eval_loss", "grad_norm", "lr", "update_ratio", "t_step_s")
MOST_IN_FULL = 12
WORD = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "info"}
STATE = {
    Status.IMPLICATED: "implicated",
    Status.EXONERATED: "ruled out",
    Status.INCONCLUSIVE: "inconclusive",
    Status.NOT_OBSERVED: "could not look",
    Status.CRASHED: "crashed",
}
POLICY = "default-src 'none'; style-src 'unsafe-inline'"  # the file itself forbids the browser to fetch anything


def render(reports: Sequence[Report]) -> str:
    names = ", ".join(report.source.name for report in reports[:3])
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>diagnose: {_t(names)}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(_report(report) for report in reports)
        + "\n</body>\n</html>\n"
    )


def _report(report: Report) -> str:
    loud, quiet = words.loud(report), words.quiet(report)
    parts = [_head(report), _verdict(report, loud), _curves(report)]
    if loud:
        parts.append("<h2>Findings</h2>")
    parts += [_finding(finding, report) for finding in loud[:MOST_IN_FULL]]
    parts.append(_table("Further findings", loud[MOST_IN_FULL:]))
    parts.append(_table("Minor notes", quiet))
    parts += [_missing(report), _reading(report)]
    return f"<main>\n{''.join(part + chr(10) for part in parts if part)}</main>"


def _head(report: Report) -> str:
    facts = []
    if report.first_step is not None:
        facts.append(f"steps {report.first_step:,} to {report.last_step:,}")
    if report.window is not None:
        facts.append(words.judged(report))
    if len(report.attempts) > 1:
        facts.append(f"{len(report.attempts)} attempts")
    facts.append(words.last_step(report, report.last_ts_ns + 10**18).replace("last step on", "last step on (UTC)"))
    facts.append(f"{report.source.rows_kept:,} rows, {report.source.format}")
    shown = " · ".join(_t(fact) for fact in facts if fact)
    return f'<header><h1>{_t(report.source.name)}</h1><p class="sub">{shown}</p></header>'


def _verdict(report: Report, loud: Sequence[Finding]) -> str:
    if not loud:
        return f'<section class="verdict ok"><b>✓ {_t(words.NOTHING.capitalize())}</b></section>'
    first = loud[0]
    step = words.next_step(first, report)
    culprit = next((s for s in words.ranked(first)), None)
    likely = ""
    if culprit is not None:
        reason = words.why(culprit)
        likely = (
            f"<p><b>{_t(words.suspect_name(culprit).capitalize())}</b> "
            f"(probability {_t(probability_text(culprit.probability))})"
            f"{': ' + _t(reason) if reason else ''}</p>"
        )
    return (
        f'<section class="verdict {WORD[first.severity]}"><b>{_mark(first)} {_t(words.title(first))} at step '
        f"{first.onset_step:,}</b>{likely}<p>Next: {_next(step)}</p></section>"
    )


def _next(step: words.Next) -> str:
    if step.command:
        return f"<code>{_t(step.command)}</code> <span class='dim'>{_t(step.note)}</span>"
    return _t(step.sentence)


def _curves(report: Report) -> str:
    if report.first_step is None or report.last_step is None:
        return ""
    steps = (report.first_step, report.last_step)
    # What never came back ended with its attempt: the steps after it are those of another one.
    ends = {a.attempt: a.last_step for a in report.attempts}
    bands = [_band(finding, ends.get(finding.attempt, steps[1])) for finding in reversed(report.findings)]
    bands += [
        Band(first=a.first_step, last=a.first_step, look="attempt", label=f"attempt {a.attempt} begins")
        for a in report.attempts[1:]
    ]
    drawn = [chart(name, list(report.curves[name]), steps, bands) for name in CURVES if report.curves.get(name)]
    if not drawn:
        return ""
    legend = (
        '<p class="dim legend"><span class="key error"></span> error <span class="key warning"></span> warning '
        '<span class="key info"></span> minor <span class="key attempt"></span> new attempt '
        '<span class="nanmark">▼</span> NaN or Inf</p>'
    )
    return f'<section class="curves">{"".join(drawn)}{legend}</section>'


def _band(finding: Finding, last_step: int) -> Band:
    over = finding.outcome not in (Outcome.NON_RECOVERING, Outcome.ONGOING)
    end = finding.end_step if finding.end_step is not None else finding.peak_step if over else last_step
    if finding.count > 1 and over:  # several bumps: the first is marked, not the time between them
        end = finding.onset_step
    return Band(
        first=finding.onset_step,
        last=max(end, finding.onset_step),
        look=WORD[finding.severity],
        label=f"{words.title(finding)}, onset {finding.onset_step:,}",
    )


def _finding(finding: Finding, report: Report) -> str:
    facts = [f"onset <b>{finding.onset_step:,}</b>"]
    if finding.peak_step != finding.onset_step:
        facts.append(f"peak {finding.peak_step:,}")
    if finding.end_step is not None:
        facts.append(f"over at {finding.end_step:,}")
    move = words.loss_move(finding, words.loss_unit(report))
    facts += [_t(move)] if move else []
    if finding.ranks:
        facts.append(f"rank {', '.join(str(rank) for rank in finding.ranks[:16])}")
    if len(report.attempts) > 1:
        facts.append(f"attempt {finding.attempt}")
    facts += [words.seen(finding)] if finding.count > 1 else []
    look = WORD[finding.severity]
    parts = [
        f'<h3><span class="chip {look}">{look}</span> {_t(words.title(finding))}</h3>',
        f'<p class="sub">{" · ".join(facts)}</p>',
        f"<p>{_t(words.facts(finding))}</p>",
        _zoom(finding),
    ]
    if finding.suspects:
        rows = "".join(_suspect(result) for result in finding.suspects)
        parts.append(f'<table class="suspects"><tbody>{rows}</tbody></table>')
    parts.append(f"<p>Next: {_next(words.next_step(finding, report))}</p>")
    return f'<article id="{_t(finding.id)}">{"".join(parts)}</article>'


def _zoom(finding: Finding) -> str:
    curves = finding.details.get("curves")
    if not isinstance(curves, dict):
        return ""
    drawn = []
    for name, raw in curves.items():
        points: list[Point] = [(int(step), value) for step, value in raw]
        if len(points) < 2:
            continue
        steps = (points[0][0], points[-1][0])
        drawn.append(chart(str(name), points, steps, [_band(finding, steps[1])], height=120))
    return f'<div class="zoom">{"".join(drawn)}</div>' if drawn else ""


def _suspect(result: SuspectResult) -> str:
    share = max(0.0, min(1.0, result.probability))
    lines = [_evidence(e, "for", "+") for e in words.claims(result, against=False, most=6)]
    lines += [_evidence(e, "against", "−") for e in words.claims(result, against=True, most=6)]
    if result.status is Status.NOT_OBSERVED:
        names = ", ".join(m.signal for m in result.missing)
        lines.append(f'<li class="dim">not recorded: {_t(names)}</li>')
    if result.error:
        lines.append(f'<li class="dim">{_t(result.error)}</li>')
    found = f"<ul>{''.join(lines)}</ul>" if lines else ""
    name = _t(words.suspect_name(result))
    state = "" if result.suspect == "undetermined" else f'<span class="dim"> {STATE[result.status]}</span>'
    return (
        f'<tr><td class="who">{name}{state}<div class="bar"><i style="width:{share:.1%}"></i></div></td>'
        f'<td class="num">{_t(probability_text(result.probability))}</td><td>{found}</td></tr>'
    )


def _evidence(evidence: Evidence, look: str, sign: str) -> str:
    query = f" <details><summary>query</summary><code>{_t(evidence.query)}</code></details>" if evidence.query else ""
    weight = f'<span class="dim" title="log-likelihood ratio">({evidence.weight_nats:+.1f} nats)</span>'
    return f'<li class="{look}"><b>{sign}</b> {_t(words.claim(evidence))} {weight}{query}</li>'


def _table(name: str, findings: Sequence[Finding]) -> str:
    if not findings:
        return ""
    rows = "".join(
        f'<tr><td><span class="chip {WORD[f.severity]}">{f.code}</span></td>'
        f'<td class="kind">{_t(words.kind_name(f.kind))}</td>'
        f'<td class="num">{f.onset_step:,}</td><td class="num">{f.count:,}</td><td>{_t(words.facts(f))}</td></tr>'
        for f in findings
    )
    return (
        f'<h2>{_t(name)}</h2><div class="wide"><table><thead><tr><th>code</th><th>kind</th><th class="num">step</th>'
        f'<th class="num">times</th><th>what</th></tr></thead><tbody>{rows}</tbody></table></div>'
    )


def _missing(report: Report) -> str:
    if not report.missing:
        return ""
    rows = "".join(f"<tr><td>{_t(m.signal)}</td><td>{_t(m.would_tell)}</td></tr>" for m in report.missing)
    return (
        "<h2>Not recorded</h2><table><thead><tr><th>signal</th><th>would tell</th></tr></thead>"
        f"<tbody>{rows}</tbody></table>"
    )


def _reading(report: Report) -> str:
    source = report.source
    lines = [f"{source.rows_kept:,} of {source.rows_read:,} rows kept"]
    if report.late_records:
        lines.append(f"{report.late_records:,} records came too late to be judged")
    if source.rows_rejected:
        lines.append(f"{source.rows_rejected:,} rows could not be read")
    lines += [f"line {row.line:,}: {row.why}" for row in source.rejected]
    lines += list(source.notes)
    items = "".join(f"<li>{_t(line)}</li>" for line in lines)
    return f'<h2>Reading</h2><p class="sub">{_t(source.source)}</p><ul class="plain">{items}</ul>'


def _mark(finding: Finding) -> str:
    return "✗" if finding.severity is Severity.ERROR else "!"


def _t(text: str) -> str:
    return html.escape(safe(text))
