"""Reading rank logs while they grow.

`SegmentTail` follows one file, `RunTail` all files of a run. A damaged stretch is reported and reading goes on at the
next frame whose checksum agrees. Whether a bad end is damage or only the growing end of a live log is decided by what
else is known: a later segment of the same rank, a later attempt, or a writer that is gone.
"""

import contextlib
import re
import time
from collections.abc import Mapping
from pathlib import Path

from runhealth.storage import process
from runhealth.storage.codec import Decoder
from runhealth.storage.errors import CorruptDataError, StoreError
from runhealth.storage.frame import HEADER_BYTES, FrameKind, decode_frame, find_frame
from runhealth.storage.records import BatchRecord, LayerSample, Record, Rejected, RunEvent, StepRecord

_ATTEMPT = re.compile(r"a(\d{3,9})")
_WRITER = re.compile(r"([rn]-?\d{4,9})")  # a rank, or a node whose agent writes for its ranks
_SEGMENT = re.compile(r"\d{6,}\.rlog")
_STRUCTURE = (FrameKind.SEGMENT, FrameKind.SCHEMA, FrameKind.END, FrameKind.RANKED)
_MTIME_TICK_S = 2.0  # a folder changed this recently may change again without a new mtime


class RetiredLogError(StoreError):
    """A rank log segment was removed, because the published run covers it, before this reader had read it."""


def order(record: Record) -> tuple[int, int, bool, int, int, int | str]:
    """Sort key of records: (attempt, step); then the events and checkpoints of all ranks, for a checkpoint holds the
    steps before its own; then by rank its scalars, its batches, its layers by name."""
    if isinstance(record, StepRecord):
        return record.attempt, record.step, True, record.rank, 0, 0
    if isinstance(record, BatchRecord):
        return record.attempt, record.step, True, record.rank, 1, record.micro_batch
    if isinstance(record, LayerSample):
        return record.attempt, record.step, True, record.rank, 2, record.layer
    return record.attempt, record.step, False, record.rank, int(not isinstance(record, RunEvent)), 0


