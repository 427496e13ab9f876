"""Robust statistics of a trailing window, cheap enough for every step."""

import math
import statistics
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Sequence

from runhealth.storage.blocks import Floats

MAD_TO_SIGMA = 1.4826  # makes the median absolute deviation a consistent estimate of sigma for a normal distribution


def median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else math.nan


def middle(ordered: Floats) -> Floats:
    """The medians of the rows of (m, n), each in ascending order; the same to the last bit as `median` of each."""
    n = ordered.shape[1]
    half = n // 2
    if n % 2:
        return ordered[:, half]
    found: Floats = (ordered[:, half - 1] + ordered[:, half]) / 2
    return found


def mad_sigma(ordered: Sequence[float], center: float) -> float:
    """1.4826 x the median absolute deviation from `center`, of values in ascending order. O(log n)."""
    count = len(ordered)
    if not count:
        return math.nan
    split = bisect_left(ordered, center)
    upper = _kth_deviation(ordered, center, split, count // 2 + 1)
    if count % 2:
        return MAD_TO_SIGMA * upper
    return MAD_TO_SIGMA * (_kth_deviation(ordered, center, split, count // 2) + upper) / 2


def _kth_deviation(ordered: Sequence[float], center: float, split: int, k: int) -> float:
    """The k-th smallest |value - center|: below `split` deviations grow to the left, from it on to the right, so it is
    the k-th of two sorted sequences, found by bisecting how many come from the left one."""
    count = len(ordered)
    low, high = max(0, k - (count - split)), min(k, split)
    while low < high:
        left = (low + high) // 2
        # too few from the left while its next is nearer than the last taken from the right
        if center - ordered[split - 1 - left] < ordered[split + k - left - 1] - center:
            low = left + 1
        else:
            high = left
    left_last = center - ordered[split - low] if low else -math.inf
    right_last = ordered[split + k - low - 1] - center if k > low else -math.inf
    return max(left_last, right_last)


class SortedWindow:
    """The last `size` values in sorted order: median in O(1), a push in O(log size) plus a short move."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.values: deque[float] = deque()
        self.ordered: list[float] = []

    def __len__(self) -> int:
        return len(self.values)

    def push(self, value: float) -> float | None:
        """Add a value; return the one that left the window."""
        left = None
        if len(self.values) == self.size:
            left = self.values.popleft()
            del self.ordered[bisect_left(self.ordered, left)]
        self.values.append(value)
        insort(self.ordered, value)
        return left

    def extend(self, values: Sequence[float]) -> None:
        """`push` each of the values."""
        if len(values) < self.size // 4:
            for value in values:
                self.push(value)
            return
        kept = [*self.values, *values[-self.size :]][-self.size :]
        self.values = deque(kept)
        self.ordered = sorted(kept)

    def median(self) -> float:
        ordered = self.ordered
        half = len(ordered) // 2
        return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2

    def clear(self) -> None:
        self.values.clear()
        self.ordered.clear()


class Baseline:
    """Median and robust sigma over the last `size` values, refreshed every `every` pushes.

    `floor` and `floor_share` (of the median's size) bound sigma from below.
    """

    __slots__ = (
        "_center", "_ordered", "_sigma", "_young", "every", "floor", "floor_share", "least", "since", "size", "values",
    )  # fmt: skip

    def __init__(
        self, size: int = 128, *, least: int = 16, every: int = 16, floor: float = 0.0, floor_share: float = 0.0
    ) -> None:
        self.size, self.least, self.every, self.floor, self.floor_share = size, least, every, floor, floor_share
        self.values: deque[float] = deque(maxlen=size)
        self.since = 0  # values since the last refresh
        self._young = True  # few values yet: refreshed at every look
        self._ordered: list[float] = []
        self._center = math.nan
        self._sigma = math.nan

    def push(self, value: float) -> None:
        self.values.append(value)
        self.since += 1

    def extend(self, values: Iterable[float]) -> None:
        for value in values:
            self.push(value)

    @property
    def ready(self) -> bool:
        return len(self.values) >= self.least

    def refresh(self) -> None:
        self._young = len(self.values) < 2 * self.least
        if not self.since or not (self._young or self.since >= self.every or not self._ordered):
            return
        self._ordered = ordered = sorted(self.values)
        self._center = median(ordered)
        self._sigma = max(mad_sigma(ordered, self._center), self.floor, self.floor_share * abs(self._center))
        self.since = 0

    @property
    def seen(self) -> tuple[float, float]:
        """Median and sigma as they were last seen: reading them is no look."""
        return self._center, self._sigma

    @property
    def center(self) -> float:
        if self._young or self.since >= self.every:
            self.refresh()
        return self._center

    @property
    def sigma(self) -> float:
        if self._young or self.since >= self.every:
            self.refresh()
        return self._sigma

    def quantile(self, share: float) -> float:
        self.refresh()
        ordered = self._ordered
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else math.nan

    def z(self, value: float) -> float:
        """How many robust sigma `value` is over the median (negative: under)."""
        if self._young or self.since >= self.every:
            self.refresh()
        return (
            (value - self._center) / self._sigma if self._sigma > 0 else math.copysign(math.inf, value - self._center)
        )
