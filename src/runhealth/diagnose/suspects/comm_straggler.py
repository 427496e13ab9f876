"""A slow link.

The transfer in collectives grows, not the waiting; it is the same on all ranks of one group, and compute is normal.
"""

from collections.abc import Iterator

from runhealth.diagnose import phases, queries
from runhealth.diagnose.case import Case
from runhealth.diagnose.findings import Evidence
from runhealth.diagnose.suspect import VETO_NATS, Needs, Suspect

EXPLAINS, NOTHING = 0.4, 0.15


def investigate(case: Case) -> Iterator[Evidence]:
    transfer = phases.extra(case, phases.COMM)
    if transfer is None:
        return
    much = transfer.share >= EXPLAINS and transfer.value_s > 1.3 * transfer.usual_s
    some = transfer.share >= NOTHING
    some_ranks = len(transfer.ranks) < transfer.of_ranks
    yield Evidence(
        claim=f"transfers took {transfer.value_s:.3g} s instead of {transfer.usual_s:.3g} s: "
        f"{transfer.share:.0%} of the extra time",
        weight_nats=3.5 if much else 0.0 if some else VETO_NATS,
        steps=transfer.steps,
        ranks=transfer.ranks if much and some_ranks else (),
        value=transfer.value_s,
        baseline=transfer.usual_s,
        query=queries.steps("max", "t_comm_s", case.incident.attempt, *transfer.steps),
    )
    if not much:
        return
    yield from phases.beside_compute(case)
    if some_ranks and len(transfer.ranks) > 1:
        yield Evidence(
            claim=f"on the ranks {', '.join(map(str, transfer.ranks[:8]))} of one group alike",
            weight_nats=0.7,
            steps=transfer.steps,
            ranks=transfer.ranks,
        )


SUSPECT = Suspect(
    name="comm_straggler",
    title="slow communication",
    needs=Needs(all=("t_comm_s",), optional=("t_forward_s", "t_wait_s")),
    investigate=investigate,
    action="investigate",
    remedy="test the links of the group pair by pair; route around the slow one",
    explains="collectives move their data more slowly, which no rank's compute explains",
    kinds=phases.TIMING_KINDS,
)