class SegmentTail:
    """Reads one segment from a byte offset on. `name` is what messages call the file.

    Bytes that are no frame, or fail their checksum, are skipped as soon as a whole frame with a good checksum is found
    behind them; `gaps` has them. Schema ids are used once in a segment, so rows behind a lost schema are rejected and
    never read under another one.
    """

    def __init__(self, path: Path, name: str, offset: int = 0) -> None:
        self.path = path
        self.name = name
        self.start = offset
        self.offset = offset  # the byte after the last frame that was taken in
        self.at_end = True  # False: the last read() stopped at its limit
        self.pending_bytes = 0  # bytes after `offset` that are not a whole frame yet
        self.problem = ""  # why reading stopped, if it was not merely the end
        self.decoder = Decoder()
        self._gaps: list[tuple[int, int, str]] = []  # first byte, byte after the last, why
        self._recalled = offset == 0
        if offset:
            self._look_for_end()

    @property
    def ended(self) -> bool:
        return self.decoder.ended

    def _look_for_end(self) -> None:
        """Was the end frame read already?"""
        with contextlib.suppress(OSError, CorruptDataError), self.path.open("rb") as file:
            file.seek(max(0, self.offset - HEADER_BYTES))
            frame = decode_frame(file.read(HEADER_BYTES))
            self.decoder.ended = frame is not None and frame.kind == FrameKind.END

    def _recall(self) -> None:
        """Learn header and schemas from the part of the file that was read earlier; what was bad was reported then."""
        with self.path.open("rb") as file:
            data = file.read(self.offset)
        position = 0
        while position < len(data):
            try:
                frame = decode_frame(data, position)
                if frame is None:
                    break
                if frame.kind in _STRUCTURE:
                    self.decoder.structure(frame)
                position = frame.end
            except CorruptDataError:
                position = find_frame(data, position + 1)
                if position < 0:
                    break

    def read(self, max_bytes: int | None = None) -> list[Record]:
        """Records of the whole frames that arrived since the last call. Raises nothing for damage: see `gaps`."""
        if self.ended:
            return []
        with self.path.open("rb") as file:
            file.seek(self.offset)
            data = file.read(-1 if max_bytes is None else max_bytes)
            self.at_end = not file.read(1)
        records: list[Record] = []
        self.problem = ""
        if data and not self._recalled:
            self._recall()
            self._recalled = True
        position = self._scan(data, records)
        if position == 0 and data and not self.at_end:  # one frame longer than max_bytes
            return self.read(None)
        self.offset += position
        self.pending_bytes = len(data) - position
        if self.decoder.ended and self.pending_bytes:
            self.problem = "bytes after the end frame"
        return records

    def _scan(self, data: bytes, records: list[Record]) -> int:
        """Take in the frames of `data`; returns how many bytes of it are done with."""
        position = 0
        while not self.decoder.ended:
            try:
                frame = decode_frame(data, position)
            except CorruptDataError as err:
                frame, why = None, str(err)
            else:
                why = "a frame that does not end"
            if frame is None:
                found = find_frame(data, position + 1)
                if found < 0:
                    self.problem = "" if why == "a frame that does not end" else why
                    break
                self._skip(position, found, why)
                position = found
                continue
            try:
                records.extend(self.decoder.decode(frame))
            except CorruptDataError as err:
                if self.decoder.unreadable:
                    self.problem = str(err)
                    break
                self._skip(position, frame.end, str(err))
            position = frame.end
        return position

    def _skip(self, start: int, end: int, why: str) -> None:
        start, end = self.offset + start, self.offset + end
        if self._gaps and self._gaps[-1][1] == start:
            start, _, why = self._gaps.pop()
        self._gaps.append((start, end, why))

    @property
    def gaps(self) -> list[Rejected]:
        """Stretches that were skipped because they are damaged."""
        return [
            Rejected(line=start, why=f"{self.name}: at byte {start}: {why} ({end - start} bytes not read)")
            for start, end, why in self._gaps
        ]

    def rejected(self, *, final: bool) -> Rejected | None:
        """What could not be read at the end, if anything. `final`: the file will not grow any more."""
        if self.problem:
            why = self.problem
        elif final and self.pending_bytes and not self.ended:
            why = "a frame was cut off; its writer did not finish it"
        else:
            return None
        return Rejected(
            line=self.offset, why=f"{self.name}: at byte {self.offset}: {why} ({self.pending_bytes} bytes not read)"
        )


