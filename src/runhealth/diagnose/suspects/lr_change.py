"""A learning rate that is off its schedule.

The learning rate jumps or climbs off its course, the update ratio moves in the same step by the same factor, on all
ranks, and the loss follows. A rate that falls off its course raises no loss; it is the cause of updates that fall.
"""

import math
from collections.abc import Iterator
from itertools import pairwise

from runhealth.diagnose import observe, queries
from runhealth.diagnose.case import Case
from runhealth.diagnose.findings import Evidence
from runhealth.diagnose.robust import median
from runhealth.diagnose.suspect import VETO_NATS, Needs, Suspect
from runhealth.diagnose.tracked import CAUSAL_KINDS

CLIMB, COURSE_ROWS = 2.0, 32
FALLING = ("update_jump", "lr_discontinuity", "not_learning")  # what a rate that is too low shows in


def investigate(case: Case) -> Iterator[Evidence]:
    first = observe.lead_from(case)
    last = case.loss_step if case.loss_moved else max(case.loss_step, case.incident.last_alarm_step)
    attempt = case.incident.attempt
    jump = observe.lr_jump(case, first, last) or _climb(case, first, last)
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
    falls = bool({a.kind for a in case.incident.alarms}.intersection(FALLING))
    yield Evidence(
        claim=f"the learning rate went to {lr:.3g} at step {step:,} where its course led to {expected:.3g} "
        f"({factor:.2g} x)",
        weight_nats=(3.5 if factor > 2 else 2.0) if up else (2.5 if factor < 0.5 else 1.5) if falls else -1.5,
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
            at, ratio_then = (max if up else min)(moves, key=lambda p: p[1])
            followed = ratio_then > 1.5 * ratio.center if up else ratio_then < ratio.center / 1.5
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


def _climb(case: Case, first: int, last: int) -> tuple[int, float, float] | None:
    """A rate that went without a jump to over twice what the course before led to, or to under half of it. The course
    goes on with the median slope, which one earlier jump does not tilt."""
    old = observe.values((f for f in case.frames if f.step < first), observe.single("lr"))[-COURSE_ROWS:]
    if len(old) < COURSE_ROWS // 2:
        return None
    slopes = [(v1 - v0) / (s1 - s0) for (s0, v0), (s1, v1) in pairwise(old) if s1 > s0]
    slope = median(sorted(slopes)) if slopes else 0.0
    s1, v1 = old[-1]
    for step, value in observe.values(case.between(first, last), observe.single("lr")):
        expected = max(v1 + slope * (step - s1), 0.0)
        if expected > 0.25 * v1 and not 1 / CLIMB < value / expected < CLIMB:
            return step, value, expected
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
    kinds=(*CAUSAL_KINDS, "lr_discontinuity", "logit_growth"),
)
