"""What replays showed, in words, and where a report says it."""

from dataclasses import replace

from runhealth.diagnose import experiments
from runhealth.diagnose.findings import UNDETERMINED, Finding, Report
from runhealth.diagnose.replays import Replayed


def attach(report: Report, results: tuple[Replayed, ...], *, whole: bool = True) -> Report:
    """The report whose findings know of their replays. A replay of an incident that is not found any more is a note, if
    the whole run was judged."""
    if not results:
        return report
    by_incident = {result.incident: result for result in results}
    findings, met = [], set()
    for finding in report.findings:
        result = by_incident.get(str(finding.details.get("incident", finding.id)))
        if result is not None:
            met.add(result.incident)
            said = finding.summary.replace(", so replay)", ")")  # what the second opinion asks for is done
            finding = replace(finding, replay=result, summary=f"{said} {sentence(result, finding)}")
        findings.append(finding)
    lost = [f"{i} was replayed, but is not found any more" for i in by_incident if whole and i not in met]
    source = replace(report.source, notes=(*report.source.notes, *lost)) if lost else report.source
    return replace(report, source=source, findings=tuple(findings))


def sentence(result: Replayed, finding: Finding) -> str:
    """What the replays proved, in one sentence."""
    control = result.tried[0]
    if control.vanished:
        if not result.deterministic:
            return "Replayed: it did not come back, but no two replays are alike, so nothing is proven."
        where = ""
        if result.parted_step is not None and result.equal_steps:
            ranks = ", ".join(map(str, result.parted_ranks))
            where = f"; the record leaves the replay at step {result.parted_step:,} on rank {ranks}"
        return f"Replayed as it was, it does not come back{where}: a passing fault of a machine."
    decisive = [one for one in result.tried[1:] if one.vanished]
    exact = "bit by bit" if result.parted_step is None else f"at {100 * control.ratio:.0f} %"
    if decisive and finding.verdict != UNDETERMINED:
        one = decisive[-1]
        return f"Replayed as it was, it comes back {exact}; {experiments.claim(result, one)}."
    return f"Replayed as it was, it comes back {exact}; no change that was tried makes it vanish."
