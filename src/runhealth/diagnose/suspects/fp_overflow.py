"""fp8 or fp16 overflow.

The amax grows over the one that the scale was chosen for, elements saturate in named tensors, and the loss follows. A
context gate: where no overflow count, amax or loss scale is recorded, nothing can be said. A bf16 run records none.
"""

import math
from collections.abc import Iterator

from runhealth.diagnose import odd_data, queries
from runhealth.diagnose.case import Case
from runhealth.diagnose.findings import Alarm, Evidence
from runhealth.diagnose.robust import Baseline
from runhealth.diagnose.suspect import VETO_NATS, Needs, Suspect

LEAD_STEPS = 32
LEAST_ELEMENTS = 16
COUNT_FACTOR = 8.0
AMAX_FACTOR = 1.3
AMAX_LEAST = 1.5
LEAST_SHARE = 0.05
MOST_TENSORS = 4
AFTER_STEPS = 4  # where the loss does not move
ONE_RANK = 0.25  # of its count: what the others may have in sum


def investigate(case: Case) -> Iterator[Evidence]:
    first = case.loss_step - LEAD_STEPS
    last = case.loss_step if case.loss_moved else min(case.horizon_step, case.loss_step + AFTER_STEPS)
    tensors = _tensors(case, first, last)
    found = (
        list(_counts(case, first, last, list(tensors)))
        + list(_amax(case, first, last))
        + list(_scale(case, first, last, named=bool(tensors)))
    )
    yield from found
    if any(e.weight_nats > 0 for e in found):
        yield from _named(case, first, last, tensors)
        yield from _upstream(case, first, last)
        if not tensors and _caught(case, first):
            yield Evidence(
                claim="the scaler met the overflow by skipping steps, and no tensor of the forward pass is named",
                weight_nats=-2.0,
                steps=(first, last),
            )
        read = case.batches(first, last)
        if any(b.values for b in read) and not case.outliers(case.between(first, last)) and not odd_data.signs(case):
            yield Evidence(
                claim=f"the {len(read)} batches read up to then look like all others",
                weight_nats=0.7,
                steps=(first, last),
            )
    elif not found:
        measured = [s for s in ("overflow_count", "amax_ratio", "loss_scale") if case.has(s)]
        yield Evidence(
            claim=f"{', '.join(measured)} stayed within the run's habit up to the onset",
            weight_nats=VETO_NATS,
            steps=(first, last),
        )


def _upstream(case: Case, first: int, last: int) -> Iterator[Evidence]:
    """Whatever makes activations or gradients jump overflows a scale that was chosen for the ones before."""
    limit = _limit(case)
    over = next((f for f in case.between(first, last) if (f.total("overflow_count") or 0) >= limit), None)
    step = over.step if over is not None else last
    ratio = case.baseline("update_ratio")
    moved = case.first("update_ratio", 2.0 * ratio.center, first=step - 4, last=step - 1) if ratio.ready else None
    if moved is not None:
        yield Evidence(
            claim=f"updates were {moved[1] / ratio.center:.2g} x normal before it: that is what made values outgrow "
            "their scale",
            weight_nats=-3.5,
            steps=(moved[0], moved[0]),
            value=moved[1],
            baseline=ratio.center,
            query=queries.steps("max", "update_ratio", case.incident.attempt, moved[0], moved[0]),
        )
    strange = case.outliers(case.between(step - 1, step))
    if strange:
        batch = strange[0].batch
        yield Evidence(
            claim=f"an unusual batch was read at step {batch.step:,}, in which values overflowed",
            weight_nats=-3.5,
            steps=(batch.step, batch.step),
            ranks=(batch.rank,),
        )
    else:
        yield from odd_data.against(case, -3.0)
    if over is None:
        return
    counts = {r: float(v) for r, v in over.per_rank("overflow_count").items()}
    most = max(counts, key=lambda r: (counts[r], -r), default=-1)
    others = sum(counts.values()) - counts.get(most, 0.0)
    if len(counts) > 2 and others < ONE_RANK * counts[most]:
        yield Evidence(
            claim=f"{counts[most]:,.0f} of the {counts[most] + others:,.0f} elements are rank {most}'s: all ranks "
            "share the scales, so it is what this one computed",
            weight_nats=-2.5,
            steps=(over.step, over.step),
            ranks=(most,),
            value=counts[most],
            baseline=others,
            query=queries.steps("max", "overflow_count", over.attempt, over.step, over.step, (most,)),
        )


def _limit(case: Case) -> float:
    return max(LEAST_ELEMENTS, COUNT_FACTOR * _count_habit(case))


def _caught(case: Case, first: int) -> bool:
    """The loss scaler skipped the steps that overflowed."""
    if any(a.kind == "loss_scale_collapse" for a in case.incident.alarms):
        return True
    over = [f for f in case.between(first, case.horizon_step) if (f.total("overflow_count") or 0) >= LEAST_ELEMENTS]
    return bool(over) and all(f.get("step_skipped") for f in over)


