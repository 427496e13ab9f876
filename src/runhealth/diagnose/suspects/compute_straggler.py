"""One rank, or one stage, computes longer, and all others wait for it.

The culprit's compute grows and its wait in collectives is the smallest. A fixed rank is hardware; all ranks of one
pipeline stage are the partition; a slowest rank that moves with the sum of squared sequence lengths is the batch.
"""

from collections.abc import Iterator, Sequence

from runhealth.diagnose import phases, queries
from runhealth.diagnose.case import Case
from runhealth.diagnose.findings import Evidence
from runhealth.diagnose.frames import Frame
from runhealth.diagnose.robust import median
from runhealth.diagnose.suspect import VETO_NATS, Needs, Suspect

LEAST_EXCESS = 0.03
FIXED = 0.6
LEAST_FRAMES = 3
BY_LENGTH = 0.7


def investigate(case: Case) -> Iterator[Evidence]:
    frames = [f for f in phases.slow_frames(case) if len(f.ranks) > 1]
    slowest = phases.slowest_rank(case, frames)
    if slowest is None or len(frames) < LEAST_FRAMES:
        return
    span = (frames[0].step, frames[-1].step)
    attempt = case.incident.attempt
    if slowest.excess < LEAST_EXCESS:
        yield Evidence(
            claim=f"no rank computed longer than the others ({slowest.excess:+.0%} at most, rank {slowest.rank})",
            weight_nats=VETO_NATS,
            steps=span,
            value=slowest.seconds,
            baseline=slowest.others_s,
            query=queries.phases("median", phases.COMPUTE, attempt, *span, (slowest.rank,)),
        )
        return
    length = _by_length(frames)
    told = {rank for a in case.incident.alarms if a.kind == "straggler" for rank in a.ranks}
    if slowest.rank in told:
        leaders = [found[0] for f in frames if (found := phases.compute_excess(f)) is not None]
        share = sum(rank in told for rank in leaders) / len(leaders)
    else:
        share = slowest.share
    fixed = share >= FIXED
    moves = not fixed and length >= BY_LENGTH
    stage = _stage(frames, slowest.rank)
    ranks = stage or (tuple(sorted(told)) if slowest.rank in told else (slowest.rank,))
    yield Evidence(
        claim=f"rank {slowest.rank} computed {slowest.excess:.0%} longer than the others, and longest of all in "
        f"{slowest.share:.0%} of the slow steps"
        + (f"; with {', '.join(map(str, sorted(told)))} in {share:.0%}" if len(told) > 1 else ""),
        weight_nats=3.5 if fixed and slowest.excess > 2 * LEAST_EXCESS else 2.0 if fixed else 0.0 if moves else -2.5,
        steps=span,
        ranks=ranks if fixed else (),
        value=slowest.seconds,
        baseline=slowest.others_s,
        query=queries.phases("median", phases.COMPUTE, attempt, *span, (slowest.rank,)),
    )
    if stage:
        yield Evidence(
            claim=f"all ranks of pipeline stage {frames[-1].ranks[slowest.rank]['stage']} are slow: the partition",
            weight_nats=1.0,
            steps=span,
            ranks=stage,
        )
    if moves:
        yield Evidence(
            claim=f"the slowest rank is the one with the longest sequences in {length:.0%} of the steps",
            weight_nats=3.5,
            steps=span,
            value=length,
        )
    yield from _waits(frames, None if moves else slowest.rank, span, attempt)
    yield from _others(case, slowest.seconds - slowest.others_s)
    yield from _waited_for_data(case, slowest.seconds - slowest.others_s)


def _waits(frames: Sequence[Frame], rank: int | None, span: tuple[int, int], attempt: int) -> Iterator[Evidence]:
    """Whoever holds the others up waits least. `rank` None: whichever computes longest in each step."""
    mine, rest, least = [], [], 0
    for frame in frames:
        waits = {r: s for r, v in frame.ranks.items() if (s := phases.spent(v, phases.WAIT)) is not None}
        longest = phases.compute_excess(frame)
        who = rank if rank is not None else longest[0] if longest is not None else -1
        if who in waits and len(waits) > 1:
            mine.append(waits[who])
            rest.append(median([s for r, s in waits.items() if r != who]))
            least += waits[who] <= rest[-1]
    if not mine:
        return
    share = least / len(mine)
    name = f"rank {rank}" if rank is not None else "the rank that computed longest"
    yield Evidence(
        claim=f"{name} waited less than the others in {share:.0%} of these steps: they wait for it"
        if share >= FIXED
        else f"{name} did not wait less: the others do not wait for it",
        weight_nats=1.5 if share >= FIXED else -1.5,
        steps=span,
        ranks=(rank,) if share >= FIXED and rank is not None else (),
        value=median(mine),
        baseline=median(rest),
        query="" if rank is None else queries.phases("median", phases.WAIT, attempt, *span, (rank,)),
    )


def _others(case: Case, seconds: float) -> Iterator[Evidence]:
    """Pauses inside the compute that have a name of their own."""
    collected = phases.extra(case, phases.GC)
    if collected is not None and collected.seconds > 0.5 * seconds:
        yield Evidence(
            claim=f"garbage collection took {collected.seconds:.3g} s of it",
            weight_nats=-3.5,
            steps=collected.steps,
            value=collected.value_s,
            baseline=collected.usual_s,
        )


def _waited_for_data(case: Case, seconds: float) -> Iterator[Evidence]:
    """A rank that waits for its data computes no longer for it."""
    data = phases.extra(case, phases.DATA)
    if data is not None and data.seconds > max(seconds, 0.0):
        yield Evidence(
            claim=f"waiting for data grew by {data.seconds:.3g} s, more than any rank's compute",
            weight_nats=-3.5,
            steps=data.steps,
            value=data.value_s,
            baseline=data.usual_s,
        )


def _by_length(frames: Sequence[Frame]) -> float:
    """In which share of the frames the rank that computes longest has the most work by sequence length."""
    hits = looked = 0
    for frame in frames:
        work = {r: float(v) for r, v in frame.per_rank("sum_len_sq").items()}
        found = phases.compute_excess(frame)
        if found is None or len(work) < 2 or max(work.values()) <= 1.05 * median(list(work.values())):
            continue
        looked += 1
        hits += work.get(found[0], 0.0) == max(work.values())
    return hits / looked if looked >= 3 else 0.0


def _stage(frames: Sequence[Frame], rank: int) -> tuple[int, ...]:
    """The ranks of the slow rank's pipeline stage, if all of them are slower than every other stage."""
    frame = frames[-1]
    stages = frame.per_rank("stage")
    mine = [r for r, s in stages.items() if s == stages.get(rank)]
    if len(set(stages.values())) < 2 or len(mine) < 2:
        return ()
    times = {
        r: median([s for f in frames if (s := phases.spent(f.ranks.get(r, {}), phases.COMPUTE)) is not None])
        for r in stages
    }
    rest = [t for r, t in times.items() if r not in mine]
    return tuple(sorted(mine)) if min(times[r] for r in mine) > (1 + LEAST_EXCESS) * median(rest) else ()


SUSPECT = Suspect(
    name="compute_straggler",
    title="compute straggler",
    needs=Needs(all=("t_forward_s",), optional=("t_backward_s", "t_wait_s", "t_gc_s", "sum_len_sq", "stage")),
    investigate=investigate,
    action="evict_rank",
    remedy="look at the rank's clocks, temperature and host, and take it out; a whole stage: divide the layers anew; "
    "long sequences: balance the batches",
    explains="one rank or stage computes longer and the others wait for it",
    kinds=phases.TIMING_KINDS,
)
