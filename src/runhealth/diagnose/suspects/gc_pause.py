"""Garbage collection, or an allocator that cleans up.

Pauses in the forward pass, on another rank each time, regular, and growing with age; the collector's own time
coincides where it is recorded.
"""

from collections import Counter
from collections.abc import Iterator

from runhealth.diagnose import phases, queries
from runhealth.diagnose.case import Case
from runhealth.diagnose.findings import Evidence
from runhealth.diagnose.suspect import VETO_NATS, Needs, Suspect

EXPLAINS = 0.4
LEAST_STALLS = 4


def investigate(case: Case) -> Iterator[Evidence]:
    collected = phases.extra(case, phases.GC)
    if collected is not None:
        much = collected.share >= EXPLAINS
        yield Evidence(
            claim=f"garbage collection took {collected.value_s:.3g} s (usually {collected.usual_s:.3g} s), "
            f"{collected.share:.0%} of the extra time",
            weight_nats=3.5 if much else VETO_NATS if collected.share < 0.15 else -0.5,
            steps=collected.steps,
            value=collected.value_s,
            baseline=collected.usual_s,
            query=queries.steps("max", "t_gc_s", case.incident.attempt, *collected.steps),
        )
        if not much:
            return
        others = [e for phase in (phases.DATA, phases.COMM) if (e := phases.extra(case, phase)) is not None]
        if others and all(e.share < 0.3 for e in others):
            yield Evidence(claim="no other phase grew with it", weight_nats=1.0, steps=collected.steps)
    yield from _rotates(case, known=collected is not None)


def _rotates(case: Case, *, known: bool) -> Iterator[Evidence]:
    """Which rank was slowest, stall by stall."""
    frames = [f for f in phases.slow_frames(case) if len(f.ranks) > 1]
    leaders = Counter(found[0] for f in frames if (found := phases.compute_excess(f)) is not None and found[1] > 0.3)
    stalls = leaders.total()
    if stalls < LEAST_STALLS:
        return
    most = leaders.most_common(1)[0][1] / stalls
    rotates = len(leaders) > 1 and most <= 0.7
    regular = any(a.kind == "periodic_stall" for a in case.incident.alarms)
    alone = 3.0 if regular else 1.5
    yield Evidence(
        claim=f"the pause is on another rank each time ({len(leaders)} ranks in {stalls} stalls)"
        if rotates
        else f"the pause is on the same rank in {most:.0%} of {stalls} stalls",
        weight_nats=(1.0 if known else alone) if rotates else (-0.5 if known else -2.5),
        steps=(frames[0].step, frames[-1].step),
        value=most,
    )


SUSPECT = Suspect(
    name="gc_pause",
    title="garbage-collection pauses",
    needs=Needs(any=("t_gc_s", "t_forward_s"), optional=("t_gc_s",)),
    investigate=investigate,
    action="repair",
    remedy="collect at the same step on all ranks (gc.disable() and gc.collect() every N steps); look for an allocator "
    "that cleans up under pressure",
    explains="single ranks pause to collect garbage and the others wait",
    kinds=phases.TIMING_KINDS,
)
