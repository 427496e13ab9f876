"""Following a live run: poll, feed, tell what is new or changed, fire hooks."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable

from runhealth.diagnose.engine import Engine
from runhealth.diagnose.findings import Finding, Severity
from runhealth.diagnose.report.json import finding_json
from runhealth.diagnose.report.plain import Style, safe, stdout_style
from runhealth.storage.reader import RunReader

HOOK_TIMEOUT_S = 600.0
STDERR_FD = 2  # stdout holds the findings; what a hook says goes beside them


def watch(
    source: object,
    *,
    hook: str | None,
    once: bool,
    interval_s: float,
    fail_on: str,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Until interrupted, or one look with `once`. Returns 1 if a finding at or above `fail_on` stands, else 0."""
    assert isinstance(source, RunReader)
    level = Severity(fail_on).level
    style = stdout_style()
    engine = Engine()
    standing: dict[str, Finding] = {}
    with source:
        name = source.info.name
        while True:
            changed: dict[str, Finding] = {}
            for record in source.poll():
                changed.update((finding.id, finding) for finding in engine.feed(record))
            if once:
                changed.update((finding.id, finding) for finding in engine.finish())
            for finding in changed.values():
                told = standing.get(finding.id)
                standing[finding.id] = finding
                if told is not None and _gist(told) == _gist(finding):
                    continue
                _tell(finding, style, new=told is None)
                if hook is not None and finding.severity.level >= level:
                    _fire(hook, name, finding)
            if once:
                return int(any(f.severity.level >= level for f in standing.values()))
            sleep(interval_s)


def _gist(finding: Finding) -> tuple[object, ...]:
    """What makes a change worth a message: not every digit."""
    return (finding.severity, finding.outcome, finding.verdict, finding.remedy.action, finding.kind)


def _tell(finding: Finding, style: Style, *, new: bool) -> None:
    word = "new" if new else "changed"
    print(
        f"{style.mark(finding.severity)} {finding.code} {word}  onset {finding.onset_step:,}  {safe(finding.summary)}",
        flush=True,
    )


def _fire(hook: str, run: str, finding: Finding) -> None:
    """Run the user's own command. A hook that fails or hangs is reported and harms nobody."""
    environment = {
        **os.environ,
        "RUNHEALTH_RUN": run,
        "RUNHEALTH_FINDING": finding.id,
        "RUNHEALTH_CODE": finding.code,
        "RUNHEALTH_SEVERITY": finding.severity.value,
        "RUNHEALTH_STEP": str(finding.onset_step),
    }
    body = json.dumps({"run": run, **finding_json(finding)})
    try:
        done = subprocess.run(
            hook,
            shell=True,
            input=body,
            text=True,
            env=environment,
            stdout=STDERR_FD,
            timeout=HOOK_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"diagnose: hook failed: {error}", file=sys.stderr)
        return
    if done.returncode != 0:
        print(f"diagnose: hook ended with exit code {done.returncode}", file=sys.stderr)
