"""Silent data corruption on one rank.

One rank's gradient, before the reduce, is unlike its peers' while its data are like theirs; or the norm of the mean
gradient is over the mean of the ranks' norms, which no correct reduce yields; or one replica's parameters differ, in
one layer.
A collective spreads it to all ranks, so the ranks' own values are looked at first.
"""

import math
from collections.abc import Iterator

from runhealth.diagnose import observe, queries
from runhealth.diagnose.case import Case
from runhealth.diagnose.findings import Evidence
from runhealth.diagnose.frames import Frame
from runhealth.diagnose.replica_layers import layer_evidence, layers_apart
from runhealth.diagnose.robust import Baseline
from runhealth.diagnose.suspect import VETO_NATS, Needs, Suspect

BEFORE_STEPS, AFTER_STEPS = 8, 1
SIGNALS = ("grad_norm_rank", "loss")
LEAST_LOG = math.log(1.5)
OVER_SPREAD = 3.0
ONCE_LOG = math.log(3.0)
Z_REDUCE = 4.0
FAR_OVER = 10.0  # x the clip threshold: then the breach is the news, whatever made it


def investigate(case: Case) -> Iterator[Evidence]:
    last = case.loss_step + AFTER_STEPS
    frames = [f for f in case.between(case.onset_step - BEFORE_STEPS, last) if len(f.ranks) > 1]
    if not frames:
        return
    found = list(_non_finite(frames)) + list(_odd(case, frames)) + list(_reduce(case, frames))
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
                    weight_nats=1.5,
                    steps=(frame.step, frame.step),
                    ranks=(odd.rank,),
                )
            return


def _is_odd(frame: Frame, signal: str, rank: int, limit: float) -> bool:
    odd = observe.odd_rank({r: float(v) for r, v in frame.per_rank(signal).items()})
    who = odd is not None and (odd.rank == rank or len(frame.per_rank(signal)) == 2)
    return odd is not None and who and abs(odd.log_ratio) > limit


def _non_finite(frames: list[Frame]) -> Iterator[Evidence]:
    """The first frame with non-finite values before the reduce: on one rank, or on all at once."""
    for frame in frames:
        bad = []
        for rank, values in frame.ranks.items():
            own = values.get("grad_norm_rank")
            if values.get("nonfinite_count", 0) > 0 or (own is not None and not math.isfinite(own)):
                bad.append(rank)
        if not bad:
            continue
        one = len(bad) == 1
        yield Evidence(
            claim=f"values of rank {bad[0]} alone were not finite before the reduce"
            if one
            else f"{len(bad)} of {len(frame.ranks)} ranks had non-finite values in the same step",
            weight_nats=2.5 if one else -2.5,
            steps=(frame.step, frame.step),
            ranks=tuple(bad) if one else (),
            value=float(len(bad)),
            baseline=0.0,
        )
        return


def _reduce(case: Case, frames: list[Frame]) -> Iterator[Evidence]:
    """Triangle inequality: |mean g| <= mean |g|. Where the log always breaks it, the norms are of something else."""
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
            yield Evidence(
                claim=f"the norm after the reduce was {ratio:.3g} x the mean of the ranks' own norms: a mean cannot be "
                "longer than what it is made of, so something changed it on its way",
                weight_nats=3.5 if facts else 3.0 if not_far else 1.5,
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
        optional=("token_entropy", "grad_norm"),
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
    ),
)
