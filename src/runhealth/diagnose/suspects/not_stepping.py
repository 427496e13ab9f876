"""No update reaches the weights.

Parameters, or those of some layers, do not move in a single bit while there are gradients and a learning rate: an
optimizer that holds other parameters, a wrapper that swallows the step, a scaler that skips every step.
"""

from collections.abc import Iterator

from runhealth.diagnose import observe, queries
from runhealth.diagnose.case import Case
from runhealth.diagnose.findings import Evidence
from runhealth.diagnose.suspect import Needs, Suspect

LEAST_ROWS = 3


def investigate(case: Case) -> Iterator[Evidence]:
    yield from _still(case)
    told = [a for a in case.incident.alarms if a.kind == "optimizer_not_stepping"]
    for alarm in told[:1]:
        yield Evidence(
            claim=alarm.message,
            weight_nats=3.5,
            steps=(alarm.onset_step, alarm.step),
            layers=alarm.layers,
            value=alarm.value if alarm.value == alarm.value else None,
        )
        rate = [v for _, v in observe.values(case.between(case.onset_step, case.horizon_step), observe.single("lr"))]
        if rate and min(rate) > 0:
            yield Evidence(claim="the learning rate is not 0", weight_nats=1.0, value=min(rate))


def _still(case: Case) -> Iterator[Evidence]:
    """Nothing moves while there is something to apply."""
    attempt = case.incident.attempt
    frames = case.between(case.onset_step, case.horizon_step)
    span = (frames[0].step, frames[-1].step) if frames else (case.onset_step, case.onset_step)
    found = False
    for signal, label in (("param_checksum", "checksum of the parameters"), ("weight_norm", "norm of the parameters")):
        points = observe.values(frames, observe.single(signal))
        if len(points) >= LEAST_ROWS and len({value for _, value in points}) == 1:
            found = True
            yield Evidence(
                claim=f"the {label} did not change in {len(points)} steps",
                weight_nats=3.5,
                steps=span,
                value=points[-1][1],
                query=queries.steps("max", signal, attempt, *span),
            )
            break
    updates = observe.values(frames, observe.single("update_ratio"))
    if len(updates) >= LEAST_ROWS and all(value == 0 for _, value in updates):
        found = True
        yield Evidence(
            claim="the updates were exactly 0",
            weight_nats=3.0,
            steps=span,
            value=0.0,
            query=queries.steps("max", "update_ratio", attempt, *span),
        )
    losses = observe.values(frames, lambda frame: frame.loss)
    if len(losses) >= 8 and len({value for _, value in losses}) == 1:
        found = True
        yield Evidence(
            claim=f"the loss is the same to the last digit in {len(losses)} rows",
            weight_nats=3.0,
            steps=span,
            value=losses[-1][1],
            query=queries.steps("max", "loss", attempt, *span),
        )
    norms = observe.values(frames, observe.single("grad_norm"))
    if found and norms:
        there = max(value for _, value in norms) > 0
        yield Evidence(
            claim="there were gradients to apply" if there else "there were no gradients at all",
            weight_nats=1.5 if there else -1.0,
            steps=span,
            value=max(value for _, value in norms),
            query=queries.steps("max", "grad_norm", attempt, *span),
        )


SUSPECT = Suspect(
    name="not_stepping",
    title="optimizer not stepping",
    needs=Needs(
        any=("param_checksum", "weight_norm", "layer.update_norm", "update_ratio", "step_skipped", "loss"),
        optional=("grad_norm", "lr"),
    ),
    investigate=investigate,
    action="repair",
    remedy="check the optimizer's parameter list, the wrapper around the step, and what skips it",
    explains="gradients were computed and updates were not applied",
    kinds=("optimizer_not_stepping",),
)
