"""The floor of the allocated memory rises without end: a leak.

The floor is the lowest value of each of at most 24 blocks of rows; blocks are joined in pairs when there are more. Told
when a dozen blocks rose nearly every time, by 15 % in all, and as fast in their second half as in the first: what warms
up levels off, and a sawtooth has a level floor. Nothing is told of less than 384 rows or 2,000 steps.
"""

import itertools
from typing import ClassVar

import numpy as np

from runhealth.diagnose.detector import Detector
from runhealth.diagnose.findings import Alarm
from runhealth.diagnose.frame_block import FrameBlock
from runhealth.diagnose.frames import Frame
from runhealth.storage.blocks import Floats, Ints

BLOCK_ROWS = 8
BLOCKS = 24
LEAST_BLOCKS = 12
GROWTH = 0.15
LEAST_ROWS, LEAST_STEPS = 384, 2000
SECOND_HALF = 0.42  # of all growth
RISING = 0.85  # of the blocks
SIGNALS = ("mem_allocated_bytes", "mem_reserved_bytes", "mem_rss_bytes")

Floors = list[tuple[float, int]]  # lowest value and first step of each block


class MemoryGrowth(Detector):
    name: ClassVar[str] = "memory_growth"
    kinds: ClassVar[tuple[str, ...]] = ("memory_growth",)
    reads: ClassVar[tuple[str, ...]] = ("mem_allocated_bytes", "mem_reserved_bytes", "mem_rss_bytes")

    def __init__(self) -> None:
        self._floors: dict[tuple[str, int], Floors] = {}
        self._rows: dict[tuple[str, int], int] = {}  # of the block that fills
        self._size: dict[tuple[str, int], int] = {}
        self._told = False

    def update(self, frame: Frame) -> list[Alarm]:
        if frame.new_attempt:
            self.__init__()  # type: ignore[misc]
        due: dict[str, list[int]] = {}
        for rank, values in frame.ranks.items():
            for signal in SIGNALS:
                value = values.get(signal)
                if value is not None and self._push((signal, rank), float(value), frame.step):
                    due.setdefault(signal, []).append(rank)
        if self._told or not due:
            return []
        signal = next(s for s in SIGNALS if s in due)
        self._told = True
        ranks = due[signal]
        return [self._alarm(frame, signal, ranks, self._floors[signal, ranks[0]])]

    def update_block(self, block: FrameBlock) -> list[tuple[int, Alarm]]:
        due: dict[int, list[tuple[int, int, Floors]]] = {}  # row -> position of the signal, rank, floors
        for position, name in enumerate(SIGNALS):
            signal = block.per_rank(name)
            if signal is None:
                continue
            for j, rank in enumerate(block.ranks):
                rows = np.flatnonzero(signal.present[:, j])
                for row, floors in self._push_all((name, rank), signal.values[rows, j], block.steps[rows], rows):
                    due.setdefault(row, []).append((position, rank, floors))
        if self._told or not due:
            return []
        self._told = True
        row = min(due)
        position, _, floors = min(due[row], key=lambda found: found[:2])
        ranks = sorted(rank for of, rank, _ in due[row] if of == position)
        return [(row, self._alarm(block.frame(row), SIGNALS[position], ranks, floors))]

    def _push_all(self, key: tuple[str, int], values: Floats, steps: Ints, rows: Ints) -> list[tuple[int, Floors]]:
        """Take in many values; the rows at which a block filled that shows a leak, and its floors then."""
        found = []
        at = 0
        while at < len(values):
            if self._push(key, float(values[at]), int(steps[at])):
                found.append((int(rows[at]), list(self._floors[key])))
            at += 1
            room = min(self._size[key] - self._rows[key] - 1, len(values) - at)  # the last one of a block is looked at
            if room > 0:
                floor, step = self._floors[key][-1]
                lowest = float(np.fmin.reduce(values[at : at + room]))
                self._floors[key][-1] = (min(floor, lowest), step)
                self._rows[key] += room
                at += room
        return found

    def _alarm(self, frame: Frame, signal: str, ranks: list[int], floors: Floors) -> Alarm:
        first, now = floors[0][0], floors[-1][0]
        some = tuple(ranks) if len(ranks) < len(frame.ranks) else ()
        message = (
            f"the floor of {signal} rose from {first / 1e9:.3g} to {now / 1e9:.3g} GB since step {floors[0][1]:,} and "
            f"goes on rising: something is kept at every step"
        )
        return self.fact(
            frame, "memory_growth", signal, message, onset=floors[0][1], value=now, baseline=first, ranks=some
        )

    def _push(self, key: tuple[str, int], value: float, step: int) -> bool:
        """Take in a value; whether a block that just filled shows a leak."""
        floors = self._floors.setdefault(key, [])
        size = self._size.setdefault(key, BLOCK_ROWS)
        rows = self._rows.get(key, size)
        if rows < size:
            floors[-1] = (min(floors[-1][0], value), floors[-1][1])
            self._rows[key] = rows + 1
            long = size * (len(floors) - 1) >= LEAST_ROWS or step - floors[0][1] >= LEAST_STEPS
            return rows + 1 == size and long and self._leaks(floors)
        if len(floors) == BLOCKS:
            floors[:] = [
                min(pair, key=lambda f: f[0])[:1] + pair[0][1:] for pair in zip(floors[::2], floors[1::2], strict=True)
            ]
            self._size[key] = 2 * size
        floors.append((value, step))
        self._rows[key] = 1
        return False

    def _leaks(self, floors: Floors) -> bool:
        values = [value for value, _ in floors][1:]  # the first block warms up
        if len(values) < LEAST_BLOCKS or values[0] <= 0:
            return False
        growth = values[-1] - values[0]
        rising = sum(b > a for a, b in itertools.pairwise(values))
        second = values[-1] - values[len(values) // 2]
        return growth >= GROWTH * values[0] and rising >= RISING * (len(values) - 1) and second >= SECOND_HALF * growth


DETECTOR = MemoryGrowth
