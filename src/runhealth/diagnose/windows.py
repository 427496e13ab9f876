"""Baselines over many values at once: the same numbers as pushing them one after the other, without the loop."""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from functools import cached_property

import numpy as np

from runhealth.diagnose.robust import MAD_TO_SIGMA, Baseline
from runhealth.storage.blocks import Floats, Ints

SHORT, LONG = 16, 1 << 16


def settled(baseline: Baseline) -> bool:
    """Whether the baseline is past its beginning, in which it is refreshed at every look: `Ahead` needs that."""
    return not baseline._young


def push(baseline: Baseline, values: Floats) -> None:
    """Push values without a look between them."""
    if len(values):
        baseline.values.extend(values[-baseline.size :].tolist())
        baseline.since += len(values)


def take(baseline: Baseline, values: Floats) -> None:
    """Push values with a look at the baseline, where it is ready, before each."""
    start = 0
    while start < len(values) and not settled(baseline):
        if baseline.ready:
            baseline.refresh()
        baseline.push(float(values[start]))
        start += 1
    looks = range(start + max(0, baseline.every - baseline.since), len(values), baseline.every)
    if looks:  # only what the last one sees counts
        push(baseline, values[start : looks[-1]])
        baseline.refresh()
        start = looks[-1]
    push(baseline, values[start:])


def take_looking(baseline: Baseline, values: Floats, looks: Ints) -> None:
    """Push values into a settled baseline, with a look at it before those at the positions `looks`."""
    found = refreshes(baseline, looks)
    if found:
        push(baseline, values[: found[-1]])
        baseline.refresh()
        push(baseline, values[found[-1] :])
    else:
        push(baseline, values)


def refreshes(baseline: Baseline, looks: Ints) -> list[int]:
    """At which of the looks, each before the value of that position is pushed, a settled baseline is refreshed."""
    found: list[int] = []
    due, at = baseline.every - baseline.since, looks.tolist()
    i = bisect_left(at, due)
    while i < len(at):
        found.append(at[i])
        i = bisect_left(at, at[i] + baseline.every, i)
    return found


class Ahead:
    """What a settled baseline says at looks that come before each of `values` (n,) is pushed, if all of them are.

    The baseline is refreshed every so many values, so n looks see few different windows. With `looks`, positions in
    ascending order, only these are looked at; what is said of others is then what was last seen.
    """

    def __init__(self, baseline: Baseline, values: Floats, looks: Ints | None = None) -> None:
        self._baseline, self._values = baseline, values
        if looks is not None:
            self._looks: Ints = np.array(refreshes(baseline, looks), dtype=np.int64)
            return
        first = max(0, baseline.every - baseline.since)
        if first == 0:
            baseline.refresh()  # as the first look does
            first = baseline.every
        self._looks = np.arange(first, len(values), baseline.every)

    @cached_property
    def _windows(self) -> tuple[Floats, Ints]:
        """(m, size) sorted, filled up with infinities, and how many values each holds."""
        size, old = self._baseline.size, np.array(self._baseline.values, dtype=np.float64)
        line = np.concatenate([np.full(size, np.inf), old, self._values])
        windows = np.lib.stride_tricks.sliding_window_view(line, size)[len(old) + self._looks]
        return np.sort(windows, axis=1), np.minimum(len(old) + self._looks, size)

    @cached_property
    def _centers(self) -> Floats:
        return _medians(*self._windows)

    def center(self) -> Floats:
        """(n,)"""
        if not len(self._looks):
            return np.full(len(self._values), self._baseline.seen[0])
        return self._until_next(self._baseline.seen[0], self._centers)

    def sigma(self) -> Floats:
        """(n,)"""
        if not len(self._looks):
            return np.full(len(self._values), self._baseline.seen[1])
        windows, counts = self._windows
        centers, baseline = self._centers, self._baseline
        away = np.sort(np.abs(windows - centers[:, None]), axis=1)
        rows = np.arange(len(counts))
        low, high = away[rows, (counts - 1) // 2], away[rows, counts // 2]
        spread = np.where(counts % 2 == 1, MAD_TO_SIGMA * high, MAD_TO_SIGMA * (low + high) / 2)
        floors = np.maximum(baseline.floor, baseline.floor_share * np.abs(centers))
        return self._until_next(baseline.seen[1], np.maximum(spread, floors))

    def quantile(self, share: float) -> Floats:
        """(n,)"""
        if not len(self._looks):
            return np.full(len(self._values), self._baseline.quantile(share))
        windows, counts = self._windows
        found = windows[np.arange(len(counts)), np.minimum(counts - 1, (share * counts).astype(np.int64))]
        return self._until_next(self._baseline.quantile(share), found)

    def _until_next(self, now: float, then: Floats) -> Floats:
        """From refreshes to looks: each stands until the next."""
        return np.repeat(np.concatenate([[now], then]), np.diff(self._looks, prepend=0, append=len(self._values)))


def _medians(windows: Floats, counts: Ints) -> Floats:
    rows = np.arange(len(counts))
    low, high = windows[rows, (counts - 1) // 2], windows[rows, counts // 2]
    middle: Floats = np.where(counts % 2 == 1, high, (low + high) / 2)
    return middle


def medians(values: Floats, *, is_sorted: bool = False) -> Floats:
    """(m, k) -> (m,), as `robust.median` computes them."""
    ordered = values if is_sorted else np.sort(values, axis=1)
    return _medians(ordered, np.full(len(ordered), ordered.shape[1], dtype=np.int64))


def total(start: float, values: Floats) -> float:
    """`start` plus the values, added one after the other as a loop does."""
    return float(np.cumsum(np.concatenate([[start], values]))[-1])


class Chunks:
    """Walks over rows in ever longer stretches. After a row at which something happened, what was computed ahead is
    lost, so the next stretch is short: it ends where the baseline is refreshed again."""

    def __init__(self, baseline: Baseline, stop: int) -> None:
        self._baseline, self._stop = baseline, stop
        self.at = 0
        self.end = 0
        self._size = 0
        self._next()

    def __bool__(self) -> bool:
        return self.at < self._stop

    def quiet(self) -> None:
        """Nothing happened in the stretch."""
        self.at, self._size = self.end, min(4 * max(self._size, SHORT), LONG)
        self._next()

    def loud(self, row: int) -> None:
        """Something happened at this row."""
        self.at, self._size = row + 1, 0
        self._next()

    def _next(self) -> None:
        baseline = self._baseline
        room = baseline.every - baseline.since if baseline.since < baseline.every else baseline.every
        self.end = min(self._stop, self.at + (self._size or room))


def quiet_stretches(
    baseline: Baseline, values: Floats, first_loud: Callable[[Floats], int]
) -> Iterator[tuple[int, int, bool]]:
    """Walk over values: the quiet ones are taken into the baseline. Yields (start, stop, loud): those from `start` to
    before `stop` were taken; where `loud`, the caller takes in the value at `stop` itself before it goes on.

    `first_loud` says of the next values which is the first that may be loud; their number if none is.
    """
    part = Chunks(baseline, len(values))
    while part:
        start, end = part.at, part.end
        stop = start + first_loud(values[start:end])
        take(baseline, values[start:stop])
        yield start, stop, stop < end
        if stop < end:
            part.loud(stop)
        else:
            part.quiet()
