"""What all console logs share: loss-scale overflows, tracebacks, resumes, torn last lines.

A format gives one function from a line to a `TextRow`; everything else is done here.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import BinaryIO

from runhealth.storage.importers.base import EVALUATION, TRAINING, Item, Mark, ReadContext, Row, Tally
from runhealth.storage.importers.failures import FailureReader
from runhealth.storage.importers.lines import iter_lines, without_ansi
from runhealth.storage.importers.names import Names
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


Parse = Callable[[str, int], "Iterable[TextRow | Mark]"]


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


def fields_of(text: str) -> dict[str, Scalar]:
    """The numbers at `field_places`."""
    return FieldReader(field_places)(text)


def read_text(stream: BinaryIO, context: ReadContext, names: Names, parse: Parse) -> Iterator[Item]:
    """Yield the items of a console log. `parse` yields nothing for a line that holds no measurement."""
    tally = context.tally
    state = _State(tally)
    usual: dict[str, Scalar] = {}
    others = 0
    for number, raw, whole in iter_lines(stream, tally):
        line = without_ansi(raw)
        if len(line) > _MAX_LINE:
            tally.reject(number, f"a line of more than {_MAX_LINE} characters in a console log")
            continue
        rank: int | None = None
        if line[:1] == "[" and (prefix := _RANK_PREFIX.match(line)):
            rank, line = int(prefix["rank"]) if prefix["rank"] else None, line[prefix.end() :]
        met = False
        for found in parse(line, number):
            if isinstance(found, Mark):
                met = True
                yield found
                continue
            if not found.fields and whole and not found.cut:
                continue
            met = True
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
            if state.overflowed and not found.evaluation:
                state.complete(values, number)
            row_rank = found.rank if found.rank is not None else rank
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
        if not met:
            others += 1
            yield from state.other_line(line, number, rank)
    yield from state.finish()
    names.finish()
    if others:
        tally.note(f"{others} lines hold no measurement")


def _is_torn(row: TextRow, usual: Mapping[str, Scalar]) -> bool:
    return not row.evaluation and bool(usual) and not usual.keys() <= row.fields.keys()


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

    @property
    def overflowed(self) -> bool:
        """Whether overflows wait for the row that they belong to."""
        return self._skips > 0 or self._scale is not None

    def other_line(self, line: str, number: int, rank: int | None) -> Iterator[Item]:
        if ("verflow" in line or "OVERFLOW" in line) and self._overflow(line[:2000], rank):
            return
        if self.failures.feed(line, number, rank):
            return
        if ("heckpoint" in line or "esum" in line) and (match := _RESUME.search(line[:2000])):
            yield Mark(line=number, kind=EventKind.RESUME, message=line.strip()[:300], step=int(match[1][:18]))

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
