"""The findings: one table over all of them, and for each the suspects with their evidence."""

from collections.abc import Sequence

from runhealth.dashboard.views.palette import Palette
from runhealth.dashboard.views.text import duration, escape, number
from runhealth.dashboard.views.verdict import is_open
from runhealth.diagnose.findings import Evidence, Finding, Missing, Status, SuspectResult

MOST_EVIDENCE = 6

_STYLE = """<style>
.rh-t{width:100%;border-collapse:collapse;font-size:.86rem;line-height:1.4}
.rh-t td,.rh-t th{padding:.35rem .5rem;vertical-align:top;text-align:left;border-bottom:1px solid rgba(128,128,128,.22)}
.rh-t th{opacity:.7;font-weight:600}.rh-t ul{margin:0;padding-left:1rem}.rh-t li{margin:0 0 .15rem 0;font-size:inherit}
.rh-p{white-space:nowrap;font-variant-numeric:tabular-nums}.rh-m{opacity:.72}
.rh-b{height:6px;border-radius:3px;background:rgba(128,128,128,.22);width:84px;margin-top:.3rem}
.rh-b i{display:block;height:6px;border-radius:3px}.rh-s{overflow-x:auto}
@media (max-width:640px){.rh-t,.rh-t tbody,.rh-t tr,.rh-t td{display:block}.rh-t tr.rh-h{display:none}
.rh-t td{border-bottom:0;padding:.15rem .2rem}.rh-t tr{border-bottom:1px solid rgba(128,128,128,.22);padding:.3rem 0}
.rh-t td[data-l]::before{content:attr(data-l);opacity:.7;font-weight:600;display:block}.rh-t td:empty{display:none}}
</style>"""


def title(finding: Finding) -> str:
    """One unescaped line: what, where, how it ended."""
    kind = finding.kind.replace("_", " ")
    outcome = "" if finding.outcome.value == "none" else f", {finding.outcome.value.replace('_', '-')}"
    times = f", {finding.count} times" if finding.count > 1 else ""
    return f"{finding.code} {kind}{outcome} at step {finding.onset_step:,}{times}"


def facts_html(finding: Finding) -> str:
    """Onset, peak, end, ranks, signals."""
    facts = [f"onset <b>{finding.onset_step:,}</b>", f"peak <b>{finding.peak_step:,}</b>"]
    if finding.end_step is not None:
        facts.append(f"end <b>{finding.end_step:,}</b>")
    elif is_open(finding):
        facts.append("not over")
    if finding.ranks:
        facts.append("rank " + ", ".join(str(rank) for rank in finding.ranks[:16]))
    if finding.signals:
        facts.append("seen in " + escape(", ".join(finding.signals)))
    facts += [
        f"{escape(channel)} moved {steps:,} step{'s' if steps > 1 else ''} before the loss"
        for channel, steps in finding.lead_steps.items()
        if steps > 0
    ]
    return (
        f'<div style="font-size:.9rem">{escape(finding.summary)}<br>'
        f'<span style="opacity:.75">{" · ".join(facts)}</span>{_plan(finding)}</div>'
    )


def _plan(finding: Finding) -> str:
    """What going back would mean."""
    plan = finding.remedy.plan
    if plan is None:
        return ""
    skip = "".join(f", skip samples {s.first_sample:,}–{s.last_sample:,} of {escape(s.shard)}" for s in plan.skip[:4])
    repair = "".join(f", {escape(r.kind.replace('_', ' '))} {escape(r.target)}".rstrip() for r in plan.repairs[:4])
    took = "" if plan.cost.seconds is None else f", about {duration(plan.cost.seconds)}"
    return (
        f"<br>Plan: back to checkpoint <b>{plan.checkpoint_step:,}</b>{skip}{repair}; "
        f"{plan.cost.steps:,} steps again{took}"
    )


def suspects_html(finding: Finding, palette: Palette) -> str:
    """Every suspect with its probability and what speaks for it, against it, and what is missing."""
    if not finding.suspects:
        return ""
    rows = "".join(_row(suspect, palette) for suspect in _by_probability(finding.suspects))
    head = "".join(f"<th>{name}</th>" for name in ("suspect", "probability", "for", "against", "missing"))
    return (
        f'{_STYLE}<div class="rh-s"><table class="rh-t"><tbody><tr class="rh-h">{head}</tr>{rows}</tbody></table></div>'
    )


def _by_probability(suspects: Sequence[SuspectResult]) -> list[SuspectResult]:
    return sorted(suspects, key=lambda s: -s.probability)


def _row(suspect: SuspectResult, palette: Palette) -> str:
    share = min(1.0, max(0.0, suspect.probability))
    colour = palette.error if suspect.status is Status.IMPLICATED else palette.muted
    speaking = sorted(suspect.evidence, key=lambda e: -abs(e.weight_nats))
    crash = f"<br>failed: {escape(suspect.error)}" if suspect.error else ""
    return (
        f"<tr><td><b>{escape(suspect.suspect.replace('_', ' '))}</b><br>"
        f'<span class="rh-m">{escape(suspect.status.value.replace("_", " "))}{crash}</span></td>'
        f'<td class="rh-p" data-l="probability">{suspect.probability:.3f}'
        f'<div class="rh-b"><i style="width:{share * 100:.0f}%;background:{colour}"></i></div></td>'
        f'<td data-l="for">{_evidence([e for e in speaking if e.weight_nats > 0])}</td>'
        f'<td data-l="against">{_evidence([e for e in speaking if e.weight_nats <= 0])}</td>'
        f'<td data-l="missing">{_missing(suspect.missing)}</td></tr>'
    )


def _evidence(items: Sequence[Evidence]) -> str:
    if not items:
        return ""
    shown = "".join(f"<li>{escape(e.claim)}{_measured(e)}</li>" for e in items[:MOST_EVIDENCE])
    rest = len(items) - MOST_EVIDENCE
    return f"<ul>{shown}</ul>" + (f'<span class="rh-m">and {rest} more</span>' if rest > 0 else "")


def _measured(evidence: Evidence) -> str:
    parts = [f"{evidence.weight_nats:+.1f} nats"]
    if evidence.value is not None and evidence.value == evidence.value and abs(evidence.value) != float("inf"):
        parts.append(f"{number(evidence.value)}")
        if evidence.baseline is not None and abs(evidence.baseline) < float("inf"):
            parts[-1] += f" (normal {number(evidence.baseline)})"
    return f' <span class="rh-m">[{", ".join(parts)}]</span>'


def _missing(items: Sequence[Missing]) -> str:
    if not items:
        return ""
    shown = "".join(f"<li>{escape(m.signal)}: would tell {escape(m.would_tell)}</li>" for m in items[:MOST_EVIDENCE])
    return f"<ul>{shown}</ul>"
