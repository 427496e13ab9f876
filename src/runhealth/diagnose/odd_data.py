"""Data that are odd in a way that no single batch shows: by a little in batch after batch, or in the loss alone of the
rank that reads them.

Statistics of tokens, batch by batch, do not see a wrong tokenizer, an order that was lost, or a mild damage. All the
same it begins where a shard begins, or shows in the mean over batches.
"""

import math
from collections.abc import Iterator
from functools import lru_cache

from runhealth.diagnose import observe, queries
from runhealth.diagnose.case import Case
from runhealth.diagnose.findings import Evidence
from runhealth.diagnose.frames import Frame
from runhealth.diagnose.robust import Baseline

Z_GROUP, OF_STEPS, IN_STEPS = 4.0, 4, 2
LEAST_LOG, ALONE, LEAST_HIGH = math.log(1.1), 0.5, 2
FAR_LOG = math.log(1.5)
BEFORE_STEPS = 2
INPUTS = "nonfinite_share"


@lru_cache(maxsize=1)  # several suspects of one walk ask for the same case
def signs(case: Case) -> tuple[Evidence, ...]:
    """For the data as the cause; empty where nothing speaks for it."""
    return (*_unlike(case), *_follows(case))


def against(case: Case, weight_nats: float) -> Iterator[Evidence]:
    """The same, against another suspect."""
    for sign in signs(case)[:1]:
        yield Evidence(
            claim=f"{sign.claim}: its data may be what is odd",
            weight_nats=weight_nats,
            steps=sign.steps,
            ranks=sign.ranks,
            value=sign.value,
            baseline=sign.baseline,
            query=sign.query,
        )


def _unlike(case: Case) -> Iterator[Evidence]:
    """Statistics that are off in batch after batch, each by too little to stand out: of all ranks together, or of the
    batches of one. Any statistic that is recorded counts."""
    frames = [f for f in case.between(case.onset_step, case.horizon_step) if f.batches][:OF_STEPS]
    signals = sorted({name for f in frames for b in f.batches for name in b.values} - {INPUTS})
    best: tuple[float, str, int | None, float, float, int] | None = None
    for signal in signals:
        groups: list[int | None] = [None, *sorted({b.rank for f in frames for b in f.batches})]
        for rank in groups:
            usual = Baseline(512, least=32, floor_share=0.005)
            usual.extend(v for f in case.before if (v := _mean(f, signal, rank)) is not None)
            now = [(f.step, v) for f in frames if (v := _mean(f, signal, rank)) is not None]
            if not usual.ready or len(now) < IN_STEPS or usual.sigma <= 0:
                continue
            far = [(step, v, usual.z(v)) for step, v in now if abs(usual.z(v)) >= Z_GROUP]
            if len(far) < IN_STEPS or len({z > 0 for *_, z in far}) > 1 or far[0][0] > case.loss_step:
                continue
            size = min(abs(z) for *_, z in far)
            if best is None or size > best[0]:
                best = (size, signal, rank, far[0][1], usual.center, far[0][0])
    if best is None:
        return
    _, signal, rank, value, center, step = best
    where = "of all ranks" if rank is None else f"of rank {rank}"
    yield Evidence(
        claim=f"the {signal.replace('_', ' ')} of the batches {where} left the run's habit at step {step:,} and stayed "
        f"off: {value:.3g} (normal {center:.3g})",
        weight_nats=3.0,
        steps=(step, frames[-1].step),
        ranks=() if rank is None else (rank,),
        value=value,
        baseline=center,
        query=queries.mean_of_batches(signal, case.incident.attempt, step, () if rank is None else (rank,)),
    )


def _mean(frame: Frame, signal: str, rank: int | None) -> float | None:
    found = [
        float(v)
        for b in frame.batches
        if (rank is None or b.rank == rank) and (v := b.values.get(signal)) is not None and math.isfinite(v)
    ]
    return sum(found) / len(found) if found else None


def _follows(case: Case) -> Iterator[Evidence]:
    """The loss of one rank leaves its peers' at the very step at which it begins to read another shard: no device
    knows of shards. Statistics of single tokens do not see a wrong tokenizer or an order that was lost."""
    usual = observe.rank_spread(case, "loss")
    frames = case.between(case.onset_step - BEFORE_STEPS, case.horizon_step)
    if not math.isfinite(usual):
        return
    limit = max(LEAST_LOG, 1.5 * usual)
    found = [
        (f, odd)
        for f in frames
        if len(f.ranks) > 2
        and (odd := observe.odd_rank({r: float(v) for r, v in f.per_rank("loss").items()})) is not None
        and odd.log_ratio > limit
        and odd.next_ratio < ALONE * odd.log_ratio
    ]
    if len(found) < LEAST_HIGH:
        return
    frame, odd = found[0]
    rank = odd.rank
    if any(o.rank != rank for _, o in found[:LEAST_HIGH]):
        return
    now = _shard_of(frame, rank)
    earlier = [shard for f in case.frames if f.step < frame.step and (shard := _shard_of(f, rank))]
    if not now or not earlier:
        return
    fresh = next((n for n, shard in enumerate(reversed(earlier)) if shard != now), None)
    if fresh is None or fresh > 1:
        return  # it had read this shard for a while
    yield Evidence(
        claim=f"the loss of rank {rank} left its peers' when it began to read shard {now}: {odd.value:.3g} where they "
        f"had {odd.others:.3g}",
        weight_nats=3.5 if odd.log_ratio > FAR_LOG else 2.5,
        steps=(frame.step, found[-1][0].step),
        ranks=(rank,),
        value=odd.value,
        baseline=odd.others,
        query=queries.steps("max", "loss", frame.attempt, frame.step, frame.step, (rank,)),
    )


def _shard_of(frame: Frame, rank: int) -> str:
    return next((b.shard for b in frame.batches if b.rank == rank and b.shard), "")


def read_again(case: Case, frame: Frame, rank: int, weight_nats: float) -> Iterator[Evidence]:
    """Against a suspect: what the rank reads is not fresh, and a model knows what it has seen."""
    mine = {b.content_hash for b in frame.batches if b.rank == rank and b.content_hash is not None}
    before = next(
        (f for f in reversed(case.frames) if f.step < frame.step and any(b.content_hash in mine for b in f.batches)),
        None,
    )
    if before is not None:
        yield Evidence(
            claim=f"rank {rank} read at step {frame.step:,} what had been read at step {before.step:,}",
            weight_nats=weight_nats,
            steps=(before.step, frame.step),
            ranks=(rank,),
        )
