"""From what the user typed to something that can be diagnosed; what was read so far, for a terminal."""

import difflib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TextIO, TypeVar, cast

from runhealth.storage.blocks import BlockSource, StepBlock
from runhealth.storage.errors import ConfigError, NoUsableDataError
from runhealth.storage.records import Record, SourceInfo
from runhealth.storage.signals import STEP_SIGNALS
from runhealth.storage.source import RecordSource

Item = TypeVar("Item")
POSITIONS = ("step", "rank", "attempt", "ts")  # what a line says besides signals
LOOK_EVERY = 2048  # records between two looks at the clock
SILENT_S, REDRAW_S = 1.0, 0.2


class Pollable(Protocol):
    """A run or log that may grow. `poll` returns what is new since the last call, at first everything."""

    def poll(self) -> Sequence[Record]: ...


def parse_mapping(pairs: Sequence[str]) -> dict[str, str]:
    """`["loss=train/ce"]` as {"loss": "train/ce"}: signal of the catalogue to the file's own name.

    Raises:
        ConfigError: no pair, an unknown signal (with the nearest ones), or one that is given twice.
    """
    mapping: dict[str, str] = {}
    for pair in pairs:
        signal, equals, name = pair.partition("=")
        signal, name = signal.strip(), name.strip()
        if not (equals and signal and name):
            raise ConfigError(f"--map: expected SIGNAL=NAME, for example loss=train/ce, met {pair!r}")
        if signal not in STEP_SIGNALS and signal not in POSITIONS:
            near = difflib.get_close_matches(signal, [*STEP_SIGNALS, *POSITIONS], n=3, cutoff=0.5)
            swapped = name in STEP_SIGNALS or name in POSITIONS
            hint = f"did you mean {name}={signal}?" if swapped else f"did you mean {', '.join(near)}?" if near else ""
            raise ConfigError(
                f"--map: no signal {signal!r}" + (f"; {hint}" if hint else "; `diagnose doctor PATH` lists the signals")
            )
        if signal in mapping:
            raise ConfigError(f"--map: {signal} is given twice, as {mapping[signal]!r} and {name!r}")
        mapping[signal] = name
    return mapping


def open_run(run: str, store: str | None) -> RecordSource:
    """A run of the store. Raises RunNotFoundError, AmbiguousRunError, StoreError."""
    from runhealth.storage.reader import RunReader

    return RunReader.open(run, store)


def open_path(path: str, mapping: Mapping[str, str]) -> RecordSource:
    """A foreign log, a folder of them, the folder of a run, or a pipe (`-`: stdin), which is read to its end.

    Raises NoUsableDataError and what `open_run` raises.
    """
    if (Path(path) / "run.json").is_file():
        return open_run(str(Path(path).absolute()), None)
    from runhealth.diagnose.spool import SpooledLog, needs_spool
    from runhealth.storage.importers import open_log

    if needs_spool(path):
        return SpooledLog(path, mapping)
    try:
        return open_log(path, mapping=mapping)
    except NoUsableDataError as error:
        if names := _runs_in(Path(path)):
            shown = ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
            raise NoUsableDataError(
                f"{path} is a store of {len(names)} run{'s' if len(names) > 1 else ''}: {shown}; expected one: "
                f"--run {names[0]} --store {path}"
            ) from error
        raise


def _runs_in(folder: Path) -> list[str]:
    """Names of the runs if the folder is a store."""
    try:
        return sorted(place.parent.name for place in folder.glob("*/run.json")) if folder.is_dir() else []
    except OSError:
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """Something that may grow. `folder`: the run's own, where a watch may keep what it needs; None if there is none."""

    source: Pollable
    info: SourceInfo
    folder: str | None


def follow_run(run: str, store: str | None) -> Followed:
    """A run of the store. Raises what `open_run` raises."""
    from runhealth.storage.reader import RunReader

    reader = RunReader.open(run, store)
    found = reader.info
    own = not found.bundled and "://" not in found.path
    info = SourceInfo(name=found.name, source=found.path, format="runhealth")
    return Followed(source=reader, info=info, folder=found.path if own else None)


