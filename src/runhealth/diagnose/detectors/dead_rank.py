"""A rank that wrote with every row writes no more while the others go on: 16 rows without it."""

from collections import deque
from typing import ClassVar

from runhealth.diagnose.detector import Detector
from runhealth.diagnose.findings import Alarm
from runhealth.diagnose.frame_block import FrameBlock
from runhealth.diagnose.frames import Frame

ABSENT_ROWS = 16
KNOWN_ROWS = 32
REGULAR = 0.9


class DeadRank(Detector):
    name: ClassVar[str] = "dead_rank"
    kinds: ClassVar[tuple[str, ...]] = ("dead_rank",)
    reads: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        self._present: dict[int, deque[bool]] = {}
        self._absent: dict[int, tuple[int, int]] = {}  # rank -> rows without it, step of the first
        self._attempt: int | None = None

    def update(self, frame: Frame) -> list[Alarm]:
        ranks = frame.ranks
        if frame.attempt != self._attempt:
            self._attempt = frame.attempt
            self._present.clear()
            self._absent.clear()
        if len(ranks) < 2 and len(self._present) < 2:
            for rank in ranks:
                self._present.setdefault(rank, deque(maxlen=KNOWN_ROWS))
            return []
        for rank in ranks:
            seen = self._present.get(rank)
            if seen is None:
                seen = self._present[rank] = deque(maxlen=KNOWN_ROWS)
            seen.append(True)
        if self._absent:
            for rank in ranks:
                self._absent.pop(rank, None)
        if len(ranks) == len(self._present):
            return []
        dead = []
        for rank, seen in self._present.items():
            if rank in ranks:
                continue
            rows, first = self._absent.get(rank, (0, frame.step))
            self._absent[rank] = (rows + 1, first)
            if rows == 0 and (len(seen) < KNOWN_ROWS or sum(seen) < REGULAR * KNOWN_ROWS):
                seen.append(False)  # it writes now and then
                del self._absent[rank]
            elif rows + 1 == ABSENT_ROWS:
                dead.append(rank)
        if not dead:
            return []
        onset = self._absent[dead[0]][1]
        names = ", ".join(map(str, dead))
        message = f"rank {names} wrote nothing any more from step {onset:,} on, while {len(ranks)} others went on"
        return [self.fact(frame, "dead_rank", "", message, onset=onset, ranks=tuple(dead))]

    def update_block(self, block: FrameBlock) -> list[tuple[int, Alarm]]:
        found: list[tuple[int, Alarm]] = []
        row = 0
        while row < len(block) and not self._complete(block):
            found.extend(self.update_rows(block, (row,)))
            row += 1
        if row < len(block) and len(block.ranks) > 1:
            written = [True] * min(len(block) - row, KNOWN_ROWS)
            for seen in self._present.values():
                seen.extend(written)
        return found

    def _complete(self, block: FrameBlock) -> bool:
        """Whether the ranks of the block are all that are known, and none was absent."""
        return self._attempt == block.attempt and not self._absent and self._present.keys() == set(block.ranks)


DETECTOR = DeadRank
