"""The report as SARIF 2.1.0, which code hosts and editors show beside a file.

Source: OASIS, Static Analysis Results Interchange Format (SARIF) Version 2.1.0, sections 3.13 to 3.52.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from runhealth import __version__
from runhealth.diagnose.codes import CODES
from runhealth.diagnose.explain import EXPLANATIONS
from runhealth.diagnose.findings import Finding, Report, Severity
from runhealth.diagnose.report import words
from runhealth.diagnose.report.json import clean
from runhealth.diagnose.report.plain import safe

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_LEVEL = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "note"}
_RULES = {kind: position for position, kind in enumerate(CODES)}


def render(reports: Sequence[Report]) -> str:
    """One SARIF run a source."""
    body = {"$schema": SCHEMA, "version": "2.1.0", "runs": [_run(report) for report in reports]}
    return json.dumps(body, indent=2, allow_nan=False) + "\n"


def _run(report: Report) -> dict[str, Any]:
    rejected = [
        {
            "level": "warning",
            "message": {"text": safe(row.why)},
            "locations": [_location(report, line=row.line)],
        }
        for row in report.source.rejected
    ]
    return {
        "tool": {"driver": {"name": "diagnose", "semanticVersion": __version__, "rules": _rules()}},
        "invocations": [{"executionSuccessful": True, "toolExecutionNotifications": rejected}],
        "automationDetails": {"id": f"diagnose/{safe(report.source.name)}"},
        "artifacts": [{"location": {"uri": uri(report.source.source)}}],
        "results": [_result(finding, report) for finding in report.findings],
    }


def _rules() -> list[dict[str, Any]]:
    return [
        {
            "id": code,
            "name": "".join(part.capitalize() for part in kind.split("_")),
            "shortDescription": {"text": words.kind_name(kind)},
            "fullDescription": {"text": EXPLANATIONS[kind].when},
            "help": {
                "text": f"{EXPLANATIONS[kind].when}\nNeeds: {EXPLANATIONS[kind].needs}\nTo do: {EXPLANATIONS[kind].do}"
            },
            "defaultConfiguration": {"level": "warning"},
        }
        for kind, code in CODES.items()
    ]


def _result(finding: Finding, report: Report) -> dict[str, Any]:
    step = words.next_step(finding, report)
    text = f"{words.title(finding)} at step {finding.onset_step:,}: {words.facts(finding)}"
    text += f" Next: {step.command or step.sentence} ({step.note})"
    line = finding.details.get("line")
    return {
        "ruleId": finding.code,
        "ruleIndex": _RULES[finding.kind],
        "level": _LEVEL[finding.severity],
        "message": {"text": text},
        "locations": [_location(report, line=line if isinstance(line, int) else None)],
        "partialFingerprints": {"finding/v1": f"{safe(report.source.name)}:{safe(finding.id)}"},
        "properties": clean(
            {
                "kind": finding.kind,
                "outcome": finding.outcome.value,
                "attempt": finding.attempt,
                "onset_step": finding.onset_step,
                "peak_step": finding.peak_step,
                "end_step": finding.end_step,
                "count": finding.count,
                "ranks": list(finding.ranks) if finding.ranks else None,
                "verdict": finding.verdict if finding.suspects else None,
                "probability": next((s.probability for s in finding.suspects if s.suspect == finding.verdict), None),
            }
        ),
    }


def _location(report: Report, *, line: int | None) -> dict[str, Any]:
    place: dict[str, Any] = {"artifactLocation": {"uri": uri(report.source.source)}}
    if line is not None and line >= 1:
        place["region"] = {"startLine": line}
    return {"physicalLocation": place}


def uri(source: str) -> str:
    """Relative where the path is: code hosts resolve it against the checkout."""
    if "://" in source:
        return quote(source, safe="/:?#[]@!$&'()*+,;=%~")
    path = Path(source)
    return "file://" + quote(str(path)) if path.is_absolute() else quote(path.as_posix())
