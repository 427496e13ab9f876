"""On which line of a log the record of a step begins, kept as runs of steps and lines that rise evenly."""

import bisect
import itertools

import numpy as np

from runhealth.storage.blocks import Ints

_MAX_RUNS = 50_000  # a log without any regularity gives up its later lines


class LineMap:
    """Filled while a log is read, in the order of its records."""

    def __init__(self) -> None:
        self._runs: dict[int, list[tuple[int, int, int, int, int]]] = {}  # first step, line, their strides, count
        self._count = 0

    def add(self, attempt: int, step: int, line: int) -> None:
        """One record."""
        runs = self._runs.setdefault(attempt, [])
        if runs:
            first, at, stride, lines, count = runs[-1]
            if count == 1 and step > first:
                runs[-1] = first, at, step - first, line - at, 2
                return
            if step == first + stride * count and line == at + lines * count:
                runs[-1] = first, at, stride, lines, count + 1
                return
        self._begin(runs, step, line, 1, 1, 1)

    def extend(self, attempt: int, steps: Ints, lines: Ints) -> None:
        """Many records, their steps ascending."""
        strides, between = np.diff(steps), np.diff(lines)
        breaks = np.flatnonzero((strides[1:] != strides[:-1]) | (between[1:] != between[:-1])) + 2
        edges = [0, *breaks.tolist(), len(steps)]
        for begin, end in itertools.pairwise(edges):
            for at in range(begin, min(begin + 2, end)):
                self.add(attempt, int(steps[at]), int(lines[at]))
            if end - begin > 2:
                self._lengthen(attempt, int(steps[end - 1]), int(lines[end - 1]), end - begin - 2)

    def find(self, attempt: int, step: int) -> int | None:
        """The line (or byte offset) of a step, None if it is not known."""
        runs = self._runs.get(attempt, [])
        at = bisect.bisect_right(runs, step, key=lambda run: run[0])
        for first, line, stride, lines, count in reversed(runs[max(0, at - 2) : at]):
            place, rest = divmod(step - first, stride)
            if rest == 0 and place < count:
                return line + lines * place
        return None

    def _lengthen(self, attempt: int, step: int, line: int, more: int) -> None:
        """Add records that go on evenly, up to this one."""
        runs = self._runs[attempt]
        first, at, stride, lines, count = runs[-1]
        # The two records before these may have ended a run of another stride.
        even = count > 1 and (first + stride * (count + more - 1), at + lines * (count + more - 1)) == (step, line)
        if even:
            runs[-1] = first, at, stride, lines, count + more
        else:
            before_step, before_line = first + stride * (count - 1), at + lines * (count - 1)
            stride, lines = (step - before_step) // more, (line - before_line) // more
            self._begin(runs, before_step + stride, before_line + lines, stride, lines, more)

    def _begin(
        self, runs: list[tuple[int, int, int, int, int]], step: int, line: int, stride: int, lines: int, count: int
    ) -> None:
        if self._count < _MAX_RUNS:
            self._count += 1
            runs.append((step, line, stride, lines, count))
