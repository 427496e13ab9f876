"""Objects of a JSON array, one at a time, in bounded memory, from files that may be torn."""

import codecs
import json
import re
from collections.abc import Iterator
from typing import BinaryIO

from runhealth.storage.importers.base import Tally

_CHUNK_BYTES = 1 << 16
_MAX_OBJECT_CHARS = 1 << 22
_TOO_DEEP = "nested too deeply for a record; the text after it was skipped up to 64 KiB"
_DECODER = json.JSONDecoder()
_FIRST_TRY_CHARS = 4096
_OBJECT = re.compile(r'\{(?=\s*(?:["}]|\Z))')
_SEPARATORS = re.compile(r"[\s,]*")


class _Window:
    """A sliding window of text over a stream, with a position, that counts lines."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self.text = ""
        self.at = 0
        self.line = 1
        self.ended = False

    @property
    def left(self) -> int:
        return len(self.text) - self.at

    def more(self) -> None:
        chunk = self._stream.read(_CHUNK_BYTES)
        self.ended = not chunk
        self.text = self.text[self.at :] + self._decode(chunk, self.ended)
        self.at = 0

    def move(self, to: int) -> None:
        self.line += self.text.count("\n", self.at, to)
        self.at = to


def iter_objects(stream: BinaryIO, tally: Tally, key: str | None) -> Iterator[tuple[int, dict[str, object]]]:
    """Yield (line, object) for the objects of the array under `key`, or of the top-level array if `key` is None.

    An object that cannot be read is rejected and the next `{` is tried; a file that ends inside the array is noted.
    """
    window = _Window(stream)
    if not _find_array(window, key):
        return
    while True:
        _skip_separators(window)
        if not window.left:
            tally.note(f"the file ends inside the list of records (line {window.line}): it is torn or still written")
            return
        if window.text[window.at] == "]":
            return
        line = window.line
        value, why = _decode_one(window)
        if why:
            tally.rows_read += 1
            tally.reject(line, why)
            if why is _TOO_DEEP:  # trying again one level deeper would take forever
                window.move(len(window.text))
            _skip_to_object(window)
        elif isinstance(value, dict):
            yield line, value
        else:
            tally.rows_read += 1
            tally.reject(line, f"expected an object, met {type(value).__name__}")


def _find_array(window: _Window, key: str | None) -> bool:
    pattern = re.compile(r"\s*\[" if key is None else rf'"{re.escape(key)}"\s*:\s*\[')
    while True:
        match = pattern.search(window.text, window.at)
        if match is not None:
            window.move(match.end())
            return True
        if window.ended:
            return False
        if window.left > _CHUNK_BYTES:
            window.move(len(window.text) - 256)  # the key may lie across the edge
        window.more()


def _skip_separators(window: _Window) -> None:
    while True:
        match = _SEPARATORS.match(window.text, window.at)
        if match is not None:
            window.move(match.end())
        if window.left or window.ended:
            return
        window.more()


def _skip_to_object(window: _Window) -> None:
    window.move(min(window.at + 1, len(window.text)))
    while True:
        match = _OBJECT.search(window.text, window.at)
        if match is not None or window.ended:
            window.move(match.start() if match is not None else len(window.text))
            return
        window.move(max(window.at, len(window.text) - 1))  # a brace may be the last character
        window.more()


def _decode_one(window: _Window) -> tuple[object, str]:
    size = _FIRST_TRY_CHARS  # what a failure costs grows with the text that it is found in
    while True:
        text = window.text[window.at : window.at + size]
        complete = window.ended and window.left <= size
        try:
            value, end = _DECODER.raw_decode(text)
        except json.JSONDecodeError as error:
            near_end = error.pos >= len(text) - 16 or error.msg.startswith("Unterminated")
            if complete or not near_end or len(text) > _MAX_OBJECT_CHARS:
                return None, f"no JSON object: {error.msg}"
        except RecursionError:
            return None, _TOO_DEEP
        except ValueError as error:
            return None, f"no usable JSON object: {error}"
        else:
            if end < len(text) or complete:
                window.move(window.at + end)
                return value, ""
        if window.left > size:
            size *= 8
        else:
            size = max(size, window.left) * 2
            window.more()