def follow_path(path: str, mapping: Mapping[str, str], *, once: bool) -> Followed:
    """A log that grows, or the folder of a run. Raises NoUsableDataError and what `open_run` raises.

    With `once` the log must be there; otherwise it may come later.
    """
    if (Path(path) / "run.json").is_file():
        return follow_run(str(Path(path).absolute()), None)
    from runhealth.storage.importers.follow import Follower

    info = SourceInfo(name=Path(path).name, source=path, format="log")
    if once:
        return Followed(source=_Whole(open_path(path, mapping)), info=info, folder=None)
    from runhealth.diagnose.spool import needs_spool

    if needs_spool(path):
        raise NoUsableDataError(f"{path} is a pipe and cannot be followed: expected a file; --once reads it to its end")
    return Followed(source=Follower(path, mapping), info=info, folder=None)


class _Whole:
    """A log as it is now, its last line included."""

    def __init__(self, source: RecordSource) -> None:
        self._source: RecordSource | None = source

    def poll(self) -> Sequence[Record]:
        source, self._source = self._source, None
        if source is None:
            return []
        try:
            return list(source.records())
        finally:
            close(source)


def close(source: object) -> None:
    closing = getattr(source, "close", None)
    if callable(closing):
        closing()


class Progress:
    """A source that shows on a terminal how much of it was read, once that takes longer than a second."""

    def __init__(
        self, source: RecordSource, stream: TextIO, clock: Callable[[], float] = time.monotonic, width: int = 79
    ) -> None:
        self._source, self._stream, self._clock, self._width = source, stream, clock, width

    def records(self) -> Iterator[Record]:
        return self._counted(self._source.records(), lambda _: 1, lambda record: record.step)

    def _counted(
        self, items: Iterable[Item], size: Callable[[Item], int], last_step: Callable[[Item], int]
    ) -> Iterator[Item]:
        started = drawn = self._clock()
        shown = False
        count = look_at = 0
        try:
            for item in items:
                count += size(item)
                if count >= look_at:
                    look_at = count + LOOK_EVERY
                    now = self._clock()
                    if now - started > SILENT_S and now - drawn > REDRAW_S:
                        line = f"reading: {count:,} records, step {last_step(item):,}, {now - started:.0f} s"
                        self._stream.write(f"\r{line[: self._width]:{self._width}}")
                        self._stream.flush()
                        shown, drawn = True, now
                yield item
        finally:
            if shown:
                self._stream.write(f"\r{'':{self._width}}\r")
                self._stream.flush()

    def describe(self) -> SourceInfo:
        return self._source.describe()

    def line_of(self, attempt: int, step: int) -> int | None:
        """The line of the log on which a step begins, where the source knows it."""
        found = getattr(self._source, "line_of", None)
        return cast("int | None", found(attempt, step)) if callable(found) else None

    def close(self) -> None:
        close(self._source)


class BlockProgress(Progress):
    """The same for a source that hands over columns."""

    def blocks(self) -> Iterator[StepBlock | Record]:
        source = cast(BlockSource, self._source)
        return self._counted(source.blocks(), _records_in, _last_step)


def _records_in(item: StepBlock | Record) -> int:
    return len(item) * len(item.ranks) if isinstance(item, StepBlock) else 1


def _last_step(item: StepBlock | Record) -> int:
    return int(item.steps[-1]) if isinstance(item, StepBlock) else item.step


def with_progress(source: RecordSource) -> RecordSource:
    """The source itself where nobody would see a progress line."""
    stream = cast("TextIO | None", sys.stderr)
    if stream is None or not stream.isatty() or os.environ.get("TERM") == "dumb":
        return source
    import shutil

    shown = BlockProgress if isinstance(source, BlockSource) else Progress
    return shown(source, stream, width=max(20, shutil.get_terminal_size().columns - 1))
