"""The memory that tensors hold was level and now rises at every step.

Floors of blocks of eight rows: six in a row that each lie over the one before, by 2 % in all and by six times what the
level floors before scattered. Sooner than `memory_growth`, which needs no level stretch before and so needs more rows.
"""

import itertools
from collections import deque
from typing import ClassVar

import numpy as np

from runhealth.diagnose.detector import Detector
from runhealth.diagnose.findings import Alarm
from runhealth.diagnose.frame_block import FrameBlock
from runhealth.diagnose.frames import Frame
from runhealth.diagnose.robust import mad_sigma, median
from runhealth.storage.blocks import Floats

BLOCK_ROWS = 8
RISES = 6
LEVEL_BLOCKS = 8
KEEP_BLOCKS = 32
GROWTH = 0.02
SIGMAS = 6.0
SIGNAL = "mem_allocated_bytes"


class MemoryLeak(Detector):
    name: ClassVar[str] = "memory_leak"
    kinds: ClassVar[tuple[str, ...]] = ("memory_growth",)
    reads: ClassVar[tuple[str, ...]] = (SIGNAL,)
    replay: ClassVar[bool] = False

    def __init__(self) -> None:
        self._rows = 0
        self._first = 0
        self._block: dict[int, float] = {}
        self._floors: dict[int, deque[tuple[int, float]]] = {}  # rank -> first step and floor of each block
        self._told = False

    def update(self, frame: Frame) -> list[Alarm]:
        if frame.new_attempt:
            self._block, self._rows, self._told = {}, 0, False
        held = frame.per_rank(SIGNAL)
        if not held:
            return []
        block = self._block
        if not self._rows:
            self._first = frame.step
        for rank, value in held.items():
            low = block.get(rank)
            if low is None or value < low:
                block[rank] = float(value)
        self._rows += 1
        if self._rows < BLOCK_ROWS:
            return []
        rising = []
        for rank, floor in block.items():
            floors = self._floors.setdefault(rank, deque(maxlen=KEEP_BLOCKS))
            floors.append((self._first, floor))
            if _rises([value for _, value in floors]):
                rising.append(rank)
        self._block, self._rows = {}, 0
        return self._tell(frame, rising, len(held))

    def _tell(self, frame: Frame, rising: list[int], ranks: int) -> list[Alarm]:
        if not rising or self._told:
            return []
        self._told = True
        floors = self._floors[rising[0]]
        onset, before = _begin(list(floors))
        now = floors[-1][1]
        a_step = (now - before) / max(1, floors[-1][0] - onset)
        message = (
            f"the memory that tensors hold was level at {before / 1e9:.3g} GB and rises by {a_step / 1e6:.3g} MB a "
            f"step since about step {onset:,}"
        )
        return [
            self.fact(
                frame,
                "memory_growth",
                SIGNAL,
                message,
                onset=onset,
                value=now,
                baseline=before,
                ranks=tuple(rising) if len(rising) < ranks else (),
            )
        ]

    def update_block(self, block: FrameBlock) -> list[tuple[int, Alarm]]:
        held = block.per_rank(SIGNAL)
        if held is None:
            return []
        ranks, steps = block.ranks, block.steps
        if not np.isfinite(held.values).all() or (self._rows and self._block.keys() != {*ranks}):
            return super().update_block(block)
        started = self._rows  # rows of the first of these blocks that came before
        known = [[self._block[rank] for rank in ranks]] * started if started else []
        values = np.concatenate([known, held.values]) if known else held.values
        count = len(values) // BLOCK_ROWS
        lows = values[: count * BLOCK_ROWS].reshape(count, BLOCK_ROWS, len(ranks)).min(axis=1)
        begins = np.arange(count) * BLOCK_ROWS - started
        firsts = [self._first if at < 0 else int(steps[at]) for at in begins.tolist()]
        found: list[tuple[int, Alarm]] = []
        at = 0
        for i in [*self._climbs(ranks, lows), count]:
            for rank, floors in zip(ranks, lows[at : i + 1].T.tolist(), strict=True):
                if floors:
                    kept = self._floors.setdefault(rank, deque(maxlen=KEEP_BLOCKS))
                    kept.extend(zip(firsts[at : i + 1], floors, strict=True))
            at = i + 1
            if i < count:
                rising = [rank for rank in ranks if _rises([value for _, value in self._floors[rank]])]
                row = int(begins[i]) + BLOCK_ROWS - 1
                found.extend((row, alarm) for alarm in self._tell(block.frame(row), rising, len(ranks)))
        rest = values[count * BLOCK_ROWS :]
        if len(rest) and not (count == 0 and started):
            self._first = int(steps[count * BLOCK_ROWS - started])
        elif count:
            self._first = firsts[-1]
        self._rows = len(rest)
        self._block = dict(zip(ranks, rest.min(axis=0).tolist(), strict=True)) if len(rest) else {}
        return found

    def _climbs(self, ranks: tuple[int, ...], lows: Floats) -> list[int]:
        """Which of the blocks (k, R) may end a rise of some rank."""
        if self._told or not len(lows):
            return []  # told once an attempt
        before = [[value for _, value in list(self._floors.get(rank, ()))[-RISES:]] for rank in ranks]
        rises = np.zeros(len(lows), dtype=np.bool_)
        for floors, old in zip(lows.T, before, strict=True):
            up = np.diff(np.concatenate([old, floors])) > 0
            since = np.arange(len(up)) - np.maximum.accumulate(np.where(up, -1, np.arange(len(up))))  # rises in a row
            ends = since[len(up) - len(floors) :] if len(old) else np.concatenate([[0], since])
            rises |= ends >= RISES
        return np.flatnonzero(rises).tolist()


def _begin(floors: list[tuple[int, float]]) -> tuple[int, float]:
    """Where the line through the rising floors meets the level before: (step, level)."""
    level = median([value for _, value in floors[: -RISES - 1][-LEVEL_BLOCKS:]])
    (s0, v0), (s1, v1) = floors[-RISES // 2 - 1], floors[-1]
    slope = (v1 - v0) / max(1, s1 - s0)
    step = s1 - int((v1 - level) / slope) if slope > 0 else s0
    return min(max(step, floors[-RISES - 1][0]), s1), level


def _rises(floors: list[float]) -> bool:
    level, last = floors[: -RISES - 1][-LEVEL_BLOCKS:], floors[-RISES - 1 :]
    if len(level) < LEVEL_BLOCKS // 2 or any(b <= a for a, b in itertools.pairwise(last)):
        return False
    center = median(level)
    grown = last[-1] - last[0]
    scatter = max(mad_sigma(sorted(level), center), (max(level) - min(level)) / 4)
    return center > 0 and grown > GROWTH * center and grown > SIGMAS * scatter


DETECTOR = MemoryLeak
