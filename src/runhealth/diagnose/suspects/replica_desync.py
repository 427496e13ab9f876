"""Replicas that are no longer the same.

Checksums of replicated parameters differ between ranks: a missing reduce, a wrapper that lost a parameter, a step that
some ranks skip. The loss often looks fine for a long time. One rank that computed something else in the very step is
`silent_corruption`, and so is a difference in one layer alone. Which of two ranks left the other, only its own past
tells.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from runhealth.diagnose import observe, queries
from runhealth.diagnose.case import Case
from runhealth.diagnose.findings import Evidence
from runhealth.diagnose.frames import Frame
from runhealth.diagnose.replica_layers import layer_evidence, layers_apart
from runhealth.diagnose.suspect import VETO_NATS, Needs, Suspect

LEAST_LOG = 0.3
SAMPLE_STEPS = 64  # checksums are at most so many steps apart


def investigate(case: Case) -> Iterator[Evidence]:
    apart = list(_apart(case))
    yield from apart
    if not apart:
        yield Evidence(
            claim="all replicas had the same parameters",
            weight_nats=VETO_NATS,
            steps=(case.onset_step - observe.LEAD_STEPS, case.horizon_step),
            value=1.0,
            baseline=1.0,
            query=queries.distinct("param_checksum", case.incident.attempt, case.onset_step),
        )


def _apart(case: Case) -> Iterator[Evidence]:
    last = max(case.loss_step, case.incident.last_alarm_step)
    differing = []
    for frame in case.between(case.onset_step - observe.LEAD_STEPS, last):
        sums = frame.per_rank("param_checksum") if len(frame.ranks) > 1 else {}
        if len(set(sums.values())) > 1:
            differing.append((frame, sums))
    if not differing:
        return
    frame, sums = differing[0]
    counts = Counter(sums.values())
    usual, most = counts.most_common(1)[0]
    odd = tuple(sorted(rank for rank, checksum in sums.items() if checksum != usual))
    named = odd if most > len(sums) / 2 else ()
    yield Evidence(
        claim=f"the parameters differ between replicas from step {frame.step:,} on: {len(counts)} versions"
        + (f", rank {', '.join(map(str, named[:8]))} unlike the others" if named else ""),
        weight_nats=3.5,
        steps=(frame.step, differing[-1][0].step),
        ranks=named,
        value=float(len(counts)),
        baseline=1.0,
        query=queries.distinct("param_checksum", frame.attempt, frame.step),
    )
    still = _stood_still(case, frame, named or tuple(sorted(sums)))
    if still is not None:
        rank, before = still
        yield Evidence(
            claim=f"rank {rank} did not step at all: its parameters are those of step {before:,}",
            weight_nats=2.0,
            steps=(before, frame.step),
            ranks=(rank,),
        )
    apart = layers_apart(case, frame.step, max(last, case.horizon_step))
    found = None if apart is None else layer_evidence(apart, one_nats=-2.0, all_nats=2.0)
    if found is not None:
        yield found
    yield from _computed(case, frame)


def _stood_still(case: Case, frame: Frame, ranks: Sequence[int]) -> tuple[int, int] | None:
    """The one rank of these whose checksum is that of its sample before, and the step of it."""
    still = []
    for rank in ranks:
        own = [
            (f.step, sums[rank])
            for f in case.between(frame.step - SAMPLE_STEPS, frame.step)
            if rank in (sums := f.per_rank("param_checksum"))
        ]
        if len(own) >= 2 and own[-1][1] == own[-2][1]:
            still.append((rank, own[-2][0]))
    return still[0] if len(still) == 1 else None


def _computed(case: Case, frame: Frame) -> Iterator[Evidence]:
    """Weights that were hit show at once in what the rank computes; an update that went apart shows slowly."""
    for signal in ("loss", "grad_norm_rank"):
        usual = observe.rank_spread(case, signal)
        for later in case.between(case.onset_step, frame.step + 2):
            odd = observe.odd_rank({r: float(v) for r, v in later.per_rank(signal).items()})
            if len(later.per_rank(signal)) == 2:
                odd = observe.odd_of_two(case, later, signal)
            if usual != usual or odd is None or abs(odd.log_ratio) <= max(LEAST_LOG, 2.0 * usual):
                continue
            yield Evidence(
                claim=f"{signal.replace('_', ' ')} of rank {odd.rank} was at once {odd.value:.3g} where the others had "
                f"{odd.others:.3g}: it computed something else",
                weight_nats=-2.0,
                steps=(later.step, later.step),
                ranks=(odd.rank,),
                value=odd.value,
                baseline=odd.others,
                query=queries.steps("max", signal, later.attempt, later.step, later.step, (odd.rank,)),
            )
            return
    yield Evidence(
        claim="the ranks' own losses and gradients were alike: the update, not the computation, went apart",
        weight_nats=1.0,
        steps=(frame.step, frame.step + 2),
    )


SUSPECT = Suspect(
    name="replica_desync",
    title="replicas out of step",
    needs=Needs(all=("param_checksum",), optional=("grad_norm_rank",)),
    investigate=investigate,
    action="rollback_and_repair",
    remedy="go back to the last checkpoint with equal replicas; look for a missing reduce or a step that a rank skips",
    explains="the replicas' parameters went apart",
    kinds=("loss_spike", "loss_divergence", "gradient_spike", "non_finite", "replica_desync", "rank_outlier"),
)
