"""One rank's loss or gradient, before the reduce, differs from its peers, up or down: possibly silent data corruption.

The distance of a rank from the median of the ranks, on a log scale, is measured against the distances that ranks
usually have: 9 robust sigma and a factor of 1.5 in two of three rows. Told of one rank only, and not where that rank's
batch is unlike the others: then the data are the reason.

Of two ranks, the median of the ranks says nothing about which of them is right. The one that left its own level is
meant, where the other stayed at its own, and fourteen of sixteen rows must say so: odd data pass, as each row brings
others, and a device stays what it is. In a healthy run of two ranks one row in 300 lay out, in bursts of up to seven
within sixteen rows: far more than independent rows would bring, so that two or three of them prove nothing.
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
from runhealth.diagnose.robust import Baseline, median, middle
from runhealth.diagnose.windows import Ahead, settled, take
from runhealth.storage.blocks import Bools, Floats

SIGNALS = ("loss", "grad_norm_rank")
Z_ALARM = 9.0
FACTOR = math.log(1.5)
OF_ROWS, IN_ROWS = 3, 2
PAIR_OF_ROWS, PAIR_IN_ROWS = 16, 14
REARM_ROWS = 256
DATA_ROWS = 8
OWN_ROWS, LEAST_OWN = 32, 16
ALONE = 0.3  # how far off the next rank may be, of the distance of the worst
SMALLEST_BLOCK, LARGEST_BLOCK = 64, 4096
NEARLY = 1e-9


class _Spread:
    """How far the ranks usually lie apart, in one signal."""

    def __init__(self) -> None:
        self.habit = Baseline(256, least=32, every=32, floor=0.005)
        self.recent: deque[tuple[int, int]] = deque(maxlen=PAIR_OF_ROWS)  # the outlier, or -1, and the step
        self.own: dict[int, deque[float]] = {}  # of two ranks: their last logs

    def judge(self, logs: Mapping[int, float]) -> tuple[int, bool, float]:
        """The rank that lies furthest out, whether it lies out of all proportion and alone, and where it should be."""
        pair = len(logs) == 2
        center = median(list(logs.values()))
        away = {rank: abs(y - center) for rank, y in logs.items()}
        furthest = max(away.values())
        habit = self.habit
        beyond = habit.ready and furthest > max(FACTOR / (1 + pair), Z_ALARM * max(habit.sigma, habit.center / 2))
        if not beyond:
            habit.push(furthest)
        if pair:
            levels = {rank: median(list(self.own.get(rank, ()))) for rank in logs}
            known = all(len(self.own.get(rank, ())) >= LEAST_OWN for rank in logs)
            if not beyond:
                for rank, y in logs.items():
                    self.own.setdefault(rank, deque(maxlen=OWN_ROWS)).append(y)
            away = {rank: abs(y - levels[rank]) if known else 0.0 for rank, y in logs.items()}
            beyond = beyond and known
        worst = max(away, key=lambda r: (away[r], -r))
        alone = sorted(away.values())[-2] < ALONE * away[worst]
        return worst, beyond and alone, levels[worst] if pair else center

    def lasting(self, rank: int, pair: bool) -> int | None:
        """The first step of the last rows at which the rank was the outlier; None if that were too few."""
        of_rows, in_rows = (PAIR_OF_ROWS, PAIR_IN_ROWS) if pair else (OF_ROWS, IN_ROWS)
        steps = [step for found, step in list(self.recent)[-of_rows:] if found == rank]
        return steps[0] if len(steps) >= in_rows else None

    def beyond(self, values: Floats) -> Bools:
        """Which of the rows of (m, R) may be beyond the habit, as `judge` has it. Only when the habit is settled."""
        furthest = _furthest(np.log(values))  # nearly: NumPy's logarithm differs in the last bit
        factor = FACTOR / (1 + (values.shape[1] == 2))
        if furthest.max() < factor - NEARLY:
            return np.zeros(len(values), dtype=np.bool_)
        ahead = Ahead(self.habit, furthest)
        limit = np.maximum(factor, Z_ALARM * np.maximum(ahead.sigma(), ahead.center() / 2))
        return np.asarray(furthest > limit - NEARLY, dtype=np.bool_)

    def take(self, ranks: tuple[int, ...], values: Floats) -> None:
        """Take in rows that are not beyond. What the habit keeps of them is exact."""
        furthest = np.zeros(len(values))
        kept = values[-self.habit.size - self.habit.every :]
        logs = np.array(list(map(math.log, kept.ravel().tolist()))).reshape(kept.shape)
        furthest[-len(kept) :] = _furthest(logs)
        take(self.habit, furthest)
        self.recent.extend([(-1, -1)] * min(len(furthest), PAIR_OF_ROWS))
        if len(ranks) == 2:
            for rank, column in zip(ranks, logs[-OWN_ROWS:].T.tolist(), strict=True):
                self.own.setdefault(rank, deque(maxlen=OWN_ROWS)).extend(column)


class RankOutlier(Detector):
    name: ClassVar[str] = "rank_outlier"
    kinds: ClassVar[tuple[str, ...]] = ("rank_outlier",)
    reads: ClassVar[tuple[str, ...]] = ("loss", "grad_norm_rank")

    def __init__(self) -> None:
        self._spreads = {signal: _Spread() for signal in SIGNALS}
        self._since = REARM_ROWS
        self._bad_data: dict[int, int] = {}  # rank -> rows since a batch of it was unlike the others

    def update(self, frame: Frame) -> list[Alarm]:
        if len(frame.ranks) < 2:
            return []
        self._since += 1
        for rank in self._bad_data:
            self._bad_data[rank] += 1
        for outlier in frame.outliers:
            if outlier.strong:
                self._bad_data[outlier.batch.rank] = 0
        alarms: list[Alarm] = []
        for signal, spread in self._spreads.items():
            logs = {r: math.log(v) for r, v in frame.per_rank(signal).items() if v > 0 and math.isfinite(v)}
            if len(logs) < min(3, len(frame.ranks)):
                continue
            worst, out, center = spread.judge(logs)
            clean = self._bad_data.get(worst, DATA_ROWS) >= DATA_ROWS
            told = out and clean
            spread.recent.append((worst, frame.step) if told else (-1, -1))
            pair = len(logs) == 2
            first = spread.lasting(worst, pair) if told else None
            if first is None or self._since < REARM_ROWS:
                continue
            self._since = 0
            value, typical = float(frame.ranks[worst][signal]), math.exp(center)
            peers = "it had" if pair else "the other ranks have"
            onset = first if pair else frame.step
            message = (
                f"{signal} of rank {worst} is {value:.4g} where {peers} {typical:.4g}, and its data look "
                "like theirs: compare the device's results with another's"
            )
            alarms.append(
                self.fact(frame, self.name, signal, message, onset=onset, value=value, baseline=typical, ranks=(worst,))
            )
        return alarms

    def update_block(self, block: FrameBlock) -> list[tuple[int, Alarm]]:
        if len(block.ranks) < 2:
            return []
        values: dict[str, Floats] = {}
        whole = np.ones(len(block), dtype=np.bool_)  # rows in which every rank has every signal that there is
        for name in SIGNALS:
            signal = block.per_rank(name)
            if signal is not None:
                known = signal.present & np.isfinite(signal.values) & (signal.values > 0)
                values[name] = np.where(known, signal.values, 1.0)
                whole &= known.all(axis=1)
        whole[list(block.outliers)] = False
        found: list[tuple[int, Alarm]] = []
        i, size = 0, LARGEST_BLOCK
        while i < len(block):
            end = min(len(block), i + size)
            stop = i
            if all(settled(self._spreads[name].habit) for name in values):
                stop += self._take(block.ranks, {name: of[i:end] for name, of in values.items()}, whole[i:end])
            size = min(4 * size, LARGEST_BLOCK)
            if stop < end:
                found.extend(self.update_rows(block, (stop,)))
                stop, size = stop + 1, SMALLEST_BLOCK  # what was computed ahead is lost
            i = stop
        return found

    def _take(self, ranks: tuple[int, ...], values: Mapping[str, Floats], whole: Bools) -> int:
        """Take in the rows before the first that is not whole or lies beyond a habit. Returns how many."""
        stop = len(whole) if whole.all() else int(whole.argmin())
        if not stop:
            return 0
        for name, of in values.items():
            beyond = self._spreads[name].beyond(of[:stop]) if stop else whole[:0]
            if beyond.any():
                stop = int(beyond.argmax())
        if stop:
            self._since += stop
            for rank in self._bad_data:
                self._bad_data[rank] += stop
            for name, of in values.items():
                self._spreads[name].take(ranks, of[:stop])
        return stop


def _furthest(logs: Floats) -> Floats:
    """(m, R) -> (m,): the largest distance of a rank from the median of the ranks."""
    return np.asarray(np.abs(logs - middle(np.sort(logs, axis=1))[:, None]).max(axis=1), dtype=np.float64)


DETECTOR = RankOutlier
