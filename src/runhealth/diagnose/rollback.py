"""From a finding to a plan: where to go back to, what to repair, which samples to skip, and what it costs."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from runhealth.diagnose.batches import BatchOutlier
from runhealth.diagnose.findings import UNDETERMINED, Finding, Outcome, Report
from runhealth.diagnose.lastgood import choose
from runhealth.diagnose.plans import Cost, Repair, RollbackPlan, SkipRange
from runhealth.diagnose.robust import median
from runhealth.diagnose.suspect import Suspect, load_suspects
from runhealth.diagnose.tracked import CAUSAL_KINDS
from runhealth.diagnose.verdicts import is_over
from runhealth.storage.errors import PlanError
from runhealth.storage.records import BatchRecord
from runhealth.storage.source import RecordSource

GAP_STEPS = 4  # outliers so far apart belong to one stretch of bad data
MARGIN_STEPS = 2
VISIT_GAP_STEPS = 32  # bad batches of one shard so far apart are of one visit
NOT_NEEDED = "training came back by itself: this plan is possible, not needed"


def build_plan(report: Report, incident: str | None, source: RecordSource) -> RollbackPlan:
    """The plan for an incident of a report; for the worst one that has a plan when `incident` is None.

    Raises:
        PlanError: no such incident, or no plan for it; the message says why.
    """
    name = source.describe().name
    candidates = [f for f in report.findings if f.kind in CAUSAL_KINDS]
    if incident is not None:
        candidates = [f for f in candidates if f.id == incident or f.details.get("incident") == incident]
        if not candidates:
            known = ", ".join(f.id for f in report.findings if f.kind in CAUSAL_KINDS) or "none"
            raise PlanError(f"{name}: no incident {incident!r} that a rollback could answer; known are: {known}")
    if not candidates:
        raise PlanError(f"{name}: nothing was found that a rollback could answer")
    planned = [f for f in candidates if f.remedy.plan is not None]
    offered = [f.offered for f in candidates if f.offered is not None]
    if not planned and incident is not None and offered:
        return replace(offered[0], run=name)
    if not planned:
        first = candidates[0]
        why = first.details.get("no_plan") or first.remedy.reason
        anyway = f" (--incident {first.id} plans a rollback all the same)" if offered else ""
        raise PlanError(f"{name}: no plan for {first.id}: {why}{anyway}")
    best = planned[0]
    assert best.remedy.plan is not None
    return replace(best.remedy.plan, run=name)


class Planner:
    """Makes plans out of what the engine remembers."""

    def __init__(
        self,
        *,
        run: str,
        checkpoints: Sequence[object],
        attempt_first_steps: Mapping[int, int],
        last_steps: Mapping[int, int],
        outliers: Iterable[BatchOutlier],
        step_seconds: Sequence[float],
        tokens_per_step: float,
        used_in_vain: Mapping[str, Collection[int]],
    ) -> None:
        self.run = run
        self.checkpoints = checkpoints
        self.attempt_first_steps = attempt_first_steps
        self.last_steps = last_steps
        self.outliers = list(outliers)
        self.step_seconds = step_seconds
        self.tokens_per_step = tokens_per_step
        self.used_in_vain = used_in_vain

    def plan(
        self, finding: Finding, nearby: Sequence[BatchRecord], layers: Sequence[str], clip_threshold: float | None
    ) -> RollbackPlan:
        """The plan for one finding.

        `nearby` are the batches read around the onset, `layers` the tensors that evidence names.

        Raises:
            PlanError: no checkpoint qualifies.
        """
        first_bad_step = self.visit_start(finding)
        incident = str(finding.details.get("incident", finding.id))
        good = choose(
            self.checkpoints,  # type: ignore[arg-type]
            attempt=finding.attempt,
            onset_step=min(finding.onset_step, first_bad_step),
            attempt_first_steps=self.attempt_first_steps,
            used_in_vain=self.used_in_vain.get(incident, ()),
        )
        suspects = {s.name: s for s in load_suspects()}
        suspect = suspects.get(finding.verdict)
        skip: tuple[SkipRange, ...] = ()
        if suspect is not None and suspect.action == "rollback_and_skip":
            skip = self._skip(finding, nearby)
        repairs = _repairs(suspect, layers, clip_threshold)
        steps = max(0, self.last_steps.get(finding.attempt, finding.onset_step) - good.step + 1)
        seconds = median(sorted(self.step_seconds)) if self.step_seconds else math.nan
        probability = next((s.probability for s in finding.suspects if s.suspect == finding.verdict), 0.0)
        preconditions = [
            f"checkpoint {good.step} exists and its manifest is committed",
            f"the plan belongs to run {self.run}",
            "no rollback to this checkpoint has failed for this incident",
        ]
        if is_over(finding.outcome, finding.end_step):
            preconditions.append(NOT_NEEDED)
        if finding.verdict == UNDETERMINED:
            preconditions.append("the cause is undetermined: nothing is repaired or skipped, so it may come again")
        return RollbackPlan(
            run=self.run,
            incident=incident,
            attempt=finding.attempt,
            cause=finding.verdict,
            probability=probability,
            onset_step=finding.onset_step,
            checkpoint_step=good.step,
            checkpoint_path=good.path,
            skip=skip,
            repairs=repairs,
            rejected=good.rejected,
            cost=Cost(
                steps=steps,
                tokens=int(steps * self.tokens_per_step),
                samples_skipped=sum(s.last_sample - s.first_sample + 1 for s in skip),
                seconds=round(steps * seconds, 1) if math.isfinite(seconds) else None,
            ),
            preconditions=tuple(preconditions),
        )

    def visit_start(self, finding: Finding) -> int:
        """The first bad batch of the visit of the shard that the onset lies in; the onset where data are no cause."""
        if finding.verdict != "bad_shard":
            return finding.onset_step
        steps = sorted(
            {
                o.batch.step
                for o in self.outliers
                if o.strong and o.batch.attempt == finding.attempt and o.batch.shard in _shards(finding)
            },
            reverse=True,
        )
        first = finding.onset_step
        for step in steps:
            if step < first - VISIT_GAP_STEPS:
                break
            first = min(first, step)
        return first

    def _skip(self, finding: Finding, nearby: Sequence[BatchRecord]) -> tuple[SkipRange, ...]:
        """The measured extent of the bad data, by shard and sample."""
        return tuple(r for shard in _shards(finding) for r in self._skip_of(shard, finding, nearby))

    def _skip_of(self, shard: str, finding: Finding, nearby: Sequence[BatchRecord]) -> tuple[SkipRange, ...]:
        mine = [
            o
            for o in self.outliers
            if o.batch.attempt == finding.attempt and o.batch.shard == shard and o.batch.first_sample >= 0
        ]
        reached = extent(mine, finding.onset_step)
        if not reached:
            return ()
        first = min(o.batch.step for o in reached) - MARGIN_STEPS
        last = max(o.batch.step for o in reached) + MARGIN_STEPS
        batches = {(b.step, b.rank, b.micro_batch): b for b in (o.batch for o in reached)}
        for batch in nearby:
            if batch.shard == shard and first <= batch.step <= last and batch.first_sample >= 0:
                batches[batch.step, batch.rank, batch.micro_batch] = batch
        why = "hash differs from the manifest" if any(o.hash_mismatch for o in reached) else "unusual token statistics"
        reason = f"{why}, read in steps {first + MARGIN_STEPS:,}-{last - MARGIN_STEPS:,} (margin {MARGIN_STEPS})"
        ranges = merge_ranges((b.first_sample, b.last_sample) for b in batches.values())
        return tuple(SkipRange(shard=shard, first_sample=low, last_sample=high, reason=reason) for low, high in ranges)


def _shards(finding: Finding) -> tuple[str, ...]:
    named = finding.details.get("shards")
    if isinstance(named, list):
        return tuple(str(shard) for shard in named)
    return (str(finding.details["shard"]),) if "shard" in finding.details else ()


def extent(outliers: Sequence[BatchOutlier], onset_step: int) -> list[BatchOutlier]:
    """The outliers connected to the onset: gaps of up to `GAP_STEPS` steps without one are joined. All outliers of a
    shard whose hash is wrong belong to it, wherever they are."""
    ordered = sorted(outliers, key=lambda o: (o.batch.step, o.batch.rank, o.batch.micro_batch))
    wrong = [o for o in ordered if o.hash_mismatch]
    if wrong:
        return wrong
    groups: list[list[BatchOutlier]] = []
    for outlier in ordered:
        if groups and outlier.batch.step - groups[-1][-1].batch.step <= GAP_STEPS + 1:
            groups[-1].append(outlier)
        else:
            groups.append([outlier])
    return [
        o
        for group in groups
        if any(o.strong for o in group) and group[-1].batch.step >= onset_step - GAP_STEPS
        for o in group
    ]


def merge_ranges(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Union of inclusive integer ranges, sorted."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return merged


def wants_rollback(finding: Finding) -> bool:
    """What came back by itself needs no rollback, nor does a small rise beside which nothing else moved; bad data that
    were read do not go away by themselves."""
    if finding.details.get("small"):
        return False
    return (
        finding.kind == "data_corrupt"
        or finding.outcome in (Outcome.NON_RECOVERING, Outcome.ONGOING)
        or (finding.outcome is Outcome.RECOVERING and finding.end_step is None)
    )


def _repairs(suspect: Suspect | None, layers: Sequence[str], clip_threshold: float | None) -> tuple[Repair, ...]:
    repairs: list[Repair] = []
    for kind in suspect.repairs if suspect is not None else ():
        reason = suspect.remedy if suspect is not None else ""
        if kind == "higher_precision":
            repairs.extend(Repair(kind=kind, target=layer, reason="overflow was seen in it") for layer in layers)
        elif kind == "lower_clip_threshold":
            value = None if clip_threshold is None else clip_threshold / 2
            repairs.append(Repair(kind=kind, value=value, reason="half of what it was"))
        else:
            repairs.append(Repair(kind=kind, reason=reason))
    return tuple(repairs)
