"""One JSON object a line, or a JSON array of objects; detectron2's `metrics.json` is the former with its own names.

Lines that are no JSON are rejected with their number. Objects that were written into the same line are both kept.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import BinaryIO

from runhealth.storage.importers.base import Item, Mark, ReadContext, Rows
from runhealth.storage.importers.json_stream import iter_objects
from runhealth.storage.importers.names import Names
from runhealth.storage.importers.recipes import Span
from runhealth.storage.importers.rows import RowBuilder
from runhealth.storage.importers.scan import Shapes, Stretch, scan
from runhealth.storage.importers.streams import peek
from runhealth.storage.importers.tables import table_for
from runhealth.storage.records import EventKind

_DECODER = json.JSONDecoder()
_PAIR = re.compile(
    r'\s*"([^"\\]*)"\s*:\s*(-?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|Infinity)|NaN)\s*(?:,|\Z)'
)
_SNIFFED_LINES = 40
_MAX_FAILURES = 8  # a line
_EVENT_KINDS = frozenset(EventKind)


class _Jsonl:
    name = "jsonl"

    def sniff(self, name: str, head: bytes) -> float:  # noqa: ARG002
        text = head.decode("utf-8", "replace").lstrip("\ufeff \t\r\n")
        if text.startswith("["):
            return 0.7 if text[1:].lstrip().startswith("{") else 0.0
        if not text.startswith("{") and "\n{" not in text:  # a log may be damaged at its start
            return 0.0
        lines = [line for line in text.split("\n", _SNIFFED_LINES)[:_SNIFFED_LINES] if line.strip()]
        objects = sum(1 for line in lines if _first_object(line) is not None)
        return 0.8 * objects / len(lines) if lines and objects * 2 >= len(lines) else 0.0

    def read(self, stream: BinaryIO, context: ReadContext) -> Iterator[Item]:
        builder: RowBuilder | None = None
        shapes = Shapes() if context.bulk else None
        for line, entry, text in _objects(stream, context, shapes):
            if isinstance(entry, Rows):
                yield entry
                continue
            if builder is None:
                table = table_for(entry.keys(), csv=False)
                if table is not None:
                    context.tally.format = table.format
                builder = RowBuilder(context, Names(context.tally, context.mapping, table.names if table else None))
            if (mark := _event(line, entry)) is not None:
                yield mark
                continue
            row = builder.row(line, entry)
            if row is not None:
                if shapes is not None and text and shapes.worth() and (places := _places(text)) is not None:
                    builder.learn(shapes, places, row, json=True)
                yield row
        if builder is not None:
            builder.finish()


def _objects(
    stream: BinaryIO, context: ReadContext, shapes: Shapes | None
) -> Iterator[tuple[int, dict[str, object] | Rows, str]]:
    """Yield (line, object, its text if it is all that the line holds), or the rows of many lines."""
    if peek(stream).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
        for line, entry in iter_objects(stream, context.tally, None):
            yield line, entry, ""
        return
    tally = context.tally
    for scanned in scan(stream, tally, shapes):
        if isinstance(scanned, Stretch):
            yield 0, scanned.take(), ""
            continue
        number, text, whole = scanned
        if text[:1] == "{" and text[-1:] == "}":
            try:
                value, at = _DECODER.raw_decode(text)
            except (ValueError, RecursionError):
                at = 0
            if at == len(text):
                yield number, value, text if whole else ""
                continue
        at, length, failures = 0, len(text), 0
        while at < length:
            at = _skip_blank(text, at)
            if at >= length:
                break
            try:
                value, at = _DECODER.raw_decode(text, at)
            except (ValueError, RecursionError) as error:
                tally.rows_read += 1
                why = error.msg if isinstance(error, json.JSONDecodeError) else type(error).__name__
                tally.reject(number, f"no JSON object at column {at + 1}: {why}")
                failures += 1
                following = text.find('{"', at + 1)
                if following < 0 or failures >= _MAX_FAILURES:
                    break
                at = following
                continue
            if isinstance(value, dict):
                yield number, value, ""
            else:
                tally.rows_read += 1
                tally.reject(number, f"expected a JSON object, met {type(value).__name__}")


def _places(text: str) -> dict[str, Span] | None:
    """Where the values of an object are, if all of them are plain numbers and no name comes twice."""
    places: dict[str, Span] = {}
    at, end = 1, len(text) - 1
    while at < end:
        match = _PAIR.match(text, at, end)
        if match is None or match[1] in places:
            return None
        places[match[1]] = match.span(2)
        at = match.end()
        if at < end and text[at - 1] != ",":
            return None
    return places


def _skip_blank(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t,":
        at += 1
    return at


def _first_object(line: str) -> dict[str, object] | None:
    try:
        value, _ = _DECODER.raw_decode(line.strip())
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _event(line: int, entry: Mapping[str, object]) -> Mark | None:
    """A line that says what happened and holds no measurement: {"event": "exception", "message": …}."""
    kind = entry.get("event")
    if not isinstance(kind, str) or "loss" in entry or kind not in _EVENT_KINDS:
        return None
    step = entry.get("step")
    message = entry.get("message")
    return Mark(
        line=line,
        kind=kind,
        message=message[:500] if isinstance(message, str) else "",
        step=step if isinstance(step, int) and not isinstance(step, bool) and 0 <= step < 2**62 else None,
    )


IMPORTER = _Jsonl()
