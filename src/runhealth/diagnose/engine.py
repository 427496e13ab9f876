"""The engine: records in, findings out. The same for a live run, for chunks of one, and for a finished one."""

import copy
import hashlib
import json
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from runhealth.diagnose import event_facts, second_opinion
from runhealth.diagnose.bank import DetectorBank
from runhealth.diagnose.batches import BatchHabit
from runhealth.diagnose.case import Case
from runhealth.diagnose.causes import FactCauses
from runhealth.diagnose.detector import CHANNEL
from runhealth.diagnose.findings import Alarm, Finding, Missing, Outcome, Report, Severity, SuspectResult
from runhealth.diagnose.frame_block import FrameBlock
from runhealth.diagnose.frames import Frame, FrameAssembler
from runhealth.diagnose.history import History, decimate
from runhealth.diagnose.incident import IncidentTracker
from runhealth.diagnose.judge import settled, walk
from runhealth.diagnose.persists import Limit, lasts, limit_of
from runhealth.diagnose.plans import SAME_INCIDENT_STEPS
from runhealth.diagnose.report.json import attempt_json, finding_json
from runhealth.diagnose.rollback import Planner, wants_rollback
from runhealth.diagnose.suspect import Suspect, load_suspects, would_tell
from runhealth.diagnose.tracked import CAUSAL_KINDS, Tracked
from runhealth.diagnose.verdicts import findings_of, healed_summary, merge
from runhealth.storage.blocks import StepBlock
from runhealth.storage.errors import PlanError
from runhealth.storage.records import (
    BatchRecord,
    CheckpointRecord,
    EventKind,
    LayerSample,
    Record,
    SourceInfo,
    StepRecord,
)

NEARBY_STEPS = 8
CURVE_BEFORE_STEPS = 40
KEY_SIGNALS = ("loss", "grad_norm", "lr", "update_ratio", "grad_norm_rank", "token_entropy")
MOST_SHARDS = 64  # named in a finding


class _Judged:
    """What the last walk over the suspects said about an incident."""

    __slots__ = ("clip_threshold", "details", "layers", "limit", "nearby", "suspects", "verdict")

    def __init__(
        self,
        suspects: tuple[SuspectResult, ...],
        verdict: str,
        details: dict[str, object],
        nearby: list[BatchRecord],
        layers: tuple[str, ...],
        clip_threshold: float | None,
        limit: Limit | None,
    ) -> None:
        self.suspects, self.verdict, self.details = suspects, verdict, details
        self.nearby, self.layers, self.clip_threshold = nearby, layers, clip_threshold
        self.limit = limit


