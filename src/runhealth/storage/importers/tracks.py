"""Files that are read one after the other (a track), and tracks that are read beside one another (one run)."""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Protocol

from runhealth.storage.importers import mlflow
from runhealth.storage.importers.assemble import Assembler, Segment
from runhealth.storage.importers.base import Importer, Item, Mark, ReadContext, Rows, Tally
from runhealth.storage.importers.clock import StepClock
from runhealth.storage.importers.lanes import Lanes
from runhealth.storage.importers.streams import open_stream, problem_of
from runhealth.storage.records import EventKind, Record, RunEvent, StepRecord


class Part(Protocol):
    """Something that yields the items of one log."""

    @property
    def path(self) -> str: ...

    @property
    def format(self) -> str: ...

    def items(self, tally: Tally, mapping: Mapping[str, str]) -> Iterator[Item]: ...


class Source(Protocol):
    """One of several logs that are read beside one another."""

    @property
    def name(self) -> str: ...

    @property
    def format(self) -> str: ...

    def records(self, tally: Tally, mapping: Mapping[str, str]) -> Iterator[Record]: ...


@dataclass(frozen=True, slots=True)
class FilePart:
    """One file and its importer; of several runs in it, `run`."""

    path: str
    importer: Importer
    run: str | None = None

    @property
    def format(self) -> str:
        """The importer's name."""
        return self.importer.name

    def items(self, tally: Tally, mapping: Mapping[str, str], *, bulk: bool = False) -> Iterator[Item]:
        """The items of the file."""
        with open_stream(self.path) as stream:
            yield from self.items_of(stream, tally, mapping, bulk=bulk)
            if problem := problem_of(stream):
                tally.note(problem)

    def items_of(
        self, stream: BinaryIO, tally: Tally, mapping: Mapping[str, str], *, bulk: bool = False
    ) -> Iterator[Item]:
        """The items of a stream with the content of the file."""
        return self.importer.read(stream, ReadContext(tally=tally, mapping=mapping, run=self.run, bulk=bulk))


@dataclass(frozen=True, slots=True)
class MlflowPart:
    """The folder of one run in MLflow's file store."""

    path: str
    format: str = "mlflow"

    def items(self, tally: Tally, mapping: Mapping[str, str]) -> Iterator[Item]:
        """The items of the run."""
        yield from mlflow.read_folder(Path(self.path), ReadContext(tally=tally, mapping=mapping))


@dataclass(frozen=True, slots=True)
class Track:
    """Parts of one log in their order. `rank`: the rank that a file without ranks belongs to. `values` false: only
    what the log tells besides numbers is used, because its steps cannot be matched with those of the other tracks."""

    name: str
    parts: Sequence[Part]
    rank: int | None = None
    values: bool = True

    @property
    def format(self) -> str:
        """The format of the first part."""
        return self.parts[0].format

    def records(self, tally: Tally, mapping: Mapping[str, str]) -> Iterator[Record]:
        """The records of all parts, as of one file."""
        for record in self._assembled(tally, mapping, bulk=False):
            if not isinstance(record, Segment) and (self.values or not isinstance(record, StepRecord)):
                yield record

    def segments(self, tally: Tally, mapping: Mapping[str, str]) -> Iterator[Record | Segment]:
        """The same, regular stretches as segments."""
        if self.values and self.rank is None:
            return self._assembled(tally, mapping, bulk=True)
        return self.records(tally, mapping)

    def _assembled(self, tally: Tally, mapping: Mapping[str, str], *, bulk: bool) -> Iterator[Record | Segment]:
        return Assembler(tally).run(StepClock(tally).run(Lanes(tally).run(self._items(tally, mapping, bulk))))

    def _items(self, tally: Tally, mapping: Mapping[str, str], bulk: bool) -> Iterator[Item]:
        for at, part in enumerate(self.parts):
            if at:
                name = part.path.replace("\\", "/").rsplit("/", 1)[-1]
                yield Mark(line=1, kind=EventKind.RESUME, message=f"the log goes on in {name}", step=None)
            items = part.items(tally, mapping, bulk=bulk) if isinstance(part, FilePart) else part.items(tally, mapping)
            if self.rank is None:
                yield from items
                continue
            for item in items:
                if not isinstance(item, Rows) and item.rank == 0:
                    item.rank = self.rank
                yield item


def merged(tracks: Sequence[Iterator[Record]]) -> Iterator[Record]:
    """The records of all tracks in order; of two records of one step and rank, the values of the earlier track win."""
    if len(tracks) == 1:
        yield from tracks[0]
        return
    held: StepRecord | None = None
    begun: set[int] = set()
    for record in heapq.merge(*tracks, key=lambda one: (one.attempt, one.step, one.rank)):
        if isinstance(record, StepRecord):
            if held is not None and (held.attempt, held.step, held.rank) == (record.attempt, record.step, record.rank):
                held = replace(held, values={**record.values, **held.values}, ts_ns=held.ts_ns or record.ts_ns)
                continue
            if held is not None:
                yield held
            held = record
            continue
        if isinstance(record, RunEvent) and record.kind == EventKind.ATTEMPT_START:
            if record.attempt in begun:
                continue
            begun.add(record.attempt)
        if held is not None:
            yield held
            held = None
        yield record
    if held is not None:
        yield held
