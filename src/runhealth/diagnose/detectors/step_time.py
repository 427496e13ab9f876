"""Step time: one slow step, stalls that recur with a period, a slowdown that stays.

The time of a step is that of its slowest rank. The first 32 frames of an attempt warm up (compilation, caches) and only
count for periods. A period needs more equal gaps, counted in logged rows, than chance explains among all stalls so far,
and a cost: a twentieth of a second a stall and 0.5 % of the time. A slowdown that ended, and by the end of the data had
cost little, is told again as info.
"""

import itertools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, NamedTuple

import numpy as np

from runhealth.diagnose.detector import Detector
from runhealth.diagnose.findings import Alarm, Severity
from runhealth.diagnose.frame_block import FrameBlock
from runhealth.diagnose.frames import Frame
from runhealth.diagnose.robust import Baseline, median
from runhealth.diagnose.windows import Ahead, Chunks, settled, take, total
from runhealth.storage.blocks import Floats, Ints

WARM_FRAMES = 32
SLOW = 4.0  # x the median: a slow step
STALL = 2.5  # x the median, if it recurs
STALLS = 5  # at least so many make a period
KEEP_STALLS = 16
CHANCE = 1e-3  # of equal gaps among all stalls so far
STALL_COST_S = 0.05  # less than this a stall: the host, not the job
STALL_COST_SHARE = 0.005
SLOWER = 1.5
SLOWER_FRAMES = 8
SLOWER_S = 30.0  # a hiccup of the host is over sooner
FEW_ROWS = 64
MUCH_SLOWER = 2.0  # under this, a schedule (longer sequences, wider attention) is as likely as a fault
COSTLY_SHARE = 0.05  # of all time
OVER_FRAMES = 16  # so many frames at the old pace: the slowdown is over


