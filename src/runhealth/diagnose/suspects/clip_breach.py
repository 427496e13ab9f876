"""Gradients far over the clip threshold.

The norm exceeds the threshold far more than the run is used to, for several steps, before or with the loss: the clip
coefficient goes towards 0 and the direction of the update is dominated by a few examples. It is the cause only where
nothing upstream explains the gradients: no unusual batch, no jump of the update ratio, no overflow.
"""

import math
from collections.abc import Iterator

from runhealth.diagnose import observe, queries, rank_directions, settings_change
from runhealth.diagnose.case import Case
from runhealth.diagnose.findings import Evidence
from runhealth.diagnose.robust import Baseline, median
from runhealth.diagnose.suspect import VETO_NATS, Needs, Suspect

LEAD_STEPS = 32
OVER_THRESHOLD = 5.0
OVER_HABIT = 3.0
FAR_OVER = 10.0  # from here on the breach is the news, whatever made it
GROWN = 1.5  # x its usual norm: what breaks a threshold by far is larger than that on each rank
AFTER_STEPS = 4  # where the loss does not move


def investigate(case: Case) -> Iterator[Evidence]:
    first = case.loss_step - LEAD_STEPS
    last = case.loss_step if case.loss_moved else min(case.horizon_step, case.loss_step + AFTER_STEPS)
    attempt = case.incident.attempt
    habit = Baseline(512, least=8)
    habit.extend(r for f in case.before if (r := _ratio(f.get("grad_norm"), f.get("clip_threshold"))) is not None)
    usual = habit.quantile(0.95) if habit.ready else 0.0
    limit = max(OVER_THRESHOLD, OVER_HABIT * usual)
    ratios = [
        (f.step, r)
        for f in case.between(first, last)
        if (r := _ratio(f.get("grad_norm"), f.get("clip_threshold"))) is not None
    ]
    if not ratios:
        return
    breaches = [(step, r) for step, r in ratios if r > limit]
    if not breaches:
        worst = max(ratios, key=lambda p: p[1])
        yield Evidence(
            claim=f"up to the onset the norm was at most {worst[1]:.2g} x the threshold (habit {usual:.2g} x)",
            weight_nats=VETO_NATS,
            steps=(first, last),
            value=worst[1],
            baseline=usual,
            query=queries.over_threshold(attempt, first, last),
        )
        return
    step, _ = breaches[0]
    worst_ratio = max(r for _, r in breaches)
    before = [s for s, _ in breaches if s < last or not case.loss_moved]
    weight = 3.5 if len(before) >= 3 else 1.5 if before else 0.5
    lead = f", from {last - step} steps before the loss moved" if before else ", with the loss"
    lead = lead if case.loss_moved else ""
    yield Evidence(
        claim=f"the gradient norm was up to {worst_ratio:.3g} x the clip threshold (habit {usual:.2g} x) in "
        f"{len(breaches)} steps{lead}",
        weight_nats=weight,
        steps=(step, last),
        value=worst_ratio,
        baseline=usual,
        query=queries.over_threshold(attempt, step, last),
    )
    yield from _alike(case, step, last)
    yield from _reduced(case, step, last)
    yield from _upstream(case, step, last)


def _alike(case: Case, first: int, last: int) -> Iterator[Evidence]:
    """A breach of the model's own is on all ranks; one rank alone has bad data or a bad device."""
    for frame in case.between(first, last):
        norms = {r: float(v) for r, v in frame.per_rank("grad_norm_rank").items() if math.isfinite(v)}
        if len(norms) < 2:
            continue
        top = max(norms, key=lambda r: norms[r])
        rest = median(sorted(v for r, v in norms.items() if r != top))
        usual = case.rank_baseline("grad_norm_rank")
        if math.isfinite(usual) and norms[top] < GROWN * usual:
            yield Evidence(
                claim=f"no rank's own gradient had grown before the reduce: {norms[top]:.3g} at most, as ever "
                f"({usual:.3g})",
                weight_nats=-3.5,
                steps=(frame.step, frame.step),
                value=norms[top],
                baseline=usual,
                query=queries.steps("max", "grad_norm_rank", frame.attempt, frame.step, frame.step),
            )
            return
        alone = norms[top] > 2.5 * rest
        yield Evidence(
            claim=f"rank {top} alone carries the norm: {norms[top]:.3g} against {rest:.3g}"
            if alone
            else "all ranks carry the norm alike before the reduce",
            weight_nats=-3.5 if alone else 1.0,
            steps=(frame.step, frame.step),
            ranks=(top,) if alone else (),
            value=norms[top],
            baseline=rest,
            query=queries.steps("max", "grad_norm_rank", frame.attempt, frame.step, frame.step, (top,)),
        )
        return


