"""Silent data corruption on one rank.

One rank's gradient, before the reduce, is unlike its peers', in size or in direction, while its data and its loss are
like theirs; or what came out of the reduce is not the mean of what went in; or one replica's parameters differ, in one
layer.
A collective spreads it to all ranks, so the ranks' own values are looked at first. Data that are damaged show in the
rank's loss as well as in its gradient; a loss like the others' with a gradient that is not clears the data.
"""

import math
from collections.abc import Iterator

from runhealth.diagnose import observe, odd_data, queries, rank_directions
from runhealth.diagnose.case import Case
from runhealth.diagnose.findings import Evidence
from runhealth.diagnose.frames import Frame
from runhealth.diagnose.replica_layers import layer_evidence, layers_apart
from runhealth.diagnose.robust import Baseline, median
from runhealth.diagnose.suspect import VETO_NATS, Needs, Suspect

BEFORE_STEPS, AFTER_STEPS = 8, 1
LOOK_STEPS = 16  # after the onset, where the loss did not move
SIGNALS = ("grad_norm_rank", "loss")
LEAST_LOG = math.log(1.5)
OVER_SPREAD = 3.0
ONCE_LOG = math.log(3.0)
Z_REDUCE = 4.0
SAME_LOSS = math.log(1.1)
HUGE_NORM = 1e15  # from about here on the square of a norm overflows in single precision
INPUTS = "nonfinite_share"
FAR_OVER = 10.0  # x the clip threshold: then the breach is the news, whatever made it


def investigate(case: Case) -> Iterator[Evidence]:
    last = case.loss_step + AFTER_STEPS if case.loss_moved else min(case.horizon_step, case.loss_step + LOOK_STEPS)
    last = max(last, case.loss_step + AFTER_STEPS)
    frames = [f for f in case.between(case.onset_step - BEFORE_STEPS, last) if len(f.ranks) > 1]
    if not frames:
        return
    found = list(_non_finite(case, frames)) + (list(_odd(case, frames)) or list(_told(case, frames)))
    found += list(_direction(case, frames))
    found += list(_reduce(case, frames))
    seen = max([last, *(alarm.step for alarm in case.alarms("param_checksum"))])  # checksums come every few steps
    found += list(_checksum(case, case.between(case.onset_step - BEFORE_STEPS, seen)))
    yield from found
    if not any(e.weight_nats > 0 for e in found):
        yield Evidence(
            claim="no rank's loss or gradient was unlike its peers' before the reduce",
            weight_nats=VETO_NATS,
            steps=(frames[0].step, frames[-1].step),
        )


def _odd(case: Case, frames: list[Frame]) -> Iterator[Evidence]:
    """One rank unlike its peers, up or down."""
    for signal in SIGNALS:
        usual = observe.rank_spread(case, signal)
        if not math.isfinite(usual):
            continue
        limit = max(LEAST_LOG, OVER_SPREAD * usual)
        for frame in frames:
            odd = observe.odd_rank({r: float(v) for r, v in frame.per_rank(signal).items()})
            if odd is None or abs(odd.log_ratio) <= limit:
                continue
            if len(frame.per_rank(signal)) == 2:
                odd = observe.odd_of_two(case, frame, signal)
                if odd is None:
                    continue  # the two differ, and nothing tells which of them is the odd one
            name = "gradient norm before the reduce" if signal == "grad_norm_rank" else "loss"
            again = sum(_is_odd(later, signal, odd.rank, limit) for later in frames if later.step > frame.step)
            far = abs(odd.log_ratio)
            # ranks' norms have heavy tails: once, and by less than 3 x, is little
            strength = 3.0 if far > 2 * limit else 2.5 if again or far > ONCE_LOG else 1.0
            # of two ranks the odd one is the one that left its own past; of three the others agree
            alone = len(frame.ranks) < 3 or odd.next_ratio < 0.3 * abs(odd.log_ratio)
            forward: list[Evidence] = []
            strange = [o for o in case.outliers(case.between(frame.step - 2, frame.step)) if o.batch.rank == odd.rank]
            told = any(b.rank == odd.rank and b.values for b in frame.batches)
            yield Evidence(
                claim=f"{name} of rank {odd.rank} was {odd.value:.3g} where the others had {odd.others:.3g}",
                weight_nats=strength if alone else 0.3,
                steps=(frame.step, frame.step),
                ranks=(odd.rank,),
                value=odd.value,
                baseline=odd.others,
                query=queries.steps("max", signal, frame.attempt, frame.step, frame.step, (odd.rank,)),
            )
            if alone and len(frame.ranks) > 2 and signal == "grad_norm_rank":
                yield Evidence(
                    claim="the other ranks lie as close together as ever",
                    weight_nats=1.0,
                    steps=(frame.step, frame.step),
                    value=math.exp(odd.next_ratio),
                )
            if signal == "grad_norm_rank":
                forward = list(_own_loss(case, frame, odd.rank))
                yield from forward
            alike = any(e.weight_nats > 0 for e in forward)
            if not alike:
                yield from odd_data.against(case, -2.5)
                yield from odd_data.read_again(case, frame, odd.rank, -3.0)
            if strange:
                yield Evidence(
                    claim=f"its batch was unlike the others too (shard {strange[0].batch.shard or '(unnamed)'}): "
                    "the data explain it",
                    weight_nats=-3.5,
                    steps=(strange[0].batch.step, strange[0].batch.step),
                    ranks=(odd.rank,),
                )
            elif told:
                yield Evidence(
                    claim="its batch looks like those of the other ranks",
                    weight_nats=1.5 if alike or signal == "loss" else 0.5,
                    steps=(frame.step, frame.step),
                    ranks=(odd.rank,),
                )
            return


