"""Reading rank logs while they grow.

`SegmentTail` follows one file, `RunTail` all files of a run. Both stop a file at the first frame that is short or fails
its checksum. Whether that is damage or only the growing end of a live log is decided by what else is known: a later
segment of the same rank, a later attempt, or a writer that is gone.
"""

import re
import time
from collections.abc import Mapping
from pathlib import Path

from runhealth.storage import process
from runhealth.storage.codec import Decoder
from runhealth.storage.errors import CorruptDataError, StoreError
from runhealth.storage.frame import FrameKind, decode_frame, frame_kind, skip_frame
from runhealth.storage.records import BatchRecord, LayerSample, Record, Rejected, RunEvent, StepRecord

_ATTEMPT = re.compile(r"a(\d{3,})")
_RANK = re.compile(r"r(-?\d{4,})")
_STRUCTURE = (FrameKind.SEGMENT, FrameKind.SCHEMA, FrameKind.END)
_MTIME_TICK_S = 2.0  # a folder changed this recently may change again without a new mtime


def order(record: Record) -> tuple[int, int, int, int]:
    """Sort key of records: (attempt, step, rank), then events, batches, layers, step values, checkpoints."""
    return record.attempt, record.step, record.rank, _PLACE.get(type(record), 4)


_PLACE: Mapping[type, int] = {RunEvent: 0, BatchRecord: 1, LayerSample: 2, StepRecord: 3}


class SegmentTail:
    """Reads one segment from a byte offset on. `name` is what messages call the file."""

    def __init__(self, path: Path, name: str, offset: int = 0) -> None:
        self.path = path
        self.name = name
        self.offset = offset  # the byte after the last frame that was taken in
        self.at_end = True  # False: the last read() stopped at its limit
        self.pending_bytes = 0  # bytes after `offset` that are not a whole frame yet
        self.problem = ""  # why reading stopped, if it was not merely the end
        self.decoder = Decoder()
        self._recalled = offset == 0

    @property
    def ended(self) -> bool:
        return self.decoder.ended

    def _recall(self) -> None:
        """Learn header and schemas from the part of the file that was read earlier; its frames were checked then."""
        with self.path.open("rb") as file:
            data = file.read(self.offset)
        position = 0
        while position < len(data):
            frame = None
            if frame_kind(data, position) in _STRUCTURE:
                frame = decode_frame(data, position)
                if frame is not None:
                    self.decoder.structure(frame)
            position = frame.end if frame is not None else skip_frame(data, position)
        if position != self.offset:
            raise CorruptDataError(f"expected a frame to end at byte {self.offset}, where reading goes on")

    def read(self, max_bytes: int | None = None) -> list[Record]:
        """Records of the whole frames that arrived since the last call. Raises nothing for damage: see `problem`."""
        if self.ended:
            return []
        with self.path.open("rb") as file:
            file.seek(self.offset)
            data = file.read(-1 if max_bytes is None else max_bytes)
            self.at_end = not file.read(1)
        records: list[Record] = []
        position = 0
        self.problem = ""
        try:
            if data and not self._recalled:
                self._recall()
                self._recalled = True
            while (frame := decode_frame(data, position)) is not None:
                records.extend(self.decoder.decode(frame))
                position = frame.end
                if self.decoder.ended:
                    break
            if position == 0 and not self.at_end:  # one frame longer than max_bytes
                return self.read(None)
        except CorruptDataError as err:
            self.problem = str(err)
        self.offset += position
        self.pending_bytes = len(data) - position
        if self.decoder.ended and self.pending_bytes:
            self.problem = "bytes after the end frame"
        return records

    def rejected(self, *, final: bool) -> Rejected | None:
        """What could not be read, if anything. `final`: the file will not grow any more."""
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
        self._ranks: dict[tuple[int, int], list[SegmentTail]] = {}

    def read(self, max_bytes: int | None = None) -> list[Record]:
        """New records of all logs, each log in its own order. With `max_bytes` (about) call again while `more`.

        Raises StoreError if a log cannot be opened; damaged frames are in `rejected()` instead.
        """
        records: list[Record] = []
        left = max_bytes
        self.more = False
        try:
            for attempt, attempt_folder in self._folders(self._run / "log", _ATTEMPT):
                for rank, rank_folder in self._folders(attempt_folder, _RANK):
                    left = self._read_rank(self._ranks.setdefault((attempt, rank), []), rank_folder, records, left)
                    if left is not None and left <= 0:
                        self.more = True
                        return records
        except OSError as err:
            raise StoreError(f"cannot read the rank logs of {self._run}: {err.strerror} ({err.filename})") from err
        return records

    def _read_rank(
        self, segments: list[SegmentTail], folder: Path, records: list[Record], left: int | None
    ) -> int | None:
        while left is None or left > 0:
            if not segments and not self._open(segments, folder):
                break
            tail = segments[-1]
            before = tail.offset
            if not tail.ended and tail.path.stat().st_size > before:
                records.extend(tail.read(left))
                if left is not None:
                    left = left - (tail.offset - before) if tail.at_end else 0
            if not self._open(segments, folder):
                break
            # The next segment exists, so this one is final; look once more for frames written in between.
            if not tail.ended:
                records.extend(tail.read())
        return left

    def _open(self, segments: list[SegmentTail], folder: Path) -> bool:
        path = folder / f"{len(segments):06d}.rlog"
        if not path.exists():
            return False
        name = path.relative_to(self._run).as_posix()
        segments.append(SegmentTail(path, name, self._start.get(name, 0)))
        return True

    def _folders(self, parent: Path, pattern: re.Pattern[str]) -> list[tuple[int, Path]]:
        """Numbered folders in order of number; listed again only when the parent may have changed."""
        try:
            mtime = parent.stat().st_mtime_ns
        except (FileNotFoundError, NotADirectoryError):
            return []
        known = self._listed.get(parent)
        if known is None or known[0] != mtime or known[1] - mtime / 1e9 < _MTIME_TICK_S:
            known = (mtime, time.time(), [entry.name for entry in parent.iterdir()])
            self._listed[parent] = known
        numbered = [(int(match[1]), parent / match[0]) for name in known[2] if (match := pattern.fullmatch(name))]
        return sorted(numbered)

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
                final = i < len(segments) - 1
                if not final and (tail.pending_bytes or tail.problem):
                    final = superseded or process.is_dead(tail.decoder.header)
                if tail.problem and not final and tail.pending_bytes < _IN_FLIGHT_BYTES:
                    continue  # perhaps a write seen half-way
                rejected = tail.rejected(final=final)
                if rejected is not None:
                    found.append(rejected)
        return found


_IN_FLIGHT_BYTES = 4096
