"""The numbers of a chunk of a log as columns, and where its regular stretches are."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from runhealth.storage.blocks import Bools, Column, Floats, Ints
from runhealth.storage.importers.base import Rows
from runhealth.storage.importers.digits import Chunk, Shape
from runhealth.storage.importers.recipes import Known, Recipe, Span
from runhealth.storage.importers.values import to_ts_ns

LEAST_LINES = 8  # a shorter stretch costs more than its lines one by one
_EXACT = 2**53


class Table:
    """The columns of a chunk, with a place for each line; only those of lines of known shapes are filled in."""

    def __init__(self, chunk: Chunk) -> None:
        size = len(chunk)
        self._chunk = chunk
        self._first = 0
        self.filled = 0
        self._which = np.full(size, -1, np.int32)
        self._inert = np.zeros(size, np.bool_)
        self._steps = np.zeros(size, np.int64)
        self._ts_ns = np.zeros(size, np.int64)
        self._kinds = np.zeros(size, np.int64)  # what may not change within a stretch
        self._columns: dict[str, tuple[npt.NDArray[Any], Bools]] = {}
        self._rows: Ints | None = None  # the lines that are not inert
        self._ends = np.zeros(0, np.int64)  # where stretches of them end
        self._long = np.zeros(0, np.int64)  # where those begin that are worth it

    def after(self, line: int) -> None:
        """Lines before this one are not looked at any more."""
        self._first = line

    def fill(self, index: int, shape: Shape, recipe: Recipe | None) -> None:
        """Fill in the places of the lines of one shape."""
        self.filled = index + 1
        self._rows = None
        lines = self._chunk.fitting(shape, np.flatnonzero(self._which[self._first :] < 0) + self._first)
        if not len(lines):
            return
        if recipe is None:
            self._which[lines], self._inert[lines] = index, True
            return
        steps = self._chunk.numbers(lines, recipe.step)
        ts_ns, good = self._times(lines, recipe)
        columns: dict[str, npt.NDArray[Any]] = {}
        for name, number in recipe.fields:
            columns[name] = (
                self._chunk.numbers(lines, number) if number is not None else (ts_ns - recipe.start_ns) / 1e9
            )
        for name, factor, whole in recipe.changed:
            values = columns[name] * factor if factor != 1.0 else columns[name]
            if whole and values.dtype != np.int64:
                fits = np.abs(values) < 2.0**62
                good &= fits
                values = np.where(fits, values, 0).astype(np.int64)
            columns[name] = values
        for name, values in columns.items():
            good &= self._fits(name, values)
        if not good.all():
            lines, steps, ts_ns = lines[good], steps[good], ts_ns[good]
            columns = {name: values[good] for name, values in columns.items()}
        self._which[lines], self._steps[lines], self._ts_ns[lines] = index, steps, ts_ns
        self._kinds[lines] = 2 * (-1 if recipe.total is None else recipe.total) + recipe.ranked
        for name, values in columns.items():
            self._put(name, lines, values)

    def _times(self, lines: Ints, recipe: Recipe) -> tuple[Ints, Bools]:
        good = np.ones(len(lines), np.bool_)
        if recipe.stamp is not None:
            return self._chunk.stamps(lines, *recipe.stamp)
        if recipe.time is not None:
            # Few logs have them, and the rules of units are not worth a second form.
            found = self._chunk.numbers(lines, recipe.time).tolist()
            times = [to_ts_ns(value) for value in found]
            return np.array(times, np.int64), np.array([time > 0 for time in times], np.bool_)
        return np.zeros(len(lines), np.int64), good

    def _fits(self, name: str, values: npt.NDArray[Any]) -> Bools:
        """Where values can be kept in a column that may hold floats already."""
        known = self._columns.get(name)
        if known is None or known[0].dtype == values.dtype:
            return np.ones(len(values), np.bool_)
        if values.dtype == np.int64:
            fits: Bools = np.abs(values) <= _EXACT
            return fits
        exact = bool((np.abs(known[0]) <= _EXACT).all())
        return np.full(len(values), exact)

    def _put(self, name: str, lines: Ints, values: Ints | Floats) -> None:
        size = len(self._which)
        kept, present = self._columns.get(name) or (np.zeros(size, values.dtype), np.zeros(size, np.bool_))
        if kept.dtype == np.int64 and values.dtype != np.int64:
            kept = kept.astype(np.float64)
        kept[lines] = values
        present[lines] = True
        self._columns[name] = kept, present

    def stretch(self, line: int) -> tuple[Span, int]:
        """The rows of the stretch that begins with a line, as the first and the one after the last of all rows, and the
        line after it. No rows, if the next line that is not inert has no known shape."""
        if self._rows is None:
            self._rows = np.flatnonzero(~self._inert)
            steps, kinds = self._steps[self._rows], self._kinds[self._rows]
            known = self._which[self._rows] >= 0
            goes_on = np.zeros(len(known), np.bool_)
            goes_on[1:] = known[1:] & known[:-1] & (steps[1:] > steps[:-1]) & (kinds[1:] == kinds[:-1])
            begins = np.flatnonzero(~goes_on)
            self._ends = np.append(begins, len(known))
            long = known[begins] & (np.diff(self._ends) >= LEAST_LINES)
            self._long = begins[long]
        first = int(np.searchsorted(self._rows, line))
        if first == len(self._rows) or self._which[self._rows[first]] < 0:
            return (first, first), line
        last = int(self._ends[np.searchsorted(self._ends, first, side="right")])
        return (first, last), int(self._rows[last]) if last < len(self._rows) else len(self._which)

    def next_stretch(self, row: int) -> int:
        """The line on which, from a row on, the next stretch of some length begins, or the end."""
        assert self._rows is not None
        at = int(np.searchsorted(self._long, row))
        return int(self._rows[self._long[at]]) if at < len(self._long) else len(self._which)

    def shape_of_row(self, row: int) -> int:
        """Which of the known shapes a row has."""
        assert self._rows is not None
        return int(self._which[self._rows[row]])

    def rows(self, first: int, last: int, before: int, known: Sequence[Known]) -> Rows:
        """Rows `first` up to, and without, `last`, of a chunk that `before` lines come before."""
        assert self._rows is not None
        lines = self._rows[first:last]
        begin, end = int(lines[0]), int(lines[-1]) + 1
        at: slice | Ints = slice(begin, end) if end - begin == len(lines) else lines
        which = self._which[at]
        shapes: list[int] = [int(which[0])] if (which == which[0]).all() else np.unique(which).tolist()
        recipes = [recipe for shape in shapes if (recipe := known[shape][1]) is not None]
        columns: dict[str, Column] = {}
        for name in {name: None for recipe in recipes for name, _ in recipe.fields}:
            values, present = self._columns[name]
            part = present[at] if len(shapes) > 1 else None
            if part is not None and part.all():
                part = None
            columns[name] = Column(values=values[at], present=part)
        return Rows(
            lines=lines + (before + 1),
            steps=self._steps[at],
            ts_ns=self._ts_ns[at],
            columns=columns,
            total=recipes[0].total,
            ranked=recipes[0].ranked,
        )
