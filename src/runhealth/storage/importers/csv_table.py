"""CSV, TSV and semicolon tables with a header: exported trackers, Lightning, Keras, Ultralytics, AlgoPerf.

Empty cells are absent. A header that comes again, as when a run is appended, is taken as one. Each line is split by
itself, so that a stray quote cannot swallow the lines after it.
"""

import csv
import re
from collections.abc import Collection, Iterator
from typing import BinaryIO

import numpy as np

from runhealth.storage.errors import NoUsableDataError
from runhealth.storage.importers.base import Item, ReadContext, Row, Rows, Tally
from runhealth.storage.importers.names import Names, field_of, normalise, target_of
from runhealth.storage.importers.recipes import Span
from runhealth.storage.importers.rows import RowBuilder
from runhealth.storage.importers.scan import Shapes, Stretch, scan
from runhealth.storage.importers.tables import table_for
from runhealth.storage.importers.values import to_number

_DELIMITERS = ",\t;|"
_MAX_COLUMNS = 5000
_WATCHED = ("loss", "grad_norm")
_LEAST_FILLED, _LEAST_EMPTY = 5, 3  # rows
_DECIMAL_COMMA = re.compile(r"[-+]?\d+,\d+(?:[eE][-+]?\d+)?\Z")


class _CsvTable:
    name = "csv"

    def sniff(self, name: str, head: bytes) -> float:  # noqa: ARG002
        text = head.decode("utf-8", "replace").removeprefix("\ufeff")
        lines = [line for line in text.split("\n", 30)[:30] if line.strip() and not line.startswith("#")]
        if len(lines) < 2:
            return 0.0
        delimiter = _delimiter(lines[0])
        header = _cells(lines[0], delimiter) if delimiter else None
        if header is None or not _is_header(header):
            return 0.0
        body = lines[1:-1] or lines[1:]  # the last line of the head may be cut
        fitting = sum(1 for line in body if (cells := _cells(line, delimiter)) and len(cells) == len(header))
        return 0.75 if fitting * 2 >= len(body) else 0.0

    def read(self, stream: BinaryIO, context: ReadContext) -> Iterator[Item]:
        tally = context.tally
        header: list[str] | None = None
        delimiter = ","
        builder: RowBuilder | None = None
        chosen = frozenset(context.mapping.values())
        decimal_comma = False
        shapes = Shapes() if context.bulk else None
        emptied = _Emptied()
        for scanned in scan(stream, tally, shapes):
            if isinstance(scanned, Stretch):
                rows = scanned.take()
                emptied.see_rows(rows)
                yield rows
                continue
            number, text, whole = scanned
            if not text.strip() or (header is None and text.startswith("#")):
                continue
            if header is None:
                delimiter = _delimiter(text) or ","
            cells = _cells(text, delimiter)
            if cells is None or len(cells) > _MAX_COLUMNS:
                tally.rows_read += 1
                tally.reject(number, f"cannot be split into cells: {text[:60]!r}")
                continue
            if header is None or _is_header(cells, chosen):
                if header is not None:
                    tally.note(f"the header comes again on line {number}")
                    if shapes is not None:
                        shapes.forget()
                header = _unique(cells)
                if builder is None:
                    builder = self._builder(header, context)
                continue
            if len(cells) != len(header) or builder is None:
                tally.rows_read += 1
                tally.reject(number, f"expected {len(header)} cells, met {len(cells)}")
                continue
            if delimiter == ";":
                decimal_comma = decimal_comma or _has_decimal_comma(cells, tally, number)
                if decimal_comma:
                    cells = [cell.replace(",", ".") if _DECIMAL_COMMA.match(cell) else cell for cell in cells]
            row = builder.row(number, dict(zip(header, cells, strict=True)))
            if row is not None:
                plain = whole and '"' not in text and not (delimiter == ";" and "," in text)
                if shapes is not None and plain and shapes.worth() and (places := _places(text, delimiter, header)):
                    builder.learn(shapes, places, row)
                emptied.see(row)
                yield row
        if builder is not None:
            builder.finish()
        emptied.finish(tally)

    @staticmethod
    def _builder(header: list[str], context: ReadContext) -> RowBuilder:
        table = table_for(header, csv=True)
        if table is not None:
            context.tally.format = table.format
        if "loss" not in context.mapping:
            _refuse_several(header)
        names = Names(context.tally, context.mapping, table.names if table is not None else None)
        fields = {context.mapping[key] for key in ("step", "rank", "attempt", "ts") if key in context.mapping}
        names.learn(name for name in header if name not in fields and field_of(name) is None)
        return RowBuilder(context, names)