def _told(case: Case, frames: list[Frame]) -> Iterator[Evidence]:
    """One rank that the detector of outliers among ranks singled out, where the look above sees none."""
    told = next((a for a in case.incident.alarms if a.kind == "rank_outlier" and a.signal in SIGNALS and a.ranks), None)
    if told is None:
        return
    yield Evidence(
        claim=told.message,
        weight_nats=2.5,
        steps=(told.onset_step, told.step),
        ranks=told.ranks,
        value=told.value,
        baseline=told.baseline,
        query=queries.steps("max", told.signal, told.attempt, told.step, told.step, told.ranks),
    )
    frame = next((f for f in frames if f.step == told.step), None)
    if frame is not None and told.signal == "grad_norm_rank":
        yield from _own_loss(case, frame, told.ranks[0])
    elif frame is not None:
        yield from odd_data.against(case, -2.5)
        yield from odd_data.read_again(case, frame, told.ranks[0], -3.0)


def _own_loss(case: Case, frame: Frame, rank: int) -> Iterator[Evidence]:
    """What is wrong with the data is wrong in the forward pass already; a device may err in the backward pass alone."""
    losses = {r: float(v) for r, v in frame.per_rank("loss").items()}
    usual = observe.rank_spread(case, "loss")
    own = losses.get(rank)
    others = [v for r, v in losses.items() if r != rank and v > 0 and math.isfinite(v)]
    if own is None or not (own > 0 and math.isfinite(own)) or not others or not math.isfinite(usual):
        return
    typical = median(others)
    alike = abs(math.log(own / typical)) <= max(SAME_LOSS, usual)
    yield Evidence(
        claim=f"its loss was {own:.4g}, {'like' if alike else 'unlike'} the others' {typical:.4g}: "
        + ("what it read is not what is odd" if alike else "the forward pass was odd already, so it may be its data"),
        weight_nats=1.5 if alike else -1.0,
        steps=(frame.step, frame.step),
        ranks=(rank,),
        value=own,
        baseline=typical,
        query=queries.steps("max", "loss", frame.attempt, frame.step, frame.step, (rank,)),
    )


def _direction(case: Case, frames: list[Frame]) -> Iterator[Evidence]:
    """One rank's gradient points elsewhere than its peers', whatever its norm."""
    told = next((a for a in case.incident.alarms if a.signal == rank_directions.COSINE and a.ranks), None)
    odd = rank_directions.odd_direction(case, case.onset_step - 1, frames[-1].step)
    if told is not None:
        rank = told.ranks[0]
        frame = next((f for f in frames if f.step == told.step), frames[-1])
        found = rank_directions.cosines(frame)
        yield Evidence(
            claim=told.message,
            weight_nats=3.5,
            steps=(told.onset_step, told.step),
            ranks=told.ranks,
            value=found.get(rank),
            baseline=median([v for r, v in found.items() if r != rank]) if len(found) > 1 else None,
            query=queries.cosine_with_others(told.attempt, frame.step, rank, len(frame.ranks)) if rank in found else "",
        )
    if odd is None or (told is not None and odd.rank not in told.ranks):
        return
    sure = odd.count > 1  # once is chance
    span = (odd.step, frames[-1].step)
    again = f", in {odd.count} of these steps" if odd.count > 1 else ""
    yield Evidence(
        claim=f"the gradient of rank {odd.rank} pointed elsewhere before the reduce: cosine with the others' "
        f"{odd.cosine:.2g} where they had {odd.others:.2g}{again}"
        + (", and its projection has the wrong sign" if odd.negative else ""),
        weight_nats=0.7 if told is not None else 3.5 if sure else 0.5,
        steps=span,
        ranks=(odd.rank,) if sure or told is not None else (),
        value=odd.cosine,
        baseline=odd.others,
        query=queries.cosine_with_others(case.incident.attempt, odd.step, odd.rank, len(frames[-1].ranks)),
    )
    frame = next(f for f in frames if f.step == odd.step)
    strange = [o for o in case.outliers(case.between(odd.step - 2, odd.step)) if o.batch.rank == odd.rank]
    if strange:
        yield Evidence(
            claim=f"its batch was unlike the others too (shard {strange[0].batch.shard or '(unnamed)'})",
            weight_nats=-3.5,
            steps=(strange[0].batch.step, strange[0].batch.step),
            ranks=(odd.rank,),
        )
    elif sure or told is not None:
        yield from _own_loss(case, frame, odd.rank)


