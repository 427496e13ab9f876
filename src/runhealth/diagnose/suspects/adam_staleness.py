"""A second moment that is behind the gradient.

The RMS of g/sqrt(v) goes far over 1 in a few tensors, one to eight iterations before the loss, on all ranks, and with
whatever data; the update grows with it. Told from a lost state by the second moment, which is not smaller than before.
Source of the signature: Wortsman et al. 2023, "Stable and low-precision training for large-scale vision-language
models" (RMS spikes precede loss spikes by 1-8 iterations).
"""

from collections.abc import Iterator

from runhealth.diagnose import observe, queries, settings_change
from runhealth.diagnose.case import Case
from runhealth.diagnose.findings import Evidence
from runhealth.diagnose.suspect import VETO_NATS, Needs, Suspect
from runhealth.diagnose.tracked import CAUSAL_KINDS

LEAD_STEPS = 16
OVER_HABIT = 1.4
RECENT_FRAMES = 64
LEAST_RMS = 1.5
FAR_MORE = 3.0
FEW_TENSORS = 0.34


def investigate(case: Case) -> Iterator[Evidence]:
    attempt, last = case.incident.attempt, case.cause_until
    first = last - LEAD_STEPS
    globally = case.has("adam_rms")
    read = observe.largest("adam_rms") if globally else observe.layer_largest("adam_rms")
    habit = observe.habit(case, read, frames=RECENT_FRAMES)
    if not habit.ready:
        return
    usual = habit.quantile(0.98)
    limit = max(LEAST_RMS, OVER_HABIT * habit.center, 1.1 * usual)

    def query(low: int, high: int) -> str:
        return queries.steps("max", "adam_rms", attempt, low, high) if globally else ""

    # where the loss has not moved, the steps since the alarm count too
    until = last if case.loss_moved else case.horizon_step
    before = observe.move(case, read, limit, first=first, last=until)
    few = [] if before is not None else [e for e in _tensors(case, last - 1, until) if e.weight_nats > 0]
    if few:  # far out for these tensors, though others are as far out by habit
        before = observe.move(case, read, 0.0, first=last - 1, last=until)
    if before is None:
        at_once = observe.move(case, read, limit, first=last + 1, last=last + 1)
        worst = max(observe.values(case.between(first, last + 1), read), key=lambda p: p[1], default=None)
        if worst is not None:
            yield Evidence(
                claim=f"the RMS of g/sqrt(v) was at most {worst[1]:.2g} up to the onset (98 % of steps: {usual:.2g})"
                if at_once is None
                else f"the RMS of g/sqrt(v) rose with the loss, to {at_once.value:.2g}, not before it",
                weight_nats=VETO_NATS if at_once is None else -1.5,
                steps=(first, last + 1),
                value=worst[1],
                baseline=usual,
                query=query(first, last + 1),
            )
        return
    lead = case.loss_step - before.step
    when = f", {lead} step{'s' if lead > 1 else ''} before the loss moved" if case.loss_moved else ""
    yield Evidence(
        claim=f"the RMS of g/sqrt(v) reached {before.extreme:.2g} (98 % of steps: {usual:.2g}){when}",
        weight_nats=0.0 if few else 3.0 if before.extreme >= 2 * usual and before.count > 1 else 2.0,
        steps=(before.step, until),
        value=before.extreme,
        baseline=usual,
        query=query(before.step, until),
    )
    tensors = list(_tensors(case, before.step, case.horizon_step))
    yield from tensors
    yield from _state(case, before.step, until, in_few=any(e.weight_nats > 0 for e in tensors))
    yield from observe.lr_on_course(case, before.step - 4, until)
    yield from observe.data_alike(case, before.step - 1, before.step)
    yield from _norm(case, before.step)
    yield from settings_change.changed_evidence(case, before.step - LEAD_STEPS, until, -3.5)
    jumped = observe.jump(case, observe.single("update_ratio"), 1.4, first=before.step - 2, last=until)
    if jumped is not None and jumped.value / jumped.extreme > FAR_MORE * before.extreme / habit.center:
        yield Evidence(
            claim=f"updates grew by {jumped.value / jumped.extreme:.2g} x, g/sqrt(v) only by "
            f"{before.extreme / habit.center:.2g} x: it is not what made them large",
            weight_nats=-3.5,
            steps=(jumped.step, jumped.step),
            value=jumped.value,
            baseline=jumped.extreme,
            query=queries.steps("max", "update_ratio", attempt, jumped.step, jumped.step),
        )
    elif case.has("update_ratio"):
        yield Evidence(
            claim=f"updates grew with it, {jumped.value / jumped.extreme:.1f} x from one step to the next"
            if jumped is not None
            else "updates did not grow with it",
            # it acts through the updates, and through nothing else
            weight_nats=1.5 if jumped is not None else -3.5,
            steps=(before.step - 2, until),
            value=jumped.value if jumped is not None else None,
            baseline=jumped.extreme if jumped is not None else None,
        )


