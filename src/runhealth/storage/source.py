"""What the diagnosis reads from: a run in the store and an imported log look the same."""

from collections.abc import Iterator
from typing import Protocol

from runhealth.storage.records import Record, SourceInfo


class RecordSource(Protocol):
    """Anything that can be diagnosed."""

    def records(self) -> Iterator[Record]:
        """Yield every record ordered by (attempt, step); the records of one step in any order. Calling it again starts
        over."""
        ...

    def describe(self) -> SourceInfo:
        """Say what was read. Complete only once `records()` has been exhausted."""
        ...
