"""One rank's loss or gradient, before the reduce, differs from its peers, up or down: possibly silent data corruption.

The distance of a rank from the median of the ranks, on a log scale, is measured against the distances that ranks
usually have: 9 robust sigma and a factor of 1.5 in two of three rows. Told of one rank only, among three or more, and
not where that rank's batch is unlike the others: then the data are the reason.
"""

import math
from collections import deque
from typing import ClassVar

from runhealth.diagnose.detector import Detector
from runhealth.diagnose.findings import Alarm
from runhealth.diagnose.frames import Frame
from runhealth.diagnose.robust import Baseline, median

SIGNALS = ("loss", "grad_norm_rank")
Z_ALARM = 9.0
FACTOR = math.log(1.5)
OF_ROWS, IN_ROWS = 3, 2
REARM_ROWS = 256
DATA_ROWS = 8


class RankOutlier(Detector):
    name: ClassVar[str] = "rank_outlier"
    kinds: ClassVar[tuple[str, ...]] = ("rank_outlier",)
    reads: ClassVar[tuple[str, ...]] = ("loss", "grad_norm_rank")

    def __init__(self) -> None:
        self._habits = {signal: Baseline(256, least=32, every=32, floor=0.005) for signal in SIGNALS}
        self._recent: dict[str, deque[int]] = {signal: deque(maxlen=OF_ROWS) for signal in SIGNALS}
        self._since = REARM_ROWS
        self._bad_data: dict[int, int] = {}  # rank -> rows since a batch of it was unlike the others

    def update(self, frame: Frame) -> list[Alarm]:
        if len(frame.ranks) < 3:
            return []
        self._since += 1
        for rank in self._bad_data:
            self._bad_data[rank] += 1
        for outlier in frame.outliers:
            if outlier.strong:
                self._bad_data[outlier.batch.rank] = 0
        alarms: list[Alarm] = []
        for signal in SIGNALS:
            logs = {r: math.log(v) for r, v in frame.per_rank(signal).items() if v > 0 and math.isfinite(v)}
            if len(logs) < 3:
                continue
            center = median(list(logs.values()))
            away = {rank: abs(y - center) for rank, y in logs.items()}
            worst = max(away, key=lambda r: (away[r], -r))
            habit = self._habits[signal]
            beyond = habit.ready and away[worst] > max(FACTOR, Z_ALARM * max(habit.sigma, habit.center / 2))
            alone = sorted(away.values())[-2] < 0.3 * away[worst]
            if not beyond:
                habit.push(away[worst])
            clean = self._bad_data.get(worst, DATA_ROWS) >= DATA_ROWS
            recent = self._recent[signal]
            recent.append(worst if beyond and alone and clean else -1)
            if recent[-1] < 0 or recent.count(worst) < IN_ROWS or self._since < REARM_ROWS:
                continue
            self._since = 0
            value, typical = float(frame.ranks[worst][signal]), math.exp(center)
            message = (
                f"{signal} of rank {worst} is {value:.4g} where the other ranks have {typical:.4g}, and its data look "
                "like theirs: compare the device's results with another's"
            )
            alarms.append(
                self.fact(frame, "rank_outlier", signal, message, value=value, baseline=typical, ranks=(worst,))
            )
        return alarms


DETECTOR = RankOutlier
