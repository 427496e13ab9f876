"""RunTail: following files in pieces of any size, and what counts as damage."""

from collections.abc import Callable
from pathlib import Path

import pytest

from runhealth.storage.publish import Publisher
from runhealth.storage.ranklog import RankLog
from runhealth.storage.reader import RunReader
from runhealth.storage.records import StepRecord
from runhealth.storage.store import RunInfo
from runhealth.storage.tail import RunTail

LogFor = Callable[..., RankLog]


@pytest.fixture
def two_ranks(log_for: LogFor) -> list[tuple[int, int]]:
    """Rank 0 in many small segments, rank 1 in one; the last ones stay open. Returns (rank, step) of all records."""
    for rank, segment_bytes in ((0, 700), (1, 10**6)):
        log = log_for(rank, segment_bytes=segment_bytes)
        for number in range(60):
            values = {f"m{i}": 1.0 for i in range(number % 5)}
            log.append([StepRecord(attempt=0, step=number, rank=rank, values=values)])
    return [(rank, number) for rank in (0, 1) for number in range(60)]


@pytest.mark.parametrize("limit", [1, 50, 333, 701, 5000, 10**9])
def test_pieces_of_any_size_add_up(two_ranks: list[tuple[int, int]], run: RunInfo, limit: int) -> None:
    tail, got = RunTail(run.path), []
    more = True
    while more:
        got += [(record.rank, record.step) for record in tail.read(limit)]
        more = tail.more
    assert sorted(got) == two_ranks
    assert len(tail.read(limit)) == 0


def test_going_on_from_any_offset(two_ranks: list[tuple[int, int]], run: RunInfo) -> None:
    first, seen = RunTail(run.path), []
    more = True
    while more:
        seen += [(record.rank, record.step) for record in first.read(400)]
        more = first.more
        rest = RunTail(run.path, first.offsets()).read()
        assert sorted(seen + [(record.rank, record.step) for record in rest]) == two_ranks


@pytest.mark.parametrize("limit", [500, 1300])
def test_nothing_is_left_for_later_by_publisher_and_reader(
    two_ranks: list[tuple[int, int]], run: RunInfo, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runhealth.storage.publish._CHUNK_BYTES", limit)
    monkeypatch.setattr("runhealth.storage.view._TAIL_CHUNK_BYTES", limit)
    reader = RunReader.open(run.path)
    assert sorted((record.rank, record.step) for record in reader.records()) == two_ranks
    assert Publisher(run.path).publish().records == len(two_ranks)
    assert sorted((record.rank, record.step) for record in reader.records()) == two_ranks


def test_a_segment_that_is_there_but_empty_is_no_damage(log_for: LogFor, run: RunInfo) -> None:
    log = log_for()
    (Path(log.path) / "000000.rlog").write_bytes(b"")
    tail = RunTail(run.path)
    assert tail.read() == []
    assert tail.rejected() == []
    log.close()


def test_a_folder_that_is_no_log_is_ignored(log_for: LogFor, run: RunInfo) -> None:
    with log_for() as log:
        log.append([StepRecord(attempt=0, step=0, rank=0)])
    for name in ("log/notes", "log/a000/x", "log/a000/r00000/other.txt"):
        Path(run.path, name).mkdir()
    assert len(RunTail(run.path).read()) == 1
