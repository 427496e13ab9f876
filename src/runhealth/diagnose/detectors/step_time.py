"""Step time: one slow step, stalls that recur with a period, a slowdown that stays.

The time of a step is that of its slowest rank. The first 32 frames of an attempt warm up (compilation, caches) and only
count for periods.
"""

import itertools
import math
from collections import deque
from collections.abc import Sequence
from typing import ClassVar

from runhealth.diagnose.detector import Detector
from runhealth.diagnose.findings import Alarm, Severity
from runhealth.diagnose.frames import Frame
from runhealth.diagnose.robust import Baseline, median

WARM_FRAMES = 32
SLOW = 4.0  # x the median: a slow step
STALL = 2.5  # x the median, if it recurs
STALLS = 5
SLOWER = 1.5
SLOWER_FRAMES = 8
SLOWER_S = 30.0  # a hiccup of the host is over sooner
MUCH_SLOWER = 2.0  # under this, a schedule (longer sequences, wider attention) is as likely as a fault
COSTLY_SHARE = 0.05  # of all time


class StepTime(Detector):
    name: ClassVar[str] = "step_time"
    kinds: ClassVar[tuple[str, ...]] = ("slow_step", "periodic_stall", "sustained_slowdown")

    def __init__(self) -> None:
        self._time = Baseline(128, least=8, floor_share=0.02)
        self._stalls: deque[tuple[int, float, int | None]] = deque(maxlen=STALLS)
        self._slower: list[int] = []
        self._slower_s = 0.0
        self._frames = 0
        self._period: float | None = None

    def update(self, frame: Frame) -> list[Alarm]:
        seconds = frame.largest("t_step_s")
        if seconds is None or not math.isfinite(seconds) or seconds <= 0:
            return []
        self._frames += 1
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
        return [
            Alarm(
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
        ]

    def _stall(self, frame: Frame, seconds: float, usual: float) -> list[Alarm]:
        self._stalls.append((frame.step, seconds, _culprit(frame)))
        steps = [step for step, _, _ in self._stalls]
        if self._period is not None and len(steps) >= 2 and _same([steps[-1] - steps[-2], self._period]):
            return []  # the known period goes on
        gaps = [b - a for a, b in itertools.pairwise(steps)]
        if len(steps) >= STALLS and min(gaps) >= 2 and _same(gaps):
            self._period = median(sorted(gaps))
            return [self._periodic(frame, steps[0], usual)]
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

    def _periodic(self, frame: Frame, onset: int, usual: float) -> Alarm:
        assert self._period is not None
        stall = median(sorted(seconds for _, seconds, _ in self._stalls))
        share = (stall - usual) / (self._period * usual)
        ranks = [rank for _, _, rank in self._stalls if rank is not None]
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
            onset_step=onset,
            score=stall / usual,
            value=stall,
            baseline=usual,
            ranks=(ranks[0],) if ranks and len(set(ranks)) == 1 else (),
            severity=Severity.WARNING if share >= COSTLY_SHARE else Severity.INFO,
            message=f"about every {self._period:.0f} steps one takes {stall:.3g} s instead of {usual:.3g} s{who}; it "
            f"costs {share:.0%} of the time",
        )


def _same(gaps: Sequence[float]) -> bool:
    """Equal gaps: to the step where they are short, since on a noisy host many short gaps are nearly equal."""
    middle = median(sorted(gaps))
    return max(gaps) - min(gaps) <= (0 if middle < 20 else max(1.0, 0.05 * middle))


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