def _is_odd(frame: Frame, signal: str, rank: int, limit: float) -> bool:
    odd = observe.odd_rank({r: float(v) for r, v in frame.per_rank(signal).items()})
    who = odd is not None and (odd.rank == rank or len(frame.per_rank(signal)) == 2)
    return odd is not None and who and abs(odd.log_ratio) > limit


def _non_finite(case: Case, frames: list[Frame]) -> Iterator[Evidence]:
    """The first frame with non-finite values: before the reduce on one rank or on all at once, or only after it."""
    for frame in frames:
        bad = []
        for rank, values in frame.ranks.items():
            own = values.get("grad_norm_rank")
            if values.get("nonfinite_count", 0) > 0 or (own is not None and not math.isfinite(own)):
                bad.append(rank)
        if not bad:
            norm, own_norms = frame.get("grad_norm"), frame.per_rank("grad_norm_rank")
            measured = len(own_norms) == len(frame.ranks) and max(own_norms.values()) < HUGE_NORM
            if norm is not None and not math.isfinite(norm) and measured:
                yield Evidence(
                    claim="all ranks' gradients were finite before the reduce and what came out of it was not",
                    weight_nats=3.5,
                    steps=(frame.step, frame.step),
                    value=max(float(v) for v in own_norms.values()),
                    query=queries.steps("max", "grad_norm_rank", frame.attempt, frame.step, frame.step),
                )
                return
            continue
        one = len(bad) == 1
        scaled = bool(frame.get("step_skipped"))
        if one and scaled and (again := observe.alone_again(frames, frame.step)) is not None:
            yield again
            return
        yield Evidence(
            claim=f"values of rank {bad[0]} alone were not finite before the reduce"
            if one
            else f"{len(bad)} of {len(frame.ranks)} ranks had non-finite values in the same step",
            weight_nats=(1.0 if scaled else 2.0) if one else -2.5,
            steps=(frame.step, frame.step),
            ranks=tuple(bad) if one else (),
            value=float(len(bad)),
            baseline=0.0,
        )
        if one and not scaled:
            yield from _inputs(case, frame, bad[0])
        return


def _inputs(case: Case, frame: Frame, rank: int) -> Iterator[Evidence]:
    """Inputs that are not finite, or a loss that is: which of the two a rank's non-finite gradient comes from."""
    shares = [
        float(b.values[INPUTS])
        for f in case.between(frame.step - 1, frame.step)
        for b in f.batches
        if b.rank == rank and INPUTS in b.values
    ]
    loss = frame.per_rank("loss").get(rank)
    if any(share > 0 for share in shares):
        yield Evidence(
            claim=f"{max(shares):.2g} of the inputs it read were not finite: the data explain it",
            weight_nats=VETO_NATS,
            steps=(frame.step, frame.step),
            ranks=(rank,),
            value=max(shares),
            baseline=0.0,
        )
    elif loss is not None and math.isfinite(loss):
        yield Evidence(
            claim=f"its loss was finite ({loss:.4g}): the forward pass was in order, and its data with it",
            weight_nats=3.0,
            steps=(frame.step, frame.step),
            ranks=(rank,),
            value=float(loss),
            query=queries.steps("max", "loss", frame.attempt, frame.step, frame.step, (rank,)),
        )
    elif shares:
        yield Evidence(
            claim="all the inputs it read were finite",
            weight_nats=2.5,
            steps=(frame.step, frame.step),
            ranks=(rank,),
            value=0.0,
        )
    elif loss is not None:
        yield Evidence(
            claim="its loss was not finite either; whether its inputs were is not recorded, so it may be its data",
            weight_nats=-0.5,
            steps=(frame.step, frame.step),
            ranks=(rank,),
        )


