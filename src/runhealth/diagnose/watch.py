"""Following a live run or a growing log: poll, feed, tell what is new or changed, fire hooks."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

from runhealth.diagnose.auto_rollback import AutoRollback
from runhealth.diagnose.engine import Engine
from runhealth.diagnose.findings import Report, Severity
from runhealth.diagnose.hooks import TIMEOUT_S, HookRunner
from runhealth.diagnose.opening import Pollable
from runhealth.diagnose.report.output import write_output
from runhealth.diagnose.report.plain import Style, safe, stdout_style
from runhealth.diagnose.report.words import facts, next_step, title
from runhealth.diagnose.service import beyond_records
from runhealth.diagnose.told import NEW, Told
from runhealth.storage.records import SourceInfo

LIVENESS_NS = 10_000_000_000  # between two looks at whether the run is still at work
MOST_POLLS = 64  # in one look: a run that writes faster than we read still gets its findings told


def watch(
    source: Pollable,
    info: SourceInfo,
    told: Told,
    *,
    hook: str | None,
    once: bool,
    interval_s: float,
    fail_on: str,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], int] = time.time_ns,
    hook_timeout_s: float = TIMEOUT_S,
    rollback: AutoRollback | None = None,
) -> int:
    """Until interrupted, or one look with `once`. Returns 1 if a finding at or above `fail_on` stands, else 0."""
    level = Severity(fail_on).level
    style = stdout_style()
    engine = Engine()
    hooks = HookRunner(hook, info.name, hook_timeout_s) if hook is not None else None
    done = said = waits = False
    look_at_ns = clock() + LIVENESS_NS
    still: Engine | None = None  # with the steps that some ranks have not written; until there is news
    try:
        while True:
            came, news = _feed(engine, source)
            waiting = getattr(source, "waiting_for", None)
            if waiting and not said:
                print(f"diagnose: waiting: {safe(waiting)}", file=sys.stderr)
                said = True
            if once:
                engine.finish()
            now_ns = clock()
            if came:
                look_at_ns, still = now_ns + LIVENESS_NS, None
            due = not 0 < look_at_ns - now_ns <= LIVENESS_NS  # also where the clock went back
            looked = info.format == "runhealth" and (once or due)
            if news or looked or once or (came and waits):
                report = engine.report(info)
                if looked:  # a run that has died or hangs writes nothing that could be news
                    look_at_ns = now_ns + LIVENESS_NS
                    still = still or (engine if once else _as_it_stands(engine))
                    report = beyond_records(report, still, now_ns)
                _tell(report, told, style, hooks, level)
                waits = rollback is not None and rollback.look(report)
                if once:
                    done = True
                    return int(any(f.severity.level >= level for f in report.findings))
            sleep(interval_s)
    finally:
        if hooks is not None:
            hooks.close(wait=done)


def _as_it_stands(engine: Engine) -> Engine:
    """A copy that takes the data to end here; the engine itself goes on."""
    copy = Engine()
    copy.load_state_dict(engine.state_dict())
    copy.finish()
    return copy


def _feed(engine: Engine, source: Pollable) -> tuple[bool, bool]:
    """Returns whether records came, and whether findings may have changed."""
    came = news = False
    for _ in range(MOST_POLLS):
        records = source.poll()
        if not records:
            break
        came = True
        for record in records:
            news |= engine.feed_quietly(record)
    return came, news


def _tell(report: Report, told: Told, style: Style, hooks: HookRunner | None, level: int) -> None:
    changed = False
    for finding in report.findings:
        change = told.change(finding)
        if change is None:
            continue
        changed = True
        told.add(finding)
        step = next_step(finding, report)
        word = NEW if change == NEW else "has changed"
        text = f"{title(finding)} {word}, onset {finding.onset_step:,}: {facts(finding)}"
        text += f"{'' if text.endswith(('.', '…')) else '.'} Next: {step.command or step.sentence}"
        write_output(f"{style.mark(finding.severity)} {style.plain(text)}\n", None)
        if hooks is not None and finding.severity.level >= level:
            hooks.fire(finding, change)
    if changed:
        told.save()


def identity_of(path: str) -> str:
    """What tells a log from another one that takes its place: the name, and the file behind it."""
    try:
        return f"{Path(path).absolute()}#{Path(path).stat().st_ino}"
    except OSError:
        return path
