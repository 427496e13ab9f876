"""The port to the trainer: called as a command, never imported, so that a diagnosis needs no torch."""

import contextlib
import json
import os
import subprocess
import sys
from types import TracebackType

from runhealth.diagnose.plans import ReplayOrder
from runhealth.storage.errors import ReplayError
from runhealth.storage.jsontext import parse_json


def train_command(run: str, store: str, plan: str) -> list[str]:
    return [sys.executable, "-m", "runhealth.cli", "train", "--run", run, "--store", store, "--plan", plan]


def resume_with_plan(run: str, store: str, plan: str) -> int:
    """Resume the run with the plan as a child process; returns its exit code. Ctrl-C reaches the child too, which ends
    its ranks in order; it is waited for."""
    child = subprocess.Popen(train_command(run, store, plan))
    while True:
        try:
            return child.wait()
        except KeyboardInterrupt:
            continue


class ReplayProcess:
    """A `runhealth replay` that takes one order after the other, so that torch is loaded once. A context manager: the
    child ends with it, and with this process, however that ends. What it says for people goes to stderr."""

    def __init__(self, run_path: str) -> None:
        command = [sys.executable, "-m", "runhealth.cli", "replay", "--run", run_path, "--parent", str(os.getpid())]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def play(self, order: ReplayOrder) -> str:
        """Returns the folder of the replay's telemetry. Raises ReplayError with what the trainer said."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        try:
            self._child.stdin.write(f"{json.dumps(order.to_json())}\n")
            self._child.stdin.flush()
            line = self._child.stdout.readline()
        except OSError:
            line = ""
        if not line:
            code = self._child.wait()
            how = f"was killed (signal {-code})" if code < 0 else f"ended with exit code {code}; it has said why above"
            raise ReplayError(f"replay {order.name}: the trainer {how}")
        answer = parse_json(line)
        if "error" in answer:
            raise ReplayError(f"replay {order.name}: {answer['error']}")
        return str(answer["path"])

    def __enter__(self) -> "ReplayProcess":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ctrl-C reaches the child too, which ends its ranks in order; it is waited for."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        with contextlib.suppress(OSError):
            self._child.stdin.close()
        while True:
            try:
                self._child.wait()
                break
            except KeyboardInterrupt:
                continue
        self._child.stdout.close()
