"""Saving or loading checkpoints.

Slow: a comb in the step time at the interval of the saves. Corrupt: verification fails, or the first loss after a load
is off.
"""

import itertools
from collections.abc import Iterator

from runhealth.diagnose import observe, phases, queries
from runhealth.diagnose.case import Case
from runhealth.diagnose.findings import Evidence
from runhealth.diagnose.suspect import VETO_NATS, Needs, Suspect

EXPLAINS = 0.4
LEAST_FRAMES = 3
FEW_SAVED = 0.5  # of the slow steps: what one of them spent on a save says nothing of the others
TOLD = ("checkpoint_slow", "checkpoint_corrupt")
LOADED = ("loss_spike", "loss_divergence", "non_finite", "gradient_spike", "resume_jump")
AT_ONCE_STEPS = 2


def investigate(case: Case) -> Iterator[Evidence]:
    if any(a.kind in LOADED for a in case.incident.alarms):
        yield from _loaded(case)
        return
    told = [a for a in case.incident.alarms if a.kind in TOLD]
    for alarm in told[:1]:
        yield Evidence(claim=alarm.message, weight_nats=3.5, steps=(alarm.onset_step, alarm.step))
        if alarm.kind == "checkpoint_corrupt":
            yield Evidence(
                claim="nothing can be loaded from it: it was not written whole, or has changed since", weight_nats=1.5
            )
    saving = phases.extra(case, phases.SAVE)
    slow = phases.slow_frames(case)
    saved = [f.step for f in slow if (phases.longest(f, phases.SAVE) or 0.0) > 0]
    if saving is None or len(saved) < FEW_SAVED * len(slow):
        # logged with the saves only: then the steps that saved are those that have it
        if not told and case.has("t_checkpoint_s") and len(slow) >= LEAST_FRAMES:
            share = len(saved) / len(slow)
            yield Evidence(
                claim=f"a checkpoint was saved in {len(saved)} of the {len(slow)} slow steps",
                weight_nats=3.5 if share >= 0.7 else -1.0 if share > 0.2 else VETO_NATS,
                steps=(slow[0].step, slow[-1].step),
                value=share,
            )
            yield from _comb(saved)
        return
    much = saving.share >= EXPLAINS
    if much or not told:
        yield Evidence(
            claim=f"saving took {saving.value_s:.3g} s in these steps: {saving.share:.0%} of the extra time",
            weight_nats=3.5 if much else VETO_NATS if saving.share < 0.15 else -0.5,
            steps=saving.steps,
            value=saving.value_s,
            baseline=saving.usual_s,
            query=queries.steps("max", "t_checkpoint_s", case.incident.attempt, *saving.steps),
        )
    if much:
        yield from _comb(saved)


def _comb(saved: list[int]) -> Iterator[Evidence]:
    gaps = {b - a for a, b in itertools.pairwise(saved)}
    if len(saved) >= 3 and len(gaps) == 1:
        yield Evidence(claim=f"every {gaps.pop()} steps, with each save", weight_nats=1.0, steps=(saved[0], saved[-1]))


def _loaded(case: Case) -> Iterator[Evidence]:
    """The first loss after a load is off, while everything that is logged of the state is as it was."""
    attempt, step = case.incident.attempt, case.loss_step
    resumed = observe.resumed_step(case, step)
    if resumed is None or step - resumed > AT_ONCE_STEPS:
        yield Evidence(claim="no checkpoint had just been loaded", weight_nats=VETO_NATS, steps=(step, step))
        return
    yield Evidence(
        claim=f"the loss is off from the first steps after the load at step {resumed:,}",
        weight_nats=3.0,
        steps=(resumed, step),
    )
    weights = case.baseline("weight_norm")
    now = observe.values(case.between(resumed, resumed + 2), observe.single("weight_norm"))
    if weights.ready and now and weights.center > 0:
        at, value = now[0]
        last = observe.values(case.before[-8:], observe.single("weight_norm"))[-1][1]
        off = abs(value / last - 1)
        yield Evidence(
            claim=f"the norm of the weights is {value:.5g} after the load and was {last:.5g} before",
            weight_nats=2.5 if off > 0.01 else -1.0,
            steps=(at, at),
            value=value,
            baseline=last,
            query=queries.steps("max", "weight_norm", attempt, at, at),
        )
    yield from observe.lr_on_course(case, resumed, step)
    yield from observe.data_alike(case, resumed, step)
    moment = case.baseline("second_moment_norm")
    found = observe.values(case.between(resumed, resumed + 2), observe.single("second_moment_norm"))
    if moment.ready and found and moment.center > 0:
        at, value = found[0]
        whole = value > 0.5 * moment.center
        yield Evidence(
            claim=f"the optimizer's second moment was {'restored' if whole else 'lost'}",
            weight_nats=0.7 if whole else -3.0,
            steps=(at, at),
            value=value,
            baseline=moment.center,
            query=queries.steps("max", "second_moment_norm", attempt, at, at),
        )


SUSPECT = Suspect(
    name="checkpoint_io",
    title="checkpoints",
    needs=Needs(any=("loss", "t_step_s", "t_checkpoint_s"), optional=("t_checkpoint_s", "weight_norm")),
    investigate=investigate,
    action="repair",
    remedy="save asynchronously or less often, and keep two verified generations",
    explains="saving, or what was saved, is at fault",
    kinds=(*phases.TIMING_KINDS, *TOLD, *LOADED),
)