def _tensors(case: Case, first: int, last: int) -> Iterator[Evidence]:
    """Few tensors: staleness. All of them: the whole state."""
    usual = observe.layer_values((s for f in case.before[-RECENT_FRAMES:] for s in f.layers), "adam_rms")
    now = observe.layer_values(case.layers(first, last), "adam_rms")
    stale = sorted((n for n in now if n in usual and now[n] > 1.3 * usual[n]), key=lambda n: (-now[n], n))
    if not stale:
        return
    few = len(stale) <= max(1, FEW_TENSORS * len(now))
    yield Evidence(
        claim=f"{len(stale)} of {len(now)} tensors: {', '.join(stale[:4])}",
        weight_nats=2.0 if few else -1.5,
        steps=(first, last),
        layers=tuple(stale[:4]),
        value=now[stale[0]],
        baseline=usual[stale[0]],
        query=queries.layers("max", "adam_rms", case.incident.attempt, first, last, stale[0]),
    )


def _state(case: Case, step: int, last: int, *, in_few: bool) -> Iterator[Evidence]:
    """A state that was lost or scaled down is smaller than before, in all tensors; a stale one is not."""
    usual = case.baseline("second_moment_norm")
    now = observe.values(case.between(step, last), observe.single("second_moment_norm"))
    if not usual.ready or not now or usual.center <= 0:
        return
    at, low = min(now, key=lambda p: p[1])
    lost = low < 0.5 * usual.center
    yield Evidence(
        claim=f"Adam's second moment {'had shrunk' if lost else 'was as large as ever'}: {low:.3g} against "
        f"{usual.center:.3g}",
        weight_nats=(-1.0 if in_few else -3.0) if lost else 1.0,
        steps=(at, at),
        value=low,
        baseline=usual.center,
        query=queries.steps("min", "second_moment_norm", case.incident.attempt, at, at),
    )


def _norm(case: Case, step: int) -> Iterator[Evidence]:
    grown = observe.jump(case, observe.single("grad_norm"), 2.0, first=step, last=step)
    if grown is not None:
        yield Evidence(
            claim=f"the gradient norm jumped in the same step, to {grown.value:.3g}: v is not behind, g is far out",
            weight_nats=-3.0,
            steps=(step, step),
            value=grown.value,
            baseline=grown.extreme,
            query=queries.steps("max", "grad_norm", case.incident.attempt, step, step),
        )
        return
    usual = observe.habit(case, observe.norm_over_threshold)
    if not usual.ready:
        return
    limit = max(5.0, 3.0 * usual.quantile(0.95))
    over = observe.move(case, observe.norm_over_threshold, limit, first=step - 4, last=step)
    if over is not None:
        yield Evidence(
            claim=f"the gradient norm was {over.extreme:.3g} x the clip threshold in the same steps: v is not behind, "
            "g is far out",
            weight_nats=-2.5,
            steps=(over.step, step),
            value=over.extreme,
            baseline=usual.center,
            query=queries.over_threshold(case.incident.attempt, step - 4, step),
        )


SUSPECT = Suspect(
    name="adam_staleness",
    title="stale Adam second moment",
    needs=Needs(any=("adam_rms", "layer.adam_rms"), optional=("second_moment_norm", "lr", "grad_norm")),
    investigate=investigate,
    action="rollback_and_repair",
    remedy="go back, clip updates by their RMS (as AdaFactor does), lower beta2 or the learning rate",
    explains="the gradient outgrew Adam's second moment in some tensors, so updates were far too large",
    kinds=(*CAUSAL_KINDS, "optimizer_state_lost"),
)
