"""nanoGPT, llm.c, modded-nanogpt and parameter-golf text.

Line shapes (formats as those programs print them):
`step:10/5100 train_loss:6.1 train_time:1200ms step_avg:120.1ms`, also with `val_loss:`, seconds, more fields;
`s:10 trl:6.1`, `s:250 tel:5.9` (llm.c main.log);
`step   10/19560 | loss 6.10 (+1.2z)| norm 2.1 (-0.3z)| lr 1.0e-04 | 130.5 ms | 55.0% bf16 MFU | 400000 tok/s` (llm.c);
`iter 10: loss 6.1, time 50.1ms, mfu 3.2%` and `step 250: train loss 5.8, val loss 5.9` (nanoGPT).

Lines are matched from their start and need a number where the step is, so source code above the log is no data.
`step_avg` is a running mean and stays under its own name; step times come from differences of `train_time`.
"""

import re
from collections.abc import Iterator
from typing import BinaryIO

from runhealth.storage.importers.base import Item, Mark, ReadContext
from runhealth.storage.importers.names import Names
from runhealth.storage.importers.text import TextRow, fields_of, read_text
from runhealth.storage.importers.values import NUMBER, to_number
from runhealth.storage.records import Scalar

_COLON = re.compile(r"step:(?P<step>\d{1,18})/(?P<total>\d{1,18})(?=[ \t])")
_LLMC_MAIN = re.compile(r"s:(?P<step>\d{1,18}) (?=(?:trl|tel|eval|lr|norm):)")
_LLMC = re.compile(r"step\s+(?P<step>\d{1,18})/(?P<total>\d{1,18}) \|")
_LLMC_PART = re.compile(
    rf"\s*(?P<name>[a-z][\w /.]{{0,60}}?)[ :=]\s*(?P<value>{NUMBER})\s*(?:\((?P<z>[^)]*)\))?\s*\Z", re.I
)
_LLMC_BARE = re.compile(rf"\s*(?P<value>{NUMBER})\s*(?P<unit>ms|%[\w ]*MFU|tok/s)\s*\Z", re.I)
_LLMC_VAL = re.compile(rf"val loss (?P<val>{NUMBER})\s*\Z", re.I)
_ITER = re.compile(r"iter (?P<step>\d{1,18}): (?=loss )")
_EVAL = re.compile(rf"step (?P<step>\d{{1,18}}): train loss (?P<train>{NUMBER}), val loss (?P<val>{NUMBER})", re.I)
_ITER_PART = re.compile(rf"(?P<name>[a-z_]+) (?P<value>{NUMBER})(?P<unit>ms|s|%)?(?=,|\s|\Z)", re.I)
_TABLE = {"time_ms": "t_step_s", "time_s": "t_step_s", "trl": "loss", "tel": "eval_loss", "norm": "grad_norm"}
_VALIDATION = ("val_loss", "tel", "val_bpb", "eval")


class _NanoGPT:
    name = "nanogpt"

    def sniff(self, name: str, head: bytes) -> float:  # noqa: ARG002
        text = head.decode("utf-8", "replace")
        for line in text.splitlines():
            if line[:1] == "s" and (_LLMC_MAIN.match(line) or _LLMC.match(line)):
                return 0.9
            if line[:5] == "step:" and (match := _COLON.match(line)) and fields_of(line[match.end() :][:400]):
                return 0.9
            if line[:1] in "is" and (_ITER.match(line) or _EVAL.match(line)):
                return 0.9
        return 0.0

    def read(self, stream: BinaryIO, context: ReadContext) -> Iterator[Item]:
        names = Names(context.tally, context.mapping, _TABLE)
        return read_text(stream, context, names, _Parser())


class _Parser:
    """Remembers the step for llm.c's `val loss` lines, which state none and come before the next step."""

    def __init__(self) -> None:
        self._step = 0

    def __call__(self, line: str, number: int) -> Iterator[TextRow | Mark]:  # noqa: ARG002
        if line[:1] == "v" and (match := _LLMC_VAL.match(line)):
            yield TextRow(self._step, _numbers({"val_loss": match["val"]}), evaluation=True)
            return
        for row in _parse(line):
            self._step = row.step
            yield row


def _parse(line: str) -> Iterator[TextRow]:
    first = line[:1]
    if first == "s":
        if match := _COLON.match(line):
            yield from _colon_rows(line, match)
        elif match := _LLMC_MAIN.match(line):
            yield _colon_row(line[match.end() :], match, None)
        elif match := _LLMC.match(line):
            yield TextRow(int(match["step"]), _llmc_fields(line[match.end() :]), total=int(match["total"]))
        elif match := _EVAL.match(line):
            fields = {"val_loss": match["val"], "eval_train_loss": match["train"]}
            yield TextRow(int(match["step"]), _numbers(fields), evaluation=True)
    elif first == "i" and (match := _ITER.match(line)):
        found = {}
        for part in _ITER_PART.finditer(line, match.end()):
            unit = part["unit"]
            found[f"{part['name']}_{unit}" if unit in ("ms", "s") else part["name"]] = part["value"]
        yield TextRow(int(match["step"]), _numbers(found))


def _colon_rows(line: str, match: re.Match[str]) -> Iterator[TextRow]:
    """One row, or several where writers ran into the same line."""
    while True:
        following = _COLON.search(line, match.end()) if "step:" in line[match.end() :] else None
        text = line[match.end() : following.start() if following else None]
        yield _colon_row(text, match, int(match["total"]))
        if following is None:
            return
        match = following


def _colon_row(text: str, match: re.Match[str], total: int | None) -> TextRow:
    fields = fields_of(text)
    evaluation = any(name in fields for name in _VALIDATION) and not ("train_loss" in fields or "trl" in fields)
    return TextRow(int(match["step"]), fields, evaluation=evaluation, total=total)


def _llmc_fields(text: str) -> dict[str, Scalar]:
    found: dict[str, str] = {}
    for part in text.split("|"):
        if match := _LLMC_PART.match(part):
            found[match["name"].strip()] = match["value"]
            if match["z"]:
                found[f"{match['name'].strip()}_z"] = match["z"].rstrip("z")
        elif match := _LLMC_BARE.match(part):
            unit = match["unit"].lower()
            found["time_ms" if unit == "ms" else "tok/s" if unit == "tok/s" else "mfu"] = match["value"]
    return _numbers(found)


def _numbers(found: dict[str, str]) -> dict[str, Scalar]:
    numbers = {name: to_number(value) for name, value in found.items()}
    return {name: value for name, value in numbers.items() if value is not None}


IMPORTER = _NanoGPT()
