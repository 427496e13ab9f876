"""Console text of any trainer that prints a step and a loss on one line, as `key=value`, `key: value` or `key value`.

`step 12 | loss 2.31 | lr 3.0e-04 | 182.6 ms`, `[INFO] Iter: 10/500, Loss: 2.3, grad_norm=1.1`,
`{'loss': '2.31', 'learning_rate': 3e-4, 'epoch': 0.5}` without a step (Hugging Face console; rows are then numbered).
A line without a loss is taken only if it has the step of a line with one in the same shape (skipped steps).
"""

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import BinaryIO

from runhealth.storage.importers.base import Item, Mark, ReadContext
from runhealth.storage.importers.lines import without_ansi
from runhealth.storage.importers.names import Names, target_of
from runhealth.storage.importers.text import TextRow, read_text
from runhealth.storage.importers.values import NUMBER, to_number
from runhealth.storage.records import Scalar

_STEP = re.compile(
    r"(?<![\w/])['\"]?(?:global[_ ]?step|train[_ ]?step|num_updates|steps?|iter(?:ation)?s?|it)['\"]?"
    r"\s*(?:[:=#]\s*|\s+|\s*\[\s*)"
    r"(?P<step>\d{1,18})(?:\s*/\s*(?P<total>\d{1,18}))?(?![\w.])",
    re.I,
)
_PAIR = re.compile(
    rf"(?P<name>[A-Za-z_][\w./-]{{0,60}}(?: [A-Za-z_][\w./-]{{0,60}}){{0,3}}?)['\"]?"
    rf"(?:\s*\((?P<paren>ms|s|MB|GB|GiB)\))?\s*[:=]\s*['\"\[]{{0,2}}(?P<value>{NUMBER})(?P<unit>\s?(?:ms|us|s|GiB|MiB|GB|MB)\b)?(?![\w.:/-])",
    re.I,
)
_SPACED = re.compile(
    rf"\A\s*(?P<name>[A-Za-z_][\w./-]{{0,60}}(?: [A-Za-z_][\w./-]{{0,60}}){{0,3}}?)\s+(?P<value>{NUMBER})"
    r"(?P<unit>\s?(?:ms|us|s|GiB|MiB|GB|MB))?\s*\Z",
    re.I,
)
_WORD_PAIR = re.compile(
    rf"(?<!\S)(?P<name>[A-Za-z_][\w./-]{{0,60}}) (?P<value>{NUMBER})(?P<unit>\s?(?:ms|us|s|GiB|MiB|GB|MB))?(?!\S)", re.I
)
_BARE_TIME = re.compile(rf"\A\s*(?P<value>{NUMBER})\s?(?P<unit>ms|s)(?:/(?:it|step|iter))?\s*\Z")
_SPLIT = re.compile(r"\s*[|;]\s*|,\s+|\s-\s|\t+")
_SNIFF_LINES = 20_000
_SNIFF_CHARS = 4096
_EVALUATION = re.compile(r"\b(?:eval|valid|validation|val)\b", re.I)


class _KeyValue:
    name = "text"

    def sniff(self, name: str, head: bytes) -> float:  # noqa: ARG002
        text = without_ansi(head.decode("utf-8", "replace"))
        found = 0
        for line in text.splitlines()[:_SNIFF_LINES]:
            if ("oss" in line or "OSS" in line) and len(line) <= _SNIFF_CHARS:
                fields = _fields(line)
                if _has_loss(fields) and (_STEP.search(line) or line.lstrip().startswith("{'")):
                    found += 1
                    if found == 2:
                        return 0.4
        return 0.25 if found else 0.0

    def read(self, stream: BinaryIO, context: ReadContext) -> Iterator[Item]:
        names = Names(context.tally, context.mapping, {"step_ms": "t_step_s", "step_s": "t_step_s"})
        return read_text(stream, context, names, _Parser(context))


class _Parser:
    def __init__(self, context: ReadContext) -> None:
        self._tally = context.tally
        self._mapped = frozenset(context.mapping.values())
        self._shapes: set[str] = set()
        self._count = 0

    def __call__(self, line: str, number: int) -> Iterator[TextRow | Mark]:  # noqa: ARG002
        match = _STEP.search(line)
        if match is None:
            yield from self._without_step(line)
            return
        shape = line[: match.start()][-24:] + match[0][: match.start("step") - match.start()]
        fields = _fields(line)
        for name in ("step", "iter", "iteration", "global_step", "steps"):
            fields.pop(name, None)
        known = _has_loss(fields) or bool(self._mapped & fields.keys())
        if known:
            if len(self._shapes) < 1000:
                self._shapes.add(_words(shape))
        elif not fields or _words(shape) not in self._shapes:
            return
        evaluation = _is_evaluation(line, fields)
        if evaluation:
            fields = {("eval_loss" if name.lower() == "loss" else name): value for name, value in fields.items()}
        total = int(match["total"]) if match["total"] else None
        yield TextRow(int(match["step"]), fields, evaluation=evaluation, total=total)

    def _without_step(self, line: str) -> Iterator[TextRow | Mark]:
        text = line.strip()
        at = text.find("{'")
        if at < 0 or not text.endswith("}"):
            return
        fields = _fields(text[at:])
        if not _has_loss(fields) or "train_runtime" in fields:
            return
        self._tally.note("no step in the lines: they are numbered in the order of the file")
        evaluation = "eval_loss" in fields and "loss" not in fields
        if not evaluation:
            self._count += 1
        yield TextRow(max(0, self._count - 1), fields, evaluation=evaluation)


def _words(shape: str) -> str:
    return re.sub(r"[\d\W]+", " ", shape).strip().lower()


def _fields(line: str) -> dict[str, Scalar]:
    found: dict[str, Scalar] = {}
    for part in _SPLIT.split(line):
        met = False
        for match in _PAIR.finditer(part):
            met = True
            _put(found, match["name"], match["value"], match["unit"] or match["paren"])
        if met:
            continue
        if match_ := _SPACED.match(part):
            _put(found, match_["name"], match_["value"], match_["unit"])
        elif match_ := _BARE_TIME.match(part):
            _put(found, "step", match_["value"], match_["unit"])
        else:
            for match in _WORD_PAIR.finditer(part):
                _put(found, match["name"], match["value"], match["unit"])
    return found


def _put(found: dict[str, Scalar], name: str, value: str, unit: str | None) -> None:
    number = to_number(value)
    if number is not None:
        found.setdefault(_known_tail(name, unit.strip() if unit else ""), number)


@lru_cache(maxsize=4096)
def _known_tail(name: str, unit: str) -> str:
    """ "INFO train loss" -> "train loss": the longest tail of the words that is a known name, else the last word."""
    words = name.split(" ")
    tails = [" ".join(words[first:]) for first in range(len(words))]
    known = next((tail for tail in tails if target_of(tail) is not None), tails[-1])
    return f"{known}_{unit}" if unit else known


def _has_loss(fields: dict[str, Scalar]) -> bool:
    for name in fields:
        target = target_of(name)
        if target is not None and target[0] in ("loss", "eval_loss"):
            return True
    return False


def _is_evaluation(line: str, fields: dict[str, Scalar]) -> bool:
    targets = {target[0] for name in fields if (target := target_of(name)) is not None}
    if "eval_loss" in targets and "loss" not in targets:
        return True
    return "loss" in targets and _EVALUATION.search(line) is not None and "eval_loss" not in targets


IMPORTER = _KeyValue()
