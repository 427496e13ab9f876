"""Causes of facts: a straggler, a stall, a replica that drifts have suspects too, though no loss incident holds them.

A fact is judged when it is told and again 2 and 16 frames later; `judge.settled` says which look stands. The frames
at the end of each attempt are kept, since an event that tells of its end (a crash, a lost rank) may come when they are
gone.
"""

import copy
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from runhealth.diagnose import second_opinion
from runhealth.diagnose.case import Case
from runhealth.diagnose.findings import UNDETERMINED, Alarm, Finding, Incident, Remedy, Severity, Status
from runhealth.diagnose.frames import Frame
from runhealth.diagnose.history import History
from runhealth.diagnose.judge import Judgement, settled, walk
from runhealth.diagnose.suspect import Suspect
from runhealth.diagnose.tracked import CAUSAL_KINDS
from runhealth.diagnose.verdicts import culprit_ranks, fact_of

LOOK_AT = (0, 2, 16)  # frames after a fact at which its suspects are walked
END_FRAMES = 64
ENDS = 8  # attempts whose last frames are kept

Key = tuple[str, int, int, tuple[int, ...]]


class FactCauses:
    """Walks the suspects of facts, and makes findings of both. `history`: what the engine remembers, to read only."""

    def __init__(self, suspects: Sequence[Suspect], history: History) -> None:
        self._history = history
        self._suspects = tuple(suspects)
        self._known = {suspect.name: suspect for suspect in self._suspects}
        self._kinds = {kind for suspect in self._suspects for kind in suspect.kinds} - set(CAUSAL_KINDS)
        self._judged: dict[Key, Judgement] = {}
        self._pending: list[tuple[int, Alarm]] = []  # frames to wait before the next look
        self._ends: deque[tuple[int, tuple[Frame, ...]]] = deque(maxlen=ENDS)

    def note(self, alarms: Iterable[Alarm]) -> None:
        """Take in facts; they are judged with the next `look`."""
        for alarm in alarms:
            if alarm.kind in self._kinds:
                self._pending.extend((wait, alarm) for wait in LOOK_AT)

    @property
    def waiting(self) -> bool:
        """Whether a look at one of the next frames is due."""
        return bool(self._pending)

    def look(self, frames: Iterable[Frame], *, last: bool = False) -> bool:
        """A frame has closed (or the data end: `last`): judge what is due. Returns whether anything was judged."""
        if not self._pending:
            return False
        due = [alarm for wait, alarm in self._pending if wait <= 0 or last]
        self._pending = [] if last else [(wait - 1, alarm) for wait, alarm in self._pending if wait > 0]
        ring = list(frames) if due else []
        for alarm in due:
            key = _key(alarm)
            self._judged[key] = settled(self._judged.get(key), self._walk(alarm, ring))
        return bool(due)

    def end_attempt(self, attempt: int, frames: Iterable[Frame]) -> None:
        """The attempt is over: judge what waits, and keep its last frames."""
        ring = list(frames)
        self.look(ring, last=True)
        self._ends.append((attempt, tuple(ring[-END_FRAMES:])))

    def finding(self, alarm: Alarm, frames: Iterable[Frame]) -> Finding:
        """The finding of a fact. `frames` is what is at hand for one that was not judged when it was told."""
        plain = fact_of(alarm)
        if alarm.kind not in self._kinds:
            return plain
        judgement = self._judged.get(_key(alarm))
        if judgement is None:
            kept = next((ring for attempt, ring in self._ends if attempt == alarm.attempt), None)
            judgement = self._walk(alarm, list(frames) if kept is None else kept)
        results, verdict = judgement
        if not any(r.status not in (Status.NOT_OBSERVED, Status.CRASHED) for r in results if r.suspect != UNDETERMINED):
            return plain
        suspect = self._known.get(verdict)
        remedy = plain.remedy
        if suspect is not None and plain.severity is not Severity.INFO and suspect.action != "continue":
            remedy = Remedy(action=suspect.action, reason=suspect.remedy)
        # plans answer incidents; a fact is repaired first
        unplanned = {"no_plan": "repair the cause first"} if plain.severity is Severity.ERROR else {}
        missing = {m.signal: m for result in results for m in result.missing}
        return replace(
            plain,
            suspects=results,
            verdict=verdict,
            remedy=remedy,
            ranks=culprit_ranks(results, verdict) or plain.ranks,
            missing=tuple(missing.values()),
            details={**plain.details, **second_opinion.detail(results, alarm.kind), **unplanned},
        )

    def _walk(self, alarm: Alarm, frames: Sequence[Frame]) -> Judgement:
        incident = Incident(
            id=f"a{alarm.attempt}-s{alarm.onset_step}-{alarm.kind}",
            attempt=alarm.attempt,
            onset_step=alarm.onset_step,
            alarms=(alarm,),
            last_alarm_step=alarm.step,
        )
        return walk(Case(incident, frames, met=self._history.signals), self._suspects)

    def state_dict(self) -> dict[str, Any]:
        return copy.deepcopy({"judged": self._judged, "pending": self._pending, "ends": self._ends})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        state = copy.deepcopy(dict(state))
        self._judged, self._pending, self._ends = state["judged"], state["pending"], state["ends"]


def _key(alarm: Alarm) -> Key:
    return (alarm.kind, alarm.attempt, alarm.onset_step, alarm.ranks)
