"""Untrusted text on a terminal, colours, symbols with text twins, sparklines."""

import math
import os
import re
import shutil
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

from runhealth.diagnose.findings import Severity
from runhealth.diagnose.report.output import stdout

WIDEST, NARROWEST = 118, 40  # columns: lines over 118 are hard to read, under 40 nothing fits
GLUE = "\u00a0"  # a space at which no line is broken; shown as a space
BARS = "▁▂▃▄▅▆▇█"
TEXT_BARS = "_.-~=+*#"
NAN_MARK = "!"
_COLOURS = {"red": "31", "yellow": "33", "cyan": "36", "green": "32", "bold": "1", "dim": "2"}
_SYMBOLS = {
    Severity.ERROR: ("✗", "ERROR", "red"),
    Severity.WARNING: ("!", "WARN", "yellow"),
    Severity.INFO: ("·", "info", "cyan"),
}


def safe(text: str) -> str:
    """Names and messages come from logs that anyone may have written: control characters, bidirectional overrides and
    other invisible format characters are shown as escapes, so that they cannot drive a terminal or fake a line."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        c if not unicodedata.category(c).startswith("C") and c not in "\u2028\u2029" else _escape(c) for c in text
    )


def _escape(char: str) -> str:
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


_NUMBER = re.compile(r"(?<![\w./-])([-+]?)(\d+(?:\.\d+)?(?:e[-+]?\d+)?)( s\b)?(?![\w/]|\.\d)")


def short_number(value: float) -> str:
    """At most four digits that matter, no exponent where people write none: 340, 1.42, 12,600, 1.03e10."""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if value != 0 and (size < 1e-4 or size >= 1e9):
        mantissa, exponent = f"{value:.3g}".split("e") if "e" in f"{value:.3g}" else f"{value:.2e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.4g}"


def readable(text: str) -> str:
    """Numbers in a sentence as a person would write them: 3.4e+02 as 340, 1.938245 as 1.938, 0.0835 s as 83.5 ms."""

    def shorten(match: re.Match[str]) -> str:
        sign, digits, seconds = match[1], match[2], match[3] or ""
        if "." not in digits and "e" not in digits:
            return match[0]
        value = float(digits)
        if seconds and 0 < value < 0.9995:
            scale, unit = (1e3, "ms") if value >= 1e-3 else (1e6, "us")
            return f"{sign}{value * scale:.3g}{GLUE}{unit}"
        return sign + short_number(value) + seconds

    return _NUMBER.sub(shorten, text)


def cells(text: str) -> int:
    """Columns that a text takes on a terminal: wide characters take two, combining ones none."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """How the text may look: with colour, with symbols beyond ASCII, how wide in columns."""

    colour: bool = False
    unicode: bool = True
    width: int = WIDEST

    @classmethod
    def of(cls, stream: TextIO) -> "Style":
        """`FORCE_COLOR` beats `NO_COLOR` beats `TERM=dumb` beats whether the stream is a terminal."""
        env = os.environ
        if env.get("FORCE_COLOR", "") not in ("", "0"):
            colour = True
        elif env.get("NO_COLOR") or env.get("TERM") == "dumb":
            colour = False
        else:
            colour = stream.isatty()
        encoding = (getattr(stream, "encoding", None) or "ascii").lower().replace("_", "-")
        width = WIDEST
        if stream.isatty() or env.get("COLUMNS", "").isdigit():
            width = min(WIDEST, max(NARROWEST, shutil.get_terminal_size((WIDEST, 24)).columns))
        return cls(colour=colour, unicode=encoding.startswith("utf") and env.get("TERM") != "dumb", width=width)

    def plain(self, text: str) -> str:
        """Text without characters that the stream does not have."""
        text = text.replace(GLUE, " ")
        if self.unicode:
            return text
        for char, twin in (("…", "..."), ("→", "->"), ("–", "-"), ("×", "x")):
            text = text.replace(char, twin)
        return text.encode("ascii", "backslashreplace").decode()

    def wrap(self, text: str, *, hanging: int = 0, most: int | None = None, width: int | None = None) -> list[str]:
        """`text` in lines of at most the width, the second and later ones indented by `hanging`; what goes beyond
        `most` lines is cut with a mark. A word that is too long for a line is broken. The text holds no colour."""
        width = width or self.width
        stripped = text.lstrip(" ")
        lead = " " * (len(text) - len(stripped))
        lines: list[str] = []
        current = lead
        fresh = True
        for word in stripped.split(" "):
            shown = self.plain(word)
            room = width - cells(current) - (0 if fresh else 1)
            if cells(shown) > room and not fresh:
                lines.append(current.rstrip())
                current, fresh = " " * hanging, True
                room = width - hanging
            while cells(shown) > room:
                cut = _fit(shown, room)
                lines.append(current + shown[:cut])
                shown, current, room = shown[cut:], " " * hanging, width - hanging
            current += shown if fresh else f" {shown}"
            fresh = False
        lines.append(current)
        if most is not None and len(lines) > most:
            mark = "…" if self.unicode else "..."
            last = lines[most - 1]
            lines = [*lines[: most - 1], last[: _fit(last, width - len(mark) - 1)].rstrip() + f" {mark}"]
        return lines

    def paint(self, text: str, colour: str) -> str:
        return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m" if self.colour else text

    def mark(self, severity: Severity) -> str:
        symbol, word, colour = _SYMBOLS[severity]
        return self.paint(symbol if self.unicode else word, colour)

    def bar(self, values: Sequence[float | None], width: int = 24) -> str:
        """A sparkline of about `width` characters: each shows the value of its bucket that is farthest from the
        median, NaN (or None) is `!`, and so no spike and no NaN gets lost."""
        if not values:
            return ""
        bars = BARS if self.unicode else TEXT_BARS
        points = [math.nan if v is None else v for v in values]
        finite = sorted(v for v in points if math.isfinite(v))
        if not finite:
            return NAN_MARK * min(width, len(points))
        low, high, middle = finite[0], finite[-1], finite[len(finite) // 2]
        buckets = min(width, len(points))
        out = []
        for index in range(buckets):
            part = points[index * len(points) // buckets : (index + 1) * len(points) // buckets]
            if any(not math.isfinite(v) for v in part):
                out.append(NAN_MARK)
                continue
            value = max(part, key=lambda v: abs(v - middle))
            share = (value - low) / (high - low) if high > low else 0.0
            out.append(bars[min(len(bars) - 1, int(share * len(bars)))])
        return "".join(out)


def _fit(text: str, room: int) -> int:
    """How many characters fit into `room` columns; at least one."""
    taken = 0
    for index, char in enumerate(text):
        taken += cells(char)
        if taken > room:
            return max(1, index)
    return len(text)


def stdout_style() -> Style:
    stream = stdout()
    return Style.of(stream) if stream is not None else Style()
