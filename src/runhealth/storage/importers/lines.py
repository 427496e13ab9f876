"""Lines of a binary stream, in bounded memory, as text."""

import re
from collections.abc import Iterator
from typing import BinaryIO

from runhealth.storage.importers.base import Tally

MAX_LINE_BYTES = 1 << 20
_CHUNK_BYTES = 1 << 18
_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_CUT_ANSI = re.compile(r"(?<![\w\x1b])\[(?:\d{1,3}(?:;\d{1,3})*)m")  # the escape character itself was lost


def iter_lines(stream: BinaryIO, tally: Tally) -> Iterator[tuple[int, str, bool]]:
    """Yield (line number from 1, text without line end, whether it ended with a line end).

    A line over 1 MiB is rejected and skipped. Progress bars that write over their own line with carriage returns
    yield each part under the same number. NUL bytes, which a crashed file system leaves behind, are taken out.
    """
    number = 0
    for block, whole in blocks_of_lines(stream):
        if block is None:
            number += 1
            reject_long(number, tally)
            continue
        at = number
        for number, line in lines_of(block, at, whole, tally):
            yield number, line, whole


def reject_long(number: int, tally: Tally) -> None:
    """Say that a line was over the limit."""
    tally.reject(number, f"a line of more than {MAX_LINE_BYTES} bytes")


def lines_of(block: bytes, before: int, whole: bool, tally: Tally) -> Iterator[tuple[int, str]]:
    """Yield (number, text) of the lines in a block that follows `before` lines."""
    number = before
    text = block.decode("utf-8", "replace")
    if number == 0:
        text = text.removeprefix("\ufeff")
    odd = "\0" in text or "\r" in text
    lines = text.split("\n")
    if whole:
        del lines[-1]  # what follows the last line end: nothing
    if not odd:
        yield from enumerate(lines, number + 1)
        return
    for line in lines:
        number += 1
        if "\0" in line:
            line = line.replace("\0", "")
            tally.note("the file holds NUL bytes, which were left out")
        line = line.rstrip("\r")
        if "\r" in line:
            for part in line.split("\r"):
                yield number, part
        else:
            yield number, line


def blocks_of_lines(stream: BinaryIO, chunk_bytes: int = 0) -> Iterator[tuple[bytes | None, bool]]:
    """Yield (bytes of whole lines, True), at the end perhaps (a line without its end, False), and (None, True) for a
    line that is too long. `chunk_bytes`: how much to wait for; by default whatever is there."""
    read = stream.read
    if not chunk_bytes:
        read = getattr(stream, "read1", read)  # what is there at once: a file that grows is read up to its end
    rest = b""
    skipping = False
    while chunk := read(chunk_bytes or _CHUNK_BYTES):
        end = chunk.rfind(b"\n") + 1
        if not end:
            if not skipping:
                rest += chunk
                if len(rest) > MAX_LINE_BYTES:
                    rest, skipping = b"", True
                    yield None, True
            continue
        start = 0
        if skipping:
            skipping = False
            start = chunk.find(b"\n") + 1
        elif len(rest) + chunk.find(b"\n") > MAX_LINE_BYTES:
            rest, start = b"", chunk.find(b"\n") + 1
            yield None, True
        block = rest + chunk[start:end]
        rest = chunk[end:]
        if block:
            yield block, True
    if rest and not skipping:
        yield rest, False


def without_ansi(text: str) -> str:
    """The text without terminal colours and other escape sequences."""
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    if "[" in text and "m" in text:
        text = _CUT_ANSI.sub("", text)
    return text


def kept_places(text: str) -> list[int]:
    """Where the characters of `without_ansi(text)` are in the text."""
    places = list(range(len(text)))
    if "\x1b" in text:
        text = _cut(text, places, _ANSI)
    if "[" in text and "m" in text:
        _cut(text, places, _CUT_ANSI)
    return places


def _cut(text: str, places: list[int], pattern: re.Pattern[str]) -> str:
    """The text without what matches, and the places of what is left."""
    for match in reversed(list(pattern.finditer(text))):
        del places[match.start() : match.end()]
    return pattern.sub("", text)


def looks_binary(head: bytes) -> bool:
    """Whether this is no text: more than a tenth of NUL, control or undecodable bytes."""
    sample = head[:8192]
    if not sample:
        return False
    text = sample.decode("utf-8", "replace")
    odd = sum(1 for c in text if c == "\ufffd" or (c < " " and c not in "\t\n\r\x1b\x08\x0c"))
    return odd > len(text) / 10