class Engine:
    """Feed records in any interleaving of ranks; ask for findings at any time.

    `window` = (first, last) limits what is judged to these steps; earlier frames still build the baselines.
    """

    def __init__(self, *, suspects: Sequence[Suspect] | None = None, window: tuple[int, int] | None = None) -> None:
        self._suspects = tuple(suspects) if suspects is not None else load_suspects()
        self._known = {suspect.name: suspect for suspect in self._suspects}
        self._window = window
        self._assembler = FrameAssembler()
        self._habit = BatchHabit()
        self._history = History()
        self._tracker = IncidentTracker()
        self._bank = DetectorBank()
        self._facts: list[Alarm] = []
        self._causes = FactCauses(self._suspects, self._history)
        self._judged: dict[str, _Judged] = {}
        self._told: dict[str, str] = {}
        self._finished = False

    def feed(self, record: Record) -> list[Finding]:
        """Add one record. Returns findings that are new, or changed since they were last returned."""
        return self._changed() if self.feed_quietly(record) else []

    def feed_quietly(self, record: Record) -> bool:
        """Add one record; say only whether findings may have changed. For a post-mortem, which reports at the end."""
        if isinstance(record, StepRecord | BatchRecord | LayerSample):
            closed = self._assembler.feed(record)
            if not closed:
                return False
            changed = False
            for frame in closed:
                changed |= self._frame(frame)
            return changed
        if isinstance(record, CheckpointRecord):
            self._history.add_checkpoint(record)
            return False
        self._history.add_event(record)
        world = record.data.get("world_size", record.data.get("world"))
        if record.kind in (EventKind.RUN_START, EventKind.ATTEMPT_START) and isinstance(world, int):
            self._assembler.expect_ranks(record.attempt, world)
        return False

    def finish(self) -> list[Finding]:
        """The data end here. Further records are not expected."""
        for frame in self._assembler.finish():
            self._frame(frame)
        if not self._finished:
            for alarms in self._bank.finish():
                self._note([a for a in alarms if self._in_window(a) and a.kind not in CAUSAL_KINDS])
            for tracked in self._tracker.end_attempt():
                self._walk(tracked)
            self._causes.look(self._history.frames, last=True)
            self._finished = True
        return self._changed()

    def report(self, source: SourceInfo) -> Report:
        """Everything known so far. Before `finish()`, open incidents are judged as they stand."""
        history = self._history
        if self._bank.crashed:
            notes = (f"detector {name} failed and was left out ({why})" for name, why in self._bank.crashed.items())
            source = replace(source, notes=(*source.notes, *notes))
        steps = list(history.attempts())
        return Report(
            source=source,
            attempts=tuple(steps),
            findings=tuple(self._findings(source.name)),
            missing=self._missing(),
            first_step=min((a.first_step for a in steps), default=None),
            last_step=max((a.last_step for a in steps), default=None),
            last_ts_ns=history.last_ts_ns,
            curves=history.curves(),
            late_records=self._assembler.late_records,
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything that `load_state_dict` needs to go on; plain containers and records, fit for pickle."""
        return copy.deepcopy(
            {
                "assembler": self._assembler.state_dict(),
                "habit": self._habit.state_dict(),
                "history": self._history.state_dict(),
                "tracker": self._tracker.state_dict(),
                "detectors": self._bank.state_dict(),
                "facts": self._facts,
                "causes": self._causes.state_dict(),
                "judged": self._judged,
                "told": self._told,
                "window": self._window,
                "finished": self._finished,
            }
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        state = copy.deepcopy(dict(state))
        self._assembler.load_state_dict(state["assembler"])
        self._habit.load_state_dict(state["habit"])
        self._history.load_state_dict(state["history"])
        self._tracker.load_state_dict(state["tracker"])
        self._bank.load_state_dict(state["detectors"], self._history.signals)
        self._facts, self._judged, self._told = state["facts"], state["judged"], state["told"]
        self._causes.load_state_dict(state["causes"])
        self._window, self._finished = state["window"], state["finished"]

    # -- one frame --------------------------------------------------------------------------------------------------

    def _frame(self, frame: Frame) -> bool:
        """Returns whether findings may have changed."""
        due: list[Tracked] = []
        if frame.batches:
            frame.outliers = self._habit.judge(frame.batches)
        if frame.new_attempt and self._history.lasts:
            due.extend(self._tracker.end_attempt())
            for tracked in due:
                self._walk(tracked)
            self._causes.end_attempt(self._history.frames[-1].attempt, self._history.frames)
            self._rewind(frame)
        self._history.append(frame)
        self._bank.bind(self._history.signals)
        return self._look(frame, self._bank.update(frame)) or bool(due)

    def _look(self, frame: Frame, alarms: list[Alarm]) -> bool:
        """What the detectors said about the newest frame. Returns whether findings may have changed."""
        facts: list[Alarm] = []
        if alarms:
            if self._window is not None:
                alarms = [alarm for alarm in alarms if self._in_window(alarm)]
            facts = [a for a in alarms if a.kind not in CAUSAL_KINDS and a.kind != CHANNEL]
            self._note(facts)
        walks = self._tracker.update(frame, alarms)
        for tracked in walks:
            self._walk(tracked)
        told = self._causes.waiting and self._causes.look(self._history.frames)
        return bool(walks or facts or told)

    # -- many frames ------------------------------------------------------------------------------------------------

    def feed_block(self, block: StepBlock) -> bool:
        """Add many steps at once: the same as `feed_quietly` of each of `block.records()`."""
        rows, others = FrameBlock.of(block), deque(block.others)
        changed, row = False, 0
        while row < len(rows) and not self._assembler.follows(block.attempt, block.ranks, int(block.steps[row])):
            self._feed_others(others, row)
            for record in rows.records(row):
                changed |= self.feed_quietly(record)
            row += 1
        if row < len(rows):
            self._feed_others(others, row)
            before = int(block.steps[-2]) if len(rows) - row > 1 else None
            for frame in self._assembler.advance(rows.opened(len(rows) - 1), before):
                changed |= self._frame(frame)
            if row < len(rows) - 1:
                changed |= self._frames(rows.part(row, len(rows) - 1), others, row)
        self._feed_others(others, len(rows))
        rows.forget_frames()
        return changed

    def _frames(self, block: FrameBlock, others: deque[tuple[int, Record]], first: int) -> bool:
        """Frames that have closed. `others` are counted from `first` rows before the block; one that comes before a
        row has been read by the time the row before that closes."""
        block.judge_batches(self._habit)
        alarms = self._bank.update_block(block, self._history.signals)
        changed, row = False, 0
        for loud in [*alarms, len(block)]:
            while row < loud:
                if self._causes.waiting:
                    stop, walks = self._tracker.follow(block, row, row + 1)
                else:
                    stop, walks = self._tracker.follow(block, row, loud)
                self._history.extend(block.part(row, stop))
                self._feed_others(others, first + stop)
                for tracked in walks:
                    self._walk(tracked)
                told = self._causes.waiting and self._causes.look(self._history.frames)
                changed |= bool(walks or told)
                row = stop
            if loud < len(block):
                self._history.extend(block.part(loud, loud + 1))
                self._feed_others(others, first + loud + 1)
                changed |= self._look(block.frame(loud), alarms[loud])
                row = loud + 1
        self._bank.bind(self._history.signals)
        return changed

    def _feed_others(self, others: deque[tuple[int, Record]], until: int) -> None:
        while others and others[0][0] <= until:
            self.feed_quietly(others.popleft()[1])

    def _note(self, facts: Sequence[Alarm]) -> None:
        """Keep facts. One with an end takes the place of what was told when it began."""
        for alarm in facts:
            if alarm.end_step is not None:
                key = (alarm.kind, alarm.attempt, alarm.onset_step, alarm.ranks)
                self._facts = [f for f in self._facts if (f.kind, f.attempt, f.onset_step, f.ranks) != key]
            self._facts.append(alarm)
        self._causes.note(facts)

    def _rewind(self, frame: Frame) -> None:
        """A new attempt: baselines are what lies before its first step."""
        before = self._history.rewind(frame.step)
        self._note([a for a in self._bank.restart(before, self._history.signals) if self._in_window(a)])

    def _in_window(self, alarm: Alarm) -> bool:
        return self._window is None or self._window[0] <= alarm.step <= self._window[1]

    def _walk(self, tracked: Tracked) -> None:
        judged = self._judge(tracked)
        if judged is not None:
            self._judged[tracked.id] = judged

    def _judge(self, tracked: Tracked) -> _Judged | None:
        frames = self._history.frames
        if not frames or (
            tracked.id in self._judged and frames[0].step > tracked.onset_step and frames[0].attempt >= tracked.attempt
        ):
            return None  # the ring has moved on; what was said with the telemetry at hand stands
        _, back = tracked.loss_outcome()
        case = Case(tracked.incident(), list(frames), loss_back_step=back, met=self._history.signals)
        before = self._judged.get(tracked.id)
        said = None if before is None else (before.suspects, before.verdict)
        suspects, verdict = settled(said, walk(case, self._suspects))
        onset = tracked.onset_step
        details: dict[str, object] = second_opinion.detail(suspects, tracked.incident().kind)
        nearby: list[BatchRecord] = []
        strong = case.outliers(case.between(case.loss_step - 2, case.loss_step))
        if tracked.shard is not None:
            details["shard"], details["shards"] = tracked.shard, tracked.shards[:MOST_SHARDS]
        elif verdict == "bad_shard" and strong:
            details["shard"] = max(
                strong, key=lambda o: (o.hash_mismatch, abs(o.largest.z) if o.largest else 0)
            ).batch.shard
        if verdict == "bad_shard" and "shard" in details:
            nearby = case.batches(onset - NEARBY_STEPS, case.horizon_step)[:512]
        implicated = next((s for s in suspects if s.suspect == verdict), None)
        layers = next((e.layers for e in implicated.evidence if e.layers), ()) if implicated else ()
        threshold = next((t for f in reversed(case.before) if (t := f.get("clip_threshold")) is not None), None)
        span = max(CURVE_BEFORE_STEPS, 2 * (tracked.seen_step - onset))
        details["curves"] = {
            name: [[step, value if math.isfinite(value) else None] for step, value in points]
            for name in ("loss", "grad_norm")
            if (points := _spark(self._history.window(tracked.attempt, name, onset - span, onset + 2 * span)))
        }
        clip = float(threshold) if threshold is not None else None
        limit = limit_of(verdict, case)
        if tracked.closed and not lasts(limit, frames, tracked.attempt):
            limit = None  # over by then: the same trouble later is another incident
        return _Judged(suspects, verdict, details, nearby, layers, clip, limit)

    # -- findings ---------------------------------------------------------------------------------------------------

    def _findings(self, run: str) -> list[Finding]:
        planner = self._planner(run)
        found: list[Finding] = []
        for tracked in (*self._tracker.closed, *self._tracker.open):
            judged = self._judged.get(tracked.id) or self._judge(tracked)
            if judged is None:
                continue
            lasting = lasts(judged.limit, self._history.frames, tracked.attempt)
            if tracked.scale_collapsed:
                lasting = lasting or "the loss scale has not grown again"
            headlines = findings_of(tracked, judged.suspects, judged.verdict, self._known, judged.details, lasting)
            found.extend(self._planned(self._healed(finding), judged, planner) for finding in headlines)
        told = [*self._facts, *(a for a in event_facts.alarms(self._history) if self._in_window(a))]
        facts = event_facts.unexcused(self._history, told)
        found.extend(self._causes.finding(alarm, self._history.frames) for alarm in facts)
        return merge(found)

    def _planned(self, finding: Finding, judged: _Judged, planner: Planner) -> Finding:
        finding = replace(finding, onset_step=planner.visit_start(finding))
        wanted = wants_rollback(finding)
        suspect = self._known.get(finding.verdict)
        answers = suspect is not None and suspect.action.startswith("rollback")
        if not (wanted or answers) or not self._history.checkpoints:
            return finding
        try:
            plan = planner.plan(finding, judged.nearby, judged.layers, judged.clip_threshold)
        except PlanError as error:
            return replace(finding, details={**finding.details, "no_plan": str(error)}) if wanted else finding
        if not wanted:
            return replace(finding, offered=plan)
        return replace(finding, remedy=replace(finding.remedy, plan=plan))

    def _healed(self, finding: Finding) -> Finding:
        """Did a later attempt go over the same steps without the trouble? The finding stays, and says so."""
        history = self._history
        for attempt in sorted(history.firsts):
            if attempt <= finding.attempt or history.firsts[attempt] > finding.onset_step:
                continue
            passed = history.lasts[attempt] >= finding.peak_step + 20
            again = any(
                t.attempt == attempt and t.onset_step <= finding.peak_step + 20 and not t.recovered
                for t in (*self._tracker.closed, *self._tracker.open)
            )
            if passed and not again:
                brief = finding.outcome is Outcome.ONGOING and finding.severity is Severity.WARNING
                return replace(
                    finding,
                    severity=Severity.INFO if brief else finding.severity,
                    summary=healed_summary(finding.summary, attempt),
                    details={**finding.details, "healed_by_attempt": attempt},
                )
        return finding

    def _planner(self, run: str) -> Planner:
        history = self._history
        vain: dict[str, set[int]] = {}
        rollbacks = [e for e in history.events if e.kind == EventKind.ROLLBACK]
        for tracked in (*self._tracker.closed, *self._tracker.open):
            for event in rollbacks:
                onset, step = event.data.get("onset_step"), event.data.get("checkpoint_step")
                same = isinstance(onset, int) and abs(onset - tracked.onset_step) <= SAME_INCIDENT_STEPS
                if same and isinstance(step, int) and event.attempt <= tracked.attempt:
                    vain.setdefault(tracked.id, set()).add(step)
        seconds = [float(v) for f in history.frames if (v := f.largest("t_step_s")) is not None]
        return Planner(
            run=run,
            checkpoints=history.checkpoints,
            attempt_first_steps=history.firsts,
            last_steps=history.lasts,
            outliers=history.outliers,
            step_seconds=seconds,
            tokens_per_step=history.tokens_per_step,
            used_in_vain=vain,
        )

    def _missing(self) -> tuple[Missing, ...]:
        known = self._history.signals
        return tuple(Missing(signal=s, would_tell=would_tell(s)) for s in KEY_SIGNALS if s not in known)

    def _changed(self) -> list[Finding]:
        changed = []
        for finding in self._findings(""):
            digest = _digest(finding)
            if self._told.get(finding.id) != digest:
                self._told[finding.id] = digest
                changed.append(finding)
        return changed

    @property
    def history(self) -> History:
        """What was met so far, to read only."""
        return self._history

    @property
    def last_step(self) -> int | None:
        frames = self._history.frames
        return frames[-1].step if frames else None

    @property
    def signals(self) -> frozenset[str]:
        """Names of all signals met so far; layer signals with the prefix `layer.`."""
        return frozenset(self._history.signals)


def _spark(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    return list(decimate(points, 72))


def _digest(finding: Finding) -> str:
    return hashlib.sha256(json.dumps(finding_json(finding), sort_keys=True).encode()).hexdigest()


def verdict_hash(report: Report) -> str:
    """One hash over what was concluded: attempts and findings with all evidence. Equal for equal conclusions, however
    the records arrived."""
    said = {
        "attempts": [attempt_json(a) for a in report.attempts],
        "findings": [finding_json(f) for f in report.findings],
        "missing": [m.signal for m in report.missing],
    }
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
