"""The report as JUnit XML, which CI systems show as tests: one test case for each kind that is looked for."""

import xml.etree.ElementTree as ET
from collections.abc import Sequence

from runhealth.diagnose.codes import CODES
from runhealth.diagnose.explain import absent_for, checked_kinds
from runhealth.diagnose.findings import Finding, Report
from runhealth.diagnose.report import words
from runhealth.diagnose.report.plain import safe


def render(reports: Sequence[Report]) -> str:
    """One suite a source. A kind fails with a finding at warning or above, and is skipped where the signals that it
    needs were not recorded. Minor findings are the output of their case."""
    root = ET.Element("testsuites", name="diagnose")
    for report in reports:
        _suite(root, report)
    for count in ("tests", "failures", "errors", "skipped"):
        root.set(count, str(sum(int(suite.get(count, "0")) for suite in root)))
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _suite(root: ET.Element, report: Report) -> None:
    suite = ET.SubElement(root, "testsuite", name=safe(report.source.name))
    by_kind: dict[str, list[Finding]] = {}
    for finding in report.findings:
        by_kind.setdefault(finding.kind, []).append(finding)
    signals = frozenset(report.source.signals)
    failures = skipped = 0
    kinds = dict.fromkeys((*checked_kinds(), *by_kind))
    for kind in kinds:
        case = ET.SubElement(
            suite,
            "testcase",
            classname=f"diagnose.{safe(report.source.name)}",
            name=f"{CODES[kind]} {kind}",
            time="0",
        )
        found = by_kind.get(kind, [])
        failed = [f for f in found if f in words.loud(report)]
        absent = absent_for(kind, signals)
        if failed:
            failures += 1
            first = failed[0]
            failure = ET.SubElement(
                case, "failure", type=first.severity.value, message=f"step {first.onset_step:,}: {words.facts(first)}"
            )
            failure.text = "\n".join(_told(f, report) for f in failed)
        elif not found and absent:
            skipped += 1
            ET.SubElement(case, "skipped", message=f"not recorded: {absent}")
        minor = [f for f in found if f not in failed]
        if minor:
            ET.SubElement(case, "system-out").text = "\n".join(_told(f, report) for f in minor)
    suite.set("tests", str(len(kinds)))
    suite.set("failures", str(failures))
    suite.set("errors", "0")
    suite.set("skipped", str(skipped))
    suite.set("time", "0")


def _told(finding: Finding, report: Report) -> str:
    step = words.next_step(finding, report)
    act = f"{step.command} ({step.note})" if step.command else step.sentence
    return (
        f"{finding.severity.value}: {words.title(finding)}, attempt {finding.attempt}, onset step "
        f"{finding.onset_step:,}: {words.facts(finding)} Next: {act}"
    )
