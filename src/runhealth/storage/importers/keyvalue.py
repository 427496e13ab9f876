"""Console text of any trainer that prints a step and a loss on one line, as `key=value`, `key: value` or `key value`.

`step 12 | loss 2.31 | lr 3.0e-04 | 182.6 ms`, `[INFO] Iter: 10/500, Loss: 2.3, grad_norm=1.1`,
`{'loss': '2.31', 'learning_rate': 3e-4, 'epoch': 0.5}` without a step (Hugging Face console; rows are then numbered).
A line without a loss is taken only if it has the step of a line with one in the same shape (skipped steps).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import BinaryIO

from runhealth.storage.importers.base import Item, Mark, ReadContext
from runhealth.storage.importers.lines import without_ansi
from runhealth.storage.importers.names import Names, target_of
from runhealth.storage.importers.recipes import Spots
from runhealth.storage.importers.shapes import FieldReader
from runhealth.storage.importers.text import TextRow, read_text, spots_of
from runhealth.storage.importers.values import NUMBER, to_number
from runhealth.storage.records import Scalar

_COUNT = r"\d{1,3}(?:,\d{3})+|\d{1,18}"
_STEP = re.compile(
    r"(?<![\w/])['\"]?(?:global[_ ]?step|train[_ ]?step|num_updates|steps?|iter(?:ation)?s?|it)['\"]?"
    r"\s*(?:[:=#]\s*|\s+|\s*\[\s*)['\"]?"
    rf"(?P<step>{_COUNT})(?:\.0{{1,6}}(?!\d))?(?:\s*/\s*(?P<total>{_COUNT}))?(?![\w.%]|,\d)",
    re.I,
)
_ANY_STEP = re.compile(
    r"(?<![\w/])['\"]?(?:global[_ ]?step|train[_ ]?step|num_updates|steps?|iter(?:ation)?s?|it)['\"]?"
    r"\s*(?:[:=#]\s*|\s+|\s*\[\s*)['\"]?\d",
    re.I,
)
_ANY_BATCH = re.compile(r"\d\s?/\s?\d")
_CLOCK = re.compile(r"\W{0,3}\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?=[\s|\]])")
# `[ 10/5005]`, `| 20/100 [00:01<…`, `[640/60000 (1%)]`: batches of an epoch, or of the whole training
_BATCH = re.compile(
    r"(?:(?P<open>[\[|])|(?<![\w/.:-]))\s{0,9}(?P<step>\d{1,15})\s?/\s?(?P<total>\d{1,15})(?![\w/.:-])"
    r"(?P<close>\s{0,3}[\])(\[━])?"  # the last: the bar of Keras 3
)
_BAR = re.compile(r"\s*\d{1,3}%\|[^|]{0,400}\|\s*\d")  # without a name before it: not that of a download or a map
_EPOCH = re.compile(r"\b(?:epoch|train)\b(?:\(train\))?\W{0,6}(?P<epoch>\d{1,6})(?![\d.]|\s?%)", re.I)
_EPOCH_LINE = re.compile(r"\s*Epoch\s+(?P<epoch>\d{1,6})\s*/\s*\d{1,6}\s*\Z")
# A head line, then one indented line for each value: OLMo, Composer
_HEAD = re.compile(r"\[(?:step|batch)=(?P<step>\d{1,18})(?:/(?P<total>\d{1,18}))?[,\]]")
_INDENTED = re.compile(rf"\s{{2,}}(?P<name>[A-Za-z_][\w./() -]{{0,120}}?)\s*[:=]\s*(?P<value>{NUMBER})\s*\Z", re.I)
# CLU, the metric writer of JAX examples: `logging_writer.py:48] [20] grad_norm=0.5, loss=3.2`
_CLU = re.compile(r"\w\.py:\d{1,6}\] \[(?P<step>\d{1,18})(?:/(?P<total>\d{1,18}))?\] (?=[\w./-]+=)")
_BLANK = (" ", "\t")
_DEEPSPEED = re.compile(r"\bstep=(?P<step>\d{1,18}), skipped=(?P<skipped>\d{1,18}), lr=\[(?P<lr>[^,\]]{1,40})")
_PAIR = re.compile(
    rf"(?P<name>[A-Za-z_][\w./-]{{0,60}}(?: [A-Za-z_][\w./-]{{0,60}}){{0,3}}?)['\"]?"
    rf"(?:\s*\((?P<paren>ms|s|MB|GB|GiB)\))?\s*[:=]\s*['\"\[]{{0,2}}(?P<value>{NUMBER})(?P<unit>\s?(?:ms|us|s|GiB|MiB|GB|MB)\b)?(?![\w./-]|:\S)",
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
_STEP_NAMES = ("step", "iter", "iteration", "global_step", "steps", "num_updates")
_TABLE = {"step_ms": "t_step_s", "step_s": "t_step_s", "seconds": "t_step_s"}
_EVALUATION = re.compile(r"\b(?:eval|valid|validation|val)\b", re.I)
_TEST = re.compile(r"\s*(?:test|eval(?:uation)?|val(?:id(?:ation)?)?)\b", re.I)
# `Accuracy: 9800/10000 (98%)` counts hits, no batches.
_COUNTED = re.compile(r"(?:\bacc(?:uracy)?|\bcorrect|\bhits?|\btop-?\d|\bprecision|\brecall)[\s:=(]*\Z", re.I)


class _KeyValue:
    name = "text"

    def sniff(self, name: str, head: bytes) -> float:  # noqa: ARG002
        text = without_ansi(head.decode("utf-8", "replace").replace("\r", "\n"))
        found = 0
        headed = False
        for line in text.split("\n")[:_SNIFF_LINES]:
            if len(line) > _SNIFF_CHARS:
                continue
            if "oss" in line or "OSS" in line:
                fields = _fields_of(line)
                placed = _STEP.search(line) or _batch(line) or _dict_at(line) >= 0 or _CLU.search(line)
                if headed and (match := _INDENTED.match(line)):
                    fields, placed = {_known_tail(match["name"], ""): 0}, True
                found += bool(placed) and _has_loss(fields)
            elif "skipped=" in line and _DEEPSPEED.search(line):
                found += 1
            headed = headed or _HEAD.search(line) is not None
            if found == 2:
                return 0.4
        return 0.25 if found else 0.0

    def read(self, stream: BinaryIO, context: ReadContext) -> Iterator[Item]:
        names = Names(context.tally, context.mapping, _TABLE)
        return read_text(stream, context, names, _Parser(context))


class _Parser:
    def __init__(self, context: ReadContext) -> None:
        self._tally = context.tally
        self._mapped = frozenset(context.mapping.values())
        self._shapes: set[str] = set()
        self._count = 0
        self._bar: tuple[int, int] | None = None  # where the progress bar is: step and total
        self._told_at: tuple[int, int] | None = None  # where it was at the last dictionary without a step
        self._epoch: int | None = None  # of a line that holds nothing else
        self._head: tuple[int, int | None] | None = None
        self._zero_based = False  # the first epoch is 0
        self._skipped = 0
        self._last: int | None = None  # the last step that was counted over all epochs
        self._read = FieldReader(_places)

    def __call__(self, line: str, number: int) -> Sequence[TextRow | Mark]:  # noqa: ARG002
        if self._head is not None and line[:1] in _BLANK and (match := _INDENTED.match(line)):
            return self._indented(match)
        if "[" in line and (head := _HEAD.search(line)):
            self._head = int(head["step"]), int(head["total"]) if head["total"] else None
        if match := _STEP.search(line) or _CLU.search(line):
            return self._stepped(line, match)
        if match := _batch(line):
            return self._batch_of_epoch(line, match)
        if match := _EPOCH_LINE.match(line):
            self._epoch = int(match["epoch"])
        return self._without_step(line)

    def _stepped(self, line: str, match: re.Match[str]) -> Sequence[TextRow]:
        if "skipped=" in line and (found := _DEEPSPEED.search(line)):
            return self._deepspeed(found)
        fields = self._fields(line)
        shape = _words(line[max(0, match.start() - 24) : match.start("step")])
        if _has_loss(fields) or not self._mapped.isdisjoint(fields):
            if len(self._shapes) < 1000:
                self._shapes.add(shape)
        elif not fields or shape not in self._shapes:
            return ()
        return self._row(_count(match["step"]), _count(match["total"]) if match["total"] else None, line, fields)

    def _batch_of_epoch(self, line: str, match: re.Match[str]) -> Sequence[TextRow]:
        fields = self._fields(line)
        if not _has_loss(fields) and self._mapped.isdisjoint(fields):
            if (self._told_at is None or int(match["total"]) == self._told_at[1]) and _BAR.match(line):
                self._bar = int(match["step"]), int(match["total"])
            return ()
        step, total = int(match["step"]), int(match["total"])
        before = _EPOCH.search(line[: match.start()])
        epoch = int(before["epoch"]) if before else self._epoch
        if epoch is None:
            return self._row(step, total, line, fields)
        self._tally.note(
            "no step over all epochs: the step is the place in the epoch, in the log's own units (batches or samples), "
            "added to those of the epochs before"
        )
        self._zero_based = self._zero_based or epoch == 0
        step += (epoch if self._zero_based else epoch - 1) * total
        self._last = step
        return self._row(step, None, line, fields)

    def spots(self, line: str) -> Spots | None:
        match = _STEP.search(line)
        first = _ANY_STEP.search(line)
        if match is None or first is None or first.start() != match.start() or not match[0].isascii():
            return None  # an earlier word may be the step of a line with other digits
        if "," in match[0] or "." in match[0] or "skipped=" in line:
            return None
        if _HEAD.search(line) or (line[:1] in _BLANK and _INDENTED.match(line)):
            return None
        fields = spots_of(_places(line), 0)
        if fields is None:
            return None
        spans = {name: (start, end) for name, start, end in fields if name not in _STEP_NAMES}
        if "time" in spans and "data_time" in spans:
            spans["time_s"] = spans.pop("time")
        clock = _CLOCK.match(line)
        begin = min([match.start(), *(start for _, start, _ in fields)])
        free = (clock.span(),) if clock is not None and clock.end() <= begin else ()
        total = int(match["total"]) if match["total"] else None
        found = [(name, start, end) for name, (start, end) in spans.items()]
        return Spots(step=match.span("step"), fields=found, free=free, total=total)

    def inert(self, line: str) -> bool:
        if "oss" in line or "poch" in line or "{'" in line or "%|" in line or "skipped=" in line:
            return False
        if _ANY_STEP.search(line) or _ANY_BATCH.search(line) or (line[:1] in _BLANK and _INDENTED.match(line)):
            return False
        return _HEAD.search(line) is None and self._mapped.isdisjoint(self._read(line))

    def passed(self, rows: int, step: int) -> None:
        """Nothing is kept from line to line that lines with spots would change."""

    def _row(self, step: int, total: int | None, line: str, fields: dict[str, Scalar]) -> Sequence[TextRow]:
        evaluation = _is_evaluation(line, fields)
        if evaluation:
            fields = {("eval_loss" if name.lower() == "loss" else name): value for name, value in fields.items()}
        return (TextRow(step, fields, evaluation, total),)

    def _fields(self, line: str) -> dict[str, Scalar]:
        fields = self._read(line)
        for name in _STEP_NAMES:
            fields.pop(name, None)
        if "time" in fields and "data_time" in fields:  # detectron2 and OpenMMLab: seconds a step
            fields["time_s"] = fields.pop("time")
        return fields

    def _indented(self, match: re.Match[str]) -> Sequence[TextRow]:
        assert self._head is not None
        number = to_number(match["value"])
        if number is None:
            return ()
        step, total = self._head
        fields = {_known_tail(match["name"].strip(), ""): number}
        targets = {target[0] for name in fields if (target := target_of(name)) is not None}
        return (TextRow(step, fields, "eval_loss" in targets, total),)

    def _deepspeed(self, match: re.Match[str]) -> Sequence[TextRow]:
        """`skipped` counts since the start of the process."""
        skipped = int(match["skipped"])
        new, self._skipped = skipped - self._skipped, skipped
        fields: dict[str, Scalar] = {"step_skipped": max(0, new)}
        lr = to_number(match["lr"])
        if lr is not None:
            fields["lr"] = lr
        return (TextRow(int(match["step"]), fields),)

    def _without_step(self, line: str) -> Sequence[TextRow]:
        if self._last is not None and "oss" in line and _TEST.match(line):
            # An evaluation between two epochs states no step: it belongs to the last one before it.
            fields = self._fields(line)
            return self._row(self._last, None, line, fields) if _has_loss(fields) else ()
        text = line.strip()
        at = _dict_at(text)
        if at < 0 or not text.endswith("}"):
            return ()
        fields = self._read(text[at:])
        if not _has_loss(fields) or "train_runtime" in fields:
            return ()
        evaluation = "eval_loss" in fields and "loss" not in fields
        if not evaluation:
            self._count = self._next_count()
        return (TextRow(max(0, self._count - 1), fields, evaluation),)

    def _next_count(self) -> int:
        """One more than the step of a dictionary that states none: where the progress bar was before it, else the
        number of the dictionary."""
        if self._bar is None or self._bar[0] == 0 or (self._told_at is None and self._count):
            self._tally.note("no step in the lines: they are numbered in the order of the file")
            return self._count + 1
        self._tally.note("no step in the lines: the count of the progress bar before a line is its step")
        went_back = self._told_at is not None and self._bar[0] < self._told_at[0]
        self._told_at = self._bar
        return self._bar[0] + 1 if went_back else max(self._bar[0] + 1, self._count + 1)


def _count(text: str) -> int:
    return int(text.replace(",", ""))


def _dict_at(line: str) -> int:
    """Where a printed dictionary begins, -1 if there is none."""
    return line.find("{'")


def _batch(line: str) -> re.Match[str] | None:
    """The first `n/total` of a line that a bracket or bar says to be a progress."""
    for match in _BATCH.finditer(line[:400]):
        progress = (match["open"] or match["close"]) and int(match["step"]) <= int(match["total"])
        if progress and not _COUNTED.search(line, max(0, match.start() - 40), match.start()):
            return match
    return None


@lru_cache(maxsize=1024)
def _words(shape: str) -> str:
    return re.sub(r"[\d\W]+", " ", shape).strip().lower()


def _fields_of(line: str) -> dict[str, Scalar]:
    found: dict[str, Scalar] = {}
    for name, start, end in _places(line):
        number = to_number(line[start:end])
        if number is not None:
            found.setdefault(name, number)
    return found


def _places(line: str) -> list[tuple[str, int, int]]:
    found: list[tuple[str, int, int]] = []
    start = 0
    for separator in (*_SPLIT.finditer(line), None):
        end = separator.start() if separator is not None else len(line)
        _part(line[start:end], start, found)
        if separator is not None:
            start = separator.end()
    return found


def _part(part: str, at: int, found: list[tuple[str, int, int]]) -> None:
    paired: list[tuple[int, int]] = []
    for match in _PAIR.finditer(part):
        paired.append(match.span())
        found.append(_place(match["name"], match["unit"] or match["paren"], match, at))
    if paired:
        # `step 10 loss 2.5 lr=1e-4`: what stands between the pairs counts if its name is known.
        if paired[0][0] > 0 or len(part) > paired[-1][1] + 4:
            _between(part, at, paired, found)
        return
    if match_ := _SPACED.match(part):
        found.append(_place(match_["name"], match_["unit"], match_, at))
    elif match_ := _BARE_TIME.match(part):
        found.append(_place("step", match_["unit"], match_, at))
    else:
        found.extend(_place(match["name"], match["unit"], match, at) for match in _WORD_PAIR.finditer(part))


def _between(part: str, at: int, paired: list[tuple[int, int]], found: list[tuple[str, int, int]]) -> None:
    for match in _WORD_PAIR.finditer(part):
        apart = all(match.end() <= start or match.start() >= end for start, end in paired)
        if apart and target_of(match["name"]) is not None:
            place = _place(match["name"], match["unit"], match, at)
            if all(name != place[0] for name, _, _ in found):
                found.append(place)


def _place(name: str, unit: str | None, match: re.Match[str], at: int) -> tuple[str, int, int]:
    value = match["value"].rstrip(",")
    start = at + match.start("value")
    return _known_tail(name, unit.strip() if unit else ""), start, start + len(value)


@lru_cache(maxsize=4096)
def _known_tail(name: str, unit: str) -> str:
    """ "INFO train loss" -> "train loss": the longest tail of the words that is a known name, else the last word."""
    words = name.split(" ")
    tails = [" ".join(words[first:]) for first in range(len(words))]
    known = next((tail for tail in tails if target_of(tail) is not None), tails[-1])
    return f"{known}_{unit}" if unit else known


@lru_cache(maxsize=1024)
def _targets(names: tuple[str, ...]) -> frozenset[str]:
    """The signals that names are known as."""
    return frozenset(target[0] for name in names if (target := target_of(name)) is not None)


def _has_loss(fields: Mapping[str, Scalar]) -> bool:
    return not _targets(tuple(fields)).isdisjoint(("loss", "eval_loss"))


def _is_evaluation(line: str, fields: Mapping[str, Scalar]) -> bool:
    targets = _targets(tuple(fields))
    if "eval_loss" in targets:
        return "loss" not in targets
    if "loss" not in targets:
        return False
    return _TEST.match(line) is not None or ("val" in line.lower() and _EVALUATION.search(line) is not None)


IMPORTER = _KeyValue()
