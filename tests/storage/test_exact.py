"""Numbers that no single type holds exactly keep their value; imports keep all their digits."""

from collections.abc import Callable

import duckdb
import pytest

from runhealth.storage.publish import Publisher
from runhealth.storage.ranklog import RankLog
from runhealth.storage.reader import RunReader
from runhealth.storage.records import LayerSample, StepRecord
from runhealth.storage.store import RunInfo

LogFor = Callable[..., RankLog]
BIG = 2**53 + 1


@pytest.mark.parametrize("seal", [False, True])
@pytest.mark.parametrize(
    "values",
    [
        [BIG, 0.5, 2**63 - 1, 3, float("inf")],  # integers first
        [0.5, BIG, -BIG, 7],  # a float first
        [2**64 - 1, 1.25, -1],
        [1, 0.5, BIG],
    ],
)
def test_large_integers_and_floats_under_one_name(
    log_for: LogFor, run: RunInfo, values: list[float], seal: bool
) -> None:
    publisher, reader = Publisher(run.path), RunReader.open(run.path)
    with log_for() as log:
        for number, value in enumerate(values):
            log.append([StepRecord(attempt=0, step=number, rank=0, values={"mixed": value, "tokens": value})])
            live = [record.values["tokens"] for record in reader.records() if isinstance(record, StepRecord)]
            assert live == values[: number + 1]
            publisher.publish(seal=seal)
    got = [dict(record.values) for record in reader.records() if isinstance(record, StepRecord)]
    assert got == [{"mixed": value, "tokens": value} for value in values]
    columns = reader.sql(
        "SELECT column_name, column_type FROM signals WHERE name = 'mixed' ORDER BY column_name"
    ).rows()
    assert columns[0][0] == "mixed"
    assert len(columns) == 2  # the second holds what the first cannot


def test_small_integers_become_floats_with_the_first_float(log_for: LogFor, run: RunInfo) -> None:
    with log_for() as log:
        for number, value in enumerate([0, 1, 0.5]):
            log.append([StepRecord(attempt=0, step=number, rank=0, values={"accuracy": value})])
            Publisher(run.path).publish(seal=True)
    reader = RunReader.open(run.path)
    assert reader.sql("SELECT accuracy FROM steps ORDER BY step")["accuracy"].to_list() == [0.0, 1.0, 0.5]


def test_doubles_keep_all_digits(log_for: LogFor, run: RunInfo) -> None:
    values = {"loss": 0.12345678901234567, "grad_norm": 1 / 3}
    with log_for(doubles=True) as log:
        log.append([
            StepRecord(attempt=0, step=0, rank=0, values=values),
            LayerSample(attempt=0, step=0, rank=0, layer="a", values={"amax": 0.1}),
        ])  # fmt: skip
    Publisher(run.path).publish(seal=True)
    step, layer = RunReader.open(run.path).records()
    assert isinstance(layer, LayerSample)
    assert isinstance(step, StepRecord)
    assert dict(layer.values) == {"amax": 0.1}
    assert dict(step.values) == values


def test_integers_of_one_part_and_floats_of_another_under_one_name(log_for: LogFor, run: RunInfo) -> None:
    values = [2**24 + 1, 0.5, 2**24 + 3, 2**53, 0.25]  # a float of single precision holds no odd integer beyond 2^24
    with log_for() as log:
        for number, value in enumerate(values):
            log.append([StepRecord(attempt=0, step=number, rank=0, values={"free": value})])
            Publisher(run.path).publish(seal=True)
    reader = RunReader.open(run.path)
    assert reader.sql("SELECT free FROM steps ORDER BY step")["free"].to_list() == [float(value) for value in values]
    with duckdb.connect(f"{run.path}/run.duckdb", read_only=True) as client:
        assert client.execute("SELECT free FROM steps ORDER BY step").fetchall() == [(float(v),) for v in values]
