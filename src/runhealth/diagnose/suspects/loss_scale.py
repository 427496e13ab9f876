"""The loss scale of fp16 training.

Consecutive halvings without regrowth over different batches: the gradients overflow at every scale. Or a scale that is
far from its habit all at once: the scaler was reset or set wrongly, and steps are skipped or gradients vanish.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

from runhealth.diagnose import observe, queries
from runhealth.diagnose.case import Case
from runhealth.diagnose.findings import Evidence
from runhealth.diagnose.suspect import VETO_NATS, Needs, Suspect

DOUBLINGS = 3.5
SKIPS, OF_STEPS = 3, 10
LEAST_FALLS = 3


def investigate(case: Case) -> Iterator[Evidence]:
    attempt = case.incident.attempt
    told = [a for a in case.incident.alarms if a.kind in ("loss_scale_collapse", "loss_scale_reset")]
    first, last = case.loss_step - observe.LEAD_STEPS, max(case.loss_step, *(a.step for a in told), case.loss_step)
    scale = observe.values(case.between(first, last), observe.single("loss_scale"))
    usual = case.baseline("loss_scale")
    if not scale:
        return
    scale_now = observe.values(case.between(case.onset_step - 4, case.horizon_step), observe.single("loss_scale"))
    late = case.loss_moved and bool(told) and min(a.onset_step for a in told) > case.loss_step
    found = False
    if told:
        alarm = min(told, key=lambda a: a.onset_step)
        found = True
        yield Evidence(
            claim=f"the loss scale fell from {alarm.baseline:g} to {alarm.value:g} from step {alarm.onset_step:,} on, "
            + ("after the loss had moved" if late else "without growing again"),
            weight_nats=0.5 if late else 2.5 if alarm.kind == "loss_scale_reset" else 3.5,
            steps=(alarm.onset_step, alarm.step),
            value=alarm.value,
            baseline=alarm.baseline,
            query=queries.steps("min", "loss_scale", attempt, alarm.onset_step, alarm.step),
        )
    elif usual.ready and usual.center > 0:
        step, value = max(scale, key=lambda p: abs(math.log2(p[1] / usual.center)) if p[1] > 0 else math.inf)
        doublings = math.log2(value / usual.center) if value > 0 else -math.inf
        if abs(doublings) >= DOUBLINGS:
            found = True
            way = "over" if doublings > 0 else "under"
            yield Evidence(
                claim=f"the loss scale was 2^{abs(doublings):.0f} {way} its habit ({usual.center:g}) at step {step:,}",
                weight_nats=3.0,
                steps=(step, last),
                value=value,
                baseline=usual.center,
                query=queries.steps("max" if doublings > 0 else "min", "loss_scale", attempt, step, step),
            )
    falls = [(a, b) for a, b in itertools.pairwise(scale_now) if b[1] < a[1]]
    if len(falls) >= LEAST_FALLS and not any(b[1] > a[1] for a, b in itertools.pairwise(scale_now)) and not told:
        found = True
        yield Evidence(
            claim=f"the loss scale fell {len(falls)} times in a row, from {falls[0][0][1]:g} to {falls[-1][1][1]:g}",
            weight_nats=2.5,
            steps=(falls[0][1][0], falls[-1][1][0]),
            value=falls[-1][1][1],
            baseline=falls[0][0][1],
            query=queries.steps("min", "loss_scale", attempt, falls[0][1][0], falls[-1][1][0]),
        )
    skips = [s for s, v in observe.values(case.between(last - OF_STEPS, last + 2), observe.single("step_skipped")) if v]
    habit = [v for _, v in observe.values(case.before, observe.single("step_skipped"))]
    often = sum(habit) / len(habit) if habit else 0.0
    if len(skips) >= max(SKIPS, 3 * often * OF_STEPS):
        found = True
        yield Evidence(
            claim=f"{len(skips)} optimizer steps were skipped in steps {skips[0]:,}-{skips[-1]:,}",
            weight_nats=1.5,
            steps=(skips[0], skips[-1]),
            value=float(len(skips)),
            baseline=often,
            query=queries.steps("sum", "step_skipped", attempt, skips[0], skips[-1]),
        )
    if not found:
        yield Evidence(
            claim=f"the loss scale stayed at its habit ({usual.center:g}) up to the onset"
            if usual.ready
            else "the loss scale did not fall",
            weight_nats=VETO_NATS,
            steps=(first, last),
            value=min(v for _, v in scale),
            baseline=usual.center if usual.ready else None,
            query=queries.steps("min", "loss_scale", attempt, first, last),
        )
        return
    yield from _first(case, told[0].onset_step if told else case.loss_step)
    one = observe.alone_again(case.between(case.onset_step, case.horizon_step), case.onset_step)
    if one is not None:
        yield replace(one, weight_nats=-3.5)
    yield from observe.data_alike(case, first, min(last, case.loss_step), 0.5)


def _first(case: Case, step: int) -> Iterator[Evidence]:
    """Overflow in named tensors before the scale fell: the number format is the cause and the scale the symptom."""
    if case.has("amax_ratio"):
        usual = observe.habit(case, observe.largest("amax_ratio"))
        if usual.ready:
            limit = max(1.5, 1.3 * usual.quantile(0.98))
            moved = observe.move(case, observe.largest("amax_ratio"), limit, first=step - 16, last=step)
            if moved is not None:
                yield Evidence(
                    claim=f"amax had outgrown its scale at step {moved.step:,}",
                    weight_nats=-2.0,
                    steps=(moved.step, step),
                    value=moved.extreme,
                    baseline=usual.center,
                )


SUSPECT = Suspect(
    name="loss_scale",
    title="loss scale",
    needs=Needs(all=("loss_scale",), optional=("step_skipped", "overflow_count")),
    investigate=investigate,
    action="rollback_and_repair",
    remedy="go back to before the first decrease, reset the loss scale; train in bf16 if it falls again",
    explains="the loss scale left its level, so that steps were skipped or gradients lost",
    repairs=("reset_loss_scale",),
    kinds=(
        "loss_spike",
        "loss_divergence",
        "non_finite",
        "gradient_spike",
        "loss_scale_collapse",
        "fp_overflow",
        "loss_scale_reset",
    ),
)
