"""Lines of a log, and stretches of lines of known shapes as columns.

A reader goes through a log line by line. Where it allows, the shape of a line that came before is remembered together
with the places of the numbers that the format's rules found in it; further lines of such shapes then come as one
stretch. Everything else comes as single lines, as from `iter_lines`: other shapes, torn and damaged lines, lines
between whose numbers nothing is known.
"""

from collections.abc import Iterator, Sequence
from typing import BinaryIO

from runhealth.storage.importers.base import Rows, Tally
from runhealth.storage.importers.chunk_table import LEAST_LINES, Table
from runhealth.storage.importers.digits import Chunk, shape_of
from runhealth.storage.importers.lines import blocks_of_lines, iter_lines, lines_of, reject_long
from runhealth.storage.importers.recipes import Conversion, Known, Span, Spots, recipe_of
from runhealth.storage.records import Scalar

CHUNK_BYTES = 1 << 20
_MAX_SHAPES = 64
_MAX_INERT = 32  # of them
_MAX_SEEN = 4096
_MAX_CHARS = 4000


class Shapes:
    """The shapes that one reading knows."""

    def __init__(self) -> None:
        self.known: list[Known] = []
        self.version = 0  # changes with what is known
        self._seen: dict[bytes, int] = {}
        self._inert: set[bytes] = set()
        self._chunk: Chunk | None = None
        self._line = 0

    def at(self, chunk: Chunk | None, line: int) -> None:
        """The line that is being read."""
        self._chunk, self._line = chunk, line

    def worth(self) -> bool:
        """Whether to learn the shape of the line that is being read: if it came before, but not at each time."""
        if self._chunk is None or len(self.known) >= _MAX_SHAPES:
            return False
        skeleton = self._chunk.skeleton(self._line)
        if len(skeleton) > _MAX_CHARS:
            return False
        if len(self._seen) >= _MAX_SEEN:
            self._seen.clear()
        count = self._seen[skeleton] = self._seen.get(skeleton, 0) + 1
        return count > 1 and count & (count - 1) == 0

    def learn(self, spots: Spots, conversion: Conversion, step: int, ts_ns: int, values: dict[str, Scalar]) -> None:
        """Remember the line that is being read, in which `spots` are and of which the rules made the other arguments.
        Nothing is remembered if reading it with arrays gives anything else."""
        assert self._chunk is not None
        raw = self._chunk.raw(self._line)
        if not _is_plain(raw):
            return
        made = recipe_of(raw, spots, conversion)
        if made is None:
            return
        chunk = Chunk(raw + b"\n")
        table = Table(chunk)
        table.fill(0, *made)
        if table.stretch(0)[0] != (0, 1):
            return
        (row,) = table.rows(0, 1, 0, [made]).rows()
        if (row.step, row.ts_ns) != (step, ts_ns) or not _same(row.values, values):
            return
        self.known.append(made)
        self.version += 1

    def learn_inert(self, *, any_digits: bool) -> None:
        """Remember that the line that is being read has no effect, with these digits or with any."""
        assert self._chunk is not None
        raw, skeleton = self._chunk.raw(self._line), self._chunk.skeleton(self._line)
        inert = sum(recipe is None for _, recipe in self.known)
        if not _is_plain(raw) or skeleton in self._inert or inert >= _MAX_INERT:
            return
        shape = shape_of(raw, [(0, len(raw))] if any_digits else [], [])
        if shape is not None:
            if not any_digits:
                self._inert.add(skeleton)
            self.known.append((shape, None))
            self.version += 1

    def forget(self) -> None:
        """The meaning of all lines has changed."""
        self.known.clear()
        self._seen.clear()
        self._inert.clear()
        self.version += 1


class Stretch:
    """Lines of known shapes. Unless it is taken, its first line comes by itself."""

    def __init__(self, table: "Table", rows: Span, lines: Span, before: int, known: Sequence[Known]) -> None:
        self._table, self._rows, self._lines, self._before, self._known = table, rows, lines, before, known
        self.taken = False

    @property
    def names(self) -> tuple[str, ...]:
        """The file's names of the fields in the last row."""
        recipe = self._known[self._table.shape_of_row(self._rows[1] - 1)][1]
        assert recipe is not None
        return recipe.names

    @property
    def inert(self) -> int:
        """How many of the lines are none of the rows."""
        return (self._lines[1] - self._lines[0]) - (self._rows[1] - self._rows[0])

    def take(self) -> Rows:
        """The lines as rows."""
        self.taken = True
        return self._table.rows(*self._rows, self._before, self._known)


Scanned = tuple[int, str, bool] | Stretch


def scan(stream: BinaryIO, tally: Tally, shapes: Shapes | None) -> Iterator[Scanned]:
    """Yield what `iter_lines` yields, or a stretch in place of the lines that it holds."""
    if shapes is None:
        yield from iter_lines(stream, tally)
        return
    number = 0
    for block, whole in blocks_of_lines(stream, CHUNK_BYTES):
        if block is None:
            number += 1
            reject_long(number, tally)
            continue
        if not whole:
            shapes.at(None, 0)
            before = number
            for number, text in lines_of(block, before, False, tally):
                yield number, text, False
            continue
        chunk = Chunk(block)
        yield from _scan_chunk(chunk, number, tally, shapes)
        number += len(chunk)


def _scan_chunk(chunk: Chunk, before: int, tally: Tally, shapes: Shapes) -> Iterator[Scanned]:
    table, version, at, count = Table(chunk), -1, 0, len(chunk)
    while at < count:
        if version != shapes.version:
            if len(shapes.known) <= table.filled:
                table = Table(chunk)
            table.after(at)
            for index in range(table.filled, len(shapes.known)):
                table.fill(index, *shapes.known[index])
            version = shapes.version
        rows, end = table.stretch(at)
        until = at + 1
        if rows[1] - rows[0] >= LEAST_LINES:
            stretch = Stretch(table, rows, (at, end), before, shapes.known)
            yield stretch
            if stretch.taken:
                at = end
                continue
        else:
            until = table.next_stretch(rows[1])
        raw = chunk.data[chunk.line_starts[at] : chunk.line_starts[until]]
        line = -1
        for number, text in lines_of(raw, before + at, True, tally):
            if line != number - before - 1:
                line = number - before - 1
                if version != shapes.version:
                    until = line
                    break
                shapes.at(chunk, line)
            yield number, text, True
        at = until


def _is_plain(raw: bytes) -> bool:
    """Whether the text of a line is its bytes."""
    return raw.isascii() and b"\0" not in raw and b"\r" not in raw[:-1]


def _same(found: dict[str, Scalar], wanted: dict[str, Scalar]) -> bool:
    if found.keys() != wanted.keys():
        return False
    return all(
        value == wanted[name] or (value != value and wanted[name] != wanted[name]) for name, value in found.items()
    )
