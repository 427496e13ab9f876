"""Untrusted text on a terminal, colours, symbols with text twins, sparklines."""

import math
import os
import sys
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

from runhealth.diagnose.findings import Severity

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """How the text may look: with colour, with symbols beyond ASCII."""

    colour: bool = False
    unicode: bool = True

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
        return cls(colour=colour, unicode=encoding.startswith("utf") and env.get("TERM") != "dumb")

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


def stdout_style() -> Style:
    return Style.of(sys.stdout)
