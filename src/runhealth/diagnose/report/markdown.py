"""The report for an issue or a chat: Markdown, at most 40 lines."""

from runhealth.diagnose.findings import Finding, Report, Severity, probability_text
from runhealth.diagnose.report import words
from runhealth.diagnose.report.plain import Style, safe

MOST_LINES = 40
_WORD = {Severity.ERROR: "ERROR", Severity.WARNING: "WARNING", Severity.INFO: "info"}


def render(report: Report) -> str:
    steps = f", steps {report.first_step:,}–{report.last_step:,}" if report.first_step is not None else ""
    judged = f", {words.judged(report)}" if report.window is not None else ""
    lines = [f"### {_md(report.source.name)}{steps}{judged}", ""]
    worst = words.loud(report)[:2]
    if not worst:
        lines += ["Nothing at warning or above was found.", ""]
    for finding in worst:
        lines += _finding(finding, report)
    rest = [f for f in report.findings if f not in worst]
    if rest:
        lines += ["| code | kind | severity | step | what |", "|---|---|---|---|---|"]
        room = MOST_LINES - len(lines) - 2
        shown = rest if len(rest) <= room + 2 else rest[:room]
        lines += [
            f"| {f.code} | {_md(words.kind_name(f.kind))} | {_WORD[f.severity]} | {f.onset_step:,} "
            f"| {_md(_short(words.facts(f), 140))} |"
            for f in shown
        ]
        if len(shown) < len(rest):
            lines += ["", f"{len(rest) - len(shown)} more not shown"]
    return "\n".join(lines[:MOST_LINES]).rstrip() + "\n"


def _finding(finding: Finding, report: Report) -> list[str]:
    move = words.loss_move(finding, words.loss_unit(report))
    peak = f", peak {finding.peak_step:,}" if finding.peak_step != finding.onset_step else ""
    lines = [
        f"**{_WORD[finding.severity]} {_md(words.title(finding))}** at step {finding.onset_step:,}{peak}"
        + (f", {move}" if move else ""),
        "",
        _md(_short(words.facts(finding), 400)),
        "",
    ]
    curves = finding.details.get("curves")
    if isinstance(curves, dict) and curves.get("loss"):
        lines += [f"`loss {Style(unicode=True).bar([v for _, v in curves['loss']])}`", ""]
    for result in words.ranked(finding)[:2]:
        lines.append(f"- {_md(result.suspect)} {_md(probability_text(result.probability))}")
        for against, label in ((False, "for"), (True, "against")):
            lines += [
                f"  - {label}: {_md(_short(words.claim(evidence), 200))}"
                for evidence in words.claims(result, against=against, most=2 if not against else 1)
            ]
    lines += [f"- replayed {_md(_short(line, 240))}" for line in words.replay_lines(finding)]
    step = words.next_step(finding, report)
    if step.command:
        lines.append(f"- next: `{step.command.replace('`', '')}` ({_md(step.note)})")
    else:
        lines.append(f"- next: {_md(_short(step.sentence, 240))}")
    return [*lines, ""]


def _md(text: str) -> str:
    text = safe(text)
    for char in "\\`*_[]<>|":
        text = text.replace(char, f"\\{char}")
    return text


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
