"""Megatron-LM and Megatron-DeepSpeed text.

` iteration 10/ 1000 | consumed samples: 40 | elapsed time per iteration (ms): 1354.9 | lm loss: 1.2E+01 | … |`, the
`time (ms) | forward-compute: … |` line after it, `validation loss at iteration 100 | lm loss value: … |`, and the
lines about saved checkpoints. Megatron leaves the loss field out when no finite loss was seen; the row then has no
`loss`, and the counters of skipped and NaN iterations say what Megatron thinks.

Megatron counts iterations from 1, so a run that loads the checkpoint of iteration N continues with step N + 1.
"""

import re
from collections.abc import Iterator
from typing import BinaryIO

from runhealth.storage.importers.base import Item, Mark, ReadContext
from runhealth.storage.importers.names import Names
from runhealth.storage.importers.recipes import Spots
from runhealth.storage.importers.shapes import FieldReader
from runhealth.storage.importers.text import TextRow, read_text, spots_of
from runhealth.storage.importers.values import to_number, to_ts_ns

_ITERATION = re.compile(r"\biteration\s+(?P<step>\d{1,18})\s*/\s*(?P<total>\d{1,18})\s*\|")
_VALIDATION = re.compile(
    r"\bvalidation loss at (?:the end of training|iteration (?P<step>\d{1,18}))[^|]*\|(?P<rest>.*)"
)
_TIMERS = re.compile(r"\s*time \(ms\)\s*\|(?P<rest>.*)")
_STAMP = re.compile(r"\[(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?)\]")
_SAVED = re.compile(
    r"successfully saved checkpoint (?:at|from) iteration\s+(?P<step>\d{1,18})(?:\s.*?to\s+(?P<path>\S+))?"
)
_LOADED = re.compile(
    r"successfully loaded checkpoint from\s+(?P<path>\S+).*?(?:at|from) iteration\s+(?P<step>\d{1,18})"
)
_RANK_MEMORY = re.compile(
    r"\[Rank (?P<rank>\d{1,6})\] \(after (?P<step>\d{1,18}) iterations\) memory \(MB\)(?P<rest>[^\[]*)"
)
_TABLE = {
    "lm loss": "loss",
    "lm loss value": "eval_loss",
    "elapsed time per iteration (ms)": "t_step_s",
    "elapsed time per iteration (s)": "t_step_s",
    "forward-compute_ms": "t_forward_s",
    "backward-compute_ms": "t_backward_s",
    "optimizer_ms": "t_optimizer_s",
    "batch-generator_ms": "t_data_s",
    "save-checkpoint_ms": "t_checkpoint_s",
    "params norm": "weight_norm",
}


class _Megatron:
    name = "megatron"

    def sniff(self, name: str, head: bytes) -> float:  # noqa: ARG002
        return 0.95 if _ITERATION.search(head.decode("utf-8", "replace")) else 0.0

    def read(self, stream: BinaryIO, context: ReadContext) -> Iterator[Item]:
        names = Names(context.tally, context.mapping, _TABLE)
        return read_text(stream, context, names, _Parser(context))


class _Parser:
    def __init__(self, context: ReadContext) -> None:
        self._tally = context.tally
        self._step: int | None = None
        self._fields = FieldReader(_places)
        self._timers = FieldReader(_places)

    def __call__(self, line: str, number: int) -> Iterator[TextRow | Mark]:
        if "iteration" in line:
            yield from self._iteration(line, number)
        elif self._step is not None and (match := _TIMERS.match(line)):
            fields = self._timers(match["rest"])
            # A timer line belongs to the iteration above it.
            yield TextRow(self._step, {f"{name}_ms": value for name, value in fields.items()}, rank=0)

    def spots(self, line: str) -> Spots | None:
        match = _ITERATION.search(line)
        fields = spots_of(_places(line[match.end() :]), match.end()) if match is not None else None
        if match is None or fields is None:
            return None
        stamp = _STAMP.search(line, 0, match.start()) if match.start() > 12 else None
        return Spots(
            step=match.span("step"), fields=fields, total=int(match["total"]), stamp=stamp.span(1) if stamp else None
        )

    def inert(self, line: str) -> bool:
        return "iteration" not in line and _TIMERS.match(line) is None

    def passed(self, rows: int, step: int) -> None:  # noqa: ARG002
        self._step = step

    def _iteration(self, line: str, number: int) -> Iterator[TextRow | Mark]:
        match = _ITERATION.search(line)
        while match is not None:
            following = _ITERATION.search(line, match.end()) if line.find("/", match.end()) >= 0 else None
            rest = line[match.end() : following.start() if following else None]
            self._step = int(match[1])
            stamp = _STAMP.search(line, 0, match.start()) if match.start() > 12 else None
            unclosed = not rest.rstrip().endswith("|")
            if following is not None:
                self._tally.note(f"line {number} holds several iterations: writers ran into each other")
            yield TextRow(
                self._step,
                self._fields(rest),
                False,
                int(match[2]),
                0,  # the last rank prints it, for all of them
                to_ts_ns(stamp[1]) if stamp else 0,
                unclosed,
                following is not None and unclosed,
            )
            if following is None:
                return
            match = following
        if validation := _VALIDATION.search(line):
            step = int(validation["step"]) if validation["step"] else self._step
            if step is not None:
                yield TextRow(step, self._fields(validation["rest"]), evaluation=True, rank=0)
        elif saved := _SAVED.search(line):
            path = saved["path"] or f"iteration {saved['step']}"
            yield Mark(line=number, kind="checkpoint", step=int(saved["step"]) + 1, path=path, status="saved")
        elif loaded := _LOADED.search(line):
            yield Mark(
                line=number, kind="checkpoint", step=int(loaded["step"]) + 1, path=loaded["path"], status="loaded"
            )
        elif "[Rank " in line:
            for memory in _RANK_MEMORY.finditer(line):
                # Not a record of its rank: it comes once, and the rank would seem to fall silent after it.
                sizes: dict[str, object] = {
                    f"{name} (MiB)": value for name, value in self._fields(memory["rest"]).items()
                }
                sizes["rank"] = int(memory["rank"])
                yield Mark(line=number, kind="rank_memory", step=int(memory["step"]), data=sizes)


def _places(text: str) -> list[tuple[str, int, int]]:
    found: dict[str, tuple[str, int, int]] = {}
    end = -1
    for part in text.split("|"):
        end += 1 + len(part)
        name, separator, value = part.rpartition(":")
        if not separator:
            name, separator, value = part.rpartition("=")
        name = name.strip()
        if separator and name and to_number(value) is not None:
            found.pop(name, None)  # the last one counts
            found[name] = (name, end - len(value.lstrip()), end - len(value) + len(value.rstrip()))
    return list(found.values())


IMPORTER = _Megatron()
