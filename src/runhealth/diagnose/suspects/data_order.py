"""Data that come again, or are skipped.

At a resume the position in the data goes back or jumps ahead: the loss falls under its trend on samples seen before,
and rises again at fresh ones. A batch ledger and the count of consumed samples show it.
"""

from collections.abc import Iterator

from runhealth.diagnose import observe, queries
from runhealth.diagnose.case import Case
from runhealth.diagnose.findings import Evidence
from runhealth.diagnose.suspect import VETO_NATS, Needs, Suspect
from runhealth.storage.records import BatchRecord

TOLD = ("data_repeated", "data_restarted", "data_skipped")
SEEN_SHARE = 0.3
OFF_STEPS = 2.0


def investigate(case: Case) -> Iterator[Evidence]:
    told = [a for a in case.incident.alarms if a.kind in TOLD]
    found = [*_position(case), *_ledger(case)]
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
    seen = {_key(b) for f in case.frames if f.step < case.onset_step - 1 for b in f.batches}
    first, batches, again = case.onset_step, 0, 0
    for batch in case.batches(case.onset_step - 1, case.horizon_step):
        key = _key(batch)
        if key is None or not (isinstance(key, int) or resumed):
            continue
        batches += 1
        if key in seen:
            again += 1
            first = batch.step if again == 1 else first
        seen.add(key)
    share = again / batches if batches else 0.0
    if batches >= 2 and share > SEEN_SHARE:
        yield Evidence(
            claim=f"{share:.0%} of the batches read since step {first:,} had been read before",
            weight_nats=3.5,
            steps=(first, case.horizon_step),
            value=share,
            baseline=0.0,
            query=queries.batches_seen_before(case.incident.attempt, case.onset_step - 1, case.horizon_step),
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
    kinds=("loss_spike", "loss_divergence", "gradient_spike", "resume_jump", *TOLD),
)