class _Emptied:
    """Columns whose cells stay empty to the end after they were filled: what became NaN, as pandas writes it, or what
    is no longer measured."""

    def __init__(self) -> None:
        self._filled = dict.fromkeys(_WATCHED, 0)  # rows
        self._empty = dict.fromkeys(_WATCHED, 0)  # rows since the last that was filled
        self._since = dict.fromkeys(_WATCHED, 0)  # the line of the first of them

    def see(self, row: Row) -> None:
        for name in _WATCHED:
            if name in row.values:
                self._filled[name] += 1
                self._empty[name] = 0
            else:
                self._more(name, row.line, 1)

    def see_rows(self, rows: Rows) -> None:
        for name in _WATCHED:
            column = rows.columns.get(name)
            last = -1 if column is None else len(rows) - 1
            if column is not None and column.present is not None:
                last = int(np.flatnonzero(column.present)[-1])
            if last >= 0:
                self._filled[name] += last + 1
                self._empty[name] = 0
            if last < len(rows) - 1:
                self._more(name, int(rows.lines[last + 1]), len(rows) - 1 - last)

    def _more(self, name: str, line: int, count: int) -> None:
        if not self._empty[name]:
            self._since[name] = line
        self._empty[name] += count

    def finish(self, tally: Tally) -> None:
        for name in _WATCHED:
            if self._filled[name] >= _LEAST_FILLED and self._empty[name] >= _LEAST_EMPTY:
                where = f"from line {self._since[name]} to the end ({self._empty[name]} rows)"
                tally.note(f"the cells of {name} are empty {where}: many programs leave a cell empty for NaN")


def _refuse_several(header: list[str]) -> None:
    """A chart exported from Weights & Biases has one column a run: `run - metric`."""
    runs = {
        name.rsplit(" - ", 1)[0]: name
        for name in header
        if " - " in name and (target := target_of(name)) is not None and target[0] == "loss"
    }
    if len(runs) > 1:
        raise NoUsableDataError(
            f"a table of {len(runs)} runs: {', '.join(list(runs)[:12])}; expected one: choose its column, "
            f'for example --map "loss={next(iter(runs.values()))}"'
        )


def _delimiter(line: str) -> str:
    best = max(_DELIMITERS, key=line.count)
    return best if line.count(best) else ""


def _cells(line: str, delimiter: str) -> list[str] | None:
    if '"' not in line:
        return [cell.strip() for cell in line.split(delimiter)]
    try:
        return [cell.strip() for cell in next(csv.reader([line], delimiter=delimiter, skipinitialspace=True))]
    except (csv.Error, StopIteration):
        return None


def _places(text: str, delimiter: str, header: list[str]) -> dict[str, Span]:
    """Where the cells are that are not empty; nothing if one of them is no number."""
    places: dict[str, Span] = {}
    at = 0
    for name, cell in zip(header, text.split(delimiter), strict=True):
        inner = cell.strip()
        if inner:
            if to_number(inner) is None:
                return {}
            start = at + len(cell) - len(cell.lstrip())
            places[name] = (start, start + len(inner))
        at += len(cell) + 1
    return places


def _has_decimal_comma(cells: list[str], tally: Tally, number: int) -> bool:
    """Spreadsheets of many countries write 2,5 and separate cells with semicolons."""
    found = any(_DECIMAL_COMMA.match(cell) for cell in cells) and not any("." in cell for cell in cells)
    if found:
        tally.note(f"numbers are read with decimal commas from line {number} on")
    return found


def is_header(line: str, chosen: Collection[str]) -> bool:
    """Whether a line is the header of a table with one of the names that a mapping chose."""
    cells = _cells(line, _delimiter(line) or ",")
    return cells is not None and not set(chosen).isdisjoint(cells) and _is_header(cells, chosen)


def _is_header(cells: list[str], chosen: Collection[str] = ()) -> bool:
    """Names, no numbers, and at least one of them known, or chosen by a mapping."""
    if len(cells) < 2 or any(to_number(cell) is not None for cell in cells):
        return False
    return any(
        cell and (cell in chosen or field_of(cell) or target_of(cell) or normalise(cell) == "epoch") for cell in cells
    )


def _unique(cells: list[str]) -> list[str]:
    """Column names without gaps and repetitions."""
    seen: dict[str, int] = {}
    names = []
    for at, cell in enumerate(cells):
        name = cell or f"column_{at + 1}"
        seen[name] = seen.get(name, 0) + 1
        names.append(name if seen[name] == 1 else f"{name}_{seen[name]}")
    return names


IMPORTER = _CsvTable()
