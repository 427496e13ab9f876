"""The report as the JSON object of the contract, with additions beside it. `schema.json` describes it."""

import json
import math
from typing import Any

from runhealth.diagnose.findings import AttemptSummary, Evidence, Finding, Missing, Report, SuspectResult

SCHEMA_VERSION = 1


def report_json(report: Report) -> dict[str, Any]:
    """Contract: schema_version, run, findings, missing. Added: run.last_ts_ns, run.late_records, run.notes, run.window
    (first and last step that were judged, if not all), curves."""
    source = report.source
    return {
        "schema_version": SCHEMA_VERSION,
        "run": {
            "name": source.name,
            "source": source.source,
            "format": source.format,
            "first_step": report.first_step,
            "last_step": report.last_step,
            "attempts": [attempt_json(a) for a in report.attempts],
            "signals": list(source.signals),
            "rows_read": source.rows_read,
            "rows_kept": source.rows_kept,
            "rows_rejected": source.rows_rejected,
            "rejected": [{"line": r.line, "why": r.why} for r in source.rejected[:20]],
            "notes": list(source.notes),
            "last_ts_ns": report.last_ts_ns,
            "late_records": report.late_records,
            "window": list(report.window) if report.window is not None else None,
        },
        "findings": [finding_json(f) for f in report.findings],
        "missing": [missing_json(m) for m in report.missing],
        "curves": {name: [[step, number(value)] for step, value in points] for name, points in report.curves.items()},
    }


def render(report: Report) -> str:
    return json.dumps(report_json(report), indent=2, allow_nan=False) + "\n"


def attempt_json(attempt: AttemptSummary) -> dict[str, Any]:
    return {
        "attempt": attempt.attempt,
        "first_step": attempt.first_step,
        "last_step": attempt.last_step,
        "superseded_steps": attempt.superseded_steps,
    }


def finding_json(finding: Finding) -> dict[str, Any]:
    return {
        "id": finding.id,
        "code": finding.code,
        "kind": finding.kind,
        "severity": finding.severity.value,
        "outcome": finding.outcome.value,
        "attempt": finding.attempt,
        "onset_step": finding.onset_step,
        "peak_step": finding.peak_step,
        "end_step": finding.end_step,
        "count": finding.count,
        "ranks": None if finding.ranks is None else list(finding.ranks),
        "signals": list(finding.signals),
        "lead_steps": dict(finding.lead_steps),
        "summary": finding.summary,
        "suspects": [suspect_json(s) for s in finding.suspects],
        "verdict": finding.verdict if finding.suspects else None,
        "remedy": {
            "action": finding.remedy.action,
            "reason": finding.remedy.reason,
            "plan": clean(finding.remedy.plan.to_json()) if finding.remedy.plan is not None else None,
        },
        "missing": [missing_json(m) for m in finding.missing],
        "details": clean(dict(finding.details)),
        "replay": finding.replay.to_json() if finding.replay is not None else None,
    }


def suspect_json(result: SuspectResult) -> dict[str, Any]:
    return {
        "suspect": result.suspect,
        "status": result.status.value,
        "probability": result.probability,
        "for": [evidence_json(e) for e in result.evidence if e.weight_nats >= 0],
        "against": [evidence_json(e) for e in result.evidence if e.weight_nats < 0],
        "missing": [missing_json(m) for m in result.missing],
        "error": result.error or None,
    }


def evidence_json(evidence: Evidence) -> dict[str, Any]:
    return {
        "claim": evidence.claim,
        "weight_nats": evidence.weight_nats,
        "steps": list(evidence.steps) if evidence.steps is not None else None,
        "ranks": list(evidence.ranks),
        "layers": list(evidence.layers),
        "value": number(evidence.value),
        "baseline": number(evidence.baseline),
        "query": evidence.query or None,
    }


def missing_json(missing: Missing) -> dict[str, Any]:
    return {"signal": missing.signal, "would_tell": missing.would_tell}


def number(value: float | None) -> float | None:
    """JSON knows no NaN and no infinity: both become null."""
    return value if value is not None and math.isfinite(value) else None


def clean(value: Any) -> Any:
    """Details with non-finite numbers as null, tuples as lists, keys as text."""
    if isinstance(value, float):
        return number(value)
    if isinstance(value, dict):
        return {str(k): clean(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [clean(v) for v in value]
    return value
