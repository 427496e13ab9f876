"""One rank holds the others up: its compute is longest, and it waits least.

Wall times are equal behind an all-reduce, so they tell nothing about ranks; compute (forward and backward) and wait do.
A rank is named when its compute is over 10 % and 6 robust sigma above the median of the others, and its wait, where
recorded, the smallest of all, for at least five frames and five seconds; a frame that says otherwise takes back two.
"""

import itertools
import math
from bisect import bisect_left
from collections import deque
from typing import ClassVar

import numpy as np

from runhealth.diagnose.detector import Detector
from runhealth.diagnose.findings import Alarm
from runhealth.diagnose.frame_block import FrameBlock, Signal
from runhealth.diagnose.frames import Frame
from runhealth.diagnose.robust import Baseline, median
from runhealth.diagnose.windows import medians, push
from runhealth.storage.blocks import Ints

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
        if not math.isfinite(longest) or others <= 0:
            return []
        waits = {rank: values["t_wait_s"] for rank, values in frame.ranks.items() if "t_wait_s" in values}
        wait = waits.get(slowest)
        least = min(waits.values(), default=None)
        alarm = self._look(frame.attempt, frame.step, slowest, float(longest), float(others), wait, least)
        return [alarm] if alarm is not None else []

    def update_block(self, block: FrameBlock) -> list[tuple[int, Alarm]]:
        forward, backward, waits = (block.per_rank(f"t_{phase}_s") for phase in ("forward", "backward", "wait"))
        if len(block.ranks) < 2:
            return []
        if forward is None:
            self._since += len(block)
            return []
        compute = forward.values
        if backward is not None:
            compute = compute + np.where(backward.present, backward.values, 0.0)
        ordered = np.sort(compute, axis=1)
        others = medians(ordered[:, :-1], is_sorted=True)
        plain = np.isfinite(compute).all(axis=1) & (others > 0)  # all ranks have it
        excess = np.divide(ordered[:, -1], others, out=np.full(len(block), np.nan), where=plain) - 1
        loud = np.flatnonzero(~(excess <= EXCESS)).tolist()
        if not loud and self._frames <= 0:
            push(self._habit, excess)
            self._since += len(block)
            return []
        slow = compute.argmax(axis=1)
        wait, least = _waits(waits, slow) if waits is not None else ([None] * len(block), [None] * len(block))
        rows = list(
            zip(block.steps.tolist(), slow.tolist(), ordered[:, -1].tolist(), others.tolist(), wait, least, strict=True)
        )
        usual, is_plain = excess.tolist(), plain.tolist()
        found: list[tuple[int, Alarm]] = []
        row = 0
        while row < len(rows):
            if self._frames <= 0 and usual[row] <= EXCESS:
                later = bisect_left(loud, row)
                stop = loud[later] if later < len(loud) else len(rows)
                push(self._habit, excess[row:stop])
                self._since += stop - row
                row = stop
            elif is_plain[row]:
                self._since += 1
                step, j, *seconds = rows[row]
                alarm = self._look(block.attempt, step, block.ranks[j], *seconds)
                if alarm is not None:
                    found.append((row, alarm))
                row += 1
            else:
                found.extend(self.update_rows(block, (row,)))
                row += 1
        return found

    def _look(
        self,
        attempt: int,
        step: int,
        slowest: int,
        longest: float,
        others: float,
        wait: float | None,
        least_wait: float | None,
    ) -> Alarm | None:
        """The rank with the longest compute, in seconds; the median of the others; its wait, and the least of all."""
        excess = longest / others - 1
        if excess <= EXCESS and self._frames <= 0:
            self._habit.push(excess)
            return None
        least = least_wait is None or wait is None or wait <= 1.05 * least_wait
        ready = self._habit.ready
        beyond = ready and excess > EXCESS and least and (excess - self._habit.center) > Z_ALARM * self._habit.sigma
        seconds = longest + (wait or 0.0)
        if not beyond:
            self._habit.push(excess)
        if not beyond or slowest != self._rank:
            self._frames = max(self._frames, 0) - TAKEN_BACK
            self._seconds -= TAKEN_BACK * seconds
            if self._frames > 0 or not beyond:
                return None
            self._rank, self._onset, self._frames, self._seconds = slowest, step, 0, 0.0
            self._excesses.clear()
        self._frames += 1
        self._seconds += seconds
        self._excesses.append(excess)
        if self._frames < FRAMES or self._seconds < SECONDS or self._since < REARM_FRAMES:
            return None
        self._since = 0
        typical = median(sorted(self._excesses))
        waits_least = " and it waits least" if least_wait is not None else ""
        return Alarm(
            detector=self.name,
            kind="straggler",
            signal="t_forward_s",
            attempt=attempt,
            step=step,
            onset_step=self._onset,
            score=typical / EXCESS,
            value=longest,
            baseline=others,
            ranks=(slowest,),
            message=f"rank {slowest} computes {typical:.0%} longer than the others since step "
            f"{self._onset:,}{waits_least}: it holds them up",
        )


def _waits(waits: Signal, slow: Ints) -> tuple[list[float | None], list[float | None]]:
    """The wait of the slowest rank of each row, and the least of all ranks."""
    rows = np.arange(len(slow))
    mine = zip(waits.values[rows, slow].tolist(), waits.present[rows, slow].tolist(), strict=True)
    own = [seconds if there else None for seconds, there in mine]
    if waits.present.all():
        return own, list(map(min, waits.values.tolist()))
    every = zip(waits.values.tolist(), waits.present.tolist(), strict=True)
    return own, [min(itertools.compress(row, there), default=None) for row, there in every]


DETECTOR = Straggler
