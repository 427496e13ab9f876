"""Nothing is wrong: a hard but clean batch, noise with heavy tails.

The loss is back at once, its batches look like the others, and nothing else moved.
"""

import math
from collections.abc import Iterator

from runhealth.diagnose import queries
from runhealth.diagnose.case import Case
from runhealth.diagnose.findings import Evidence
from runhealth.diagnose.suspect import VETO_NATS, Needs, Suspect

BACK_AT_ONCE_STEPS = 3


def investigate(case: Case) -> Iterator[Evidence]:
    onset, attempt = case.loss_step, case.incident.attempt
    if any(a.kind == "non_finite" for a in case.incident.alarms):
        yield Evidence(claim="a value is not finite", weight_nats=VETO_NATS)
        return
    back = case.loss_back_step
    after = [f for f in case.around if f.step > onset and f.loss is not None]
    if back is None and len(after) >= 2:
        values = [f.loss for f in after if f.loss is not None and math.isfinite(f.loss)]
        yield Evidence(
            claim=f"the loss was not back {len(after)} logged steps later",
            weight_nats=-3.5,
            steps=(onset, after[-1].step),
            value=max(values, default=None),
        )
        if len(after) >= 16:
            yield Evidence(claim="nor did it come back after that", weight_nats=-1.5)
    elif back is not None:
        quick = back - onset <= BACK_AT_ONCE_STEPS or (after and back <= after[0].step)
        yield Evidence(
            claim=f"the loss was back at step {back:,}",
            weight_nats=2.0 if quick else 0.5,
            steps=(onset, back),
        )
    if case.outliers(case.between(onset - 2, onset)):
        yield Evidence(claim="a batch of the onset is unlike the others", weight_nats=-3.5, steps=(onset - 2, onset))
    elif any(b.values for b in case.batches(onset - 2, onset)):
        yield Evidence(claim="the batches of the onset look like all others", weight_nats=1.0, steps=(onset - 2, onset))
    others = sorted({a.signal for a in case.incident.alarms if a.signal not in ("loss", "grad_norm")})
    if others:
        yield Evidence(claim=f"{', '.join(others)} left their habit too", weight_nats=-2.0)
    norm = case.baseline("grad_norm", log=True)
    value = next((f.get("grad_norm") for f in case.between(onset, onset)), None)
    if norm.ready and value is not None and math.isfinite(value) and value > 0:
        factor = value / math.exp(norm.center)
        yield Evidence(
            claim=f"the gradient norm was {factor:.2g} x normal at the onset",
            weight_nats=1.0 if factor < 2 else 0.0 if factor < 4 else -1.0,
            steps=(onset, onset),
            value=float(value),
            baseline=math.exp(norm.center),
            query=queries.steps("max", "grad_norm", attempt, onset, onset),
        )


SUSPECT = Suspect(
    name="benign",
    title="nothing wrong (a hard batch, noise)",
    needs=Needs(all=("loss",), optional=("grad_norm", "token_entropy")),
    investigate=investigate,
    action="continue",
    remedy="go on; no rollback is needed",
    explains="an ordinary excursion of a noisy loss that is gone at once",
    kinds=("loss_spike", "gradient_spike"),
)
