"""A run held against its plan: utilisation, pipeline bubble and memory as measured and as planned.

The plan is the answer of `runhealth plan --run NAME --json` in the run's folder. Like `liveness`, this looks beyond the
records, so it is made last and by itself.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runhealth.diagnose.findings import Alarm, Finding, Severity
from runhealth.diagnose.frames import Frame
from runhealth.diagnose.history import History
from runhealth.diagnose.robust import median
from runhealth.diagnose.verdicts import fact_of
from runhealth.storage.errors import StoreError
from runhealth.storage.jsontext import parse_json

PLAN_FILE = "plan.json"
FRAMES = 256  # newest frames whose medians are compared
LEAST_FRAMES = 16
LOW = 0.75  # of the planned MFU; a first-order plan is not believed more closely
BUBBLE = 0.10  # absolute, over the planned bubble
MEMORY = 1.15  # x the planned bytes


def check(run_path: str, history: History) -> Finding | None:
    """The finding `low_mfu`, or None: no plan, no measured MFU, or utilisation as planned.

    Raises:
        StoreError: a plan that cannot be read as one.
    """
    plan = _planned(run_path)
    if plan is None:
        return None
    frames = list(history.frames)[-FRAMES:]
    mfu, planned = _median(frames, "mfu"), _number(plan, "mfu")
    if mfu is None or planned is None or mfu >= LOW * planned:
        return None
    message = f"utilisation {mfu:.1%}, planned {planned:.1%} for {plan.get('words', 'the recommended layout')}"
    reasons = _reasons(plan, frames)
    message += f"; {'; '.join(reasons)}" if reasons else "; bubble and memory are as planned or were not recorded"
    first, last = frames[0], frames[-1]
    return fact_of(
        Alarm(
            detector="against_plan",
            kind="low_mfu",
            signal="mfu",
            attempt=last.attempt,
            step=last.step,
            onset_step=first.step,
            score=planned / mfu if mfu > 0 else math.inf,
            value=mfu,
            baseline=planned,
            severity=Severity.WARNING,
            message=message,
        )
    )


def _reasons(plan: Mapping[str, Any], frames: Sequence[Frame]) -> list[str]:
    """What else is off the plan, the likely reasons for the lost time."""
    found = []
    bubble, planned = _median(frames, "bubble_fraction"), _number(plan, "bubble_fraction")
    if bubble is not None and planned is not None and bubble > planned + BUBBLE:
        found.append(f"the pipeline idles {bubble:.1%} of a step, planned {planned:.1%}")
    held, budget = _median(frames, "mem_allocated_bytes"), _number(plan.get("memory_bytes"), "total")
    if held is not None and budget is not None and held > MEMORY * budget:
        found.append(f"{held / 1e9:.3g} GB are allocated, planned {budget / 1e9:.3g} GB")
    seconds = plan.get("seconds")
    step, planned_step = _median(frames, "t_step_s"), _number(seconds, "step")
    wait = _median(frames, "t_wait_s")
    if step is not None and planned_step is not None and wait is not None and wait > 0.2 * step:
        found.append(f"{wait:.3g} s of a step of {step:.3g} s wait in collectives (planned step {planned_step:.3g} s)")
    return found


def _median(frames: Sequence[Frame], signal: str) -> float | None:
    """Of the largest value over the ranks, frame by frame; None with too few of them."""
    values = [float(value) for frame in frames if (value := frame.largest(signal)) is not None and math.isfinite(value)]
    return median(sorted(values)) if len(values) >= LEAST_FRAMES else None


def _planned(run_path: str) -> Mapping[str, Any] | None:
    path = Path(run_path) / PLAN_FILE
    try:
        raw = parse_json(path.read_text(encoding="utf-8"))
        recommended = raw["recommended"]
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(
            f"{path}: expected the answer of `runhealth plan --run NAME`, met {type(error).__name__}: {error}; "
            "write it again, or remove the file"
        ) from error
    return recommended if isinstance(recommended, Mapping) else None


def _number(values: object, name: str) -> float | None:
    found = values.get(name) if isinstance(values, Mapping) else None
    return float(found) if isinstance(found, int | float) and math.isfinite(found) else None