class StepTime(Detector):
    name: ClassVar[str] = "step_time"
    kinds: ClassVar[tuple[str, ...]] = ("slow_step", "periodic_stall", "sustained_slowdown")
    reads: ClassVar[tuple[str, ...]] = ("t_step_s",)

    def __init__(self) -> None:
        self._time = Baseline(128, least=8, floor_share=0.02)
        self._stalls: deque[_Stall] = deque(maxlen=KEEP_STALLS)
        self._stalls_seen = 0
        self._total_s = 0.0
        self._slowdowns: list[_Slowdown] = []
        self._slower: list[int] = []
        self._slower_s = 0.0
        self._frames = 0
        self._period: float | None = None

    def update(self, frame: Frame) -> list[Alarm]:
        seconds = frame.largest("t_step_s")
        if seconds is None or not math.isfinite(seconds) or seconds <= 0:
            return []
        if frame.new_attempt:
            self._slowdowns.clear()  # those of the attempt before were told when it ended
        self._frames += 1
        self._total_s += seconds
        if self._slowdowns and self._slowdowns[-1].end is None:
            self._slowdowns[-1].follow(frame.step, float(seconds))
        if not self._time.ready:
            self._time.push(float(seconds))
            return []
        usual = self._time.center
        ratio = seconds / usual
        if ratio < SLOWER:
            self._time.push(float(seconds))
            self._slower.clear()
            self._slower_s = 0.0
            return []
        alarms = self._sustained(frame, float(seconds), usual)
        if ratio >= STALL:
            alarms += self._stall(frame, float(seconds), usual)
        return alarms

    def update_block(self, block: FrameBlock) -> list[tuple[int, Alarm]]:
        signal = block.largest("t_step_s")
        if signal is None:
            return []
        rows = np.flatnonzero(np.isfinite(signal.values) & (signal.values > 0))
        seconds, steps = signal.values[rows], block.steps[rows]
        found: list[tuple[int, Alarm]] = []
        part = Chunks(self._time, len(rows))
        while part:
            if part.end - part.at <= FEW_ROWS:  # among many slow steps arrays cost more than they save
                stop = part.at + self._pass(steps[part.at : part.end].tolist(), seconds[part.at : part.end].tolist())
            else:
                stop = part.at + self._first_slow(seconds[part.at : part.end])
            if stop > part.at and part.end - part.at > FEW_ROWS:
                quiet = seconds[part.at : stop]
                self._frames += len(quiet)
                self._total_s = total(self._total_s, quiet)
                if self._slowdowns:
                    self._slowdowns[-1].follow_all(steps[part.at : stop], quiet)
                take(self._time, quiet)
                self._slower.clear()
                self._slower_s = 0.0
            if stop == part.end:
                part.quiet()
            else:
                found.extend(self.update_rows(block, (int(rows[stop]),)))
                part.loud(stop)
        return found

    def _pass(self, steps: list[int], seconds: list[float]) -> int:
        """Take in the rows before the first slow one, one by one. Returns how many."""
        time = self._time
        for i, value in enumerate(seconds):
            ready = time.ready
            if ready and value / time.center >= SLOWER:
                return i
            self._frames += 1
            self._total_s += value
            if self._slowdowns and self._slowdowns[-1].end is None:
                self._slowdowns[-1].follow(steps[i], value)
            time.push(value)
            if ready:
                self._slower.clear()
                self._slower_s = 0.0
        return len(seconds)

    def _first_slow(self, seconds: Floats) -> int:
        """The first that is much slower than usual; their number if none is."""
        if not settled(self._time):
            return 0
        if seconds.max() < SLOWER * min(float(seconds.min()), min(self._time.values)):
            return len(seconds)
        slow = seconds / Ahead(self._time, seconds).center() >= SLOWER
        return int(slow.argmax()) if slow.any() else len(seconds)

    def _sustained(self, frame: Frame, seconds: float, usual: float) -> list[Alarm]:
        self._slower.append(frame.step)
        self._slower_s += seconds
        if len(self._slower) < SLOWER_FRAMES or self._slower_s < SLOWER_S:
            return []
        onset = self._slower[0]
        self._slower.clear()
        self._slower_s = 0.0
        warm = self._frames > WARM_FRAMES or onset > WARM_FRAMES
        self._time = Baseline(128, least=8, floor_share=0.02)  # the new pace is the habit from here on
        if not warm:
            return []
        alarm = Alarm(
            detector=self.name,
            kind="sustained_slowdown",
            signal="t_step_s",
            attempt=frame.attempt,
            step=frame.step,
            onset_step=onset,
            score=seconds / usual,
            value=seconds,
            baseline=usual,
            message=f"steps take {seconds:.3g} s since step {onset:,} and took {usual:.3g} s before "
            f"({seconds / usual:.1f} x)",
            severity=Severity.WARNING if seconds >= MUCH_SLOWER * usual else Severity.INFO,
        )
        self._slowdowns.append(_Slowdown(alarm, usual))
        return [alarm]

    def finish(self) -> list[Alarm]:
        """Slowdowns that are over and cost little of all time."""
        return [
            slowdown.over()
            for slowdown in self._slowdowns
            if slowdown.end is not None and slowdown.lost_s < COSTLY_SHARE * self._total_s
        ]

    def _stall(self, frame: Frame, seconds: float, usual: float) -> list[Alarm]:
        self._stalls_seen += 1
        self._stalls.append(_Stall(self._frames, frame.step, seconds, _culprit(frame)))
        rows = [stall.row for stall in self._stalls]
        if self._period is not None and len(rows) >= 2 and _same([rows[-1] - rows[-2], self._period]):
            return []  # the known period goes on
        regular = self._regular(rows)
        if regular:
            group = list(self._stalls)[-regular:]
            period = median(sorted(b - a for a, b in itertools.pairwise(rows[-regular:])))
            stall = median(sorted(one.seconds for one in group))
            share = (stall - usual) / (period * usual)
            if stall - usual >= STALL_COST_S and share >= STALL_COST_SHARE:
                self._period = period
                return [self._periodic(frame, group, stall, usual, share)]
        if seconds < SLOW * usual or self._frames <= WARM_FRAMES:
            return []
        return [
            Alarm(
                detector=self.name,
                kind="slow_step",
                signal="t_step_s",
                attempt=frame.attempt,
                step=frame.step,
                onset_step=frame.step,
                score=seconds / usual,
                value=seconds,
                baseline=usual,
                severity=Severity.INFO,
                message=f"step {frame.step:,} took {seconds:.3g} s, its neighbours {usual:.3g} s",
            )
        ]

    def _regular(self, rows: list[int]) -> int:
        """How many of the last stalls follow each other at equal gaps; 0 when chance explains so many."""
        gaps = [b - a for a, b in itertools.pairwise(rows)]
        count = 0
        while count < len(gaps) and min(gaps[-count - 1 :]) >= 2 and _same(gaps[-count - 1 :]):
            count += 1
        if count + 1 < STALLS:
            return 0
        middle = median(sorted(gaps[-count:]))
        likely = min(0.9, (2 * _tolerance(middle) + 1) / middle)  # that one more gap is equal by chance
        return count + 1 if self._stalls_seen * likely ** (count - 1) < CHANCE or count + 1 == KEEP_STALLS else 0

    def _periodic(self, frame: Frame, group: list["_Stall"], stall: float, usual: float, share: float) -> Alarm:
        steps = (group[-1].step - group[0].step) / (len(group) - 1)
        ranks = [one.rank for one in group if one.rank is not None]
        who = ""
        if ranks and len(set(ranks)) > 1:
            who = ", on a different rank each time (as garbage collection does)"
        elif ranks:
            who = f", always on rank {ranks[0]}"
        return Alarm(
            detector=self.name,
            kind="periodic_stall",
            signal="t_step_s",
            attempt=frame.attempt,
            step=frame.step,
            onset_step=group[0].step,
            score=stall / usual,
            value=stall,
            baseline=usual,
            ranks=(ranks[0],) if ranks and len(set(ranks)) == 1 else (),
            severity=Severity.WARNING if share >= COSTLY_SHARE else Severity.INFO,
            message=f"about every {steps:.0f} steps one takes {stall:.3g} s instead of {usual:.3g} s{who}; it "
            f"costs {share:.0%} of the time",
        )


