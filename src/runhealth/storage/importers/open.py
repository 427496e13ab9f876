"""Opening a foreign log: which importer, which file, and what to say when there is none."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from runhealth.storage.blocks import StepBlock
from runhealth.storage.errors import ConfigError, NoUsableDataError, UnknownFormatError
from runhealth.storage.importers import csv_table
from runhealth.storage.importers.base import REJECTED_SHOWN, USABLE, Importer, Tally
from runhealth.storage.importers.lines import looks_binary, without_ansi
from runhealth.storage.importers.names import FIELD_NAMES
from runhealth.storage.importers.packing import packed
from runhealth.storage.importers.registry import importers
from runhealth.storage.importers.streams import open_stream
from runhealth.storage.importers.tracks import FilePart, Source, Track, merged
from runhealth.storage.records import Record, Rejected, SourceInfo
from runhealth.storage.signals import STEP_SIGNALS

if TYPE_CHECKING:
    from runhealth.storage.importers.follow import Follower

_HEAD_BYTES = 1 << 20
_MAX_SNIFFED_BYTES = 1 << 28  # source listings and build output may come before the first measurement
_LEAST_SCORE = 0.2
_LOSS_LIKE = re.compile(r"loss|(?:^|[/_])(?:ce|nll|ppl|perplexity|objective)(?:$|[/_])", re.I)
_NAMED_NUMBER = re.compile(r"\b([A-Za-z_][\w/]{0,40})\s*[:=]\s*[-+]?\d")


class ImportedLog:
    """A foreign log as a RecordSource. `records()` reads the files anew each time and holds bounded memory."""

    def __init__(
        self, path: str, tracks: Sequence[Source], mapping: Mapping[str, str], notes: Sequence[str] = ()
    ) -> None:
        self._path = path
        self._tracks = tuple(tracks)
        self._mapping = dict(mapping)
        self._notes = tuple(notes)
        self._tallies: tuple[Tally, ...] = ()

    @property
    def path(self) -> str:
        """What was opened."""
        return self._path

    @property
    def tracks(self) -> tuple[Source, ...]:
        """The files, as they are read."""
        return self._tracks

    def records(self) -> Iterator[Record]:
        """Yield records ordered by (attempt, step, rank). NoUsableDataError at the end if nothing can be diagnosed."""
        yield from self._merged()
        self._check_usable()

    def blocks(self) -> Iterator[StepBlock | Record]:
        """The same as columns: regular stretches of a log are read many lines at a time."""
        if len(self._tracks) == 1 and isinstance(self._tracks[0], Track):
            self._tallies = (Tally(),)
            yield from packed(self._tracks[0].segments(self._tallies[0], self._mapping))
        else:
            yield from packed(self._merged())
        self._check_usable()

    def _merged(self) -> Iterator[Record]:
        self._tallies = tuple(Tally() for _ in self._tracks)
        return merged(
            [track.records(tally, self._mapping) for track, tally in zip(self._tracks, self._tallies, strict=True)]
        )

    def _check_usable(self) -> None:
        if not any(tally.signals & USABLE for tally in self._tallies):
            raise NoUsableDataError(self._nothing_usable(self._tallies[0]))

    def follow(self) -> "Follower":
        """A follower of this log from its start: `poll()` gives what is there, then what is new."""
        from runhealth.storage.importers.follow import Follower

        return Follower(self._path, self._mapping)

    def describe(self) -> SourceInfo:
        """What was read; complete once `records()` has been exhausted."""
        tallies = self._tallies or (Tally(),)
        signals = {signal for tally in tallies for signal in tally.signals}
        several = len(self._tracks) > 1
        rejected: list[Rejected] = []
        notes: dict[str, None] = dict.fromkeys(self._notes)
        for track, tally in zip(self._tracks, tallies, strict=False):
            prefix = f"{track.name}: " if several else ""
            rejected += [Rejected(line=one.line, why=f"{prefix}{one.why}") for one in tally.rejected]
            notes.update(dict.fromkeys(f"{prefix}{note}" for note in tally.notes))
        return SourceInfo(
            name=_basename(self._path),
            source=self._path,
            format=tallies[0].format or self._tracks[0].format,
            signals=tuple(sorted(signals, key=lambda signal: (signal not in STEP_SIGNALS, signal))),
            rows_read=sum(tally.rows_read for tally in tallies),
            rows_kept=sum(tally.rows_kept for tally in tallies),
            rows_rejected=sum(tally.rows_rejected for tally in tallies),
            rejected=tuple(rejected[:REJECTED_SHOWN]),
            notes=tuple(notes),
        )

    def line_of(self, attempt: int, step: int) -> int | None:
        """The line (in binary files, the byte offset) on which the record of a step begins, once it was read. None if
        it is not known, or the log consists of several files."""
        track = self._tracks[0]
        if len(self._tallies) != 1 or not isinstance(track, Track) or len(track.parts) != 1:
            return None
        return self._tallies[0].lines.find(attempt, step)

    def _nothing_usable(self, tally: Tally) -> str:
        names = list(dict.fromkeys([*sorted(tally.signals), *tally.met]))
        met = ", ".join(names[:20]) or "none"
        guess = next((name for name in names if _LOSS_LIKE.search(name) and name not in STEP_SIGNALS), None)
        no_step = tally.met and not tally.rows_kept
        options = "--map step=NAME --map loss=NAME" if no_step else "--map loss=NAME"
        text = (
            f"{self._path}: read as {self._tracks[0].format}, {tally.rows_kept} of {tally.rows_read} rows kept, but no "
            f"loss, gradient norm, loss scale or step time among the columns: {met}. If one of them is the loss, "
            f"say so: {options}" + (f" (perhaps loss={guess})" if guess else "")
        )
        if tally.rejected:
            text += f"; the first rejected line is {tally.rejected[0].line}: {tally.rejected[0].why}"
        return text


def open_log(path: str, *, mapping: Mapping[str, str] | None = None) -> ImportedLog:
    """Find the importer for a file by its content, or for a folder those of the files of its one run.

    `mapping` says under which name the file has a signal (or `step`, `rank`, `attempt`, `ts`): {"loss": "train/ce"}.
    Of a store with several runs one is chosen as `PATH#RUN`. UnknownFormatError if no importer recognises the file,
    NoUsableDataError if there is none, it is empty, or a folder holds several runs.
    """
    mapping = dict(mapping or {})
    if unknown := [name for name in mapping if name not in STEP_SIGNALS and name not in FIELD_NAMES]:
        raise ConfigError(
            f"--map: expected signals on the left, met {', '.join(unknown)}; signals are {', '.join(STEP_SIGNALS)}, "
            f"fields {', '.join(FIELD_NAMES)}"
        )
    place, run = path, None
    if "#" in path and "://" not in path and not Path(path).exists():
        place, run = path.rsplit("#", 1)
    try:
        if "://" not in place and Path(place).is_dir():
            from runhealth.storage.importers.folder import tracks_of

            tracks, notes = tracks_of(Path(place), mapping)
            return ImportedLog(path, tracks, mapping, notes)
        importer = _importer_for(place, mapping)
    except OSError as error:
        raise NoUsableDataError(f"cannot read {path}: {error.strerror or error}") from error
    return ImportedLog(path, [Track(_basename(place), [FilePart(place, importer, run)])], mapping)


def _importer_for(path: str, mapping: Mapping[str, str]) -> Importer:
    """By the content; a file that no importer knows is a table or text with the names that the mapping chose."""
    try:
        with open_stream(path) as stream:
            return recognise(path, stream)
    except UnknownFormatError:
        with open_stream(path) as stream:
            head = stream.read(_HEAD_BYTES)
        text = without_ansi(head.decode("utf-8", "replace"))
        lines = [line for line in text.removeprefix("\ufeff").split("\n", 200)[:200] if line.strip() and line[0] != "#"]
        if lines and not looks_binary(head):
            if csv_table.is_header(lines[0].rstrip("\r"), mapping.values()):
                return importers()["csv"]
            if any(name in text for name in mapping.values()):
                return importers()["text"]
        raise


def _basename(path: str) -> str:
    return path.rstrip("/").rsplit("/", 1)[-1] or path


def recognise(path: str, stream: BinaryIO, max_bytes: int = _MAX_SNIFFED_BYTES) -> Importer:
    """The importer for the content of a stream. UnknownFormatError says what was met instead."""
    head = stream.read(_HEAD_BYTES)
    if not head.strip():
        raise NoUsableDataError(f"{path} is empty")
    tried: dict[str, float] = {}
    name = _basename(path)
    window, read = head, len(head)
    while window:
        scores = {known: importer.sniff(name, window) for known, importer in importers().items()}
        tried = {known: max(score, tried.get(known, 0.0)) for known, score in scores.items()}
        best = max(scores, key=lambda known: scores[known])
        if scores[best] >= _LEAST_SCORE:
            return importers()[best]
        if read >= max_bytes or looks_binary(head):
            break
        # Continue at a line start: the measurements may come after a long listing.
        rest = stream.readline(_HEAD_BYTES)
        window = stream.read(_HEAD_BYTES)
        read += len(rest) + len(window)
    raise UnknownFormatError(_unknown(path, head, tuple(tried)))


def _unknown(path: str, head: bytes, tried: tuple[str, ...]) -> str:
    formats = ", ".join(tried)
    if looks_binary(head):
        return f"{path} is binary and no TensorBoard event file; formats tried: {formats}"
    text = without_ansi(head.decode("utf-8", "replace"))
    met = list(dict.fromkeys(match[1] for match in _NAMED_NUMBER.finditer(text[:200_000])))[:12]
    found = f"named numbers met: {', '.join(met)}" if met else "no named number was met"
    return (
        f"{path}: no line with a step and a loss was found, so there is nothing to diagnose; {found}; "
        f"formats tried: {formats}. If one of the names is the loss, say so: --map loss=NAME"
    )
