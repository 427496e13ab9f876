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
    following = window.text.find("{", window.at + 1)
    while following < 0 and not window.ended:
        window.move(len(window.text))
        window.more()
        following = window.text.find("{")
    window.move(following if following >= 0 else len(window.text))


def _decode_one(window: _Window) -> tuple[object, str]:
    while True:
        try:
            value, end = _DECODER.raw_decode(window.text, window.at)
        except json.JSONDecodeError as error:
            near_end = error.pos >= len(window.text) - 16 or error.msg.startswith("Unterminated")
            if window.ended or not near_end or window.left > _MAX_OBJECT_CHARS:
                return None, f"no JSON object: {error.msg}"
        except RecursionError:
            return None, _TOO_DEEP
        except ValueError as error:
            return None, f"no usable JSON object: {error}"
        else:
            if end < len(window.text) or window.ended:
                window.move(end)
                return value, ""
        window.more()