def _reduce(case: Case, frames: list[Frame]) -> Iterator[Evidence]:
    """What came out of the reduce against what went in. The mean of the projections tells exactly; without it, the
    triangle inequality: |mean g| <= mean |g|. Where a log always breaks it, the norms are of something else."""
    test = rank_directions.reduced(case, frames[0].step, frames[-1].step)
    if test is not None and test.is_off:
        yield Evidence(
            claim=f"the ranks' gradients project on what came out of the reduce with a mean of {test.mean:.3g} instead "
            f"of 1 (before: off by {test.usual_off:.1g} at most): it is not their mean",
            weight_nats=3.5,
            steps=(test.step, test.step),
            value=test.mean,
            baseline=1.0,
            query=queries.steps("avg", rank_directions.PROJECTION, case.incident.attempt, test.step, test.step),
        )
    before = [r for f in case.before[-observe.RANK_FRAMES :] if (r := observe.reduce_ratio(f)) is not None]
    if len(before) < 8 or sum(r > observe.TRIANGLE for r in before) > 0.05 * len(before):
        return
    habit = Baseline(observe.RANK_FRAMES, least=8, floor=0.01)
    habit.extend(math.log(r) for r in before if r > 0)
    limit = math.exp(habit.center + Z_REDUCE * habit.sigma) if habit.ready else observe.TRIANGLE
    facts = any(a.kind == "rank_outlier" for a in case.incident.alarms)
    for frame in frames:
        ratio = observe.reduce_ratio(frame)
        if ratio is not None and ratio > max(observe.TRIANGLE, limit):
            over = observe.norm_over_threshold(frame)
            not_far = over is None or over < FAR_OVER
            told = 3.5 if facts else 3.0 if not_far else 1.5
            yield Evidence(
                claim=f"the norm after the reduce was {ratio:.3g} x the mean of the ranks' own norms: a mean cannot be "
                "longer than what it is made of, so something changed it on its way",
                # where the projections say that it is the mean, the two norms are of different things
                weight_nats=told if test is None or test.is_off else -1.0,
                steps=(frame.step, frame.step),
                value=ratio,
                baseline=max(before),
                query=queries.mean_norm_ratio(frame.attempt, frame.step),
            )
            return


def _checksum(case: Case, frames: list[Frame]) -> Iterator[Evidence]:
    for frame in frames:
        sums = frame.per_rank("param_checksum")
        groups: dict[float, list[int]] = {}
        for rank, checksum in sums.items():
            groups.setdefault(checksum, []).append(rank)
        if len(groups) < 2:
            continue
        smallest = min(groups.values(), key=len)
        if len(sums) >= 3 and len(groups) == 2 and len(smallest) == 1:
            yield Evidence(
                claim=f"the parameters of rank {smallest[0]} alone differ from all other replicas",
                weight_nats=3.0,
                steps=(frame.step, frame.step),
                ranks=(smallest[0],),
                value=2.0,
                baseline=1.0,
                query=queries.distinct("param_checksum", frame.attempt, frame.step),
            )
        if len(sums) == 2:
            yield Evidence(
                claim="the parameters of the two replicas differ; which of them is the wrong one, they do not tell",
                weight_nats=1.5,
                steps=(frame.step, frame.step),
                value=2.0,
                baseline=1.0,
                query=queries.distinct("param_checksum", frame.attempt, frame.step),
            )
        apart = layers_apart(case, frame.step, case.horizon_step)
        in_layers = None if apart is None else layer_evidence(apart, one_nats=2.5, all_nats=-2.0)
        if in_layers is not None:
            yield in_layers
        return


SUSPECT = Suspect(
    name="silent_corruption",
    title="silent data corruption",
    needs=Needs(
        any=("grad_norm_rank", "nonfinite_count", "param_checksum"),
        optional=("token_entropy", "grad_norm", "grad_projection_rank", "grad_cosine_rank", "nonfinite_share"),
    ),
    investigate=investigate,
    action="rollback_and_repair",
    remedy="take the rank's device out, go back to before the step, and compare its results with another device's",
    explains="one rank computed something else than its data and weights give",
    kinds=(
        "loss_spike",
        "loss_divergence",
        "non_finite",
        "gradient_spike",
        "clip_breach",
        "rank_outlier",
        "replica_desync",
        "loss_scale_collapse",
        "fp_overflow",
    ),
)
