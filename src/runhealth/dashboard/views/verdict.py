"""The verdict bar: in what state the run is, what is wrong with it, and what to do next."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from runhealth.dashboard.queries import Attempt, Progress
from runhealth.dashboard.views.palette import Palette
from runhealth.dashboard.views.text import command, duration, escape, number
from runhealth.diagnose.findings import UNDETERMINED, Finding, Outcome, Report, Severity, probability_text

STALE_S = 60.0
STALE_STEPS = 5


class RunState(StrEnum):
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"  # the latest attempt ended in an exception
    STALE = "stale"  # no step for too long, and nothing says that the run ended
    NO_DATA = "no data"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`superseded_by` is the attempt that went back behind `finding`, `cause` and `probability` are the finding's;
    `action` is a shell command; `age_s` is the age of the last step."""

    state: RunState
    age_s: float | None
    step: int | None
    attempt: int | None
    attempts: int
    finding: Finding | None
    superseded_by: int | None
    others: int
    cause: str
    probability: float | None
    why: str
    action: str


def stale_after_s(median_step_s: float | None) -> float:
    """No step for this long means that the run stands still."""
    return max(STALE_S, STALE_STEPS * (median_step_s or 0.0))


def run_state(progress: Progress | None, now_ns: int) -> RunState:
    if progress is None:
        return RunState.NO_DATA
    if progress.exception is not None:
        return RunState.FAILED
    if progress.end is not None:
        return RunState.FINISHED
    age_s = (now_ns - progress.last_ts_ns) / 1e9
    return RunState.STALE if age_s > stale_after_s(progress.median_step_s) else RunState.RUNNING


def is_open(finding: Finding) -> bool:
    """An incident whose end the data do not hold, as opposed to a fact that has no duration."""
    return finding.end_step is None and finding.outcome not in (Outcome.NONE, Outcome.TRANSIENT)


def superseded_by(finding: Finding, attempts: Sequence[Attempt]) -> int | None:
    """The attempt that trained a finding's steps again, from before its onset on. What it found there is its own."""
    own = next((a for a in attempts if a.attempt == finding.attempt), None)
    if own is None or own.superseded_from is None or own.superseded_from > finding.onset_step:
        return None
    return next((a.attempt for a in attempts if a.attempt > own.attempt and a.first_step <= finding.onset_step), None)


def ranked(report: Report | None, attempts: Sequence[Attempt]) -> list[Finding]:
    """Worst first: trouble that still stands, trouble that a later attempt went back behind, plain facts; within these
    by severity, then the one that began first."""
    findings = report.findings if report is not None else ()

    def order(f: Finding) -> tuple[bool, bool, int, int, int, str]:
        fact = f.severity is Severity.INFO
        return fact, superseded_by(f, attempts) is not None, -f.severity.level, f.attempt, f.onset_step, f.code

    return sorted(findings, key=order)


def verdict(progress: Progress | None, report: Report | None, now_ns: int, *, run: str, store: str | None) -> Verdict:
    """`store` is None when the commands find the run without being told where."""
    state = run_state(progress, now_ns)
    attempts = progress.attempts if progress is not None else ()
    findings = ranked(report, attempts)
    worst = findings[0] if findings else None
    cause = worst.verdict if worst is not None and worst.suspects else ""
    top = next((s for s in worst.suspects if s.suspect == cause), None) if worst is not None else None
    return Verdict(
        state=state,
        age_s=None if progress is None or not progress.last_ts_ns else (now_ns - progress.last_ts_ns) / 1e9,
        step=None if progress is None else progress.last_step,
        attempt=None if progress is None else progress.last_attempt,
        attempts=0 if progress is None else len(progress.attempts),
        finding=worst,
        superseded_by=None if worst is None else superseded_by(worst, attempts),
        others=max(0, len(findings) - 1),
        cause=cause,
        probability=None if top is None else top.probability,
        why=_why(progress, state),
        action=next_command(worst, state, attempts, run=run, store=store),
    )


def _why(progress: Progress | None, state: RunState) -> str:
    if progress is None:
        return "no step has been recorded yet"
    if state is RunState.STALE:
        return f"no step for more than {duration(stale_after_s(progress.median_step_s))} (60 s or 5 median steps)"
    if state is RunState.FAILED:
        return progress.exception or ""
    return ""


