"""A corrupted data shard.

No precursor: the loss and the raw gradient norm jump on the bad steps, on the ranks that read the shard, while the
update ratio stays near normal. The token statistics, or the shard's hash, tie with the loss or lead it.
"""

import math
from collections.abc import Iterator

from runhealth.diagnose import odd_data, queries
from runhealth.diagnose.batches import BatchOutlier
from runhealth.diagnose.case import Case
from runhealth.diagnose.detectors.data_corrupt import degenerate
from runhealth.diagnose.findings import Evidence
from runhealth.diagnose.odd_data import INPUTS
from runhealth.diagnose.robust import median
from runhealth.diagnose.suspect import VETO_NATS, Needs, Suspect
from runhealth.diagnose.tracked import CAUSAL_KINDS

LEAD_STEPS = 2  # an outlier so many steps before the loss still counts as its cause
HEAVY, GROWN = 2.0, 1.5  # x the usual
UNITS = {"token_entropy": " bits"}


def investigate(case: Case) -> Iterator[Evidence]:
    # bad data that are told by themselves count from their first batch: the loss may fall on them and rise after
    told = [a.onset_step for a in case.incident.alarms if a.kind == "data_corrupt"]
    loss_step = min([case.loss_step, *told])
    first, last = loss_step - LEAD_STEPS, max(loss_step, case.loss_step if told else loss_step)
    broken = list(_inputs(case, first - 2, last))
    yield from broken
    at_onset = case.outliers(case.between(first, last))
    if not at_onset and not broken:
        blind = odd_data.signs(case)
        yield from blind
        yield from _nothing_there(case, first, last, blind=bool(blind))
        if blind:
            yield from _updates(case, loss_step)
            yield from _grew(case, loss_step, next((e.ranks for e in blind if e.ranks), ()))
        return
    if not at_onset:
        return
    shard = _main_shard(at_onset)
    of_shard = [o for o in case.outliers() if o.batch.shard == shard and o.batch.step >= first]
    everywhere = {o.batch.rank for o in at_onset}
    spread = len(everywhere) > 1 and len({o.batch.shard for o in at_onset}) > 1
    ranks = tuple(sorted({o.batch.rank for o in of_shard} | (everywhere if spread else set())))
    span = (min(o.batch.step for o in of_shard), max(o.batch.step for o in of_shard))
    lead = next(o for o in at_onset if o.batch.shard == shard)
    yield from _statistics(case, lead, shard, span, ranks)
    yield from _hash(case, of_shard, shard, span, ranks)
    if spread:
        yield Evidence(
            claim=f"so are the batches of {len(everywhere)} ranks, out of several shards: all of them went "
            "through what damaged them",
            weight_nats=1.0,
            steps=span,
            ranks=tuple(sorted(everywhere)),
        )
    yield from _elsewhere(case)
    if case.loss_step == loss_step and case.loss_moved:
        yield from _ranks(case, tuple(sorted({o.batch.rank for o in at_onset})))
    yield from _updates(case, loss_step)


def _updates(case: Case, loss_step: int) -> Iterator[Evidence]:
    """Updates that were large before the loss moved are another cause; normal ones have no part in it."""
    attempt = case.incident.attempt
    ratio = case.baseline("update_ratio")
    if ratio.ready:
        moved = case.first("update_ratio", 2.0 * ratio.center, first=case.onset_step - 8, last=loss_step - 1)
        if moved is not None:
            yield Evidence(
                claim=f"the update ratio was {moved[1] / ratio.center:.1f} x normal before the loss moved",
                weight_nats=-2.0,
                steps=(moved[0], moved[0]),
                value=moved[1],
                baseline=ratio.center,
                query=queries.steps("max", "update_ratio", attempt, moved[0], moved[0]),
            )
        else:
            value = _largest(case, "update_ratio", loss_step - 4, loss_step - 1)
            if value is not None:
                yield Evidence(
                    claim="the update ratio was normal until the loss moved",
                    weight_nats=0.7,
                    steps=(loss_step - 4, loss_step - 1),
                    value=value,
                    baseline=ratio.center,
                    query=queries.steps("max", "update_ratio", attempt, loss_step - 4, loss_step - 1),
                )


def _inputs(case: Case, first: int, last: int) -> Iterator[Evidence]:
    """Inputs that are not finite when they arrive."""
    bad = [b for b in case.batches(first, last) if float(b.values.get(INPUTS, 0.0)) > 0]
    if not bad:
        return
    batch = bad[0]
    ranks = tuple(sorted({b.rank for b in bad}))
    share = float(batch.values[INPUTS])
    yield Evidence(
        claim=f"shard {batch.shard or '(unnamed)'}: {share:.2g} of the inputs that rank "
        f"{', '.join(map(str, ranks))} read at step {batch.step:,} were not finite",
        weight_nats=3.5,
        steps=(batch.step, bad[-1].step),
        ranks=ranks,
        value=share,
        baseline=0.0,
        query=queries.batches("max", INPUTS, batch.attempt, batch.step, batch.rank, batch.micro_batch),
    )
    losses = next((f.per_rank("loss") for f in case.between(batch.step, batch.step)), {})
    alone = losses and all(math.isfinite(v) == (rank not in ranks) for rank, v in losses.items())
    if alone and len(losses) > len(ranks):
        yield Evidence(
            claim="the loss turned non-finite on the ranks that read them, and on no other",
            weight_nats=2.0,
            steps=(batch.step, batch.step),
            ranks=ranks,
        )


