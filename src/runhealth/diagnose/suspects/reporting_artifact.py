"""The log lies: training is as it was, what is written about it changed.

The loss changes by an exact factor from one step to the next while gradient, update and peers go on as before; or a
0.0 follows NaN, a mean stands in for NaN, a field vanishes.
"""

import math
from collections.abc import Iterator

from runhealth.diagnose import observe, queries
from runhealth.diagnose.case import Case
from runhealth.diagnose.findings import Evidence
from runhealth.diagnose.robust import mad_sigma, median
from runhealth.diagnose.suspect import VETO_NATS, Needs, Suspect

TOLD = ("masked_non_finite", "placeholder_value", "scale_change", "short_accumulation_window", "no_training_signal")
POINTS = 16
LEAST_AFTER = 3
LEAST_HIDDEN = 2
LARGEST = 64
ALIKE = math.log(1.25)


def investigate(case: Case) -> Iterator[Evidence]:
    told = [a for a in case.incident.alarms if a.kind in TOLD]
    for alarm in told[:1]:
        yield Evidence(
            claim=alarm.message,
            weight_nats=3.5 if alarm.kind != "scale_change" else 1.0,
            steps=(alarm.onset_step, alarm.step),
            value=alarm.value if math.isfinite(alarm.value) else None,
            baseline=alarm.baseline if math.isfinite(alarm.baseline) else None,
        )
        if alarm.kind != "scale_change":
            yield Evidence(claim="it is a matter of what is written, not of what was computed", weight_nats=1.5)
    step = case.loss_step
    hidden = [] if told else list(_hidden(case))
    if any(a.kind == "non_finite" for a in case.incident.alarms):
        yield from hidden
        if not hidden:
            yield Evidence(claim="the log shows what is not finite", weight_nats=VETO_NATS, steps=(step, step))
        return
    factor = _factor(case, step)
    if factor is None:
        yield from observe.data_alike(case, step - 2, step, 0.0) if told else ()
        if not told:
            yield Evidence(
                claim="the loss did not change by an exact factor",
                weight_nats=VETO_NATS,
                steps=(step, case.horizon_step),
            )
        return
    times, before, after = factor
    yield Evidence(
        claim=f"the loss is {times} what it was, to within its noise, from step {step:,} on",
        weight_nats=2.0,
        steps=(step, case.horizon_step),
        value=after,
        baseline=before,
        query=queries.steps("median", "loss", case.incident.attempt, step, case.horizon_step),
    )
    yield from observe.data_alike(case, step - 2, step, 0.0)
    still: list[str] = []
    moved: list[str] = []
    for signal in ("grad_norm", "grad_norm_rank", "update_ratio", "weight_norm"):
        usual = case.baseline(signal, log=True)
        now = [v for _, v in observe.values(case.between(step, case.horizon_step), observe.single(signal)) if v > 0]
        if usual.ready and now:
            off = abs(math.log(median(now)) - usual.center)
            (still if off <= max(ALIKE, 3 * usual.sigma) else moved).append(signal)
    if still and not moved:
        yield Evidence(
            claim=f"{', '.join(still)} went on as before: only what is written changed",
            weight_nats=3.0,
            steps=(step, case.horizon_step),
        )
    elif moved:
        yield Evidence(
            claim=f"{', '.join(moved)} moved too: this is real, or the loss itself is summed otherwise",
            weight_nats=-2.5,
            steps=(step, case.horizon_step),
        )


def _hidden(case: Case) -> Iterator[Evidence]:
    """Finite losses go on while gradients are not finite and no step is skipped: after one such update every loss is
    NaN, so these numbers are not what was computed."""
    rows = []
    for frame in case.between(case.onset_step, case.horizon_step):
        norm = frame.get("grad_norm")
        if norm is not None and not math.isfinite(norm) and not frame.get("step_skipped"):
            rows.append((frame.step, frame.loss))
    shown = [(step, loss) for step, loss in rows[1:] if loss is not None and math.isfinite(loss)]
    if len(shown) >= LEAST_HIDDEN and len(shown) == len(rows) - 1:
        yield Evidence(
            claim=f"the log shows losses such as {shown[0][1]:.4g} while the gradient has not been finite since step "
            f"{rows[0][0]:,} and no step was skipped",
            weight_nats=3.5,
            steps=(rows[0][0], shown[-1][0]),
            value=shown[0][1],
        )
        values = {loss for _, loss in shown}
        if len(values) == 1:
            yield Evidence(
                claim="and it is the same number each time",
                weight_nats=2.0,
                steps=(shown[0][0], shown[-1][0]),
                value=shown[0][1],
                query=queries.steps("max", "loss", case.incident.attempt, shown[0][0], shown[-1][0]),
            )


def _factor(case: Case, step: int) -> tuple[str, float, float] | None:
    """The factor as words, and the levels before and after, if the change is sharp and whole."""
    before = [v for _, v in observe.values(case.frames, lambda f: f.loss if f.step < step else None) if v > 0][-POINTS:]
    own = case.between(step, case.horizon_step)
    after = [v for _, v in observe.values(own, lambda f: f.loss) if v > 0][:POINTS]
    if len(before) < 8 or len(after) < LEAST_AFTER:
        return None
    low, high = [math.log(v) for v in before], [math.log(v) for v in after]
    change = median(high) - median(low)
    times = round(math.exp(abs(change)))
    if not 2 <= times <= LARGEST:
        return None
    sigma = max(mad_sigma(sorted(low), median(low)), 0.004)
    error = 3 * 1.25 * sigma * math.sqrt(1 / len(before) + 1 / len(after))
    if abs(abs(change) - math.log(times)) > min(error, 0.05) or max(high) - min(high) > 8 * sigma:
        return None
    return (f"{times} x" if change > 0 else f"1/{times} of"), math.exp(median(low)), math.exp(median(high))


SUSPECT = Suspect(
    name="reporting_artifact",
    title="what is logged",
    needs=Needs(any=("loss", "eval_loss", "grad_norm"), optional=("update_ratio", "weight_norm")),
    investigate=investigate,
    action="repair",
    remedy="correct the logging (reduction, accumulation, NaN filter) and read the numbers since with care",
    explains="the log changed, training did not",
    kinds=("loss_spike", "loss_divergence", "non_finite", *TOLD),
)
