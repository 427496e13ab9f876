"""The training waits for data.

The wait for data grows first and the kernels are normal. On all ranks: the storage; on one: its host.
"""

from collections.abc import Iterator

from runhealth.diagnose import phases, queries
from runhealth.diagnose.case import Case
from runhealth.diagnose.findings import Evidence
from runhealth.diagnose.suspect import VETO_NATS, Needs, Suspect

EXPLAINS, NOTHING = 0.4, 0.15


def investigate(case: Case) -> Iterator[Evidence]:
    wait = phases.extra(case, phases.DATA)
    if wait is None:
        return
    much = wait.share >= EXPLAINS and wait.value_s > 1.3 * wait.usual_s
    some = wait.share >= NOTHING
    one = len(wait.ranks) < wait.of_ranks
    where = f" on rank {', '.join(map(str, wait.ranks[:8]))} (its host)" if one else " on all ranks (the storage)"
    yield Evidence(
        claim=f"waiting for data took {wait.value_s:.3g} s instead of {wait.usual_s:.3g} s: {wait.share:.0%} of the "
        f"extra time{where if much else ''}",
        weight_nats=3.5 if much else 0.0 if some else VETO_NATS,
        steps=wait.steps,
        ranks=wait.ranks if much and one else (),
        value=wait.value_s,
        baseline=wait.usual_s,
        query=queries.steps("max", "t_data_s", case.incident.attempt, *wait.steps),
    )
    if much:
        yield from phases.beside_compute(case)


SUSPECT = Suspect(
    name="dataloader_stall",
    title="dataloader stall",
    needs=Needs(all=("t_data_s",), optional=("t_forward_s",)),
    investigate=investigate,
    action="investigate",
    remedy="more workers and prefetching; look at the storage, or at the host if it is one rank",
    explains="steps wait for their data",
    kinds=phases.TIMING_KINDS,
)
