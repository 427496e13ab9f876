"""Attention or output logits that run away.

The largest logit climbs for tens to hundreds of steps; the softmax saturates, and the loss stalls or spikes. It is the
same on all data ranks and confined to layers.
"""

from collections.abc import Iterator

from runhealth.diagnose import observe, queries
from runhealth.diagnose.case import Case
from runhealth.diagnose.findings import Evidence
from runhealth.diagnose.robust import median
from runhealth.diagnose.suspect import VETO_NATS, Needs, Suspect

SIGNALS = ("attn_logit_max", "logit_max")
OLD_FRAMES = 32
CLIMB = 1.7
FLAT = 1.3
RECENT_STEPS = 4
FASTER = 1.4  # x its climb before
FAR, NEAR = 80, 48  # steps before, between which the level before the climb is taken


def investigate(case: Case) -> Iterator[Evidence]:
    told = [a for a in case.incident.alarms if a.kind == "logit_growth"]
    looks = [look for signal in SIGNALS if (look := _look(case, signal)) is not None]
    if not looks:
        return
    signal, old, recent, step = max(looks, key=lambda look: look[2] / look[1])
    climb, attempt = recent / old, case.incident.attempt
    name = "attention logit" if signal == "attn_logit_max" else "logit"
    span = (step - FAR, step)
    if climb < FLAT and not told:
        yield Evidence(
            claim=f"the largest {name} was {recent:.3g} just before, as ever ({old:.3g})",
            weight_nats=VETO_NATS,
            steps=(step, step),
            value=recent,
            baseline=old,
            query=queries.steps("max", signal, attempt, step - RECENT_STEPS, step),
        )
        return
    weight = 3.5 if climb >= 2.5 else 2.5 if climb >= CLIMB else 0.5
    before = _climb_before(case, signal, old)
    usual = "" if told or climb > FASTER * before else f", as it always does ({before:.2g} x in as many steps before)"
    yield Evidence(
        claim=f"the largest {name} had climbed from {old:.3g} to {recent:.3g} before the loss moved{usual}",
        weight_nats=3.5 if told else 0.5 if usual else weight,
        steps=span,
        value=recent,
        baseline=old,
        query=queries.steps("max", signal, attempt, step - RECENT_STEPS, step),
    )
    if (climb < CLIMB or usual) and not told:
        return
    yield from _layers(case, span)
    yield from observe.data_alike(case, case.loss_step - 2, case.loss_step)
    seen = case.loss_step if case.loss_moved else max(case.loss_step, case.incident.last_alarm_step)
    yield from observe.lr_on_course(case, case.loss_step - observe.LEAD_STEPS, seen)
    moved = observe.jump(case, observe.single("update_ratio"), 1.7, first=span[0], last=case.cause_until)
    if moved is not None:
        yield Evidence(
            claim=f"the update ratio had jumped to {moved.value / moved.extreme:.1f} x normal: that is what grew them",
            weight_nats=-3.0,
            steps=(moved.step, moved.step),
            value=moved.value,
            baseline=moved.extreme,
            query=queries.steps("max", "update_ratio", attempt, moved.step, moved.step),
        )
    elif case.has("update_ratio"):
        yield Evidence(claim="updates did not jump", weight_nats=1.0, steps=(span[0], case.cause_until))


def _look(case: Case, signal: str) -> tuple[str, float, float, int] | None:
    """(signal, level long before, level just before the loss moved, last step of it)."""
    if not case.has(signal):
        return None
    read = observe.largest(signal)
    last = case.cause_until
    old = [v for _, v in observe.values((f for f in case.frames if last - FAR <= f.step < last - NEAR), read)]
    recent = observe.values((f for f in case.frames if last - RECENT_STEPS <= f.step <= last), read)
    if len(old) < 8 or not recent or median(old) <= 0:
        return None
    return signal, median(old), max(v for _, v in recent), recent[-1][0]


def _climb_before(case: Case, signal: str, level: float) -> float:
    """By how much it had climbed to that level, in as many steps; 1 where too little is known. Logits grow in every run
    while it learns."""
    last = case.cause_until - FAR
    older = [
        v
        for _, v in observe.values(
            (f for f in case.frames if last - FAR <= f.step < last - NEAR), observe.largest(signal)
        )
    ]
    return level / median(older) if len(older) >= 8 and median(older) > 0 else 1.0


def _layers(case: Case, span: tuple[int, int]) -> Iterator[Evidence]:
    """Which layers, where they were sampled."""
    old = observe.layer_values((s for f in case.before[:OLD_FRAMES] for s in f.layers), "logit_max")
    new = observe.layer_values((s for f in case.frames if f.step >= span[1] - 16 for s in f.layers), "logit_max")
    grown = sorted((n for n in new if old.get(n, 0) > 0 and new[n] > CLIMB * old[n]), key=lambda n: (-new[n], n))
    if grown:
        yield Evidence(
            claim=f"in {len(grown)} of {len(new)} layers: {', '.join(grown[:4])}",
            weight_nats=0.7,
            steps=(span[1] - 16, span[1]),
            layers=tuple(grown[:4]),
            value=new[grown[0]],
            baseline=old[grown[0]],
            query=queries.layers("max", "logit_max", case.incident.attempt, span[1] - 16, span[1], grown[0]),
        )


SUSPECT = Suspect(
    name="logit_growth",
    title="logit growth",
    needs=Needs(any=SIGNALS, optional=("layer.logit_max", "update_ratio", "lr")),
    investigate=investigate,
    action="rollback_and_repair",
    remedy="go back to before the climb; normalise queries and keys or cap the logits, add a z-loss, or lower the rate",
    explains="attention or output logits ran away until the softmax saturated",
    kinds=(
        "loss_spike",
        "loss_divergence",
        "non_finite",
        "gradient_spike",
        "clip_breach",
        "fp_overflow",
        "logit_growth",
    ),
)
