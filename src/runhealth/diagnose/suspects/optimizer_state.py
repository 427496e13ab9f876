"""A lost or damaged optimizer state.

The update ratio jumps on all ranks while the learning rate keeps to its course and the data are in order; most often
at a resume. The loss follows.
"""

from collections.abc import Iterator

from runhealth.diagnose import queries
from runhealth.diagnose.case import Case
from runhealth.diagnose.findings import Evidence
from runhealth.diagnose.suspect import VETO_NATS, Needs, Suspect

LEAD_STEPS = 32
FACTOR = 2.0
RECENT_STEPS = 2


def investigate(case: Case) -> Iterator[Evidence]:
    attempt, last = case.incident.attempt, case.loss_step
    first = last - LEAD_STEPS
    ratio = case.baseline("update_ratio")
    if not ratio.ready:
        return
    values = [(f.step, float(v)) for f in case.between(first, last - 1) if (v := f.get("update_ratio")) is not None]
    if not values:
        return
    moved = next(((step, v) for step, v in values if v > FACTOR * ratio.center), None)
    if moved is None:
        recent = last - values[-1][0] <= RECENT_STEPS  # sampled now and then, it may have missed the jump
        worst = max(values, key=lambda p: p[1])
        yield Evidence(
            claim="the update ratio was flat until the loss moved"
            if recent
            else f"the update ratio was flat, but last measured {last - values[-1][0]} steps before the loss moved",
            weight_nats=VETO_NATS if recent else -0.5,
            steps=(first, last - 1),
            value=worst[1],
            baseline=ratio.center,
            query=queries.steps("max", "update_ratio", attempt, first, last - 1),
        )
        return
    step, value = moved
    yield Evidence(
        claim=f"the update ratio jumped to {value / ratio.center:.1f} x normal at step {step:,}, "
        f"{last - step} steps before the loss moved",
        weight_nats=3.0,
        steps=(step, step),
        value=value,
        baseline=ratio.center,
        query=queries.steps("max", "update_ratio", attempt, step, step),
    )
    if case.alarms("lr"):
        yield Evidence(
            claim="the learning rate explains it: it jumped as well",
            weight_nats=-3.5,
            steps=(case.alarms("lr")[0].step, case.alarms("lr")[0].step),
        )
    elif case.has("lr"):
        yield Evidence(claim="the learning rate kept to its course", weight_nats=1.0)
    resumed = next((f.step for f in case.around if f.new_attempt and f.attempt > 0 and f.step <= step), None)
    if resumed is not None and step - resumed <= 16:
        yield Evidence(claim=f"training had resumed at step {resumed:,}", weight_nats=2.0, steps=(resumed, step))
    outliers = [o for o in case.outliers() if step - 2 <= o.batch.step <= step]
    if outliers:
        yield Evidence(
            claim=f"an unusual batch was read at step {outliers[0].batch.step:,}",
            weight_nats=-2.5,
            steps=(outliers[0].batch.step, outliers[0].batch.step),
            ranks=(outliers[0].batch.rank,),
        )
    breach = case.alarms("grad_norm")
    if breach and breach[0].onset_step < step:
        yield Evidence(
            claim="the gradient norm had risen before", weight_nats=-2.0, steps=(breach[0].onset_step, breach[0].step)
        )


SUSPECT = Suspect(
    name="optimizer_state",
    title="optimizer state",
    needs=Needs(all=("update_ratio",), optional=("lr", "grad_norm")),
    investigate=investigate,
    action="rollback_and_repair",
    remedy="go back to a checkpoint that holds the optimizer state",
    explains="the optimizer's moments were lost or damaged, so its updates were far too large",
)
