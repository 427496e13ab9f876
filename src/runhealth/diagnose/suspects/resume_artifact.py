"""Trouble that begins with a resume: the state that was loaded is not the state that was saved.

The loss jumps in the first steps of an attempt. Where learning rate, optimizer, data position or loss scale show what
was not restored, they are the better answer; this suspect stands for what is left: weights, random state, a different
world size or code.
"""

from collections.abc import Iterator

from runhealth.diagnose import observe, queries
from runhealth.diagnose.case import Case
from runhealth.diagnose.findings import Evidence
from runhealth.diagnose.suspect import VETO_NATS, Needs, Suspect

AT_ONCE_STEPS = 3
SOON_STEPS = 16
LEAST_HEALTHY, USUAL_Z = 2, 3.0


def investigate(case: Case) -> Iterator[Evidence]:
    attempt, step = case.incident.attempt, case.loss_step
    resumed = observe.resumed_step(case, step)
    if resumed is None or step - resumed > SOON_STEPS:
        yield Evidence(
            claim="training had not been resumed shortly before",
            weight_nats=VETO_NATS,
            steps=(step - SOON_STEPS, step),
        )
        return
    after = step - resumed
    healthy = _healthy(case, resumed, step)
    yield Evidence(
        claim=f"it began {after} steps after the resume at step {resumed:,}",
        weight_nats=2.0 if after <= AT_ONCE_STEPS else -1.0,
        steps=(resumed, step),
    )
    if healthy:
        yield Evidence(
            claim=f"the {healthy} losses between were as ever: what is loaded wrongly shows at once",
            weight_nats=-2.0,
            steps=(resumed, step - 1),
        )
    yield from observe.lr_on_course(case, resumed, step)
    yield from observe.data_alike(case, resumed, step)
    ratio = case.baseline("update_ratio")
    if ratio.ready:
        moved = case.first("update_ratio", 2.0 * ratio.center, first=resumed, last=step)
        value = moved[1] if moved else None
        if moved is not None:
            yield Evidence(
                claim=f"the update ratio was {moved[1] / ratio.center:.1f} x normal: optimizer state or rate",
                weight_nats=-2.5,
                steps=(moved[0], moved[0]),
                value=value,
                baseline=ratio.center,
                query=queries.steps("max", "update_ratio", attempt, moved[0], moved[0]),
            )
        else:
            yield Evidence(claim="updates were as large as ever", weight_nats=0.7, steps=(resumed, step))
    weights = observe.values(case.before[-8:], observe.single("weight_norm"))
    now = observe.values(case.between(resumed, resumed + 2), observe.single("weight_norm"))
    if weights and now and weights[-1][1] > 0:
        (at, value), last = now[0], weights[-1][1]
        off = abs(value / last - 1)
        yield Evidence(
            claim=f"the norm of the weights is {value:.5g} after the load and was {last:.5g} before"
            + (": the checkpoint" if off > 0.01 else ""),
            weight_nats=-2.0 if off > 0.01 else 1.0,
            steps=(at, at),
            value=value,
            baseline=last,
            query=queries.steps("max", "weight_norm", attempt, at, at),
        )


def _healthy(case: Case, resumed: int, step: int) -> int:
    """How many losses after the resume and before the trouble lay at the habit; 0 if one did not."""
    habit = case.baseline("loss")
    losses = [f.loss for f in case.between(resumed, step - 1)]
    near = [loss for loss in losses if loss is not None and habit.ready and abs(habit.z(loss)) < USUAL_Z]
    return len(near) if len(near) == len(losses) >= LEAST_HEALTHY else 0


SUSPECT = Suspect(
    name="resume_artifact",
    title="resume",
    needs=Needs(all=("loss",), optional=("lr", "update_ratio", "weight_norm", "consumed_samples")),
    investigate=investigate,
    action="rollback_and_repair",
    remedy="load the checkpoint again and compare weights, optimizer, schedule, scaler and data position with what was "
    "saved",
    explains="the resume did not restore the state that had been saved",
    kinds=("loss_spike", "loss_divergence", "non_finite", "gradient_spike", "resume_jump"),
)