class _Stall(NamedTuple):
    row: int  # counts the logged rows
    step: int
    seconds: float
    rank: int | None


class _Slowdown:
    """A slowdown that was told, followed until the old pace is back."""

    def __init__(self, alarm: Alarm, usual: float) -> None:
        self.alarm = alarm
        self.usual = usual
        self.lost_s = SLOWER_FRAMES * (alarm.value - usual)
        self.end: int | None = None
        self._quick: list[int] = []

    def follow(self, step: int, seconds: float) -> None:
        self.lost_s += max(0.0, seconds - self.usual)
        if seconds >= SLOWER * self.usual:
            self._quick.clear()
            return
        self._quick.append(step)
        if len(self._quick) >= OVER_FRAMES:
            self.end = self._quick[0]

    def follow_all(self, steps: Ints, seconds: Floats) -> None:
        """`follow` of many rows, until the slowdown is over."""
        if self.end is not None:
            return
        slow = seconds >= SLOWER * self.usual
        rows = np.arange(len(slow))
        since = np.maximum.accumulate(np.where(slow, rows, -1))  # the last slow row
        quick = np.where(since < 0, rows + 1 + len(self._quick), rows - since)
        over = quick >= OVER_FRAMES
        stop = int(over.argmax()) + 1 if over.any() else len(slow)
        self.lost_s = total(self.lost_s, np.maximum(0.0, seconds[:stop] - self.usual))
        last = int(since[stop - 1])
        if last >= 0:
            self._quick.clear()
        self._quick.extend(steps[last + 1 : stop].tolist())
        if over.any():
            self.end = self._quick[0]

    def over(self) -> Alarm:
        message = f"{self.alarm.message}, until step {self.end:,}; {self.lost_s:.3g} s were lost"
        return replace(self.alarm, severity=Severity.INFO, end_step=self.end, message=message)


def _tolerance(middle: float) -> float:
    """By how much gaps may differ: not at all where they are short, since on a noisy host many short gaps are nearly
    equal."""
    return 0 if middle < 20 else max(1.0, 0.05 * middle)


def _same(gaps: Sequence[float]) -> bool:
    return max(gaps) - min(gaps) <= _tolerance(median(sorted(gaps)))


def _culprit(frame: Frame) -> int | None:
    """The rank that computed longest, where compute times are known and one stands out."""
    times = {
        rank: values.get("t_forward_s", 0) + values.get("t_backward_s", 0)
        for rank, values in frame.ranks.items()
        if "t_forward_s" in values
    }
    if len(times) < 2:
        return None
    ordered = sorted(times, key=lambda r: -times[r])
    return ordered[0] if times[ordered[0]] > 1.5 * times[ordered[1]] else None


DETECTOR = StepTime
