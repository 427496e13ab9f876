"""Data that come again, or are skipped.

At a resume the position in the data goes back or jumps ahead: the loss falls under its trend on samples seen before,
and rises again at fresh ones. A batch ledger and the count of consumed samples show it.
"""

from collections.abc import Iterator, Sequence

from runhealth.diagnose import observe, queries
from runhealth.diagnose.case import Case
from runhealth.diagnose.findings import Alarm, Evidence
from runhealth.diagnose.suspect import VETO_NATS, Needs, Suspect
from runhealth.storage.records import BatchRecord

TOLD = ("data_repeated", "data_restarted", "data_skipped")
SEEN_SHARE = 0.3
OFF_STEPS = 2.0
STUCK_STEPS, LEAST_STUCK = 16, 3  # a loader that stands still brings a rank so many batches again


def investigate(case: Case) -> Iterator[Evidence]:
    told = [a for a in case.incident.alarms if a.kind in TOLD]
    copies = [a for a in told if a.ranks]
    found = [*_position(case), *([] if copies else _ledger(case)), *_copies(case, copies)]
    if told and not found:
        found = [
            Evidence(
                claim=told[0].message,
                weight_nats=3.5,
                steps=(told[0].onset_step, told[0].step),
                value=told[0].value,
                baseline=told[0].baseline,
            )
        ]
    yield from found
    if any(e.weight_nats > 0 for e in found):
        yield from _loss(case)
        yield from observe.lr_on_course(case, case.onset_step - observe.LEAD_STEPS, case.onset_step)
    else:
        yield Evidence(
            claim="no sample was read twice or skipped",
            weight_nats=VETO_NATS,
            steps=(case.onset_step - 2, case.horizon_step),
        )


def _position(case: Case) -> Iterator[Evidence]:
    """consumed = step x batch: does the position go on where it should?"""
    points = observe.values(case.frames, observe.single("consumed_samples"))
    start = next((i for i, (step, _) in enumerate(points) if step >= case.onset_step - observe.LEAD_STEPS), None)
    if start is None or start < 4:
        return
    old = points[max(0, start - 64) : start]
    (s0, v0), (s1, v1) = old[0], old[-1]
    a_step = (v1 - v0) / (s1 - s0) if s1 > s0 else 0.0
    if a_step <= 0:
        return
    for step, value in points[start:]:
        if step > case.loss_step:
            return
        off = (value - (v1 + a_step * (step - s1))) / a_step
        if abs(off) > OFF_STEPS:
            way = "back" if off < 0 else "ahead"
            yield Evidence(
                claim=f"the position in the data was {abs(off):,.0f} steps {way} of where it belongs at step {step:,}",
                weight_nats=3.5,
                steps=(step, step),
                value=value,
                baseline=v1 + a_step * (step - s1),
                query=queries.steps("max", "consumed_samples", case.incident.attempt, step, step),
            )
            return


def _ledger(case: Case) -> Iterator[Evidence]:
    """Were these batches read before? Only as far back as frames are at hand."""
    resumed = observe.resumed_step(case, case.loss_step) is not None
    read = _repeats(case, case.onset_step - 1, resumed=resumed)
    everything = [found for one in read.values() for found in one]
    ranks: tuple[int, ...] = ()
    if len(everything) < 2 or sum(again for _, again in everything) <= SEEN_SHARE * len(everything):
        read = _repeats(case, case.onset_step - STUCK_STEPS, resumed=resumed)
        stuck = [r for r, one in read.items() if sum(a for _, a in one) >= LEAST_STUCK and any(a for _, a in one[-8:])]
        if not stuck or len(stuck) == len(read):
            return
        ranks = tuple(sorted(stuck))
        # from the first that was read before on
        everything = [f for rank in ranks for f in read[rank][next(i for i, (_, a) in enumerate(read[rank]) if a) :]]
    share = sum(again for _, again in everything) / len(everything)
    first = min(step for step, again in everything if again)
    yield Evidence(
        claim=f"{share:.0%} of the batches read "
        + (f"by rank {', '.join(map(str, ranks))} " if ranks else "")
        + f"since step {first:,} had been read before",
        weight_nats=3.5,
        steps=(first, case.horizon_step),
        ranks=ranks,
        value=share,
        baseline=0.0,
        query=queries.repeated_batches(case.incident.attempt, first, case.horizon_step, ranks)
        if ranks
        else queries.batches_seen_before(case.incident.attempt, case.onset_step - 1, case.horizon_step),
    )
    if ranks:
        yield Evidence(
            claim="the other ranks read fresh ones", weight_nats=1.0, steps=(first, case.horizon_step), ranks=ranks
        )


def _repeats(case: Case, first: int, *, resumed: bool) -> dict[int, list[tuple[int, bool]]]:
    """rank -> (step, whether it had been read before) of each batch from `first` on."""
    seen = {_key(b) for f in case.frames if f.step < first for b in f.batches}
    read: dict[int, list[tuple[int, bool]]] = {}
    for batch in case.batches(first, case.horizon_step):
        key = _key(batch)
        if key is None or not (isinstance(key, int) or resumed):
            continue
        read.setdefault(batch.rank, []).append((batch.step, key in seen))
        seen.add(key)
    return read


def _copies(case: Case, told: Sequence[Alarm]) -> Iterator[Evidence]:
    """Ranks that read what is not theirs to read."""
    for alarm in told[:1]:
        hashes = [b.content_hash for b in case.batches(alarm.onset_step, alarm.step) if b.content_hash is not None]
        yield Evidence(
            claim=alarm.message,
            weight_nats=3.5,
            steps=(alarm.onset_step, alarm.step),
            ranks=alarm.ranks,
            value=1 - len(set(hashes)) / len(hashes) if hashes else alarm.value,
            baseline=alarm.baseline,
            query=queries.copied_batches(alarm.attempt, alarm.onset_step, alarm.step),
        )
        if len(alarm.ranks) < len(case.frames[-1].ranks):
            yield Evidence(
                claim="the other ranks go on with their own samples",
                weight_nats=1.0,
                steps=(alarm.onset_step, alarm.step),
            )


def _loss(case: Case) -> Iterator[Evidence]:
    resumed = observe.steps_since_resume(case, case.loss_step)
    if resumed is not None and resumed <= 16:
        yield Evidence(
            claim=f"training had resumed {resumed} steps before",
            weight_nats=1.0,
            steps=(case.loss_step - resumed, case.loss_step),
        )


def _key(batch: BatchRecord) -> tuple[str, int, int] | int | None:
    if batch.content_hash is not None:
        return batch.content_hash
    return (batch.shard, batch.first_sample, batch.last_sample) if batch.first_sample >= 0 else None


SUSPECT = Suspect(
    name="data_order",
    title="data order",
    needs=Needs(any=("consumed_samples", "shard")),
    investigate=investigate,
    action="rollback_and_repair",
    remedy="restore the data position with the checkpoint and go back to the resume",
    explains="samples came again or were skipped",
    kinds=("loss_spike", "loss_divergence", "gradient_spike", "resume_jump", "rank_outlier", *TOLD),
)
