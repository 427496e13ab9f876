"""Lines of a binary stream, in bounded memory, as text."""

import re
from collections.abc import Iterator
from typing import BinaryIO

from runhealth.storage.importers.base import Tally

MAX_LINE_BYTES = 1 << 20
_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_CUT_ANSI = re.compile(r"(?<![\w\x1b])\[(?:\d{1,3}(?:;\d{1,3})*)m")  # the escape character itself was lost


def iter_lines(stream: BinaryIO, tally: Tally) -> Iterator[tuple[int, str, bool]]:
    """Yield (line number from 1, text without line end, whether it ended with a line end).

    A line over 1 MiB is rejected and skipped. Progress bars that write over their own line with carriage returns
    yield each part under the same number.
    """
    number = 0
    while raw := stream.readline(MAX_LINE_BYTES):
        number += 1
        if len(raw) >= MAX_LINE_BYTES and not raw.endswith(b"\n"):
            tally.reject(number, f"a line of more than {MAX_LINE_BYTES} bytes")
            while (raw := stream.readline(MAX_LINE_BYTES)) and not raw.endswith(b"\n"):
                pass
            continue
        whole = raw.endswith(b"\n")
        text = raw.decode("utf-8", "replace").rstrip("\r\n")
        if number == 1:
            text = text.removeprefix("\ufeff")
        if "\r" in text:
            for part in text.split("\r"):
                yield number, part, whole
        else:
            yield number, text, whole


def without_ansi(text: str) -> str:
    """The text without terminal colours and other escape sequences."""
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    if "[" in text and "m" in text:
        text = _CUT_ANSI.sub("", text)
    return text


def looks_binary(head: bytes) -> bool:
    """Whether this is no text: a NUL byte, or more than a tenth of control or undecodable bytes."""
    sample = head[:8192]
    if not sample:
        return False
    if b"\0" in sample:
        return True
    text = sample.decode("utf-8", "replace")
    odd = sum(1 for c in text if c == "\ufffd" or (c < " " and c not in "\t\n\r\x1b\x08\x0c"))
    return odd > len(text) / 10
