"""A lost or damaged optimizer state, or optimizer settings that changed.

The update ratio leaves its level on all ranks, up or down, while gradient and learning rate keep to their course and
the data are in order; most often at a resume. Adam's second moment is smaller than it was, or a setting of the
optimizer is another one than before. The loss follows.
"""

import itertools
import math
from collections.abc import Iterator

from runhealth.diagnose import observe, queries, settings_change
from runhealth.diagnose.case import Case
from runhealth.diagnose.findings import Evidence
from runhealth.diagnose.robust import median
from runhealth.diagnose.suspect import VETO_NATS, Needs, Suspect

LEAD_STEPS = 32
FACTOR = 2.0
RECENT_STEPS = 2
SHRUNK = 0.5
SOON_STEPS = 16
LEAST_LOW = 2
AT_ONCE, FAR_LOW = 1.6, 0.33


def investigate(case: Case) -> Iterator[Evidence]:
    attempt, last = case.incident.attempt, case.cause_until
    first = last - LEAD_STEPS
    until = max(last + 1, case.incident.last_alarm_step if not case.loss_moved else last + 1)
    changed = list(settings_change.changed_evidence(case, min(first, case.onset_step - 2), until, 3.5))
    lost = [] if changed else list(_moment(case, first, last + 1))
    ratio = case.baseline("update_ratio")
    values = observe.values(case.between(first, last), observe.single("update_ratio"))
    moved = next(((step, v) for step, v in values if v > FACTOR * ratio.center), None) if ratio.ready else None
    told = [a for a in case.incident.alarms if a.kind == "optimizer_state_lost"]
    yield from changed
    yield from lost
    for alarm in told[:1]:
        yield Evidence(
            claim=alarm.message,
            # where updates jumped, both are told of the same numbers
            weight_nats=3.0 if moved is None else 1.0,
            steps=(alarm.onset_step, alarm.step),
            value=alarm.value,
            baseline=alarm.baseline,
        )
    if moved is None:
        shrunk = any(e.weight_nats > 0 for e in lost)
        fell = list(_fell(case, first, until)) if not (shrunk or told) else []
        yield from fell
        if values and ratio.ready and not (shrunk or told or changed or fell):
            yield _flat(case, values, ratio.center, first, last)
        if not (shrunk or told or changed or fell):
            return
    step = moved[0] if moved is not None else case.onset_step
    if moved is not None:
        lead = f"{case.loss_step - step} steps before the loss moved" if case.loss_moved else "the loss has not moved"
        yield Evidence(
            claim=f"the update ratio jumped to {moved[1] / ratio.center:.1f} x normal at step {step:,}, {lead}",
            weight_nats=3.0,
            steps=(step, step),
            value=moved[1],
            baseline=ratio.center,
            query=queries.steps("max", "update_ratio", attempt, step, step),
        )
    if moved is not None:
        yield from _gradient(case, step)
    if case.alarms("lr"):
        yield Evidence(
            claim="the learning rate explains it: it jumped as well",
            weight_nats=-3.5,
            steps=(case.alarms("lr")[0].step, case.alarms("lr")[0].step),
        )
    elif case.has("lr"):
        yield Evidence(claim="the learning rate kept to its course", weight_nats=1.0)
    resumed = observe.resumed_step(case, step)
    if resumed is not None and step - resumed <= SOON_STEPS:
        yield Evidence(claim=f"training had resumed at step {resumed:,}", weight_nats=2.0, steps=(resumed, step))
    yield from _upstream(case, step, moved[1] / ratio.center if moved is not None else 1.0)


def _gradient(case: Case, step: int) -> Iterator[Evidence]:
    """What went into the update that jumped."""
    norm = case.baseline("grad_norm", log=True)
    value = next((f.get("grad_norm") for f in case.between(step, step)), None)
    if not norm.ready or value is None or not (value > 0 and math.isfinite(value)):
        return
    usual = math.exp(norm.center)
    alike = value < FACTOR * usual
    yield Evidence(
        claim=f"the gradient norm of that step was {value / usual:.2g} x normal"
        + (": what went into the update had not changed" if alike else ""),
        weight_nats=1.0 if alike else -0.5,
        steps=(step, step),
        value=float(value),
        baseline=usual,
        query=queries.steps("max", "grad_norm", case.incident.attempt, step, step),
    )


