"""Merging parts: as few as they should be, and whoever reads or dies meanwhile never notices."""

import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import duckdb
import fsspec
import pytest

from runhealth.storage.blocks import StepBlock
from runhealth.storage.errors import StoreError
from runhealth.storage.merge import AT_ONCE, MERGED_BYTES, to_merge
from runhealth.storage.parts import Manifest, PartFile, read_manifests
from runhealth.storage.publish import Publisher
from runhealth.storage.push import push
from runhealth.storage.ranklog import RankLog
from runhealth.storage.reader import RunReader
from runhealth.storage.records import Record, StepRecord
from runhealth.storage.store import RunInfo

LogFor = Callable[..., RankLog]
OneStep = Callable[..., list[Record]]


def step(number: int, **values: float) -> StepRecord:
    return StepRecord(attempt=0, step=number, rank=0, values=values or {"loss": float(number)})


def part(number: int, size_bytes: int, last: int | None = None) -> Manifest:
    file = PartFile(
        number=number, table_name="steps", file=f"parts/{number}", rows=1, first_row=number, size_bytes=size_bytes,
        xxh3_64=0, first_step=0, last_step=0,
    )  # fmt: skip
    return Manifest(number=number, last=number if last is None else last, files=(file,), signals=(), progress=())


def compact(run: RunInfo, *, retention_s: float = 0.0) -> None:
    Publisher(run.path, retention_s=retention_s).publish(seal=True)


@pytest.mark.parametrize("pattern", ["equal", "random", "now and then a large one"])
def test_the_number_of_parts_grows_slowly_and_so_does_the_work(pattern: str) -> None:
    rng = random.Random(3)
    parts: list[Manifest] = []
    written = total = 0
    most = 0
    for number in range(3000):
        size = {"equal": 5000, "random": rng.randrange(1000, 50_000)}.get(
            pattern, 3_000_000 if number % 97 == 0 else 4000
        )
        parts.append(part(number, size))
        total += size
        while pieces := to_merge(parts):
            assert len(pieces) >= AT_ONCE
            size = sum(one.files[0].size_bytes for one in pieces)
            assert size <= MERGED_BYTES
            written += size
            at = parts.index(pieces[0])
            parts[at : at + len(pieces)] = [part(pieces[0].number, size, pieces[-1].last)]
        most = max(most, len(parts))
        assert all(one.last + 1 == other.number for one, other in pairwise(parts))
    assert most < 60
    assert written < 8 * total


def test_a_run_that_is_compacted_often_has_few_parts(log_for: LogFor, run: RunInfo, one_step: OneStep) -> None:
    log, wanted = log_for(segment_bytes=3000), []
    for number in range(18):
        log.append(one_step(number))
        wanted += one_step(number)
        compact(run)
        assert len(read_manifests(Path(run.path))) <= AT_ONCE
    assert len(read_manifests(Path(run.path))) < 12
    assert len(list(Path(run.path, "parts").glob("*.json"))) < 12  # the pieces are gone
    reader = RunReader.open(run.path)
    assert list(reader.records()) == wanted
    assert reader.describe().notes == ()
    with duckdb.connect(f"{run.path}/run.duckdb", read_only=True) as client:
        assert client.execute("SELECT step FROM steps").fetchall() == [(number,) for number in range(18)]
        rows = client.execute("SELECT table_name, first_row, rows FROM parts ORDER BY table_name, number").fetchall()
    for (table, first, count), (next_table, next_first, _) in pairwise(rows):
        assert table != next_table or first + count == next_first
    shutil.rmtree(f"{run.path}/.publish")
    Path(run.path, "run.duckdb").unlink()
    compact(run)  # from the merged parts and what is left of the logs
    assert list(RunReader.open(run.path).records()) == wanted
    log.close()


def test_pieces_stay_for_readers_of_the_run_as_it_was(log_for: LogFor, run: RunInfo) -> None:
    with log_for() as log:
        for number in range(AT_ONCE):
            log.append([step(number)])
            compact(run, retention_s=900.0)
    manifests = read_manifests(Path(run.path))
    assert [(one.number, one.last) for one in manifests] == [(0, AT_ONCE - 1)]
    assert len(list(Path(run.path, "parts").glob("*.parquet"))) == AT_ONCE + 1
    compact(run)
    assert {file.name for file in Path(run.path, "parts").iterdir()} == {"000000.json", "000000-000007-steps.parquet"}


