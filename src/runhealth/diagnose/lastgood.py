"""The last good checkpoint: the newest verified one at or before onset - 5, of the branch that led to the incident."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from runhealth.diagnose.plans import RejectedCheckpoint
from runhealth.storage.errors import PlanError
from runhealth.storage.records import CheckpointRecord, CheckpointStatus

MARGIN_STEPS = 5  # the onset is known to within a few steps; the earliest channel may still lag the cause


@dataclass(frozen=True, slots=True, kw_only=True)
class LastGood:
    step: int
    path: str
    attempt: int
    rejected: tuple[RejectedCheckpoint, ...]


def choose(
    checkpoints: Sequence[CheckpointRecord],
    *,
    attempt: int,
    onset_step: int,
    attempt_first_steps: Mapping[int, int],
    used_in_vain: Collection[int] = (),
) -> LastGood:
    """Pick the checkpoint to go back to, with a reason for every newer one that was rejected.

    `attempt_first_steps` maps each attempt to its first step: a checkpoint of an earlier attempt that lies after the
    first step of a later one is of a branch that was given up. `used_in_vain` holds steps of checkpoints from which a
    rollback for this incident has already failed.

    Raises:
        PlanError: no checkpoint qualifies; the message names each and why.
    """
    by_place: dict[tuple[int, str], list[CheckpointRecord]] = {}
    for record in sorted(checkpoints, key=lambda c: (c.attempt, c.step, c.ts_ns, c.status)):
        if record.attempt <= attempt:
            by_place.setdefault((record.step, record.path), []).append(record)
    if not by_place:
        raise PlanError("no checkpoint was recorded for this run, so there is nothing to go back to")
    rejected: list[RejectedCheckpoint] = []
    # Newest first; a checkpoint saved again in a later attempt counts with its later save.
    for (step, path), records in sorted(by_place.items(), key=lambda item: (-item[0][0], item[0][1])):
        why = _why_not(records, step, attempt, onset_step, attempt_first_steps, used_in_vain)
        if why is None:
            return LastGood(step=step, path=path, attempt=records[-1].attempt, rejected=tuple(rejected))
        rejected.append(RejectedCheckpoint(step=step, why=why))
    listed = "; ".join(f"{r.step:,}: {r.why}" for r in rejected[:8])
    raise PlanError(f"none of {len(rejected)} checkpoints qualifies for an onset at step {onset_step:,} ({listed})")


def _why_not(
    records: Sequence[CheckpointRecord],
    step: int,
    attempt: int,
    onset_step: int,
    attempt_first_steps: Mapping[int, int],
    used_in_vain: Collection[int],
) -> str | None:
    saved_in = max((r.attempt for r in records if r.status is not CheckpointStatus.LOADED), default=records[-1].attempt)
    later = [first for n, first in attempt_first_steps.items() if saved_in < n <= attempt]
    if later and step > min(later):
        return f"belongs to attempt {saved_in}, which was given up at step {min(later):,}"
    if step > onset_step:
        return "saved after the onset"
    if step > onset_step - MARGIN_STEPS:
        return f"within {MARGIN_STEPS} steps of the onset"
    failed = [r for r in records if r.status is CheckpointStatus.FAILED]
    good = [r for r in records if r.status in (CheckpointStatus.VERIFIED, CheckpointStatus.LOADED)]
    if failed and (not good or (failed[-1].attempt, failed[-1].ts_ns) > (good[-1].attempt, good[-1].ts_ns)):
        return f"failed verification{': ' + failed[-1].reason if failed[-1].reason else ''}"
    if not good:
        return "not verified"
    if step in used_in_vain:
        return "a rollback to it has already failed for this incident"
    return None
