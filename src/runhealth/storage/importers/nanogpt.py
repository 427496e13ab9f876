"""nanoGPT, llm.c, modded-nanogpt and parameter-golf text.

Line shapes (formats as those programs print them):
`step:10/5100 train_loss:6.1 train_time:1200ms step_avg:120.1ms`, also with `val_loss:`, seconds, more fields;
`s:10 trl:6.1`, `s:250 tel:5.9` (llm.c main.log);
`step   10/19560 | loss 6.10 (+1.2z)| norm 2.1 (-0.3z)| lr 1.0e-04 | 130.5 ms | 55.0% bf16 MFU | 400000 tok/s` (llm.c);
`iter 10: loss 6.1, time 50.1ms, mfu 3.2%` and `step 250: train loss 5.8, val loss 5.9` (nanoGPT);
`10 train 6.1`, `250 val 5.9`, `250 hella 0.25` (build-nanogpt log.txt).

Lines are matched from their start and need a number where the step is, so source code above the log is no data.
`step_avg` is a running mean and stays under its own name; step times come from differences of `train_time`.
"""

import re
from collections.abc import Iterator, Sequence
from typing import BinaryIO

from runhealth.storage.importers.base import Item, Mark, ReadContext
from runhealth.storage.importers.names import Names
from runhealth.storage.importers.recipes import Spots
from runhealth.storage.importers.shapes import FieldReader
from runhealth.storage.importers.text import TextRow, field_places, fields_of, read_text, spots_of
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
_BARE = re.compile(rf"(?P<step>\d{{1,18}}) (?P<name>train|val|hella) (?P<value>{NUMBER})\s*\Z")
_TABLE = {"time_ms": "t_step_s", "time_s": "t_step_s", "trl": "loss", "tel": "eval_loss", "norm": "grad_norm"}
_VALIDATION = frozenset({"val_loss", "tel", "val_bpb", "eval"})
_TRAINED = frozenset({"train_loss", "trl"})


class _NanoGPT:
    name = "nanogpt"

    def sniff(self, name: str, head: bytes) -> float:  # noqa: ARG002
        text = head.decode("utf-8", "replace")
        bare = 0
        for line in text.splitlines():
            if line[:1].isdigit() and _BARE.match(line):
                bare += 1
                if bare == 3:
                    return 0.6
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
        self._colon_fields = FieldReader(field_places)
        self._llmc_fields = FieldReader(_llmc_places)
        self._iter_fields = FieldReader(_iter_places)

    def __call__(self, line: str, number: int) -> Sequence[TextRow | Mark]:  # noqa: ARG002
        first = line[:1]
        rows: Sequence[TextRow] = ()
        if first == "s":
            rows = self._step_rows(line)
        elif first == "i" and (match := _ITER.match(line)):
            rows = (TextRow(int(match[1]), self._iter_fields(line[match.end() :])),)
        elif first == "v" and (match := _LLMC_VAL.match(line)):
            return (TextRow(self._step, _numbers({"val_loss": match["val"]}), evaluation=True),)
        elif first.isdigit() and (match := _BARE.match(line)):
            name = {"train": "train_loss", "val": "val_loss", "hella": "hellaswag"}[match["name"]]
            return (TextRow(int(match["step"]), _numbers({name: match["value"]}), evaluation=name != "train_loss"),)
        if rows:
            self._step = rows[-1].step
        return rows

    def spots(self, line: str) -> Spots | None:
        if (match := _BARE.match(line)) and match["name"] == "train":
            return Spots(step=match.span("step"), fields=[("train_loss", *match.span("value"))])
        for pattern, places in (
            (_COLON, field_places),
            (_LLMC_MAIN, field_places),
            (_LLMC, _llmc_places),
            (_ITER, _iter_places),
        ):
            if match := pattern.match(line):
                fields = spots_of(places(line[match.end() :]), match.end())
                total = match.groupdict().get("total")
                if fields is None:
                    return None
                return Spots(step=match.span("step"), fields=fields, total=int(total) if total else None)
        return None

    def inert(self, line: str) -> bool:
        return line[:1] not in ("s", "i", "v") and not line[:1].isdigit()

    def passed(self, rows: int, step: int) -> None:  # noqa: ARG002
        self._step = step

    def _step_rows(self, line: str) -> Sequence[TextRow]:
        if match := _COLON.match(line):
            if line.find("step:", match.end()) >= 0:
                return list(self._several(line, match))
            return (self._colon_row(line[match.end() :], match, int(match[2])),)
        if match := _LLMC_MAIN.match(line):
            return (self._colon_row(line[match.end() :], match, None),)
        if match := _LLMC.match(line):
            return (TextRow(int(match[1]), self._llmc_fields(line[match.end() :]), total=int(match[2])),)
        if match := _EVAL.match(line):
            fields = {"val_loss": match["val"], "eval_train_loss": match["train"]}
            return (TextRow(int(match[1]), _numbers(fields), evaluation=True),)
        return ()

    def _several(self, line: str, match: re.Match[str]) -> Iterator[TextRow]:
        """One row, or several where writers ran into the same line."""
        while True:
            following = _COLON.search(line, match.end()) if "step:" in line[match.end() :] else None
            text = line[match.end() : following.start() if following else None]
            yield self._colon_row(text, match, int(match[2]))
            if following is None:
                return
            match = following

    def _colon_row(self, text: str, match: re.Match[str], total: int | None) -> TextRow:
        fields = self._colon_fields(text)
        evaluation = not fields.keys().isdisjoint(_VALIDATION) and fields.keys().isdisjoint(_TRAINED)
        return TextRow(int(match[1]), fields, evaluation, total)


def _llmc_places(text: str) -> list[tuple[str, int, int]]:
    found: dict[str, tuple[str, int, int]] = {}
    start = 0
    for part in text.split("|"):
        if match := _LLMC_PART.match(part):
            name = match["name"].strip()
            found[name] = (name, start + match.start("value"), start + match.end("value"))
            if match["z"]:
                end = start + match.start("z") + len(match["z"].rstrip("z"))
                found[f"{name}_z"] = (f"{name}_z", start + match.start("z"), end)
        elif match := _LLMC_BARE.match(part):
            unit = match["unit"].lower()
            name = "time_ms" if unit == "ms" else "tok/s" if unit == "tok/s" else "mfu"
            found[name] = (name, start + match.start("value"), start + match.end("value"))
        start += len(part) + 1
    return list(found.values())


def _iter_places(text: str) -> list[tuple[str, int, int]]:
    found: dict[str, tuple[str, int, int]] = {}
    for part in _ITER_PART.finditer(text):
        unit = part["unit"]
        name = f"{part['name']}_{unit}" if unit in ("ms", "s") else part["name"]
        found[name] = (name, part.start("value"), part.end("value"))
    return list(found.values())


_RULES = ((_COLON, field_places), (_LLMC_MAIN, field_places), (_LLMC, _llmc_places), (_ITER, _iter_places))


def _numbers(found: dict[str, str]) -> dict[str, Scalar]:
    numbers = {name: to_number(value) for name, value in found.items()}
    return {name: value for name, value in numbers.items() if value is not None}


IMPORTER = _NanoGPT()
