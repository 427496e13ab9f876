"""One rank, or one pipeline stage, computes longer than the others, by little but in every step.

Leave one out: a rank's compute (forward and backward) over the median of the others, less what that rank's excess
usually is, smoothed over the last rows. It must be over 4 % and 6 robust sigma of what the largest of all ranks usually
is, in four rows in a row, and the rank must wait less than the others where waits are recorded. A single slow step
counts as a quarter more at most, and the rank must have been slow in three of the four rows itself. One that has far
longer sequences than the others is left to `length_lag`. Linear in the ranks; two are enough. Ranks of one stage lag
together: each is compared with the other stages.
"""

import math
from collections import deque
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from runhealth.diagnose.detector import Detector
from runhealth.diagnose.findings import Alarm
from runhealth.diagnose.frame_block import FrameBlock
from runhealth.diagnose.frames import Frame
from runhealth.diagnose.phases import COMPUTE, WAIT, spent
from runhealth.diagnose.robust import Baseline, median
from runhealth.diagnose.windows import Ahead, settled, take
from runhealth.storage.blocks import Bools, Floats
from runhealth.storage.records import Scalar

EXCESS = 0.04
Z_ALARM = 6.0
IN_A_ROW, SLOW_ITSELF = 4, 3
MORE_WORK = 1.4
REARM_FRAMES = 256
FOLLOW = 0.35  # share of the newest row in the smoothed excess
SETTLE = 0.05  # how fast a rank's usual excess follows
SMALLEST_BLOCK, LARGEST_BLOCK = 64, 4096
MOST = 0.25  # of one row


