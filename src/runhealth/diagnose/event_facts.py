"""Facts that checkpoints and events tell by themselves: a crash that ended the run, a checkpoint that is corrupt."""

import math

from runhealth.diagnose.findings import Alarm, Severity
from runhealth.diagnose.history import History
from runhealth.storage.records import CheckpointRecord, CheckpointStatus, EventKind

MESSAGE_CHARS = 200


def alarms(history: History) -> list[Alarm]:
    """In the order of (attempt, step)."""
    found: list[Alarm] = []
    last_attempt = max(history.lasts, default=0)
    for event in sorted(history.events, key=lambda e: (e.attempt, e.step, e.rank, e.ts_ns)):
        if event.kind != EventKind.EXCEPTION:
            continue
        step = event.step or history.lasts.get(event.attempt, 0)
        went_on = event.attempt < last_attempt
        lines = event.message.strip().splitlines() or ["an exception"]
        found.append(
            Alarm(
                detector="event_facts",
                kind="crash",
                signal="",
                attempt=event.attempt,
                step=step,
                onset_step=step,
                score=1.0,
                value=math.nan,
                baseline=math.nan,
                ranks=(event.rank,) if event.rank >= 0 else (),
                message=f"attempt {event.attempt} ended with an exception: {lines[-1][:MESSAGE_CHARS]}"
                + ("; a later attempt went on" if went_on else ""),
                severity=Severity.WARNING if went_on else Severity.ERROR,
            )
        )
    failed = [record for record in history.checkpoints if record.status is CheckpointStatus.FAILED]
    found.extend(_corrupt(record) for record in sorted(failed, key=lambda c: (c.attempt, c.step, c.ts_ns)))
    return found


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
