"""The port to the trainer: called as a command, never imported, so that a diagnosis needs no torch."""

import subprocess
import sys


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
