"""Replicas that are no longer the same.

Checksums of replicated parameters differ between ranks: a missing reduce, a wrapper that lost a parameter, a step that
some ranks skip. The loss often looks fine for a long time. One rank that computed something else in the very step is
`silent_corruption`.
"""

from collections import Counter
from collections.abc import Iterator

from runhealth.diagnose import observe, queries
from runhealth.diagnose.case import Case
from runhealth.diagnose.findings import Evidence
from runhealth.diagnose.frames import Frame
from runhealth.diagnose.suspect import VETO_NATS, Needs, Suspect

LEAST_LOG = 0.3


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
    own = observe.values(case.between(frame.step - 4, frame.step), lambda f: f.per_rank("param_checksum").get(odd[0]))
    if len(named) == 1 and len(own) >= 2 and own[-1][1] == own[-2][1]:
        yield Evidence(
            claim=f"rank {named[0]} did not step at all: its parameters are those of the step before",
            weight_nats=2.0,
            steps=(own[-2][0], frame.step),
            ranks=named,
        )
    yield from _computed(case, frame)


def _computed(case: Case, frame: Frame) -> Iterator[Evidence]:
    """Weights that were hit show at once in what the rank computes; an update that went apart shows slowly."""
    for signal in ("loss", "grad_norm_rank"):
        usual = observe.rank_spread(case, signal)
        for later in case.between(frame.step, frame.step + 2):
            odd = observe.odd_rank({r: float(v) for r, v in later.per_rank(signal).items()})
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