def _reduced(case: Case, first: int, last: int) -> Iterator[Evidence]:
    """Gradients that grew on their way through the reduce are no breach of the model's own."""
    test = rank_directions.reduced(case, first, last)
    if test is not None:
        yield Evidence(
            claim=f"the ranks' gradients project on what came out of the reduce with a mean of {test.mean:.3g}: "
            + ("it is not their mean" if test.is_off else "it is their mean, so they were as large before"),
            weight_nats=-3.5 if test.is_off else 1.5,
            steps=(test.step, test.step),
            value=test.mean,
            baseline=1.0,
            query=queries.steps("avg", rank_directions.PROJECTION, case.incident.attempt, test.step, test.step),
        )
        return
    for frame in case.between(first, last):
        ratio = observe.reduce_ratio(frame)
        over = observe.norm_over_threshold(frame)
        if ratio is not None and ratio > observe.TRIANGLE and over is not None and over < FAR_OVER:
            yield Evidence(
                claim=f"the norm after the reduce was {ratio:.3g} x the mean of the ranks' own norms",
                weight_nats=-1.5,
                steps=(frame.step, frame.step),
                value=ratio,
                query=queries.mean_norm_ratio(frame.attempt, frame.step),
            )
            return


def _upstream(case: Case, first: int, last: int) -> Iterator[Evidence]:
    attempt = case.incident.attempt
    outliers = [o for o in case.outliers() if first - 2 <= o.batch.step <= last]
    if outliers:
        batch = outliers[0].batch
        yield Evidence(
            claim=f"an unusual batch of shard {batch.shard} was read at step {batch.step:,}",
            weight_nats=-3.0,
            steps=(batch.step, batch.step),
            ranks=(batch.rank,),
        )
    elif any(b.values for b in case.batches(first, last)):
        yield Evidence(
            claim="the batches read in these steps look like all others", weight_nats=1.0, steps=(first, last)
        )
    ratio = case.baseline("update_ratio")
    if ratio.ready:
        moved = case.first("update_ratio", 2.0 * ratio.center, first=first - 8, last=last - 1)
        if moved is not None:
            yield Evidence(
                claim=f"the update ratio had jumped to {moved[1] / ratio.center:.1f} x normal: it moved first",
                weight_nats=-3.0 if moved[0] <= first else -1.0,
                steps=(moved[0], moved[0]),
                value=moved[1],
                baseline=ratio.center,
                query=queries.steps("max", "update_ratio", attempt, moved[0], moved[0]),
            )
    yield from settings_change.changed_evidence(case, first - 8, last, -2.0)
    overflow = [f.step for f in case.between(first - 8, last) if (f.total("overflow_count") or 0) >= 16]
    quiet = [f for f in case.before if (f.total("overflow_count") or 0) < 16]
    if overflow and len(quiet) > 0.95 * len(case.before):
        yield Evidence(
            claim=f"low-precision overflow since step {overflow[0]:,}",
            weight_nats=-2.5,
            steps=(overflow[0], overflow[-1]),
        )


def _ratio(norm: float | int | None, threshold: float | int | None) -> float | None:
    if norm is None or threshold is None or threshold <= 0 or not math.isfinite(norm):
        return None
    return norm / threshold


SUSPECT = Suspect(
    name="clip_breach",
    title="gradient norm past the clip threshold",
    needs=Needs(
        all=("grad_norm", "clip_threshold"),
        optional=("grad_norm_rank", "grad_projection_rank", "clip_coef", "update_ratio", "token_entropy"),
    ),
    investigate=investigate,
    action="rollback_and_repair",
    remedy="go back and lower the clip threshold",
    explains="updates were dominated by gradients far over the clip threshold",
    repairs=("lower_clip_threshold",),
)
