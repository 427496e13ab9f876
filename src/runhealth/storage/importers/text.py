"""What all console logs share: loss-scale overflows, tracebacks, resumes, torn last lines.

A format gives one function from a line to a `TextRow`; everything else is done here.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

from runhealth.storage.importers.base import EVALUATION, TRAINING, Item, Mark, ReadContext, Row, Tally
from runhealth.storage.importers.lines import iter_lines, without_ansi
from runhealth.storage.importers.names import Names
from runhealth.storage.importers.values import NUMBER, to_number
from runhealth.storage.records import EventKind, Scalar

_RANK_PREFIX = re.compile(r"\A(?:\[(?:(?:rank|Rank )?(?P<rank>\d{1,6})|default\d+)\]:\s?)+")  # default: a local rank
# apex and torch.amp style, and DeepSpeed's own; both name the scale that they go to.
_OVERFLOW = re.compile(
    rf"(?:Gradient overflow|OVERFLOW!|Overflow detected)"
    rf".*?(?:reducing (?:loss scale )?to\s*:?\s*(?P<scale>{NUMBER}))?\s*\Z",
    re.I,
)
_RESUME = re.compile(
    r"\b(?:resum(?:ed|ing)|loaded checkpoint|loading checkpoint)\b.*?\b(?:step|iteration)[\s_=:]*(\d+)", re.I
)
_MAX_LINE = 1 << 15
_TRACEBACK = "Traceback (most recent call last)"
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Warning|Failure|Timeout|Fault)\b")
_TORCHRUN = re.compile(r"\s*(?P<key>rank|exitcode|traceback)\s*:\s*(?P<value>.+?)\s*\Z")
_CHILD_FAILED = "ChildFailedError"
_CANCELLED = re.compile(r"slurmstepd: error: \*\*\* .*CANCELLED|received SIGTERM, exiting|DUE TO TIME LIMIT")
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


def fields_of(text: str) -> dict[str, Scalar]:
    """All `name:number unit` and `name=number unit` of a text; the unit is appended to the name (`train_time_ms`)."""
    found: dict[str, Scalar] = {}
    for match in _FIELD.finditer(text):
        value = to_number(match["value"])
        if value is not None:
            name = f"{match['name']}_{match['unit']}" if match["unit"] else match["name"]
            found.setdefault(name, value)
    return found


def read_text(stream: BinaryIO, context: ReadContext, names: Names, parse: Parse) -> Iterator[Item]:
    """Yield the items of a console log. `parse` yields nothing for a line that holds no measurement."""
    tally = context.tally
    state = _State(tally)
    usual: set[str] = set()
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
                usual = set(found.fields)
            yield from state.before_row(found)
            values, _ = names.convert(found.fields)
            state.complete(found, values, number)
            row_rank = found.rank if found.rank is not None else rank
            yield Row(
                line=number,
                step=found.step,
                values=values,
                rank=row_rank or 0,
                ranked=row_rank is not None,
                series=EVALUATION if found.evaluation else TRAINING,
                total=found.total,
                ts_ns=found.ts_ns,
            )
        if not met:
            others += 1
            yield from state.other_line(line, number)
    yield from state.finish()
    names.finish()
    if others:
        tally.note(f"{others} lines hold no measurement")


def _is_torn(row: TextRow, usual: set[str]) -> bool:
    return not row.evaluation and bool(usual) and not usual <= row.fields.keys()


class _State:
    """Overflow lines that belong to the next step, and the last traceback."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._skips = 0
        self._overflows = 0
        self._scale: Scalar | None = None
        self._in_traceback = False
        self._exception: Mark | None = None
        self._cancelled: Mark | None = None
        self._last_step = -1

    def other_line(self, line: str, number: int) -> Iterator[Item]:
        line = line[:2000]
        if self._in_traceback:
            if line[:1] in (" ", "\t", ""):
                return
            self._in_traceback = False
            # torchrun's own exception comes last and says less than the one of the worker before it.
            better = self._exception is None or _CHILD_FAILED not in line
            if better and (_EXCEPTION.match(line) or ": " in line):
                self._exception = Mark(line=number, kind=EventKind.EXCEPTION, message=line.strip()[:500])
            return
        if _TRACEBACK in line:
            self._in_traceback = True
        elif "verflow" in line or "OVERFLOW" in line:
            if match := _OVERFLOW.search(line):
                self._skips += 1
                self._overflows += 1
                scale = to_number(match["scale"]) if match["scale"] else None
                self._scale = scale if scale is not None else self._scale
        elif self._exception is not None and (match := _TORCHRUN.match(line)):
            self._exception.data.setdefault(match["key"], match["value"][:200])
        elif match := _RESUME.search(line):
            if (step := int(match[1][:18])) >= 0:
                yield Mark(line=number, kind=EventKind.RESUME, message=line.strip()[:300], step=step)
        elif _CANCELLED.search(line):
            self._cancelled = Mark(line=number, kind=EventKind.ATTEMPT_END, message=line.strip()[:300])

    def before_row(self, row: TextRow) -> Iterator[Item]:
        if self._exception is not None:
            if row.step > self._last_step:
                self._tally.note(f"training went on after the exception on line {self._exception.line}")
            else:
                yield self._exception
            self._exception = None
        self._cancelled = None
        self._last_step = row.step

    def complete(self, row: TextRow, values: dict[str, Scalar], number: int) -> None:
        if row.evaluation or not (self._skips or self._scale is not None):
            return
        if self._skips and not values.get("step_skipped"):
            if values.get("step_skipped") == 0:
                self._tally.note(f"line {number} counts no skipped steps, but overflow lines before it report a skip")
            values["step_skipped"] = self._skips
        if self._scale is not None:
            values.setdefault("loss_scale", self._scale)
        self._skips, self._scale = 0, None

    def finish(self) -> Iterator[Item]:
        if self._overflows:
            self._tally.note(f"{self._overflows} lines about overflows: each counts as a skip of the step after it")
        if self._exception is not None:
            yield self._exception
        elif self._cancelled is not None:
            yield self._cancelled