def _fell(case: Case, first: int, last: int) -> Iterator[Evidence]:
    """Updates far smaller than before, with gradients as large as ever: the state, or a term in it, holds them back."""
    ratio, norm = case.baseline("update_ratio"), case.baseline("grad_norm", log=True)
    if not ratio.ready or ratio.center <= 0:
        return
    low = observe.move(
        case,
        observe.single("update_ratio"),
        ratio.center / FACTOR,
        first=first,
        last=max(last, case.horizon_step),
        below=True,
    )
    if low is None or low.count < LEAST_LOW:
        return
    last_before = observe.values(case.between(low.step - SOON_STEPS, low.step - 1), observe.single("update_ratio"))
    if not last_before or last_before[-1][1] < AT_ONCE * low.value:
        return  # it went down little by little, as weights grow
    norms = [
        v for _, v in observe.values(case.between(low.step, case.horizon_step), observe.single("grad_norm")) if v > 0
    ]
    skipped = [f for f in case.between(low.step, case.horizon_step) if f.get("step_skipped")]
    if not norms or not norm.ready or skipped:
        return
    kept = median(sorted(norms)) > math.exp(norm.center) / FACTOR
    yield Evidence(
        claim=f"updates fell to {low.value / ratio.center:.2g} x normal at step {low.step:,} while the gradient norm "
        + ("did not" if kept else "fell too"),
        weight_nats=-1.5 if not kept else 3.0 if low.value < FAR_LOW * ratio.center else 1.5,
        steps=(low.step, case.horizon_step),
        value=low.extreme,
        baseline=ratio.center,
        query=queries.steps("min", "update_ratio", case.incident.attempt, low.step, case.horizon_step),
    )


def _flat(case: Case, values: list[tuple[int, float]], usual: float, first: int, last: int) -> Evidence:
    recent = last + 1 - values[-1][0] <= RECENT_STEPS  # sampled now and then, it may have missed the jump
    worst = max(values, key=lambda p: p[1])
    return Evidence(
        claim="the update ratio was flat until the loss moved"
        if recent
        else f"the update ratio was flat, but last measured {last + 1 - values[-1][0]} steps before the loss moved",
        weight_nats=VETO_NATS if recent else -0.5,
        steps=(first, last),
        value=worst[1],
        baseline=usual,
        query=queries.steps("max", "update_ratio", case.incident.attempt, first, last),
    )


def _moment(case: Case, first: int, last: int) -> Iterator[Evidence]:
    """Moments that were zeroed or scaled are smaller at once; from one step to the next they hardly change."""
    points = observe.values(
        (f for f in case.frames if first - 8 <= f.step <= last), observe.single("second_moment_norm")
    )
    if len(points) < 2:
        return
    falls = [(v / u, s, v, u) for (_, u), (s, v) in itertools.pairwise(points) if u > 0] or [
        (1.0, points[-1][0], 0.0, 0.0)
    ]
    share, step, value, before = min(falls)
    if before > 0 and share < SHRUNK:
        yield Evidence(
            claim=f"Adam's second moment fell from {before:.3g} to {value:.3g} at step {step:,}",
            weight_nats=3.0,
            steps=(step, step),
            value=value,
            baseline=before,
            query=queries.steps("min", "second_moment_norm", case.incident.attempt, step, step),
        )
    else:
        yield Evidence(
            claim="Adam's second moment was as large as ever",
            weight_nats=-0.5,  # the first moment, or a term of the step, may be what is off
            steps=(first, last),
            value=points[-1][1],
            baseline=points[0][1],
            query=queries.steps("min", "second_moment_norm", case.incident.attempt, first, last),
        )


def _upstream(case: Case, step: int, factor: float) -> Iterator[Evidence]:
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
    yield from _stale(case, step, factor)


def _stale(case: Case, step: int, factor: float) -> Iterator[Evidence]:
    """A second moment that is behind in a few tensors is another suspect's."""
    usual = observe.layer_values((s for f in case.before[-64:] for s in f.layers), "adam_rms")
    now = observe.layer_values(case.layers(step, step + 6), "adam_rms")
    # what made updates so much larger must itself be that large
    stale = [n for n in now if n in usual and now[n] > max(1.3, factor / 4.0) * usual[n]]
    if len(now) >= 3 and 0 < len(stale) <= max(1, len(now) // 3):
        yield Evidence(
            claim=f"g/sqrt(v) is far out in {', '.join(sorted(stale)[:3])} only, not in all tensors",
            weight_nats=-2.5,
            steps=(step, step + 6),
            layers=tuple(sorted(stale)[:3]),
        )


SUSPECT = Suspect(
    name="optimizer_state",
    title="optimizer state",
    needs=Needs(
        any=("update_ratio", "second_moment_norm", *settings_change.SETTINGS),
        optional=("lr", "grad_norm", "adam_rms"),
    ),
    investigate=investigate,
    action="rollback_and_repair",
    remedy="go back to a checkpoint that holds the optimizer state, and check the optimizer's settings",
    explains="the optimizer's moments were lost or damaged, or its settings changed, so its updates are not what the "
    "gradients ask for",
    kinds=(
        "loss_spike",
        "loss_divergence",
        "non_finite",
        "gradient_spike",
        "clip_breach",
        "update_jump",
        "loss_scale_collapse",
        "fp_overflow",
        "resume_jump",
        "optimizer_state_lost",
        "hyperparameter_changed",
        "logit_growth",
    ),
)
