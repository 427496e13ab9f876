"""Opening a foreign log: which importer, which file, and what to say when there is none."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, cast

from runhealth.storage.errors import NoUsableDataError, UnknownFormatError
from runhealth.storage.importers.assemble import Assembler
from runhealth.storage.importers.base import Importer, ReadContext, Tally
from runhealth.storage.importers.clock import StepClock
from runhealth.storage.importers.lines import looks_binary, without_ansi
from runhealth.storage.importers.registry import importers
from runhealth.storage.records import Record, SourceInfo
from runhealth.storage.signals import STEP_SIGNALS

_HEAD_BYTES = 1 << 20
_MAX_SNIFFED_BYTES = 1 << 28  # source listings and build output may come before the first measurement
_LEAST_SCORE = 0.2
# A detector reads at least one of these; a log without any of them cannot be diagnosed.
_USABLE = frozenset(
    {"loss", "eval_loss", "grad_norm", "grad_norm_rank", "loss_scale", "step_skipped", "t_step_s", "t_forward_s",
     "t_wait_s", "t_data_s", "nonfinite_count", "overflow_count", "update_ratio", "weight_norm", "logit_max"}
)  # fmt: skip
_NAMED_NUMBER = re.compile(r"\b([A-Za-z_][\w/]{0,40})\s*[:=]\s*[-+]?\d")


class ImportedLog:
    """A foreign log as a RecordSource. `records()` reads the file anew each time and holds bounded memory."""

    def __init__(self, path: str, importer: Importer, mapping: Mapping[str, str]) -> None:
        self._path = path
        self._importer = importer
        self._mapping = dict(mapping)
        self._tally = Tally()

    def records(self) -> Iterator[Record]:
        """Yield records ordered by (attempt, step, rank). NoUsableDataError at the end if nothing can be diagnosed."""
        tally = self._tally = Tally()
        assembler, clock = Assembler(tally), StepClock(tally)
        with _open(self._path) as stream:
            items = self._importer.read(stream, ReadContext(tally=tally, mapping=self._mapping))
            yield from assembler.run(clock.run(items))
        if not tally.signals & _USABLE:
            raise NoUsableDataError(self._nothing_usable(tally))

    def describe(self) -> SourceInfo:
        """What was read; complete once `records()` has been exhausted."""
        tally = self._tally
        return SourceInfo(
            name=_basename(self._path),
            source=self._path,
            format=tally.format or self._importer.name,
            signals=tuple(sorted(tally.signals, key=lambda signal: (signal not in STEP_SIGNALS, signal))),
            rows_read=tally.rows_read,
            rows_kept=tally.rows_kept,
            rows_rejected=tally.rows_rejected,
            rejected=tuple(tally.rejected),
            notes=tuple(tally.notes),
        )

    def _nothing_usable(self, tally: Tally) -> str:
        met = ", ".join(sorted(tally.signals)[:20]) or "none"
        text = (
            f"{self._path}: read as {self._importer.name}, {tally.rows_kept} of {tally.rows_read} rows kept, but no "
            f"loss, gradient norm, loss scale or step time among the columns: {met}. If one of them is the loss, "
            f"say so with a mapping, for example loss={next(iter(sorted(tally.signals)), 'NAME')}"
        )
        if tally.rejected:
            text += f"; the first rejected line is {tally.rejected[0].line}: {tally.rejected[0].why}"
        return text


def open_log(path: str, *, mapping: Mapping[str, str] | None = None) -> ImportedLog:
    """Find the importer for a file by its content.

    `mapping` says under which name the file has a signal (or `step`, `rank`, `attempt`, `ts`): {"loss": "train/ce"}.
    UnknownFormatError if no importer recognises the file, NoUsableDataError if there is none or it is empty.
    """
    try:
        if "://" not in path and Path(path).is_dir():
            raise UnknownFormatError(f"{path} is a folder: expected one log file")
        with _open(path) as stream:
            importer = _recognise(path, stream)
    except OSError as error:
        raise NoUsableDataError(f"cannot read {path}: {error.strerror or error}") from error
    return ImportedLog(path, importer, mapping or {})


def _basename(path: str) -> str:
    return path.rstrip("/").rsplit("/", 1)[-1] or path


def _open(path: str) -> BinaryIO:
    if "://" not in path:
        return open(path, "rb")
    import fsspec  # slow to import, and most logs are local

    return cast(BinaryIO, fsspec.open(path, "rb").open())


def _recognise(path: str, stream: BinaryIO) -> Importer:
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
        if read > _MAX_SNIFFED_BYTES or looks_binary(head):
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
        f"formats tried: {formats}"
    )
