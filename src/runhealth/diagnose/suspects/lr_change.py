"""A learning rate that is off its schedule.

The learning rate jumps off its course, the update ratio moves in the same step by the same factor, on all ranks, and
the loss follows.
"""

import math
from collections.abc import Iterator

from runhealth.diagnose import observe, queries
from runhealth.diagnose.case import Case
from runhealth.diagnose.findings import Evidence
from runhealth.diagnose.suspect import VETO_NATS, Needs, Suspect

FACTOR = 1.4


def investigate(case: Case) -> Iterator[Evidence]:
    first, last = observe.lead_from(case), case.loss_step
    attempt = case.incident.attempt
    jump = _jump(case, first, last)
    if jump is None:
        values = [float(v) for f in case.between(first, last) if (v := f.get("lr")) is not None]
        if values:
            yield Evidence(
                claim="the learning rate kept to its course up to the onset",
                weight_nats=VETO_NATS,
                steps=(first, last),
                value=max(values),
                query=queries.steps("max", "lr", attempt, first, last),
            )
        return
    step, lr, expected = jump
    factor = lr / expected if expected > 0 else math.inf
    up = factor > 1
    yield Evidence(
        claim=f"the learning rate went to {lr:.3g} at step {step:,} where its course led to {expected:.3g} "
        f"({factor:.2g} x)",
        weight_nats=3.5 if up and factor > 2 else 2.0 if up else -1.5,
        steps=(step, step),
        value=lr,
        baseline=expected,
        query=queries.steps("max", "lr", attempt, step, step),
    )
    ratio = case.baseline("update_ratio")
    if ratio.ready:
        until = max(step + 1, min(last, step + 2))
        moves = [(f.step, float(v)) for f in case.between(step, until) if (v := f.get("update_ratio")) is not None]
        if moves:
            at, ratio_then = max(moves, key=lambda p: p[1])
            followed = ratio_then > 1.5 * ratio.center
            yield Evidence(
                claim=f"the update ratio {'moved with it' if followed else 'did not follow'}: "
                f"{ratio_then / ratio.center:.2g} x normal",
                weight_nats=2.5 if followed else -2.0,
                steps=(at, at),
                value=ratio_then,
                baseline=ratio.center,
                query=queries.steps("max", "update_ratio", attempt, at, at),
            )
    if step > last:
        yield Evidence(claim="the loss had moved before", weight_nats=-3.0, steps=(last, last))


def _jump(case: Case, first: int, last: int) -> tuple[int, float, float] | None:
    """The first step where the learning rate leaves the straight line through the eight points before it."""
    points: list[tuple[int, float]] = []
    for frame in case.frames:
        value = frame.get("lr")
        if value is None or not math.isfinite(value) or frame.step > last + 1:
            continue
        if len(points) >= 4 and frame.step >= first:
            (s0, v0), (s1, v1) = points[-min(8, len(points))], points[-1]
            expected = v1 + ((v1 - v0) / (s1 - s0) * (frame.step - s1) if s1 > s0 else 0.0)
            if expected > 0 and not 1 / FACTOR < value / expected < FACTOR:
                return frame.step, float(value), expected
        points.append((frame.step, float(value)))
    return None


SUSPECT = Suspect(
    name="lr_change",
    title="learning-rate change",
    needs=Needs(all=("lr",), optional=("update_ratio",)),
    investigate=investigate,
    action="rollback_and_repair",
    remedy="restore the learning-rate schedule and go back to before the change",
    explains="the learning rate left its schedule",
    repairs=("restore_lr_schedule",),
)
