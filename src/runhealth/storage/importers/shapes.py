"""Fields of text lines, fast: a line that differs from an earlier one in its numbers only is read by one expression.

Console logs repeat few shapes a million times. A format finds the places of the numbers in a line once, with rules as
slow as they have to be; from these places an expression is made that reads all lines of the same shape.
"""

import re
from collections.abc import Callable, Sequence
from typing import cast

from runhealth.storage.importers.values import to_number
from runhealth.storage.records import Scalar

Places = Sequence[tuple[str, int, int]]  # name, start and end of its number

_VALUE = r"([-+.\deE]++|[-+]?[nN]a[nN]|[-+]?inf)"  # also matches what is no number; float() then says so
_NUMBER_TEXT = re.compile(r"([-+]?\d{1,40}(?:\.\d{0,40})?(?:[eE][-+]?\d{1,4})?|[-+]?[nN]a[nN]|[-+]?inf)\Z")
_GROUPED_VALUE = r"([-+]?\d{1,3}(?:,\d{3})*+(?:\.\d{0,40})?)"  # 1,234,567
_GROUPED_TEXT = re.compile(_GROUPED_VALUE + r"\Z")
_VARIABLE = re.compile(r"(?<![A-Za-z_\d])\d+| {2,}")
_KEPT = 8
_MAX_MADE = 64  # a log whose every line has a shape of its own gains nothing
_MAX_FIELDS = 60
_MAX_CHARS = 2000


class FieldReader:
    """Named numbers of one kind of line. `places` must depend on the text alone and treat all digits alike."""

    def __init__(self, places: Callable[[str], Places]) -> None:
        self._places = places
        self._shapes: list[tuple[re.Pattern[str], tuple[str, ...]]] = []
        self._made = 0

    def __call__(self, text: str) -> dict[str, Scalar]:
        """The fields of a text; of a name that comes twice the first number counts."""
        for at, (pattern, names) in enumerate(self._shapes):
            if match := pattern.fullmatch(text):
                if at:
                    self._shapes.insert(0, self._shapes.pop(at))
                try:
                    values = [
                        float(v) if "." in v else int(v) if len(v) < 19 and v.isdecimal() else _rare(v)
                        for v in match.groups()
                    ]
                except ValueError:
                    numbers = [to_number(v) for v in match.groups()]
                    if None in numbers:
                        continue
                    values = cast(list[Scalar], numbers)
                return dict(zip(names, values, strict=True))
        return self._slowly(text)

    def _slowly(self, text: str) -> dict[str, Scalar]:
        places = self._places(text)
        found: dict[str, Scalar] = {}
        plain = 0 < len(places) <= _MAX_FIELDS and len(text) <= _MAX_CHARS
        for name, start, end in places:
            number = to_number(text[start:end])
            plain = plain and number is not None and name not in found
            if number is not None:
                found.setdefault(name, number)
        if plain and self._made < _MAX_MADE:
            self._learn(text, places)
        return found

    def _learn(self, text: str, places: Places) -> None:
        self._made += 1
        # Numbers that are part of a name tell it from others.
        literal = re.escape if any(_VARIABLE.search(name) for name, _, _ in places) else _literal
        parts: list[str] = []
        before = 0
        for _, start, end in sorted(places, key=lambda place: place[1]):
            plain = _NUMBER_TEXT.match(text, start, end) is not None
            if start < before or not (plain or _GROUPED_TEXT.match(text, start, end)):
                return
            parts += [literal(text[before:start]), _VALUE if plain else _GROUPED_VALUE]
            before = end
        parts.append(literal(text[before:]))
        names = tuple(name for name, start, _ in sorted(places, key=lambda place: place[1]))
        self._shapes.insert(0, (re.compile("".join(parts)), names))
        del self._shapes[_KEPT:]


def _rare(text: str) -> Scalar:
    number = to_number(text)
    if number is None:
        raise ValueError(text)
    return number


def _literal(text: str) -> str:
    """An expression for the text between two numbers: other numbers and the width of wide gaps may change."""
    parts: list[str] = []
    before = 0
    for match in _VARIABLE.finditer(text):
        parts += [re.escape(text[before : match.start()]), r"\d{1,40}" if match[0][0] != " " else " {2,}"]
        before = match.end()
    return "".join([*parts, re.escape(text[before:])])
