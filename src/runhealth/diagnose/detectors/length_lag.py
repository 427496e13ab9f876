"""The rank that drew the longest sequences holds the others up, mostly another rank from step to step.

Attention's work grows with the sum of squared lengths. In each such step the slowest rank computes 10 % longer than the
median of the others, 6 robust sigma over what the slowest usually does, has the largest sum of squares as well, and no
more excess than that explains. Two such steps in four on different ranks are told, or four in six on one. With stages,
a rank is compared with those of its own.
"""

import math
from collections import deque
from typing import ClassVar

import numpy as np

from runhealth.diagnose.detector import Detector
from runhealth.diagnose.findings import Alarm
from runhealth.diagnose.frame_block import FrameBlock
from runhealth.diagnose.frames import Frame
from runhealth.diagnose.phases import COMPUTE, spent
from runhealth.diagnose.robust import Baseline, median
from runhealth.diagnose.windows import medians, push

WORK = "sum_len_sq"
EXCESS, Z_ALARM = 0.10, 6.0
MORE_WORK = 1.4  # x the median of the others
EXPLAINED = 1.2  # x the share by which there is more work
OF_ROWS, SOON_ROWS, ONE_RANK = 6, 4, 4
REARM_FRAMES = 256


class LengthLag(Detector):
    name: ClassVar[str] = "length_lag"
    kinds: ClassVar[tuple[str, ...]] = ("straggler",)
    reads: ClassVar[tuple[str, ...]] = (WORK,)

    def __init__(self) -> None:
        self._habit = Baseline(128, least=24, floor=0.01)  # how much longer the slowest rank computes
        self._recent: deque[tuple[int, int]] = deque(maxlen=OF_ROWS)  # step, rank or -1
        self._since = REARM_FRAMES

    def update(self, frame: Frame) -> list[Alarm]:
        self._since += 1
        work = {rank: float(v) for rank, v in frame.per_rank(WORK).items()}
        times = {rank: s for rank, values in frame.ranks.items() if (s := spent(values, COMPUTE)) is not None}
        if len(times) < 2 or work.keys() != times.keys():
            return []
        slowest = max(times, key=lambda r: (times[r], -r))
        stages = frame.per_rank("stage")
        peers = [r for r in times if r != slowest and stages.get(r) == stages.get(slowest)]
        others = median([times[r] for r in peers])
        if not math.isfinite(times[slowest]) or not others > 0:
            return []
        excess = times[slowest] / others - 1
        habit = self._habit
        usual = median([work[r] for r in peers])
        longest = work[slowest] > max(MORE_WORK * usual, *(work[r] for r in peers))
        explained = longest and EXCESS < excess < EXPLAINED * (work[slowest] / usual - 1)
        if not (explained and habit.ready and excess > habit.center + Z_ALARM * habit.sigma):
            habit.push(excess)
            self._recent.append((frame.step, -1))
            return []
        self._recent.append((frame.step, slowest))
        soon = [(step, rank) for step, rank in list(self._recent)[-SOON_ROWS:] if rank >= 0]
        found = [(step, rank) for step, rank in self._recent if rank >= 0]
        moves = len({rank for _, rank in soon}) > 1
        if not moves and (len(found) < ONE_RANK or len({rank for _, rank in found}) > 1):
            return []
        found = soon if moves else found
        since, self._since = self._since, 0
        if since < REARM_FRAMES:
            return []
        more = work[slowest] / usual
        who = "the rank with the longest sequences, another one from step to step," if moves else f"rank {slowest}"
        message = (
            f"since step {found[0][0]:,} {who} computes {excess:.0%} longer than the others: its sum of squared "
            f"sequence lengths is {more:.1f} x theirs"
        )
        return [
            self.fact(
                frame,
                "straggler",
                "t_forward_s",
                message,
                onset=found[0][0],
                value=times[slowest],
                baseline=others,
                ranks=() if moves else (slowest,),
            )
        ]

    def update_block(self, block: FrameBlock) -> list[tuple[int, Alarm]]:
        forward, backward = block.per_rank("t_forward_s"), block.per_rank("t_backward_s")
        work, stage = block.per_rank(WORK), block.per_rank("stage")
        if len(block.ranks) < 2 or work is None or (forward is None and backward is None):
            self._since += len(block)
            return []
        plain = stage is None and forward is not None and backward is not None
        if not plain or forward is None or backward is None:
            return super().update_block(block)
        compute = forward.values + backward.values
        whole = forward.present & backward.present & work.present & np.isfinite(compute)
        ordered = np.sort(np.where(whole, compute, 1.0), axis=1)
        others = medians(ordered[:, :-1], is_sorted=True)
        clear = whole.all(axis=1) & (others > 0)
        excess = np.divide(ordered[:, -1], others, out=np.full(len(block), np.nan), where=others > 0) - 1
        found: list[tuple[int, Alarm]] = []
        at = 0
        for loud in [*np.flatnonzero(~(clear & (excess <= EXCESS))).tolist(), len(block)]:
            if loud > at:
                push(self._habit, excess[at:loud])
                self._since += loud - at
                self._recent.extend((step, -1) for step in block.steps[at:loud][-OF_ROWS:].tolist())
            if loud < len(block):
                found.extend(self.update_rows(block, (loud,)))
            at = loud + 1
        return found


DETECTOR = LengthLag
