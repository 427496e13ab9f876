"""Settings of the optimizer that changed, as it used them: a cause in plain sight, where they are recorded."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from runhealth.diagnose import queries
from runhealth.diagnose.case import Case
from runhealth.diagnose.findings import Evidence

SETTINGS = ("beta1", "beta2", "weight_decay", "adam_eps")
LABELS = {"beta1": "beta1", "beta2": "beta2", "weight_decay": "the weight decay", "adam_eps": "Adam's epsilon"}
SAME = 1e-6  # relative: what rounding may do
AFTER_STEPS = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """`signal` went from `before` to `value` at `step`."""

    signal: str
    step: int
    value: float
    before: float


def changes(case: Case, first: int, last: int) -> list[Changed]:
    """What changed from one record of it to the next, at a step of the range, the earliest first. Records of an attempt
    before count: a resume may set up an optimizer anew."""
    found = []
    for signal in SETTINGS:
        points = [
            (f.step, float(v))
            for f in case.frames
            if f.step <= last and (v := f.get(signal)) is not None and math.isfinite(v)
        ]
        for (_, before), (step, value) in itertools.pairwise(points):
            if step >= first and abs(value - before) > SAME * max(abs(value), abs(before)):
                found.append(Changed(signal=signal, step=step, value=value, before=before))
    return sorted(found, key=lambda change: (change.step, change.signal))


def measured(case: Case) -> bool:
    return any(case.has(signal) for signal in SETTINGS)


def changed_evidence(case: Case, first: int, last: int, weight_nats: float) -> Iterator[Evidence]:
    """For a suspect that is not the optimizer's settings (under 0), or is (over 0): a claim for each that changed."""
    for change in changes(case, first, last)[:2]:
        went = f"from {change.before:.6g} to {change.value:.6g}"
        yield Evidence(
            claim=f"{LABELS[change.signal]} went {went} at step {change.step:,}",
            weight_nats=weight_nats,
            steps=(change.step, change.step),
            value=change.value,
            baseline=change.before,
            query=queries.steps("max", change.signal, case.incident.attempt, change.step, change.step),
        )