def _counts(case: Case, first: int, last: int, tensors: list[str]) -> Iterator[Evidence]:
    if not case.has("overflow_count"):
        return
    habit = _count_habit(case)
    limit = max(LEAST_ELEMENTS, COUNT_FACTOR * habit)
    attempt = case.incident.attempt
    before = [(f.step, float(t)) for f in case.between(first, last) if (t := f.total("overflow_count")) and t >= limit]
    after = [f.step for f in case.around if f.step > last and (f.total("overflow_count") or 0) >= limit]
    if before:
        step, count = before[0]
        yield Evidence(
            claim=f"{count:,.0f} elements overflowed at step {step:,}"
            + (f" in {', '.join(tensors)}" if tensors else "")
            + f" (habit {habit:.0f})"
            + (f", {last - step} steps before the loss moved" if step < last else ", with the loss"),
            weight_nats=3.5 if step < last else 2.5,
            steps=(step, last),
            value=count,
            baseline=habit,
            query=queries.steps("sum", "overflow_count", attempt, step, step),
        )
    elif after:
        yield Evidence(
            claim=f"elements overflow only from step {after[0]:,} on, after the loss had moved: a consequence",
            weight_nats=-3.5,
            steps=(after[0], after[-1]),
        )


def _amax(case: Case, first: int, last: int) -> Iterator[Evidence]:
    if not case.has("amax_ratio"):
        return
    habit = Baseline(512, least=8)
    habit.extend(float(v) for f in case.before if (v := f.largest("amax_ratio")) is not None and math.isfinite(v))
    usual = habit.quantile(0.98) if habit.ready else 1.0
    limit = max(AMAX_LEAST, AMAX_FACTOR * usual)
    high = [(f.step, float(v)) for f in case.between(first, last) if (v := f.largest("amax_ratio")) and v > limit]
    if high:
        step, value = high[0]
        yield Evidence(
            claim=f"amax was {value:.2g} x the one the scale was chosen for at step {step:,} "
            f"(98 % of steps: under {usual:.2g})",
            weight_nats=2.5 if len(high) >= 2 or step == last else 1.5,
            steps=(step, last),
            value=value,
            baseline=usual,
            query=queries.steps("max", "amax_ratio", case.incident.attempt, step, step),
        )


def _scale(case: Case, first: int, last: int, *, named: bool) -> Iterator[Evidence]:
    if not case.has("loss_scale"):
        return
    collapses = [a for a in case.incident.alarms if a.kind == "loss_scale_collapse"]
    if collapses:
        yield _collapse(case, min(collapses, key=lambda a: a.onset_step), named=named)
        return
    values = [(f.step, float(v)) for f in case.between(first, last) if (v := f.get("loss_scale")) is not None and v > 0]
    usual = case.baseline("loss_scale")
    if not values or not usual.ready or usual.center <= 0:
        return
    step, low = min(values, key=lambda p: p[1])
    doublings = math.log2(usual.center / low) if low > 0 else 0.0
    if doublings >= 3.5:
        yield Evidence(
            claim=f"the loss scale had fallen from {usual.center:g} to {low:g} by step {step:,}, before the loss moved",
            weight_nats=2.5,
            steps=(step, last),
            value=low,
            baseline=usual.center,
            query=queries.steps("min", "loss_scale", case.incident.attempt, step, step),
        )


def _collapse(case: Case, alarm: Alarm, *, named: bool) -> Evidence:
    """The collapse itself: the gradient overflowed at every scale on the way down."""
    after = [(f.step, float(v)) for f in case.around if (v := f.get("loss_scale")) is not None and v > 0]
    step, low = min(after, key=lambda p: (p[1], p[0]), default=(alarm.step, alarm.value))
    late = case.loss_moved and alarm.onset_step > case.loss_step
    return Evidence(
        claim=f"the loss scale fell from {alarm.baseline:g} to {low:g} in steps {alarm.onset_step:,}-{step:,}"
        + (", after the loss had moved" if late else ""),
        weight_nats=0.0 if late else 2.5 if named else 0.5,
        steps=(alarm.onset_step, step),
        value=low,
        baseline=alarm.baseline,
        query=queries.steps("min", "loss_scale", case.incident.attempt, step, step),
    )


def _tensors(case: Case, first: int, last: int) -> dict[str, float]:
    """Overflow counts by tensor, largest first, without those that hold under `LEAST_SHARE` of the largest: tensors
    further down overflow a little because of what they are fed."""
    counts: dict[str, float] = {}
    for sample in case.layers(first, last):
        count = float(sample.values.get("overflow_count", 0))
        if count > 0:
            counts[sample.layer] = counts.get(sample.layer, 0.0) + count
    least = LEAST_SHARE * max(counts.values(), default=0.0)
    names = sorted((n for n in counts if counts[n] >= least), key=lambda n: (-counts[n], n))
    return {name: counts[name] for name in names[:MOST_TENSORS]}


def _named(case: Case, first: int, last: int, tensors: dict[str, float]) -> Iterator[Evidence]:
    if not tensors:
        return
    names = list(tensors)
    yield Evidence(
        claim=f"the overflow is in named tensors, most of it in {names[0]}",
        weight_nats=1.0,
        steps=(first, last),
        layers=tuple(names),
        value=tensors[names[0]],
        query=queries.layers("sum", "overflow_count", case.incident.attempt, first, last, names[0]),
    )


def _count_habit(case: Case) -> float:
    habit = Baseline(512, least=8)
    habit.extend(float(t) for f in case.before if (t := f.total("overflow_count")) is not None)
    return habit.quantile(0.98) if habit.ready else 0.0


SUSPECT = Suspect(
    name="fp_overflow",
    title="fp8/fp16 overflow",
    needs=Needs(any=("overflow_count", "amax_ratio", "loss_scale"), optional=("layer.overflow_count",)),
    investigate=investigate,
    action="rollback_and_repair",
    remedy="go back, refill the amax histories and keep the named tensors in higher precision",
    explains="values beyond the low-precision range were clipped to it or became infinite",
    repairs=("fresh_amax", "higher_precision"),
)
