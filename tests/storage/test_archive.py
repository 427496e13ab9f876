"""pack: the same records out of a few small Parquet files."""

import math
from collections.abc import Callable
from pathlib import Path

import fsspec
import pyarrow.parquet as pq
import pytest

from runhealth.storage.archive import pack
from runhealth.storage.errors import RunNotFoundError, StoreError
from runhealth.storage.publish import Publisher
from runhealth.storage.ranklog import RankLog
from runhealth.storage.reader import RunReader
from runhealth.storage.records import Record, StepRecord
from runhealth.storage.store import RunInfo

LogFor = Callable[..., RankLog]


@pytest.fixture
def written(
    log_for: LogFor, one_step: Callable[..., list[Record]], one_step_of: Callable[..., list[Record]]
) -> list[Record]:
    with log_for(0) as zero, log_for(1) as one:
        for number in range(40):
            zero.append(one_step(number, 0))
            one.append(one_step(number, 1))
    with log_for(0, "second") as again:
        again.append(one_step(30, 0, attempt=1))
    first = [record for number in range(40) for record in one_step_of(number, 2)]
    return first + one_step(30, 0, attempt=1)


@pytest.mark.parametrize("publish", [True, False])
def test_packing_keeps_every_record(written: list[Record], run: RunInfo, tmp_path: Path, publish: bool) -> None:
    if publish:
        Publisher(run.path).publish()
    result = pack(run.path, str(tmp_path / "packed"))
    reader = RunReader.open(result.path)
    assert list(reader.records()) == written
    assert result.rows["steps"] == 81
    assert reader.info.config == {"lr": 0.1}
    assert reader.describe().signals == RunReader.open(run.path).describe().signals
    assert reader.sql("SELECT typeof(loss) FROM steps LIMIT 1").item() == "DOUBLE"  # as if published
    assert reader.sql("SELECT count(*) FROM attempts").item() == 2
    assert reader.poll() == written
    assert reader.poll() == []


def test_nan_and_absent_survive_packing(log_for: LogFor, run: RunInfo, tmp_path: Path) -> None:
    values = [{"loss": math.nan, "lr": math.nan}, {}, {"loss": 1.5, "lr": 0.1}, {"loss": math.inf}]
    with log_for() as log:
        for number, one in enumerate(values):
            log.append([StepRecord(attempt=0, step=number, rank=0, values=one)])
    reader = RunReader.open(pack(run.path, str(tmp_path / "packed")).path)
    assert [str(dict(record.values)) for record in reader.records() if isinstance(record, StepRecord)] == [
        str(one) for one in values
    ]
    assert reader.sql("SELECT step FROM steps WHERE isnan(loss)")["step"].to_list() == [0]
    assert reader.sql("SELECT step FROM steps WHERE loss > 1e30 AND isinf(loss)")["step"].to_list() == [3]


@pytest.mark.usefixtures("written")
def test_values_are_stored_as_narrow_as_they_are_and_without_statistics(run: RunInfo, tmp_path: Path) -> None:
    result = pack(run.path, str(tmp_path / "packed"))
    file = pq.ParquetFile(f"{result.path}/parts/steps.parquet")
    types = {field.name: str(field.type) for field in file.schema_arrow}
    assert types["loss"] == "float"
    assert types["lr"] == "double"
    assert types["unsigned"] == "uint64"
    assert types["step"] == "int8"
    group = file.metadata.row_group(0)
    with_statistics = {group.column(i).path_in_schema for i in range(group.num_columns) if group.column(i).is_stats_set}
    assert with_statistics == {"attempt", "step", "rank"}


def test_a_packed_run_reads_from_another_file_system(written: list[Record], run: RunInfo, tmp_path: Path) -> None:
    packed = pack(run.path, str(tmp_path / "packed")).path
    memory = fsspec.filesystem("memory")
    try:
        memory.put(packed, "/bucket/packed", recursive=True)
        assert list(RunReader.open("packed", "memory://bucket").records()) == written
    finally:
        memory.rm("/bucket", recursive=True)


@pytest.mark.usefixtures("written")
def test_mistakes_are_named(run: RunInfo, tmp_path: Path) -> None:
    with pytest.raises(RunNotFoundError, match="no-such"):
        pack(str(tmp_path / "no-such"), str(tmp_path / "packed"))
    pack(run.path, str(tmp_path / "packed"))
    with pytest.raises(StoreError, match="exists already"):
        pack(run.path, str(tmp_path / "packed"))
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot pack"):
        pack(run.path, str(tmp_path / "file"))
    part = tmp_path / "packed" / "parts" / "steps.parquet"
    part.write_bytes(b"")
    with pytest.raises(StoreError, match=r"steps\.parquet"):
        list(RunReader.open(str(tmp_path / "packed")).records())
