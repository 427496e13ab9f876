"""The report for an issue or a chat: Markdown, at most 40 lines."""

from runhealth.diagnose.findings import Finding, Report, Severity
from runhealth.diagnose.report.plain import Style, safe

MOST_LINES = 40
_WORD = {Severity.ERROR: "ERROR", Severity.WARNING: "WARNING", Severity.INFO: "info"}


def render(report: Report) -> str:
    steps = f", steps {report.first_step:,}–{report.last_step:,}" if report.first_step is not None else ""
    lines = [f"### {_md(report.source.name)}{steps}", ""]
    worst = [f for f in report.findings if f.severity is not Severity.INFO]
    if not worst:
        lines += ["Nothing at warning or above was found.", ""]
    for finding in worst[:2]:
        lines += _finding(finding)
    rest = [f for f in report.findings if f not in worst[:2]]
    if rest:
        lines += ["| code | severity | step | what |", "|---|---|---|---|"]
        room = MOST_LINES - len(lines) - 2
        lines += [
            f"| {f.code} | {_WORD[f.severity]} | {f.onset_step:,} | {_md(_short(f.summary, 140))} |"
            for f in rest[:room]
        ]
        if len(rest) > room:
            lines.append(f"\n{len(rest) - room} more not shown")
    return "\n".join(lines[:MOST_LINES]).rstrip() + "\n"


def _finding(finding: Finding) -> list[str]:
    lines = [
        (
            f"**{_WORD[finding.severity]} {finding.code} {finding.kind}** "
            f"onset {finding.onset_step:,}, peak {finding.peak_step:,}"
        ),
        "",
        _md(_short(finding.summary, 400)),
        "",
    ]
    curves = finding.details.get("curves")
    if isinstance(curves, dict) and curves.get("loss"):
        lines += [f"`loss {Style(unicode=True).bar([v for _, v in curves['loss']])}`", ""]
    for result in finding.suspects[:2]:
        lines.append(f"- {result.suspect} {result.probability:.2f}")
        for evidence in sorted(result.evidence, key=lambda e: -abs(e.weight_nats))[:2]:
            lines.append(f"  - {evidence.weight_nats:+.1f} nats: {_md(_short(evidence.claim, 200))}")
    plan = finding.remedy.plan
    if plan is not None:
        lines.append(
            f"- plan: checkpoint {plan.checkpoint_step:,}, skip {plan.cost.samples_skipped:,} samples, "
            f"{plan.cost.steps:,} steps again"
        )
    return [*lines, ""]


def _md(text: str) -> str:
    text = safe(text)
    for char in "\\`*_[]<>|":
        text = text.replace(char, f"\\{char}")
    return text


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
