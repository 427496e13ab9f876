"""A rank that is gone.

Its records stop and it says nothing more, while its peers find the connection closed. The lowest step, and who told of
no exception, name it.
"""

import re
from collections.abc import Iterator

from runhealth.diagnose import queries
from runhealth.diagnose.case import Case
from runhealth.diagnose.findings import Evidence
from runhealth.diagnose.suspect import VETO_NATS, Needs, Suspect

KINDS = ("dead_rank", "hang", "crash")
CLOSED = re.compile(
    r"closed by (the )?(remote )?peer|reset by peer|connection (refused|closed|reset|lost)|broken pipe|"
    r"remote process exited|unreachable|socket.*closed",
    re.IGNORECASE,
)
KILLED = re.compile(r"was killed|signal 9|SIGKILL|SIGTERM|exit(ed with)? code -\d", re.IGNORECASE)
TIMED_OUT = re.compile(r"time[d]? ?-?out|watchdog", re.IGNORECASE)


def investigate(case: Case) -> Iterator[Evidence]:
    alarm = next((a for a in case.incident.alarms if a.kind in KINDS), None)
    if alarm is None:
        return
    if alarm.kind == "dead_rank":
        yield Evidence(claim=alarm.message, weight_nats=3.5, steps=(alarm.onset_step, alarm.step), ranks=alarm.ranks)
    elif KILLED.search(alarm.message):
        yield Evidence(claim="its process was ended from outside", weight_nats=2.5, ranks=alarm.ranks)
    elif CLOSED.search(alarm.message):
        yield Evidence(claim="the others found their connection to it closed", weight_nats=2.0)
    elif TIMED_OUT.search(alarm.message):
        yield Evidence(claim="the others ran into a time-out: it may live and hang", weight_nats=-2.0)
    else:
        yield Evidence(claim="the exception is of this process, not of a lost peer", weight_nats=-3.0)
    silent = silent_ranks(case)
    if silent:
        yield Evidence(
            claim=f"rank {', '.join(map(str, silent[:8]))} said nothing, the others told of an exception",
            weight_nats=2.5,
            ranks=silent,
        )
    lasts = last_steps(case)
    if len(lasts) < 2:
        return
    low, high = min(lasts.values()), max(lasts.values())
    behind = tuple(sorted(rank for rank, step in lasts.items() if step == low))
    if low < high and len(behind) <= len(lasts) / 2:
        yield Evidence(
            claim=f"rank {', '.join(map(str, behind[:8]))} came to step {low:,}, the others to {high:,}",
            weight_nats=2.5,
            steps=(low, high),
            ranks=behind,
            value=float(low),
            baseline=float(high),
            query=queries.steps("max", "step", case.incident.attempt, 0, high, behind[:8]),
        )
    elif alarm.kind != "dead_rank":
        yield Evidence(
            claim=f"all {len(lasts)} ranks came to step {high:,}",
            weight_nats=-1.0 if silent else VETO_NATS,
            steps=(high, high),
        )


def silent_ranks(case: Case) -> tuple[int, ...]:
    """Ranks of the alarm's details that told of no exception."""
    for alarm in case.incident.alarms:
        found = alarm.details.get("silent_ranks")
        if isinstance(found, list):
            return tuple(found)
    return ()


def last_steps(case: Case) -> dict[int, int]:
    """rank -> its last step in the attempt."""
    lasts: dict[int, int] = {}
    for frame in case.frames:
        if frame.attempt == case.incident.attempt:
            lasts.update(dict.fromkeys(frame.ranks, frame.step))
    return lasts


SUSPECT = Suspect(
    name="dead_rank",
    title="lost rank",
    needs=Needs(),
    investigate=investigate,
    action="evict_rank",
    remedy="take the rank's host out and resume; if it happens again on other hosts, look at the code",
    explains="one rank is gone and the others cannot go on without it",
    kinds=KINDS,
)