def _one_rank_not_finite(case: Case) -> int | None:
    """The one rank whose loss turned non-finite first, where nothing tells whether its inputs were finite."""
    for frame in case.between(case.onset_step - LEAD_STEPS, case.loss_step + LEAD_STEPS):
        losses = frame.per_rank("loss")
        bad = [rank for rank, loss in losses.items() if not math.isfinite(loss)]
        if bad:
            known = any(b.rank == bad[0] and INPUTS in b.values for b in frame.batches)
            return bad[0] if len(bad) == 1 < len(losses) and not known else None
    return None


def _nothing_there(case: Case, first: int, last: int, *, blind: bool) -> Iterator[Evidence]:
    batches = case.batches(first, last)
    told = [b for b in batches if b.values or (b.shard_hash is not None and b.manifest_hash is not None)]
    later = [o for o in case.outliers() if o.batch.step > last]
    if later and not blind:
        step = later[0].batch.step
        yield Evidence(
            claim=f"unusual batches only came at step {step:,}, after the loss had moved",
            weight_nats=-3.0,
            steps=(step, step),
            ranks=(later[0].batch.rank,),
        )
        return
    rank = _one_rank_not_finite(case)
    if rank is not None:
        yield Evidence(
            claim=f"the loss of rank {rank} alone was not finite; whether what it read was is not recorded",
            weight_nats=1.5,
            steps=(case.onset_step, case.loss_step),
            ranks=(rank,),
        )
    elif told:
        yield Evidence(
            claim=f"the {len(told)} batches read at the onset look like all others" + (" one by one" if blind else ""),
            weight_nats=-0.5 if blind else VETO_NATS,
            steps=(first, last),
        )


def _statistics(
    case: Case, lead: BatchOutlier, shard: str, span: tuple[int, int], ranks: tuple[int, ...]
) -> Iterator[Evidence]:
    deviation = lead.largest
    if deviation is None:
        return
    label = deviation.signal.replace("_", " ")
    unit = UNITS.get(deviation.signal, "")
    steps = f"steps {span[0]:,}-{span[1]:,}" if span[1] > span[0] else f"step {span[0]:,}"
    batch = lead.batch
    yield Evidence(
        claim=f"shard {shard or '(unnamed)'}: {label} {deviation.value:.3g}{unit} (normal {deviation.baseline:.3g}), "
        f"on rank {', '.join(map(str, ranks))}, {steps}",
        weight_nats=3.5 if batch.step <= case.loss_step else 1.5,
        steps=span,
        ranks=ranks,
        value=deviation.value,
        baseline=deviation.baseline,
        query=queries.batches("max", deviation.signal, batch.attempt, batch.step, batch.rank, batch.micro_batch),
    )
    second = [d for d in lead.deviations if d.signal != deviation.signal and abs(d.z) >= 6]
    if second:
        other = second[0]
        yield Evidence(
            claim=f"so is its {other.signal.replace('_', ' ')}: {other.value:.3g} (normal {other.baseline:.3g})",
            weight_nats=0.7,
            steps=(batch.step, batch.step),
            ranks=(batch.rank,),
            value=other.value,
            baseline=other.baseline,
            query=queries.batches("max", other.signal, batch.attempt, batch.step, batch.rank, batch.micro_batch),
        )


def _hash(
    case: Case, of_shard: list[BatchOutlier], shard: str, span: tuple[int, int], ranks: tuple[int, ...]
) -> Iterator[Evidence]:
    attempt = case.incident.attempt
    wrong = [o for o in of_shard if o.hash_mismatch]
    if wrong:
        first, last = min(o.batch.step for o in wrong), max(o.batch.step for o in wrong)
        count = sum(1 for o in case.outliers(case.between(first, last)) if o.hash_mismatch)
        yield Evidence(
            claim=f"the bytes of shard {shard} are not those of the data manifest (xxh3 differs)",
            weight_nats=3.5,
            steps=(first, last),
            ranks=ranks,
            value=float(count),
            baseline=0.0,
            query=queries.hash_mismatches(attempt, first, last),
        )
    elif case.has("shard_hash"):
        labels = any(d.signal == "label_mismatch_share" for o in of_shard for d in o.deviations)
        broken = labels or any(degenerate(o) for o in of_shard) or _is_heavy(case, ranks)
        yield Evidence(
            claim=f"the bytes of shard {shard} are those of the data manifest: "
            + (
                "damaged before it was written, or after it was read"
                if broken
                else "merely unusual, unless damaged before it was written"
            ),
            weight_nats=-0.5 if broken else -2.5,
            steps=span,
            ranks=ranks,
            value=0.0,
            baseline=0.0,
            query=queries.hash_mismatches(attempt, *span),
        )


