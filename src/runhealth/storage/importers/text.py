"""What all console logs share: loss-scale overflows, tracebacks, resumes, torn last lines.

A format gives one function from a line to a `TextRow`; everything else is done here.
"""

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import BinaryIO, Protocol

from runhealth.storage.importers.base import EVALUATION, TRAINING, Item, Mark, ReadContext, Row, Tally
from runhealth.storage.importers.failures import FailureReader, may_tell_failure
from runhealth.storage.importers.lines import kept_places, without_ansi
from runhealth.storage.importers.names import Names
from runhealth.storage.importers.recipes import Spots
from runhealth.storage.importers.scan import Shapes, Stretch, scan
from runhealth.storage.importers.shapes import FieldReader
from runhealth.storage.importers.values import NUMBER, to_number
from runhealth.storage.records import EventKind, Scalar

_RANK_PREFIX = re.compile(r"\A(?:\[(?:(?:rank|Rank )?(?P<rank>\d{1,6})|default\d+)\]:\s?)+")  # default: a local rank
# apex and torch.amp style, and DeepSpeed's own; both name the scale that they go to.
_OVERFLOW = re.compile(r"gradient overflow|overflow!|overflow detected", re.I)
_OVERFLOW_RANK = re.compile(r"\brank (\d{1,6})\b", re.I)
_ATTEMPTED = re.compile(rf"attempted loss scale:\s*({NUMBER})", re.I)
_NEW_SCALE = re.compile(rf"\b(?:reducing|setting|decreasing) (?:the )?(?:loss scale )?to\s*:?\s*({NUMBER})", re.I)
_RESUME = re.compile(
    r"\b(?:resum(?:ed|ing)|loaded checkpoint|loading checkpoint)\b.*?\b(?:step|iteration)[\s_=:]*(\d+)", re.I
)
_TELLING = ("verflow", "OVERFLOW", "heckpoint", "esum")
_MAX_LINE = 1 << 15
_FIELD = re.compile(
    rf"(?P<name>[A-Za-z_%][\w./%-]{{0,80}})\s*[:=]\s*\[?(?P<value>{NUMBER})"
    r"(?P<unit>ns\b|us\b|ms\b|s\b|GiB\b|MiB\b|KiB\b|GB\b|MB\b)?(?=[\s,;|)\]}(%]|\Z)",
    re.I,
)


@dataclass(slots=True)
class TextRow:
    """What a format found in one line: the step and the fields under their foreign names."""

    step: int
    fields: dict[str, Scalar]
    evaluation: bool = False
    total: int | None = None
    rank: int | None = None
    ts_ns: int = 0
    unclosed: bool = False  # the separator after the last field is missing
    cut: bool = False  # another writer's line begins before this one was complete


class LineParser(Protocol):
    """The rules of one format."""

    def __call__(self, line: str, number: int) -> Iterable[TextRow | Mark]:
        """What a line holds; nothing if it holds no measurement."""
        ...

    def spots(self, line: str) -> Spots | None:
        """Where the step and the fields of a line are that gave one training row. None unless every line that differs
        in these numbers only, digit by digit, gives the same row with its numbers, whatever came before it."""
        ...

    def inert(self, line: str) -> bool:
        """Whether a line that holds no measurement leaves nothing behind, nor any that differs in its digits only."""
        ...

    def passed(self, rows: int, step: int) -> None:
        """So many lines were read by their spots, the last of them with this step."""
        ...


def field_places(text: str) -> list[tuple[str, int, int]]:
    """The places of all `name:number unit` and `name=number unit` of a text; the unit is appended to the name
    (`train_time_ms`)."""
    return [
        (
            f"{match['name']}_{match['unit']}" if match["unit"] else match["name"],
            match.start("value"),
            match.end("value"),
        )
        for match in _FIELD.finditer(text)
    ]


def spots_of(places: Iterable[tuple[str, int, int]], offset: int) -> list[tuple[str, int, int]] | None:
    """The places of fields in a text that begins `offset` characters into the line; None if a name comes twice."""
    found = [(name, start + offset, end + offset) for name, start, end in places]
    return found if found and len({name for name, _, _ in found}) == len(found) else None


def fields_of(text: str) -> dict[str, Scalar]:
    """The numbers at `field_places`."""
    return FieldReader(field_places)(text)


