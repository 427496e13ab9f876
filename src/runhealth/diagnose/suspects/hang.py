"""Nobody goes on, and nobody is gone.

Step counters freeze and collectives time out: a rank that never joined, operations or sizes that do not match, the
network, or a storage that does not answer.
"""

from collections.abc import Iterator

from runhealth.diagnose.case import Case
from runhealth.diagnose.findings import Evidence
from runhealth.diagnose.suspect import Needs, Suspect
from runhealth.diagnose.suspects.dead_rank import CLOSED, TIMED_OUT, last_steps, silent_ranks


def investigate(case: Case) -> Iterator[Evidence]:
    alarm = next((a for a in case.incident.alarms if a.kind in ("hang", "crash")), None)
    if alarm is None:
        return
    if alarm.kind == "hang":
        yield Evidence(
            claim=alarm.message,
            weight_nats=3.5,
            steps=(alarm.onset_step, alarm.step),
            ranks=alarm.ranks,
            value=alarm.value if alarm.value == alarm.value else None,
            baseline=alarm.baseline if alarm.baseline == alarm.baseline else None,
        )
    elif TIMED_OUT.search(alarm.message):
        yield Evidence(claim="a collective ran into its time-out", weight_nats=3.5)
    elif CLOSED.search(alarm.message):
        yield Evidence(claim="the connection was closed: a peer is gone, it does not hang", weight_nats=-3.0)
    else:
        yield Evidence(claim="the exception tells of no time-out", weight_nats=-3.0)
    silent, lasts = silent_ranks(case), last_steps(case)
    low = min(lasts.values(), default=0)
    behind = tuple(sorted(rank for rank, step in lasts.items() if step == low < max(lasts.values())))
    named = silent or (behind if len(behind) <= len(lasts) / 2 else ())
    if named:
        yield Evidence(
            claim=f"rank {', '.join(map(str, named[:8]))} never joined: it neither failed nor went on",
            weight_nats=1.5,
            ranks=named,
        )
    elif len(lasts) >= 2 and len(set(lasts.values())) == 1:
        yield Evidence(claim="all ranks stopped at the same step", weight_nats=1.0, steps=(low, low))


SUSPECT = Suspect(
    name="hang",
    title="hang",
    needs=Needs(),
    investigate=investigate,
    action="investigate",
    remedy="dump the stacks (py-spy dump) of a rank that waits and of one that does not, then restart",
    explains="all ranks stopped: a collective that one of them never joined, or the network",
    kinds=("hang", "crash"),
)
