"""One rank holds the others up: its compute is longest, and it waits least.

Wall times are equal behind an all-reduce, so they tell nothing about ranks; compute (forward and backward) and wait do.
A rank is named when its compute is over 10 % and 6 robust sigma above the median of the others, and its wait, where
recorded, the smallest of all, for at least five frames and five seconds; a frame that says otherwise takes back two.
"""

import math
from collections import deque
from typing import ClassVar

from runhealth.diagnose.detector import Detector
from runhealth.diagnose.findings import Alarm
from runhealth.diagnose.frames import Frame
from runhealth.diagnose.robust import Baseline, median

EXCESS = 0.10
Z_ALARM = 6.0
FRAMES = 5
SECONDS = 5.0
TAKEN_BACK = 2
REARM_FRAMES = 256


class Straggler(Detector):
    name: ClassVar[str] = "straggler"
    kinds: ClassVar[tuple[str, ...]] = ("straggler",)
    reads: ClassVar[tuple[str, ...]] = ("t_forward_s",)

    def __init__(self) -> None:
        self._habit = Baseline(128, least=16, floor=0.01)  # largest excess of any rank, as a share
        self._rank: int | None = None
        self._onset = 0
        self._frames = 0
        self._seconds = 0.0
        self._excesses: deque[float] = deque(maxlen=FRAMES)
        self._since = REARM_FRAMES

    def update(self, frame: Frame) -> list[Alarm]:
        if len(frame.ranks) < 2:
            return []
        self._since += 1
        compute: dict[int, float] = {}
        slowest, longest = -1, -math.inf
        for rank, values in frame.ranks.items():
            forward = values.get("t_forward_s")
            if forward is not None:
                compute[rank] = seconds = forward + values.get("t_backward_s", 0.0)
                if seconds > longest:
                    slowest, longest = rank, seconds
        if len(compute) < 2 or slowest < 0:
            return []
        others = median(sorted(v for r, v in compute.items() if r != slowest))
        if not math.isfinite(compute[slowest]) or others <= 0:
            return []
        excess = compute[slowest] / others - 1
        if excess <= EXCESS and self._frames <= 0:
            self._habit.push(excess)
            return []
        waits = {rank: values["t_wait_s"] for rank, values in frame.ranks.items() if "t_wait_s" in values}
        least = not waits or slowest not in waits or waits[slowest] <= 1.05 * min(waits.values())
        ready = self._habit.ready
        beyond = ready and excess > EXCESS and least and (excess - self._habit.center) > Z_ALARM * self._habit.sigma
        seconds = compute[slowest] + waits.get(slowest, 0.0)
        if not beyond:
            self._habit.push(excess)
        if not beyond or slowest != self._rank:
            self._frames = max(self._frames, 0) - TAKEN_BACK
            self._seconds -= TAKEN_BACK * seconds
            if self._frames > 0 or not beyond:
                return []
            self._rank, self._onset, self._frames, self._seconds = slowest, frame.step, 0, 0.0
            self._excesses.clear()
        self._frames += 1
        self._seconds += seconds
        self._excesses.append(excess)
        if self._frames < FRAMES or self._seconds < SECONDS or self._since < REARM_FRAMES:
            return []
        self._since = 0
        typical = median(sorted(self._excesses))
        wait = " and it waits least" if waits else ""
        return [
            Alarm(
                detector=self.name,
                kind="straggler",
                signal="t_forward_s",
                attempt=frame.attempt,
                step=frame.step,
                onset_step=self._onset,
                score=typical / EXCESS,
                value=compute[slowest],
                baseline=others,
                ranks=(slowest,),
                message=f"rank {slowest} computes {typical:.0%} longer than the others since step "
                f"{self._onset:,}{wait}: it holds them up",
            )
        ]


DETECTOR = Straggler