def read_text(stream: BinaryIO, context: ReadContext, names: Names, parse: LineParser) -> Iterator[Item]:
    """Yield the items of a console log."""
    tally = context.tally
    state = _State(tally)
    usual: Collection[str] = ()
    others = 0
    shapes = Shapes() if context.bulk else None
    for scanned in scan(stream, tally, shapes):
        if isinstance(scanned, Stretch):
            if state.failures.busy or state.overflowed:
                continue
            others += scanned.inert
            rows = scanned.take()
            state.last_step = int(rows.steps[-1])
            usual = scanned.names
            parse.passed(len(rows), state.last_step)
            yield rows
            continue
        number, raw, whole = scanned
        line = without_ansi(raw)
        if len(line) > _MAX_LINE:
            tally.reject(number, f"a line of more than {_MAX_LINE} characters in a console log")
            continue
        rank: int | None = None
        prefixed = 0
        if line[:1] == "[" and (prefix := _RANK_PREFIX.match(line)):
            rank, prefixed = int(prefix["rank"]) if prefix["rank"] else None, prefix.end()
            line = line[prefixed:]
        met = 0
        alone: tuple[TextRow, dict[str, Scalar]] | None = None
        for found in parse(line, number):
            if isinstance(found, Mark):
                met += 1
                yield found
                continue
            if not found.fields and whole and not found.cut:
                continue
            met += 1
            torn = found.cut or (not whole and (found.unclosed or not found.fields or _is_torn(found, usual)))
            if torn:
                # Without the fields that are missing, the row would look like one whose loss vanished.
                tally.rows_read += 1
                tally.reject(number, f"the line of step {found.step} is torn: {line[-60:]!r}")
                continue
            if not found.evaluation:
                usual = found.fields
            if state.failures.ended:
                yield from state.before_row(found)
            state.last_step = found.step
            values, _ = names.convert(found.fields)
            row_rank = found.rank if found.rank is not None else rank
            if state.overflowed and not found.evaluation:
                state.complete(values, number)
            elif shapes is not None and whole and not (found.evaluation or row_rank) and shapes.worth():
                alone = found, dict(values)
            yield Row(
                number,
                found.step,
                values,
                row_rank or 0,
                rank is not None and found.rank is None,  # else the line speaks for all ranks
                EVALUATION if found.evaluation else TRAINING,
                found.total,
                None,
                found.ts_ns,
            )
        if shapes is not None and alone is not None and met == 1:
            ranked = rank is not None and alone[0].rank is None
            _learn(shapes, parse.spots(line), raw, prefixed, ranked, *alone, names)
        if not met:
            others += 1
            yield from state.other_line(line, number, rank)
            if shapes is not None and not state.told and not state.failures.busy and parse.inert(line):
                _learn_inert(shapes, line)
    yield from state.finish()
    names.finish()
    if others:
        tally.note(f"{others} lines hold no measurement")


def _learn(
    shapes: Shapes,
    spots: Spots | None,
    raw: str,
    prefixed: int,
    ranked: bool,
    row: TextRow,
    values: dict[str, Scalar],
    names: Names,
) -> None:
    """Remember the shape of a line that gave a row; `spots` are those of the line without colours and prefix."""
    if spots is None:
        return
    moved = spots.moved(kept_places(raw)[prefixed:])
    if moved is not None:
        shapes.learn(replace(moved, ranked=ranked), names.conversion(row.fields), row.step, row.ts_ns, values)


def _learn_inert(shapes: Shapes, line: str) -> None:
    """Remember a line that is about nothing."""
    if shapes.worth():
        # What is known of failures, overflows and resumes could depend on the digits of a line with such words.
        shapes.learn_inert(any_digits=not (may_tell_failure(line) or any(word in line for word in _TELLING)))


def _is_torn(row: TextRow, usual: Collection[str]) -> bool:
    return not row.evaluation and bool(usual) and not all(name in row.fields for name in usual)


class _State:
    """Overflow lines that belong to the next step, and what ended the job."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._overflows = 0
        self._skips = 0
        self._told: set[tuple[int | None, Scalar | None]] = set()
        self._scale: Scalar | None = None
        self.failures = FailureReader()
        self.last_step = -1
        self.told = False  # whether the last other line told something

    @property
    def overflowed(self) -> bool:
        """Whether overflows wait for the row that they belong to."""
        return self._skips > 0 or self._scale is not None

    def other_line(self, line: str, number: int, rank: int | None) -> Iterator[Item]:
        self.told = True
        if ("verflow" in line or "OVERFLOW" in line) and self._overflow(line[:2000], rank):
            return
        if self.failures.feed(line, number, rank):
            return
        if ("heckpoint" in line or "esum" in line) and (match := _RESUME.search(line[:2000])):
            yield Mark(line=number, kind=EventKind.RESUME, message=line.strip()[:300], step=int(match[1][:18]))
            return
        self.told = False

    def _overflow(self, line: str, rank: int | None) -> bool:
        if _OVERFLOW.search(line) is None:
            return False
        self._overflows += 1
        named = _OVERFLOW_RANK.search(line)
        after = _NEW_SCALE.search(line) or _ATTEMPTED.search(line)
        scale = to_number(after[1].rstrip(",")) if after else None
        told = (int(named[1]) if named else rank, scale)
        # Each rank tells of the same overflow: a further one changes the scale, or a named rank tells it again.
        known = scale is not None and any(before == scale for _, before in self._told)
        if not known or (told in self._told and (told[0] is not None or scale == 1)):
            self._skips += 1
            self._told.clear()
        self._told.add(told)
        self._scale = scale if scale is not None else self._scale
        return True

    def before_row(self, row: TextRow) -> Iterator[Item]:
        further = row.step > self.last_step or (row.evaluation and row.step == self.last_step)
        if further and self.failures.line and not self.failures.exited:
            self._tally.note(f"training went on after the exception on line {self.failures.line}")
            self.failures.take()
        else:
            yield from self._ends(self.failures.take())

    @staticmethod
    def _ends(marks: list[Mark]) -> Iterator[Item]:
        for mark in marks:
            if mark.kind != EventKind.ATTEMPT_END:
                yield mark

    def complete(self, values: dict[str, Scalar], number: int) -> None:
        if self._skips and not values.get("step_skipped"):
            if values.get("step_skipped") == 0:
                self._tally.note(f"line {number} counts no skipped steps, but overflow lines before it report a skip")
            values["step_skipped"] = self._skips
        if self._scale is not None:
            values.setdefault("loss_scale", self._scale)
        self._skips, self._scale = 0, None
        self._told.clear()

    def finish(self) -> Iterator[Item]:
        if self._overflows:
            self._tally.note(f"{self._overflows} lines about overflows: each counts as a skip of the step after it")
        yield from self.failures.take()
