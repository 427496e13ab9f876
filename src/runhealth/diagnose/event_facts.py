"""Facts that checkpoints and events tell by themselves: a crash that ended the run, ranks that hung or died, memory
that ran out, a checkpoint that is corrupt."""

import math
import re
from collections.abc import Iterable, Mapping

from runhealth.diagnose.findings import Alarm, Severity
from runhealth.diagnose.history import History
from runhealth.storage.records import CheckpointRecord, CheckpointStatus, EventKind, RunEvent

MESSAGE_CHARS = 200
SUPERVISOR = -1  # the rank that it writes under
WORLD_CHANGED = "world_changed"
FAILURES = ("hang", "dead_rank", "out_of_memory")  # kinds of events that importers write beside an exception
_WRAPPED = re.compile(r"^(?:\w+: Got the following error when running the callback: )+")  # torch futures, nested
_OUT_OF_MEMORY = re.compile(r"out of memory|OutOfMemoryError|MemoryError|RESOURCE_EXHAUSTED")


def alarms(history: History) -> list[Alarm]:
    """In the order of (attempt, step)."""
    found: list[Alarm] = []
    last_attempt = max(history.lasts, default=0)
    events = sorted(history.events, key=lambda e: (e.attempt, e.step, e.rank, e.ts_ns))
    told = {(event.attempt, event.kind) for event in events}
    hidden = _said_twice(events)
    for event in events:
        went_on = event.attempt < last_attempt
        if event.kind == EventKind.EXCEPTION:
            cause = event.data.get("cause")
            if cause in FAILURES and (event.attempt, cause) in told:
                continue  # an event of its own names the cause: not also a crash
            if not _OUT_OF_MEMORY.search(event.message):
                if event not in hidden:
                    what = "ended" if event.rank == SUPERVISOR else "ended with an exception"
                    found.append(_failure(history, event, "crash", went_on, what))
            elif (event.attempt, "out_of_memory") not in told:
                found.append(_failure(history, event, "out_of_memory", went_on, "ran out of memory"))
        elif event.kind in FAILURES:
            what = {"hang": "hung", "dead_rank": "lost a rank", "out_of_memory": "ran out of memory"}[event.kind]
            found.append(_failure(history, event, event.kind, went_on, what))
    failed = [record for record in history.checkpoints if record.status is CheckpointStatus.FAILED]
    found.extend(_corrupt(record) for record in sorted(failed, key=lambda c: (c.attempt, c.step, c.ts_ns)))
    return found


def unexcused(history: History, alarms: Iterable[Alarm]) -> list[Alarm]:
    """Without those that were meant: a rollback that skips samples reads others than the first time, and another number
    of ranks cuts the same samples into other batches, whose hashes differ."""
    meant = {e.attempt for e in history.events if e.kind in (EventKind.ROLLBACK, EventKind.SKIP)}
    recut = {e.attempt for e in history.events if e.kind == WORLD_CHANGED}
    return [
        a
        for a in alarms
        if a.kind != "data_skipped"
        or not (meant | (recut if a.signal == "shard" else set())) & {a.attempt - 1, a.attempt}
    ]


def _failure(history: History, event: RunEvent, kind: str, went_on: bool, what: str) -> Alarm:
    step = event.step or history.lasts.get(event.attempt, 0)
    return Alarm(
        detector="event_facts",
        kind=kind,
        signal="",
        attempt=event.attempt,
        step=step,
        onset_step=step,
        score=1.0,
        value=math.nan,
        baseline=math.nan,
        ranks=_ranks(event, kind),
        message=f"attempt {event.attempt} {what}: {_gist(event)[:MESSAGE_CHARS]}"
        + ("; a later attempt went on" if went_on else ""),
        severity=Severity.WARNING if went_on else Severity.ERROR,
        details=_silent(history, event.attempt),
    )


def _silent(history: History, attempt: int) -> Mapping[str, object]:
    """The ranks that said nothing while most others told of an exception."""
    mine = [event for event in history.events if event.attempt == attempt and event.rank >= 0]
    failed = {event.rank for event in mine if event.kind == EventKind.EXCEPTION}
    silent = sorted({event.rank for event in mine} - failed)
    return {"silent_ranks": silent} if silent and len(silent) < len(failed) else {}


def _gist(event: RunEvent) -> str:
    """The line that says what went wrong. Our own events hold the exception's message, which begins with it; what
    follows may be a stack. Lines of a foreign log may be a whole traceback, which ends with it."""
    lines = event.message.strip().splitlines() or ["an exception"]
    ours = "type" in event.data or event.rank == SUPERVISOR
    return _WRAPPED.sub("", lines[0]) if ours else lines[-1]


def _said_twice(events: Iterable[RunEvent]) -> list[RunEvent]:
    """Exceptions that tell of the same end of an attempt as a better one. A supervisor that names ranks has seen all of
    them; one that does not knows less than the ranks, of which the first to fail says most."""
    ends: dict[int, list[RunEvent]] = {}
    for event in events:
        if event.kind == EventKind.EXCEPTION:
            ends.setdefault(event.attempt, []).append(event)
    hidden = []
    for found in ends.values():
        above = [event for event in found if event.rank == SUPERVISOR]
        below = [event for event in found if event.rank != SUPERVISOR]
        if above and below:
            named = any(event.data.get("ranks") for event in above)
            first = min(below, key=lambda e: (e.ts_ns, e.rank))
            hidden.extend(below if named else [*above, *(event for event in below if event is not first)])
    return hidden


def _ranks(event: RunEvent, kind: str) -> tuple[int, ...]:
    """The ranks at fault as far as the lines tell; of a plain exception, the rank that wrote it."""
    named = event.data.get("ranks")
    if isinstance(named, Iterable) and not isinstance(named, str):
        return tuple(sorted({rank for rank in named if isinstance(rank, int)}))
    return (event.rank,) if event.rank >= 0 and kind in ("crash", "out_of_memory") else ()


def _corrupt(record: CheckpointRecord) -> Alarm:
    return Alarm(
        detector="event_facts",
        kind="checkpoint_corrupt",
        signal="",
        attempt=record.attempt,
        step=record.step,
        onset_step=record.step,
        score=1.0,
        value=math.nan,
        baseline=math.nan,
        message=f"checkpoint {record.step:,} cannot be used: {record.reason or 'verification failed'}",
    )