def _is_heavy(case: Case, ranks: tuple[int, ...]) -> bool:
    """The loss of a rank that read it at least doubled: no honest data are that hard."""
    usual = case.rank_baseline("loss")
    return any(
        loss >= HEAVY * usual
        for f in case.between(case.onset_step - LEAD_STEPS, case.loss_step + LEAD_STEPS)
        for rank, loss in f.per_rank("loss").items()
        if rank in ranks and usual > 0
    )


def _grew(case: Case, step: int, ranks: tuple[int, ...]) -> Iterator[Evidence]:
    """The gradient of who reads bad data grows with its loss."""
    frame = next(iter(case.between(step, step)), None)
    usual = case.rank_baseline("grad_norm_rank")
    if frame is None or not usual > 0:
        return
    own = {r: float(v) for r, v in frame.per_rank("grad_norm_rank").items() if not ranks or r in ranks}
    if own and min(own.values()) > GROWN * usual:
        yield Evidence(
            claim="and the gradient norm before the reduce rose with it, to "
            f"{max(own.values()):.3g} (normal {usual:.3g})",
            weight_nats=1.0,
            steps=(frame.step, frame.step),
            ranks=ranks,
            value=max(own.values()),
            baseline=usual,
            query=queries.steps("max", "grad_norm_rank", frame.attempt, frame.step, frame.step, ranks),
        )


def _elsewhere(case: Case) -> Iterator[Evidence]:
    """Outliers as strong that left the loss alone weaken the claim; none before make it no precursor."""
    earlier = case.outliers(case.before)
    batches = sum(len(frame.batches) for frame in case.before)
    if batches < 16:
        return
    if len(earlier) > 0.02 * batches:
        yield Evidence(
            claim=f"{len(earlier)} of {batches} batches before were as unusual and the loss did not move",
            weight_nats=-2.5,
            value=float(len(earlier)),
        )
    elif not earlier:
        yield Evidence(
            claim=f"none of the {batches} batches before was unusual, whatever shard it came from",
            weight_nats=0.7,
            value=0.0,
        )


def _ranks(case: Case, readers: tuple[int, ...]) -> Iterator[Evidence]:
    """Who reads the shard carries the loss and the raw gradient; the other ranks do not."""
    frames = [f for f in case.between(case.loss_step, case.loss_step) if len(f.ranks) > 1]
    if not frames or len(readers) >= len(frames[0].ranks):
        return
    frame = frames[0]
    for signal, label in (("loss", "loss"), ("grad_norm_rank", "gradient norm before the reduce")):
        habit = case.rank_baseline(signal)
        values = {r: float(v) for r, v in frame.per_rank(signal).items()}
        mine = [v for r, v in values.items() if r in readers]
        others = [v for r, v in values.items() if r not in readers and math.isfinite(v)]
        if not mine or not others or not math.isfinite(habit) or habit == 0:
            continue
        high = max((v for v in mine if math.isfinite(v)), default=math.inf)
        rest = median(sorted(others))
        told = abs(high - habit) > 2 * abs(rest - habit) and high > habit
        yield Evidence(
            claim=f"{label} {'rose on' if told else 'did not single out'} the reading rank"
            f"{'s' if len(readers) > 1 else ''} {', '.join(map(str, readers))}: "
            f"{high:.3g} against {rest:.3g} elsewhere",
            weight_nats=1.5 if told else -1.0,
            steps=(frame.step, frame.step),
            ranks=readers,
            value=high if math.isfinite(high) else None,
            baseline=rest,
            query=queries.steps("max", signal, frame.attempt, frame.step, frame.step, readers),
        )


def _main_shard(outliers: list[BatchOutlier]) -> str:
    """The shard with the strongest outlier at the onset."""

    def strength(outlier: BatchOutlier) -> float:
        deviation = outlier.largest
        return (100.0 if outlier.hash_mismatch else 0.0) + (abs(deviation.z) if deviation else 0.0)

    return max(outliers, key=strength).batch.shard


def _largest(case: Case, signal: str, first: int, last: int) -> float | None:
    values = [float(v) for f in case.between(first, last) if (v := f.get(signal)) is not None and math.isfinite(v)]
    return max(values, default=None)


SUSPECT = Suspect(
    name="bad_shard",
    title="bad shard",
    needs=Needs(
        any=("token_entropy", "token_unique_share", "token_repeat_share", "label_mismatch_share", "shard_hash", INPUTS),
        optional=("shard", "grad_norm_rank", "update_ratio", "nonfinite_share"),
    ),
    investigate=investigate,
    action="rollback_and_skip",
    remedy="go back to before the bad samples and skip them",
    explains="damaged or degenerate training data reached the ranks that read one shard",
    kinds=(*CAUSAL_KINDS, "rank_outlier"),
)
