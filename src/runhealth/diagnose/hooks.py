"""Running the user's own command for a finding, beside the watch: a hook that fails or hangs harms nobody."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading

from runhealth.diagnose.findings import Finding
from runhealth.diagnose.report.json import finding_json

TIMEOUT_S = 600.0
STDERR_FD = 2  # stdout holds the findings; what a hook says goes beside them


class HookRunner:
    """Runs hooks one after the other in a thread of its own, in the order in which they were fired."""

    def __init__(self, command: str, run: str, timeout_s: float = TIMEOUT_S) -> None:
        self._command, self._run, self._timeout_s = command, run, timeout_s
        self._queue: queue.SimpleQueue[tuple[Finding, str] | None] = queue.SimpleQueue()
        self._running: subprocess.Popen[str] | None = None
        self._stopped = False
        self._thread = threading.Thread(target=self._work, name="hooks", daemon=True)
        self._thread.start()

    def fire(self, finding: Finding, change: str) -> None:
        """Queue the hook for a finding; `change` is `new` or `changed`."""
        self._queue.put((finding, change))

    def close(self, *, wait: bool) -> None:
        """With `wait`, let all queued hooks end, each within its time; without, end the running one, drop the rest."""
        if not wait:
            self._stopped = True
            running = self._running
            if running is not None:
                _kill(running)
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            if self._stopped:
                print(f"diagnose: hook for {item[0].id} was not run", file=sys.stderr)
                continue
            try:
                self._call(*item)
            except Exception as error:  # noqa: BLE001 - whatever a hook does, the next one gets its turn
                print(f"diagnose: hook failed: {error}", file=sys.stderr)

    def _call(self, finding: Finding, change: str) -> None:
        environment = {
            **os.environ,
            "RUNHEALTH_RUN": self._run,
            "RUNHEALTH_FINDING": finding.id,
            "RUNHEALTH_CODE": finding.code,
            "RUNHEALTH_KIND": finding.kind,
            "RUNHEALTH_SEVERITY": finding.severity.value,
            "RUNHEALTH_OUTCOME": finding.outcome.value,
            "RUNHEALTH_VERDICT": finding.verdict if finding.suspects else "",
            "RUNHEALTH_STEP": str(finding.onset_step),
            "RUNHEALTH_CHANGE": change,
        }
        body = json.dumps({"run": self._run, "change": change, **finding_json(finding)})
        # A session of its own, so that all the hook has started can be ended with it.
        process = subprocess.Popen(
            self._command,
            shell=True,
            stdin=subprocess.PIPE,
            stdout=STDERR_FD,
            text=True,
            env=environment,
            start_new_session=True,
        )
        self._running = process
        if self._stopped:
            _kill(process)
        try:
            process.communicate(body, timeout=self._timeout_s)
        except subprocess.TimeoutExpired:
            _kill(process)
            process.communicate()
            print(f"diagnose: hook for {finding.id} was ended after {self._timeout_s:g} s", file=sys.stderr)
            return
        finally:
            self._running = None
        if process.returncode != 0:
            print(f"diagnose: hook for {finding.id} ended with exit code {process.returncode}", file=sys.stderr)


def _kill(process: "subprocess.Popen[str]") -> None:
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
