"""One signal over a run: what the parts hold is read once, and the answer is that of SQL at any moment."""

import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from runhealth.storage import series
from runhealth.storage.errors import NoUsableDataError
from runhealth.storage.publish import Publisher
from runhealth.storage.ranklog import RankLog
from runhealth.storage.reader import RunReader
from runhealth.storage.records import StepRecord
from runhealth.storage.store import RunInfo

LogFor = Callable[..., RankLog]
ONE = "SELECT attempt, step, CAST(loss AS DOUBLE) AS value FROM steps WHERE rank = ? AND loss IS NOT NULL ORDER BY ALL"
MEAN = "SELECT attempt, step, avg(loss) AS value FROM steps WHERE loss IS NOT NULL GROUP BY ALL ORDER BY ALL"


def same(reader: RunReader, rank: int | None) -> bool:
    got = [(a, s, repr(v)) for a, s, v in reader.series("loss", rank).rows()]
    wanted = reader.sql(MEAN) if rank is None else reader.sql(ONE, [rank])
    return got == [(a, s, repr(v)) for a, s, v in wanted.rows()]


def test_the_answer_is_that_of_sql_while_a_run_grows(log_for: LogFor, run: RunInfo) -> None:
    rng, reader = random.Random(5), RunReader.open(run.path)
    logs = [log_for(rank, segment_bytes=5000) for rank in (0, 1, 2)]
    behind = [0, 0, 0]
    for turn in range(14):
        for rank, log in enumerate(logs):  # ranks are apart, so a step may be in several parts
            for number in range(behind[rank], behind[rank] + rng.randrange(1, 9)):
                loss = math.nan if number == 11 else math.inf if number == 13 else number / 4
                values = {} if number % 5 == 4 else {"loss": loss}
                log.append([StepRecord(attempt=0, step=number, rank=rank, values={**values, "lr": 0.1})])
                behind[rank] = number + 1
        if turn % 3 != 1:
            Publisher(run.path, retention_s=0.0).publish(seal=turn % 3 == 0)
        assert all(same(reader, rank) for rank in (0, 2, None))
    with log_for(1, "second") as log:
        log.append([StepRecord(attempt=1, step=number, rank=1, values={"loss": 2}) for number in range(3, 6)])
        assert all(same(reader, rank) for rank in (0, 1, None))
        for _ in range(9):
            Publisher(run.path, retention_s=0.0).publish(seal=True)
            log.append([StepRecord(attempt=1, step=7, rank=1, values={"loss": 2.5})])
            assert all(same(reader, rank) for rank in (0, None))
    assert [file.name for file in Path(run.path, "parts").glob("*-*-steps.parquet")]  # they were merged meanwhile
    for log in logs:
        log.close()


def test_what_parts_hold_is_read_once_and_bounded(
    log_for: LogFor, run: RunInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    with log_for() as log:
        for number in range(4):
            log.append(
                [StepRecord(attempt=0, step=number, rank=0, values={"loss": 1.0, **({"x": 2**60} if number else {})})]
            )
            Publisher(run.path).publish(seal=True)
    reader = RunReader.open(run.path)
    reads: list[str] = []
    original = series._read
    monkeypatch.setattr(series, "_read", lambda *args: reads.append(args[1]) or original(*args))
    for _ in range(3):
        assert reader.series("loss", 0)["value"].to_list() == [1.0] * 4
    assert len(reads) == 4 + 3
    assert reader.series("x")["value"].to_list() == [2.0**60] * 3
    assert reader.series("loss", 7).is_empty()
    monkeypatch.setattr(series, "_KEPT_BYTES", 0)
    reads.clear()
    assert reader.series("loss", 5).is_empty()
    for _ in range(2):
        assert reader.series("loss")["value"].to_list() == [1.0] * 4
    assert len(reads) == 3 * 5
    with pytest.raises(NoUsableDataError, match="no step of the run has a signal 'none'"):
        reader.series("none")


def test_a_packed_run_has_series_too(tmp_path: Path) -> None:
    with RunReader.open("40k-spike", str(tmp_path)) as reader:
        assert same(reader, 0)
        assert same(reader, None)