class RankLag(Detector):
    name: ClassVar[str] = "rank_lag"
    kinds: ClassVar[tuple[str, ...]] = ("straggler",)
    reads: ClassVar[tuple[str, ...]] = ("t_forward_s",)

    def __init__(self) -> None:
        self._usual: dict[int, float] = {}  # rank -> its usual excess
        self._smooth: dict[int, float] = {}  # rank -> excess over that, smoothed
        self._habit = Baseline(128, least=24, floor=0.003)  # the largest smoothed excess
        self._over: list[int] = []  # steps in a row that were beyond
        self._offs: deque[dict[int, float]] = deque(maxlen=IN_A_ROW)  # of the last of them: rank -> excess
        self._works: deque[dict[int, Scalar]] = deque(maxlen=IN_A_ROW)  # rank -> sum of squared lengths
        self._rank = -1
        self._since = REARM_FRAMES
        self._limit = math.inf

    def update(self, frame: Frame) -> list[Alarm]:
        if frame.new_attempt:
            self._clear()
        if len(frame.ranks) < 2:
            return []
        times = {rank: s for rank, values in frame.ranks.items() if (s := spent(values, COMPUTE)) is not None}
        if len(times) < 2:
            return []
        excess = _excess(times, {r: int(s) for r, s in frame.per_rank("stage").items()})
        if not self._beyond(frame, excess) or not _waits_least(frame, self._rank):
            return []
        self._since = 0
        return [self._alarm(frame, times, excess)]

    def update_block(self, block: FrameBlock) -> list[tuple[int, Alarm]]:
        forward, backward = block.per_rank("t_forward_s"), block.per_rank("t_backward_s")
        if len(block.ranks) < 2 or (forward is None and backward is None):
            return []
        stage = block.per_rank("stage")
        whole = forward is not None and backward is not None and (stage is None or bool(stage.present.all()))
        if not whole or forward is None or backward is None:
            return super().update_block(block)
        compute = forward.values + backward.values
        plain: Bools = np.all(forward.present & backward.present & np.isfinite(compute), axis=1)
        if stage is not None:
            plain &= (stage.values == stage.values[:, :1]).all(axis=1)
        excess = _excesses(np.where(plain[:, None], compute, 1.0))
        found: list[tuple[int, Alarm]] = []
        row, size = 0, SMALLEST_BLOCK
        while row < len(block):
            end = min(len(block), row + size)
            other = ~plain[row:end]
            stop = row + (int(other.argmax()) if other.any() else end - row)
            if stop > row:
                stop = row + self._take(block.ranks, excess[row:stop])
            size = min(4 * size, LARGEST_BLOCK)
            if stop < end:
                found.extend(self.update_rows(block, (stop,)))
                stop, size = stop + 1, SMALLEST_BLOCK
            row = stop
        return found

    def _take(self, ranks: tuple[int, ...], excess: Floats) -> int:
        """Take in the rows of (n, R) before the first in which a rank may be over the limit. Returns how many."""
        habit = self._habit
        if not settled(habit):
            return 0
        usual, smooth = self._follow(ranks, excess)
        most = smooth.max(axis=0)
        stop = len(most)
        if most.max() > EXCESS:
            ahead = Ahead(habit, most)
            beyond = most > np.maximum(EXCESS, ahead.center() + Z_ALARM * ahead.sigma())
            stop = int(beyond.argmax()) if beyond.any() else stop
        if stop:
            take(habit, most[: stop - 1])
            self._limit = max(EXCESS, habit.center + Z_ALARM * habit.sigma)
            habit.push(float(most[stop - 1]))
            self._since += stop
            self._clear()
            if stop < len(most):
                usual, _ = self._follow(ranks, excess[:stop])
            self._usual.update(zip(ranks, usual, strict=True))
            self._smooth.update(zip(ranks, smooth[:, stop - 1].tolist(), strict=True))
        return stop

    def _follow(self, ranks: tuple[int, ...], excess: Floats) -> tuple[list[float], Floats]:
        """What a rank's usual excess would be after the rows of (n, R), and the smoothed ones of each row, (R, n)."""
        smooth, ends = np.empty((len(ranks), len(excess))), []
        for j, rank in enumerate(ranks):
            values, followed = excess[:, j].tolist(), []
            usual, now = self._usual.get(rank, values[0]), self._smooth.get(rank, 0.0)
            for value in values:
                off = value - usual
                usual += SETTLE * off
                off = MOST if off > MOST else -MOST if off < -MOST else off
                now += FOLLOW * (off - now)
                followed.append(now)
            smooth[j] = followed
            ends.append(usual)
        return ends, smooth

    def _beyond(self, frame: Frame, excess: dict[int, float]) -> bool:
        """Take in a row; whether some rank, `_rank` from then on, has been over the limit for long enough."""
        self._since += 1
        usual, smooth = self._usual, self._smooth
        top, most = -1, -math.inf
        for rank, value in excess.items():
            off = value - usual.get(rank, value)
            off = MOST if off > MOST else -MOST if off < -MOST else off
            old = smooth.get(rank, 0.0)
            now = smooth[rank] = old + FOLLOW * (off - old)
            if now > most:
                top, most = rank, now
        habit = self._habit
        limit = self._limit = max(EXCESS, habit.center + Z_ALARM * habit.sigma) if habit.ready else math.inf
        if not most > limit:
            self._clear()
            habit.push(most)
            for rank, value in excess.items():
                old = usual.get(rank, value)
                usual[rank] = old + SETTLE * (value - old)
            return False
        if self._rank not in excess or not smooth[self._rank] > limit:
            self._rank = top
        self._over.append(frame.step)
        self._offs.append(excess)
        self._works.append(frame.per_rank("sum_len_sq"))
        if len(self._over) < IN_A_ROW or self._since < REARM_FRAMES:
            return False
        rank = max(excess, key=lambda r: (smooth[r], -r))
        before = usual.get(rank, 0.0)
        slow = [i for i, offs in enumerate(self._offs) if offs.get(rank, before) - before > limit]
        by_length = sum(_has_longest(self._works[i], rank) for i in slow)
        return len(slow) >= SLOW_ITSELF and 2 * by_length <= len(slow)

    def _clear(self) -> None:
        self._over.clear()
        self._offs.clear()
        self._works.clear()

    def _alarm(self, frame: Frame, times: dict[int, float], excess: dict[int, float]) -> Alarm:
        rank, limit = max(excess, key=lambda r: (self._smooth[r], -r)), self._limit
        stages = frame.per_rank("stage")
        slow = tuple(sorted(r for r in times if self._smooth[r] > max(limit, self._smooth[rank] / 2)))
        mine = [r for r in times if stages.get(r) == stages.get(rank)] if stages else []
        whole = set(mine) == set(slow) and 1 < len(mine) < len(times)
        ranks = slow if whole or len(slow) <= len(times) // 2 else (rank,)
        others = median([s for r, s in times.items() if r not in ranks])
        who = f"all ranks of stage {stages[rank]:g}" if whole else f"rank {', '.join(map(str, ranks))}"
        longer = excess[rank] - self._usual.get(rank, 0.0)
        message = (
            f"{who} compute{'' if len(ranks) > 1 else 's'} {longer:.0%} longer than the others since step "
            f"{self._over[0]:,}: the others wait"
        )
        return self.fact(
            frame,
            "straggler",
            "t_forward_s",
            message,
            onset=self._over[0],
            value=times[rank],
            baseline=others,
            ranks=ranks,
        )