class RunTail:
    """Follows every rank log of a run. `offsets` maps log file names (relative to the run) to bytes already read."""

    def __init__(self, run_path: str, offsets: Mapping[str, int] | None = None) -> None:
        self.more = False  # the last read() stopped at its limit, not at the end of what there was
        self._run = Path(run_path)
        self._start = dict(offsets or {})
        self._listed: dict[Path, tuple[int, float, list[str]]] = {}
        self._ranks: dict[tuple[int, str], list[SegmentTail]] = {}
        self._next: dict[tuple[int, str], int] = {}  # sequence number of the segment to open next

    def read(self, max_bytes: int | None = None) -> list[Record]:
        """New records of all logs, each log in its own order. With `max_bytes` (about) call again while `more`.

        Raises StoreError if a log cannot be opened; damaged frames are in `rejected()` instead.
        """
        records: list[Record] = []
        left = max_bytes
        self.more = False
        try:
            for attempt, attempt_folder in self._folders(self._run / "log", _ATTEMPT):
                for writer, folder in self._folders(attempt_folder, _WRITER):
                    left = self._read_writer((int(attempt), writer), folder, records, left)
                    if left is not None and left <= 0:
                        self.more = True
                        return records
        except StoreError:
            raise
        except OSError as err:
            raise StoreError(f"cannot read the rank logs of {self._run}: {err.strerror} ({err.filename})") from err
        return records

    def _read_writer(self, key: tuple[int, str], folder: Path, records: list[Record], left: int | None) -> int | None:
        segments = self._ranks.setdefault(key, [])
        while left is None or left > 0:
            if not segments and not self._open(key, folder):
                break
            tail = segments[-1]
            before = tail.offset
            if not tail.ended and _size(tail) > before:
                records.extend(tail.read(left))
                if left is not None:
                    left = left - (tail.offset - before) if tail.at_end else 0
            if not self._open(key, folder):
                break
            # The next segment exists, so this one is final; look once more for frames written in between.
            if not tail.ended and _size(tail) > tail.offset:
                records.extend(tail.read())
        return left

    def _open(self, key: tuple[int, str], folder: Path) -> bool:
        """Go on with the next segment of a rank, if it is there. Raises RetiredLogError if it was removed unread."""
        segments = self._ranks[key]
        path = folder / f"{self._next.get(key, 0):06d}.rlog"
        if not path.is_file():
            later = self._after_retired(key, folder, path)
            if later is None:
                return False
            path = later
        name = path.relative_to(self._run).as_posix()
        segments.append(SegmentTail(path, name, self._start.get(name, 0)))
        self._next[key] = int(path.stem) + 1
        return True

    def _after_retired(self, key: tuple[int, str], folder: Path, missing: Path) -> Path | None:
        """The first segment after those that are gone because parts cover them."""
        segments = self._ranks[key]
        if segments and not segments[-1].ended and segments[-1].path.exists():
            return None  # the usual case: the newest segment is still written to
        later = [name for name in self._names(folder) if _SEGMENT.fullmatch(name) and name > missing.name]
        if not later:
            return None
        first = folder / min(later)
        for number in range(self._next.get(key, 0), int(first.stem)):
            name = (folder / f"{number:06d}.rlog").relative_to(self._run).as_posix()
            if name not in self._start:
                raise RetiredLogError(
                    f"{self._run / name} was removed before it was read here; what it held is in the published run: "
                    "open the run anew"
                )
        return first

    def _folders(self, parent: Path, pattern: re.Pattern[str]) -> list[tuple[str, Path]]:
        """Numbered folders in order; listed again only when the parent may have changed."""
        names = self._names(parent)
        found = [(match[1], parent / match[0]) for name in names if (match := pattern.fullmatch(name))]
        return sorted(found, key=lambda one: (len(one[0]), one[0]))

    def _names(self, parent: Path) -> list[str]:
        try:
            mtime = parent.stat().st_mtime_ns
        except (FileNotFoundError, NotADirectoryError):
            return []
        known = self._listed.get(parent)
        if known is None or known[0] != mtime or known[1] - mtime / 1e9 < _MTIME_TICK_S:
            known = (mtime, time.time(), [entry.name for entry in parent.iterdir()])
            self._listed[parent] = known
        return known[2]

    def segments(self) -> list[SegmentTail]:
        """Every segment met so far, ordered by (attempt, rank, sequence)."""
        return [tail for key in sorted(self._ranks) for tail in self._ranks[key]]

    def offsets(self) -> dict[str, int]:
        """Bytes read of each file; hand them to another RunTail to continue there."""
        return {tail.name: tail.offset for tail in self.segments()}

    def rejected(self) -> list[Rejected]:
        """Damaged and cut-off frames that were met so far."""
        found = []
        for (attempt, _), segments in sorted(self._ranks.items()):
            superseded = any(other > attempt for other, _ in self._ranks)
            for i, tail in enumerate(segments):
                found += tail.gaps
                final = i < len(segments) - 1
                if not final and (tail.pending_bytes or tail.problem):
                    final = superseded or process.is_dead(tail.decoder.header)
                if tail.problem and not final and tail.pending_bytes < _IN_FLIGHT_BYTES:
                    continue  # perhaps a write seen half-way
                rejected = tail.rejected(final=final)
                if rejected is not None:
                    found.append(rejected)
        return found


def rejected_of(file: str, offset: int, message: str) -> list[Rejected]:
    """What `progress.message` of a file says, one for each line."""
    found = []
    for line in message.splitlines():
        match = _AT_BYTE.match(line)
        at = int(match[1]) if match else offset
        found.append(Rejected(line=at, why=f"{file}: {line}" if match else f"{file}: at byte {at}: {line}"))
    return found


_AT_BYTE = re.compile(r"at byte (\d+): ")


def _size(tail: SegmentTail) -> int:
    """Bytes of the segment now. A segment that is gone raises RetiredLogError unless all of it was read."""
    try:
        return tail.path.stat().st_size
    except FileNotFoundError as err:
        if tail.ended:
            return tail.offset
        raise RetiredLogError(
            f"{tail.path} was removed before it was read here; what it held is in the published run: open the run anew"
        ) from err


_IN_FLIGHT_BYTES = 4096
