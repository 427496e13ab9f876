"""torchtitan console text: colours, rank prefixes, `step: 10  loss: 5.2  grad_norm: 21.6  memory: 169.1GiB(94%) …`.

A `validate step:` line repeats a training step and is an evaluation. The log has no step times; `elapsed_s` counts
from the first time stamp, so that step times are differences of the time stamps, evaluations and checkpoints included.
"""

import re
from collections.abc import Iterator, Sequence
from typing import BinaryIO

from runhealth.storage.importers.base import Item, Mark, ReadContext
from runhealth.storage.importers.lines import without_ansi
from runhealth.storage.importers.names import Names
from runhealth.storage.importers.recipes import Spots
from runhealth.storage.importers.shapes import FieldReader
from runhealth.storage.importers.text import TextRow, field_places, read_text, spots_of
from runhealth.storage.importers.values import to_ts_ns

_STEP = re.compile(r"(?:\A|[\s-])(?P<validate>validate\s+)?step:\s*(?P<step>\d{1,18})\s+(?=loss:|[\w/]+:\s)")
_STAMP = re.compile(r"(?:\[titan\] |\A)(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[,.]\d{3})")
_SNIFF = re.compile(r"\bstep:\s*\d+\s+loss:\s*\S+\s+(?:grad_norm|memory|global_avg_loss|tps)\b")
_TABLE = {"memory_GiB": "mem_reserved_bytes"}  # printed is the largest reserved memory


class _Torchtitan:
    name = "torchtitan"

    def sniff(self, name: str, head: bytes) -> float:  # noqa: ARG002
        return 0.92 if _SNIFF.search(without_ansi(head.decode("utf-8", "replace"))) else 0.0

    def read(self, stream: BinaryIO, context: ReadContext) -> Iterator[Item]:
        names = Names(context.tally, context.mapping, _TABLE)
        return read_text(stream, context, names, _Parser())


class _Parser:
    def __init__(self) -> None:
        self._start_ns = 0
        self._fields = FieldReader(field_places)

    def __call__(self, line: str, number: int) -> Sequence[TextRow | Mark]:  # noqa: ARG002
        if "step:" not in line:
            return ()
        match = _STEP.search(line)
        if match is None:
            return ()
        fields = self._fields(line[match.end() :])
        if not fields:
            return ()
        stamp = _STAMP.search(line)
        ts_ns = to_ts_ns(stamp[1]) if stamp else 0
        evaluation = match["validate"] is not None
        if evaluation and "loss" in fields:
            fields = {("val_loss" if name == "loss" else f"validate/{name}"): value for name, value in fields.items()}
        elif ts_ns:
            self._start_ns = self._start_ns or ts_ns
            fields["elapsed_s"] = (ts_ns - self._start_ns) / 1e9
        return (TextRow(int(match["step"]), fields, evaluation=evaluation, ts_ns=ts_ns),)

    def spots(self, line: str) -> Spots | None:
        match = _STEP.search(line)
        fields = spots_of(field_places(line[match.end() :]), match.end()) if match is not None else None
        if match is None or fields is None:
            return None
        stamp = _STAMP.search(line)
        span = stamp.span(1) if stamp else None
        return Spots(step=match.span("step"), fields=fields, stamp=span, start_ns=self._start_ns if stamp else 0)

    def inert(self, line: str) -> bool:
        return "step:" not in line

    def passed(self, rows: int, step: int) -> None:
        """Nothing is kept from line to line but the first time stamp."""


IMPORTER = _Torchtitan()
