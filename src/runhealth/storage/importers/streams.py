"""Byte streams of log files: local or remote, compressed or in UTF-16, always read from start to end."""

import bz2
import codecs
import gzip
import io
import lzma
import stat
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, cast

from runhealth.storage.errors import NoUsableDataError

_BUFFER_BYTES = 1 << 18
_OPENERS: tuple[tuple[bytes, Callable[[BinaryIO], object]], ...] = (
    (b"\x1f\x8b", lambda raw: gzip.GzipFile(fileobj=raw)),
    (b"BZh", bz2.BZ2File),
    (b"\xfd7zXZ\x00", lzma.LZMAFile),
)
_REFUSED = (
    (b"\x28\xb5\x2f\xfd", "is compressed with zstd: unpack it first (zstd -d)"),
    (b"PK\x03\x04", "is a zip archive: unpack it first and give the folder"),
    (b"7z\xbc\xaf\x27\x1c", "is a 7z archive: unpack it first and give the folder"),
    (b"PAR1", "is a Parquet file: expected a log; export it as CSV"),
)


class _Decoded(io.RawIOBase):
    """Another stream's content. A stream that breaks off ends there; `problem` says so."""

    def __init__(
        self,
        source: BinaryIO,
        recode: Callable[[bytes, bool], bytes] | None = None,
        under: BinaryIO | None = None,
    ) -> None:
        """`under` is closed together with the source."""
        self._source = source
        self._read: Callable[[int], bytes] = getattr(source, "read1", source.read)  # loses less when it breaks off
        self._under = under
        self._recode = recode
        self._left = b""
        self._ended = False
        self.problem: str | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        view = memoryview(cast(bytearray, buffer))
        while not self._left and not self._ended:
            try:
                data = self._read(_BUFFER_BYTES)
            except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
                self.problem = f"the file breaks off: {str(error) or type(error).__name__}"
                data = b""
            self._ended = not data
            self._left = self._recode(data, self._ended) if self._recode else data
        size = min(len(view), len(self._left))
        view[:size] = self._left[:size]
        self._left = self._left[size:]
        return size

    def close(self) -> None:
        if not self.closed:
            self._source.close()
            if self._under is not None:
                self._under.close()
        super().close()


def open_stream(path: str) -> BinaryIO:
    """A buffered stream of the decompressed content, UTF-16 as UTF-8. OSError as `open` raises it; NoUsableDataError
    for a container that is not read, and for a pipe or device: it can be read only once, or never ends."""
    raw: BinaryIO
    if "://" in path:
        import fsspec  # slow to import, and most logs are local

        raw = _buffered(_Decoded(cast(BinaryIO, fsspec.open(path, "rb").open())))
    else:
        mode = Path(path).stat().st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            # To open a pipe that nobody writes to would block for ever.
            kind = "a pipe" if stat.S_ISFIFO(mode) else "a device or socket"
            raise NoUsableDataError(f"{path} is {kind}: expected a regular file; write the log to one first")
        raw = open(path, "rb")  # noqa: SIM115 - the caller closes what is returned
    head = peek(raw)
    for magic, why in _REFUSED:
        if head.startswith(magic):
            raw.close()
            raise NoUsableDataError(f"{path} {why}")
    for magic, opener in _OPENERS:
        if head.startswith(magic):
            inner = _buffered(_Decoded(cast(BinaryIO, opener(raw)), under=raw))
            return _as_utf8(inner, peek(inner))
    return _as_utf8(raw, head)


def is_plain(path: str) -> bool:
    """Whether a local file's bytes are its text: neither compressed nor in UTF-16."""
    if "://" in path:
        return False
    with open_stream(path) as stream:
        return not isinstance(getattr(stream, "raw", None), _Decoded)


def problem_of(stream: BinaryIO) -> str | None:
    """What went wrong while the stream was decompressed, if anything."""
    return getattr(getattr(stream, "raw", None), "problem", None)


def peek(stream: BinaryIO) -> bytes:
    """The first bytes that come next, without taking them."""
    return cast(io.BufferedReader, stream).peek(256)[:256]


def _buffered(raw: io.RawIOBase) -> BinaryIO:
    return cast(BinaryIO, io.BufferedReader(raw, _BUFFER_BYTES))


def _as_utf8(stream: BinaryIO, head: bytes) -> BinaryIO:
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        encoding = "utf-16"
    elif len(head) >= 8 and head[1::2].count(0) * 10 >= len(head) * 4 and 0 not in head[::2]:
        encoding = "utf-16-le"  # what PowerShell writes, without its mark
    else:
        return stream
    decoder = codecs.getincrementaldecoder(encoding)("replace")
    return _buffered(_Decoded(stream, lambda data, final: decoder.decode(data, final).encode("utf-8", "replace")))
