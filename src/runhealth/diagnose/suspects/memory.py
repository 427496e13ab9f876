"""Memory that grows.

The floor of the allocated memory rises in a line: something is kept at every step. A gap between reserved and
allocated memory that grows instead is fragmentation.
"""

import itertools
from collections.abc import Iterator

from runhealth.diagnose import observe, queries
from runhealth.diagnose.case import Case
from runhealth.diagnose.findings import Evidence
from runhealth.diagnose.robust import median
from runhealth.diagnose.suspect import VETO_NATS, Needs, Suspect

SIGNALS = ("mem_allocated_bytes", "mem_reserved_bytes", "mem_rss_bytes")
BLOCKS = 8
GROWTH = 0.05
RISING = 6
TOLD = ("memory_growth", "out_of_memory")


def investigate(case: Case) -> Iterator[Evidence]:
    told = [a for a in case.incident.alarms if a.kind in TOLD]
    for alarm in told[:1]:
        yield Evidence(
            claim=alarm.message,
            weight_nats=3.5,
            steps=(alarm.onset_step, alarm.step),
            ranks=alarm.ranks,
            value=alarm.value if alarm.value == alarm.value else None,
            baseline=alarm.baseline if alarm.baseline == alarm.baseline else None,
        )
    grows = False
    looked = False
    for signal in SIGNALS:
        points = observe.values(case.frames, observe.largest(signal))
        if len(points) < 4 * BLOCKS:
            continue
        looked = True
        size = len(points) // BLOCKS
        floors = [min(v for _, v in points[i * size : (i + 1) * size]) for i in range(BLOCKS)]
        rising = sum(b > a for a, b in itertools.pairwise(floors))
        if floors[0] > 0 and floors[-1] > (1 + GROWTH) * floors[0] and rising >= RISING:
            grows = True
            span = (points[0][0], points[-1][0])
            yield Evidence(
                claim=f"the floor of {signal} rose from {floors[0] / 1e9:.3g} to {floors[-1] / 1e9:.3g} GB",
                weight_nats=2.5,
                steps=span,
                value=floors[-1],
                baseline=floors[0],
                query=queries.steps("max", signal, case.incident.attempt, *span),
            )
            break
    if looked and not grows and not told:
        yield Evidence(claim="memory stayed level", weight_nats=VETO_NATS, steps=(case.onset_step, case.horizon_step))
    yield from _fragments(case)


def _fragments(case: Case) -> Iterator[Evidence]:
    gaps = []
    for frame in case.frames:
        reserved, held = frame.largest("mem_reserved_bytes"), frame.largest("mem_allocated_bytes")
        if reserved is not None and held is not None and reserved >= held > 0:
            gaps.append((reserved - held) / reserved)
    if len(gaps) < 16:
        return
    old, new = median(gaps[: len(gaps) // 4]), median(gaps[-len(gaps) // 4 :])
    if new > old + 0.1:
        yield Evidence(
            claim=f"{new:.0%} of the reserved memory is not in use (before: {old:.0%}): fragmentation",
            weight_nats=1.5,
            steps=(case.frames[0].step, case.horizon_step),
            value=new,
            baseline=old,
        )


SUSPECT = Suspect(
    name="memory",
    title="memory",
    needs=Needs(optional=SIGNALS),
    investigate=investigate,
    action="repair",
    remedy="compare two memory snapshots; look for tensors kept between steps, or a cache without a bound",
    explains="memory is kept at every step, or ran out",
    kinds=("memory_growth", "out_of_memory", "sustained_slowdown", "crash"),
)