def _excesses(times: Floats) -> Floats:
    """(n, R) -> (n, R): `_excess` of each row, without stages."""
    ordered = np.sort(times, axis=1)
    count = times.shape[1]
    half = count // 2
    middle = ordered[:, half, None]
    if count % 2:
        around = (ordered[:, half - 1, None] + ordered[:, half + 1, None]) / 2
        under, over = (middle + ordered[:, half + 1, None]) / 2, (ordered[:, half - 1, None] + middle) / 2
        others = np.where(times == middle, around, np.where(times < middle, under, over))
    else:
        below = ordered[:, half - 1, None]
        others = np.where(times <= below, middle, below)
    ratio = np.divide(times, others, out=np.ones(times.shape), where=others > 0)
    return np.asarray(ratio - 1, dtype=np.float64)


def _excess(times: dict[int, float], stages: dict[int, int]) -> dict[int, float]:
    """rank -> its compute over the median of the others, as a share; with stages, over that of the other stages."""
    if len(set(stages.values())) > 1:
        by_stage: dict[int, list[float]] = {}
        for rank, seconds in times.items():
            by_stage.setdefault(stages.get(rank, -1), []).append(seconds)
        rest = {s: median([t for other, ts in by_stage.items() if other != s for t in ts]) for s in by_stage}
        own = {s: median(ts) for s, ts in by_stage.items()}
        # within a stage a rank is compared with its peers, a stage with the other stages
        found = {}
        for rank, seconds in times.items():
            stage = stages.get(rank, -1)
            by_peers = seconds / own[stage] - 1 if len(by_stage[stage]) > 2 else -math.inf
            found[rank] = max(by_peers, seconds / rest[stage] - 1)
        return found
    ordered = sorted(times.values())
    count = len(ordered)
    half = count // 2
    # the median of the others, without sorting anew: it shifts by at most one place
    found = {}
    for rank, seconds in times.items():
        if count % 2:
            low, high = (half, half + 1) if seconds < ordered[half] else (half - 1, half)
            if seconds == ordered[half]:
                low, high = half - 1, half + 1
            others = (ordered[low] + ordered[high]) / 2
        else:
            others = ordered[half] if seconds <= ordered[half - 1] else ordered[half - 1]
        found[rank] = seconds / others - 1 if others > 0 else 0.0
    return found


def _waits_least(frame: Frame, rank: int) -> bool:
    """The others wait for it: its wait is under their median, or waits are not recorded."""
    waits = {r: s for r, values in frame.ranks.items() if (s := spent(values, WAIT)) is not None}
    return rank not in waits or len(waits) < 2 or waits[rank] <= median(list(waits.values()))


def _has_longest(work: Mapping[int, Scalar], rank: int) -> bool:
    """Whether the rank has far longer sequences than the others: `length_lag` tells of these."""
    others = [float(v) for r, v in work.items() if r != rank]
    return rank in work and bool(others) and work[rank] > MORE_WORK * median(others)


DETECTOR = RankLag
