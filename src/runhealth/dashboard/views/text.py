"""Text from a run's logs is untrusted: it is escaped here, and shortened, before it reaches HTML or Markdown."""

import html
import re
import shlex

_MARKDOWN = re.compile(r"([\\`*_{}\[\]()#+\-.!|<>~$:&^=@/])")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]+")


def plain(text: object, limit: int = 400) -> str:
    """One line without control and direction characters, at most `limit` characters."""
    line = _CONTROL.sub(" ", str(text)).strip()
    return line if len(line) <= limit else line[: limit - 1] + "…"


def escape(text: object, limit: int = 400) -> str:
    """Text for HTML, in attributes too."""
    return html.escape(plain(text, limit), quote=True)


def markdown(text: object, limit: int = 400) -> str:
    """Text for Markdown: every character that Markdown, its tables, or Streamlit's dialect could read is escaped."""
    return _MARKDOWN.sub(r"\\\1", plain(text, limit))


def command(*words: str) -> str:
    """A shell command that can be pasted whatever a run is called."""
    return " ".join(shlex.quote(word) for word in words)


def duration(seconds: float) -> str:
    """`42 s`, `3 min`, `5 h`, `12 d`."""
    seconds = max(0.0, seconds)
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def number(value: float) -> str:
    """Four significant digits."""
    return f"{value:,.0f}" if value == int(value) and abs(value) < 1e9 else f"{value:.4g}"