def next_command(
    finding: Finding | None, state: RunState, attempts: Sequence[Attempt] = (), *, run: str, store: str | None
) -> str:
    """What to type next: the rollback, if one is due and has not been done, else the whole report."""
    where = ("--store", store) if store is not None else ()
    due = finding is not None and superseded_by(finding, attempts) is None
    if finding is not None and due and finding.remedy.action.startswith("rollback"):
        return command("diagnose", "rollback", "plan", "--run", run, *where)
    if state is RunState.NO_DATA:
        return command("diagnose", "doctor", "--run", run, *where)
    return command("diagnose", "--run", run, *where)


_STYLE = """<style>
.rh-bar{display:flex;flex-wrap:wrap;gap:.35rem 1.4rem;align-items:baseline;padding:.65rem .9rem;border-radius:.5rem;
border:1px solid rgba(128,128,128,.28);border-left-width:6px;font-size:.95rem;line-height:1.45}
.rh-bar b{font-weight:650}.rh-pill{padding:.08rem .55rem;border-radius:1rem;font-weight:650;font-size:.85rem;
border:1px solid currentColor;white-space:nowrap}.rh-mut{opacity:.72}.rh-main{flex:1 1 100%;overflow-wrap:anywhere}
.rh-big{font-size:1.08rem;font-weight:650}
</style>"""

_SYMBOL = {Severity.ERROR: "✗ error", Severity.WARNING: "⚠ warning"}


def verdict_html(v: Verdict, palette: Palette, *, diagnosing: bool, problem: str = "") -> str:
    """The bar. `diagnosing` while no report is there yet, `problem` when the diagnosis failed."""
    state_colour = {
        RunState.RUNNING: palette.good, RunState.FINISHED: palette.info, RunState.FAILED: palette.error,
        RunState.STALE: palette.warning, RunState.NO_DATA: palette.muted,
    }[v.state]  # fmt: skip
    stands = v.finding is not None and v.superseded_by is None
    edge = palette.severity(v.finding.severity) if v.finding is not None and stands else state_colour
    facts = [f'<span class="rh-pill" style="color:{state_colour}">{v.state.value}</span>']
    if v.step is not None:
        facts.append(f"<span>step <b>{v.step:,}</b></span>")
    if v.attempt is not None and v.attempts > 1:
        facts.append(f"<span>attempt <b>{v.attempt}</b> ({v.attempts} in all)</span>")
    if v.age_s is not None:
        facts.append(f"<span>last step <b>{duration(v.age_s)}</b> ago</span>")
    if v.why:
        facts.append(f'<span class="rh-mut">{escape(v.why, 160)}</span>')
    return (
        f'{_STYLE}<div class="rh-bar" style="border-left-color:{edge}">{"".join(facts)}'
        f'<span class="rh-main">{_headline(v, palette, diagnosing=diagnosing, problem=problem)}</span></div>'
    )


def _headline(v: Verdict, palette: Palette, *, diagnosing: bool, problem: str) -> str:
    if problem:
        return f'<span style="color:{palette.error}">The diagnosis failed: {escape(problem)}</span>'
    if v.finding is None:
        if diagnosing:
            return '<span class="rh-mut">Reading the records for a diagnosis…</span>'
        return '<span class="rh-mut">Nothing was recorded yet.</span>' if v.step is None else "<b>No finding.</b>"
    finding = v.finding
    busy = ' <span class="rh-mut">· updating</span>' if diagnosing else ""
    if finding.severity is Severity.INFO:  # the first: there is nothing to act on
        notes = "1 minor note" if not v.others else f"{v.others + 1} minor notes"
        return (
            f'<span style="color:{palette.good}" class="rh-big">✓ nothing at warning or above was found</span>'
            f' <span class="rh-mut">· {notes} below</span>{busy}'
        )
    cause = ""
    if v.cause == UNDETERMINED:
        cause = " · cause <b>undetermined</b>"
    elif v.cause:
        chance = "" if v.probability is None else f" (p {escape(probability_text(v.probability))})"
        cause = f" · likely <b>{escape(v.cause)}</b>{chance}"
    if v.superseded_by is not None:
        cause += f" · attempt <b>{v.superseded_by}</b> went back behind it"
    more = f' <span class="rh-mut">· {v.others} more below</span>' if v.others else ""
    colour = palette.severity(finding.severity) if v.superseded_by is None else palette.muted
    return (
        f'<span style="color:{colour}" class="rh-big">{_SYMBOL[finding.severity]} '
        f"{escape(finding.code)} {escape(finding.kind.replace('_', ' '))}</span> at step "
        f"<b>{number(finding.onset_step)}</b>{cause}{more}{busy}<br>{escape(finding.summary)}"
    )