@pytest.mark.parametrize("how", ["sql", "records", "blocks", "poll"])
def test_a_reader_whose_parts_were_merged_away_goes_on(
    log_for: LogFor, run: RunInfo, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr("runhealth.storage.view._ROWS_A_CHUNK", 2)
    monkeypatch.setattr("runhealth.storage.blockwise._CELLS_A_CHUNK", 10)
    log = log_for()
    for number in range(AT_ONCE - 1):
        log.append([step(number)])
        compact(run)
    log.append([step(AT_ONCE - 1)])
    reader = RunReader.open(run.path)
    numbers = list(range(AT_ONCE))
    if how == "sql":
        query = "SELECT step FROM steps ORDER BY step"
        assert reader.sql(query)["step"].to_list() == numbers
        compact(run)
        assert reader.sql(query)["step"].to_list() == numbers
    elif how == "poll":
        assert [record.step for record in reader.poll()] == numbers
        compact(run)
        assert reader.poll() == []
        log.append([step(AT_ONCE)])
        assert reader.poll() == [step(AT_ONCE)]
    else:
        records: Iterator[Record] = reader.records() if how == "records" else (
            record
            for one in reader.blocks()
            for record in (one.records() if isinstance(one, StepBlock) else (one,))
        )  # fmt: skip
        seen = [next(records).step, next(records).step]
        compact(run)
        assert len(read_manifests(Path(run.path))) == 1
        assert [*seen, *(record.step for record in records)] == numbers
    log.close()


@pytest.mark.parametrize("then", ["goes on", "without .publish", "without .publish and run.duckdb"])
@pytest.mark.parametrize("died_in", ["write_manifest", "_list_parts", "_replace"])
def test_a_publisher_that_died_while_merging(
    log_for: LogFor, run: RunInfo, monkeypatch: pytest.MonkeyPatch, died_in: str, then: str
) -> None:
    log = log_for(segment_bytes=300)
    for number in range(AT_ONCE - 1):
        log.append([step(number)])
        compact(run)
    log.append([step(AT_ONCE - 1)])
    with monkeypatch.context() as patch:
        where = "merge.write_manifest" if died_in == "write_manifest" else f"publish.Publisher.{died_in}"
        patch.setattr(f"runhealth.storage.{where}", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            compact(run)
    numbers = list(range(AT_ONCE))
    assert [record.step for record in RunReader.open(run.path).records()] == numbers
    if "publish" in then:
        shutil.rmtree(f"{run.path}/.publish")
    if "run.duckdb" in then:
        Path(run.path, "run.duckdb").unlink()
    log.append([step(AT_ONCE)])
    compact(run)
    log.append([step(AT_ONCE + 1)])
    log.close()
    compact(run)
    assert [record.step for record in RunReader.open(run.path).records()] == [*numbers, AT_ONCE, AT_ONCE + 1]
    assert len(read_manifests(Path(run.path))) <= 3


def test_a_damaged_part_is_not_merged(log_for: LogFor, run: RunInfo) -> None:
    with log_for() as log:
        for number in range(AT_ONCE - 1):
            log.append([step(number)])
            compact(run)
        victim = Path(run.path, "parts", "000003-steps.parquet")
        whole = victim.read_bytes()
        victim.write_bytes(whole[:-1])
        for number in range(AT_ONCE - 1, 2 * AT_ONCE):
            log.append([step(number)])
            compact(run)
    assert [one.number for one in read_manifests(Path(run.path))][:5] == [0, 1, 2, 3, 4]
    assert RunReader.open(run.path).sql("SELECT count(*) FROM steps").item() == 2 * AT_ONCE - 1
    victim.write_bytes(whole)
    compact(run)
    assert len(read_manifests(Path(run.path))) < AT_ONCE
    assert [record.step for record in RunReader.open(run.path).records()] == list(range(2 * AT_ONCE))


def test_a_run_pushed_between_merges_is_followed_once(
    log_for: LogFor, run: RunInfo, request: pytest.FixtureRequest
) -> None:
    memory = fsspec.filesystem("memory")
    request.addfinalizer(lambda: memory.rm("/merged", recursive=True))
    url = "memory://merged/runs"
    got: list[int] = []
    with log_for() as zero, log_for(1) as one:
        for number in range(30):
            zero.append([step(number)])
            one.append([StepRecord(attempt=0, step=number, rank=1)])
            Publisher(run.path, retention_s=0.0).publish(seal=number % 3 != 1)
            if number == 0:
                push(run.path, url)
                reader = RunReader.open("run-one", url)
            if number % 4 == 0:
                push(run.path, url)
                got += [record.step for record in reader.poll()]
        push(run.path, url)
        got += [record.step for record in reader.poll()]
    assert got == [number for number in range(30) for _ in (0, 1)]
    here = {file.name for file in Path(run.path, "parts").glob("*.parquet")}
    assert {path.rpartition("/")[2] for path in memory.ls("/merged/runs/run-one/parts", detail=False)} == here


COMPACTOR = """
import sys
from runhealth.storage.publish import Publisher
while True:
    Publisher(sys.argv[1], retention_s=0.0).publish(seal=True, wait_s=10.0)
    print("compacted", flush=True)
"""


def test_a_compactor_killed_anywhere_loses_and_repeats_nothing(log_for: LogFor, run: RunInfo) -> None:
    log, number, rng = log_for(segment_bytes=2000), 0, random.Random(11)
    for _ in range(5):
        with subprocess.Popen(
            [sys.executable, "-c", COMPACTOR, run.path], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as compactor:
            assert compactor.stdout is not None
            for _ in range(rng.randrange(1, 6)):
                log.append([step(number)])
                number += 1
                compactor.stdout.readline()
            end = time.monotonic() + rng.random() * 0.3
            while time.monotonic() < end:
                log.append([step(number)])
                number += 1
                time.sleep(0.003)
            compactor.kill()
        reader = RunReader.open(run.path)
        assert [record.step for record in reader.records()] == list(range(number))
        assert reader.describe().notes == ()
        reader.close()
    log.close()
    compact(run)
    assert [record.step for record in RunReader.open(run.path).records()] == list(range(number))
    assert len(read_manifests(Path(run.path))) < 3 * AT_ONCE


def test_a_newer_manifest_is_refused(log_for: LogFor, run: RunInfo) -> None:
    with log_for() as log:
        log.append([step(0)])
    compact(run)
    manifest = Path(run.path, "parts", "000000.json")
    manifest.write_text(manifest.read_text().replace('"format_version": 2', '"format_version": 3'))
    with pytest.raises(StoreError, match="has format 3; this release reads up to 2"):
        compact(run)
