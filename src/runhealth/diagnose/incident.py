"""Alarms of one cause become one incident, and the incident is followed until it is over.

An alarm joins the open incident if it comes at most `JOIN_FRAMES` later, or while the loss has not come back. Channel
alarms (learning rate, update ratio, token statistics) open nothing; those of the last `LEAD_FRAMES` join the incident
that follows, and the onset is that of the earliest channel.
"""

import copy
import math
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from runhealth.diagnose.detector import CHANNEL
from runhealth.diagnose.findings import Alarm
from runhealth.diagnose.frame_block import FrameBlock
from runhealth.diagnose.frames import Frame
from runhealth.diagnose.tracked import CAUSAL_KINDS, LEVEL_POINTS, LOSS_KINDS, TIE_STEPS, Tracked

JOIN_FRAMES = 32
LEAD_FRAMES = 32
OPEN_FRAMES = 512  # an incident whose loss never came back takes in alarms for so long
CLOSE_FRAMES = 32  # so long after the last alarm, a recovered incident is over
PAUSE_STEPS = 8  # damage that goes on in the next shard so soon is of one cause
AGAIN_AT = (0, 2)  # frames after an alarm of a kind that the incident did not have
FOLLOW_ROWS = 1024
WALK_AT = (2, 16, 64)  # frames after the first alarm at which the suspects are walked


class IncidentTracker:
    """Groups alarms; says which incidents are due for a walk over the suspects."""

    def __init__(self) -> None:
        self.open: list[Tracked] = []
        self.closed: list[Tracked] = []
        self._index = 0
        self._channels: deque[tuple[int, Alarm]] = deque()
        self._losses: deque[float] = deque(maxlen=2 * LEVEL_POINTS)

    def update(self, frame: Frame, alarms: list[Alarm]) -> list[Tracked]:
        """Returns incidents that are due for a walk: new information, or over."""
        self._index += 1
        index = self._index
        if not (alarms or self.open or self._channels):
            if frame.loss is not None and math.isfinite(frame.loss):
                self._losses.append(frame.loss)
            return []
        for tracked in self.open:
            tracked.observe(frame, index)
        heads = [alarm for alarm in alarms if alarm.kind in CAUSAL_KINDS]
        channels = [alarm for alarm in alarms if alarm.kind == CHANNEL]
        for alarm in heads:
            tracked_or_none = self._joinable(index, alarm)
            if tracked_or_none is None:
                tracked = Tracked(alarm.attempt, index, alarm)
                for _, channel in self._channels:
                    tracked.add(channel, index)
                self._channels.clear()
                self.open.append(tracked)
            else:
                tracked = tracked_or_none
                if not tracked.of(alarm.kind):
                    tracked.again = [index + wait for wait in AGAIN_AT]
            tracked.add(alarm, index, self._losses)
            if alarm.kind == "non_finite":
                tracked.bad_points += 1
        for channel in channels:
            target = self._joinable(index, channel)
            if target is not None and index - target.first_index <= LEAD_FRAMES:
                target.add(channel, index)
            else:
                self._channels.append((index, channel))
        while self._channels and index - self._channels[0][0] > LEAD_FRAMES:
            self._channels.popleft()
        if frame.loss is not None and math.isfinite(frame.loss):
            self._losses.append(frame.loss)
        return self._due(index)

    def follow(self, block: FrameBlock, row: int, stop: int) -> tuple[int, list[Tracked]]:
        """The same as `update` of each row from `row` to before `stop`, none of which has alarms, up to the first
        after which incidents are due for a walk. Returns the row after the last that was looked at, and those."""
        losses = block.loss
        while row < stop:
            if not (self.open or self._channels):
                self._index += stop - row
                if losses is not None:
                    seen = losses.values[row:stop]
                    self._losses.extend(seen[np.isfinite(seen)][-2 * LEVEL_POINTS :].tolist())
                return stop, []
            if not self._channels and all(tracked.follows_loss_only for tracked in self.open):
                row, due = self._follow_loss(block, row, stop)
            else:
                due = self.update(block.frame(row), [])
                row += 1
            if due:
                return row, due
        return row, []

    def _follow_loss(self, block: FrameBlock, row: int, stop: int) -> tuple[int, list[Tracked]]:
        """The same while nothing but the loss matters, and nothing is due."""
        stop = min(stop, row + FOLLOW_ROWS)
        steps, signal = block.steps[row:stop].tolist(), block.loss
        losses: list[float | None] = [None] * len(steps)
        if signal is not None:
            there = signal.present[row:stop].tolist()
            losses = [
                loss if known else None for loss, known in zip(signal.values[row:stop].tolist(), there, strict=True)
            ]
        for step, loss in zip(steps, losses, strict=True):
            self._index += 1
            row += 1
            for tracked in self.open:
                tracked.observe_loss(step, loss)
            if loss is not None and math.isfinite(loss):
                self._losses.append(loss)
            due = self._due(self._index)
            if due:
                return row, due
        return row, []

    def end_attempt(self) -> list[Tracked]:
        """The attempt, or the data, ends: what is open is judged as it stands and followed no further."""
        ended = self.open
        self.open = []
        self.closed.extend(ended)
        self._channels.clear()
        return ended

    def _joinable(self, index: int, alarm: Alarm) -> Tracked | None:
        if alarm.kind == "data_corrupt":
            return self._same_data(index, alarm)
        for tracked in reversed(self.open):
            since = index - tracked.last_index
            if tracked.shard is not None:
                never_back = alarm.kind in LOSS_KINDS and tracked.has_loss and not tracked.loss_is_back
                if since <= JOIN_FRAMES or (never_back and index - tracked.first_index <= OPEN_FRAMES):
                    return tracked
            elif tracked.loss_is_back:
                fresh = alarm.kind in LOSS_KINDS and alarm.onset_step >= tracked.back_from
                still = alarm.kind in LOSS_KINDS and tracked.only_touched
                if (still and index - tracked.first_index <= OPEN_FRAMES) or (not fresh and since <= JOIN_FRAMES):
                    return tracked
            elif since <= JOIN_FRAMES or (tracked.has_loss and index - tracked.first_index <= OPEN_FRAMES):
                return tracked
        return None

    def _same_data(self, index: int, alarm: Alarm) -> Tracked | None:
        """The incident of this shard or of the one just before, or one that began when its data were first read."""
        for tracked in reversed(self.open):
            if index - tracked.last_index > JOIN_FRAMES:
                continue
            if tracked.shard is not None:
                pause = alarm.onset_step - (tracked.bad_data_step or 0)
                if alarm.details.get("shard") in tracked.shards or pause <= PAUSE_STEPS:
                    return tracked
            elif alarm.onset_step <= (tracked.loss_onset_step or tracked.onset_step) + TIE_STEPS:
                return tracked
        return None

    def _due(self, index: int) -> list[Tracked]:
        due = []
        for tracked in list(self.open):
            age = index - tracked.first_index
            if tracked.recovered and index - tracked.last_index >= CLOSE_FRAMES:
                tracked.closed = True
                self.open.remove(tracked)
                self.closed.append(tracked)
                due.append(tracked)
            elif tracked.again and index >= tracked.again[0]:
                del tracked.again[0]
                due.append(tracked)
            elif tracked.walks < len(WALK_AT) and age >= WALK_AT[tracked.walks]:
                tracked.walks += 1
                due.append(tracked)
        return due

    def state_dict(self) -> dict[str, Any]:
        return copy.deepcopy(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        vars(self).update(copy.deepcopy(dict(state)))
