"""Writes small logs and reads them back."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from runhealth.storage.importers import open_log
from runhealth.storage.records import CheckpointRecord, Record, RunEvent, SourceInfo, StepRecord


@dataclass(frozen=True)
class Reading:
    records: list[Record]
    info: SourceInfo

    @property
    def steps(self) -> list[StepRecord]:
        return [record for record in self.records if isinstance(record, StepRecord)]

    @property
    def events(self) -> list[RunEvent]:
        return [record for record in self.records if isinstance(record, RunEvent)]

    @property
    def checkpoints(self) -> list[CheckpointRecord]:
        return [record for record in self.records if isinstance(record, CheckpointRecord)]

    def keys(self) -> list[tuple[int, int, int]]:
        return [(record.attempt, record.step, record.rank) for record in self.steps]

    def series(self, name: str) -> list[tuple[int, float | int]]:
        return [(record.step, record.values[name]) for record in self.steps if name in record.values]


Read = Callable[..., Reading]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """read(content, name=…, mapping=…): the records and the description of a log with this content."""

    def _read(content: str | bytes, name: str = "log", mapping: Mapping[str, str] | None = None) -> Reading:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        log = open_log(str(path), mapping=mapping)
        records = list(log.records())
        return Reading(records, log.describe())

    return _read
