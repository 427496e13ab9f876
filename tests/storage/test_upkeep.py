"""size, export, prune, compact, the commands, and stores of an older format."""

import argparse
import json
import math
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import duckdb
import polars as pl
import pytest

from runhealth.storage.commands import add_compact_arguments, add_store_arguments, run_compact, run_store
from runhealth.storage.errors import ConfigError, StoreError
from runhealth.storage.export import export
from runhealth.storage.migrations import migrate
from runhealth.storage.prune import parse_span, prune
from runhealth.storage.publish import Publisher
from runhealth.storage.ranklog import RankLog
from runhealth.storage.reader import RunReader
from runhealth.storage.records import CheckpointRecord, CheckpointStatus, LayerSample, Record, RunEvent, StepRecord
from runhealth.storage.schema import ALL_TABLES, MIGRATIONS, PARTS
from runhealth.storage.store import RunInfo, Store, read_run
from runhealth.storage.usage import usage

LogFor = Callable[..., RankLog]


def cli(*words: str) -> int:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command")
    add_store_arguments(commands.add_parser("store"))
    add_compact_arguments(commands.add_parser("compact"))
    args = parser.parse_args(words)
    return run_store(args) if args.command == "store" else run_compact(args)


@pytest.fixture
def long_run(log_for: LogFor, run: RunInfo) -> RunInfo:
    """2,000 steps of two ranks; a NaN at step 777, an event at 1,500, a checkpoint at 300, a spike at 1,234."""
    for rank in (0, 1):
        with log_for(rank, segment_bytes=20_000) as log:
            for number in range(2000):
                at = {"attempt": 0, "step": number, "rank": rank}
                loss = math.nan if number == 777 else 1e6 if number == 1234 else 2.0 + (number % 10) / 8
                records: list[Record] = [StepRecord(**at, values={"loss": loss, "tokens": 4096 + number % 3})]
                if number % 10 == 0:
                    records += [LayerSample(**at, layer=f"b{i}", values={"amax": float(number)}) for i in range(3)]
                if number == 1500 and rank == 0:
                    records.append(RunEvent(**at, kind="exception", message="x"))
                if number == 300 and rank == 0:
                    records.append(CheckpointRecord(**at, path="c", status=CheckpointStatus.SAVED))
                log.append(records)
    return run


@pytest.mark.parametrize("sealed", [False, True])
def test_pruning_keeps_what_happened_and_the_extremes(long_run: RunInfo, sealed: bool) -> None:
    if sealed:
        Publisher(long_run.path).publish(seal=True)
    before = RunReader.open(long_run.path).sql("SELECT * FROM steps ORDER BY step, rank")
    result = prune(long_run, every=100, around=50, keep=[(1900, 1910)])
    reader = RunReader.open(long_run.path)
    after = reader.sql("SELECT * FROM steps ORDER BY step, rank")
    assert result.rows_after < result.rows_before / 4
    assert len(after) + reader.sql("SELECT count(*) FROM layers").item() == result.rows_after
    for first, last in ((250, 350), (1450, 1550), (1900, 1910), (777, 777)):  # raw
        inside = pl.col("step").is_between(first, last)
        assert after.filter(inside).equals(before.filter(inside), null_equal=True)
    assert after["loss"].fill_nan(None).max() == 1e6
    assert after["tokens"].min() == 4096
    stretch = after.filter(pl.col("step").is_between(1000, 1099), rank=0)
    raw = before.filter(pl.col("step").is_between(1000, 1099), rank=0)
    assert stretch["step"].to_list() == [1000, 1050, 1099]
    assert stretch["loss"].to_list() == [raw["loss"].min(), pytest.approx(raw["loss"].mean()), raw["loss"].max()]
    events = {record.kind: record for record in reader.records() if isinstance(record, RunEvent)}
    assert set(events) == {"exception", "pruned"}
    assert events["pruned"].data["rows_before"] == result.rows_before
    assert not list(Path(long_run.path).glob("log/a*/r*/*.rlog"))
    assert not list(Path(long_run.path).glob("parts/*"))
    assert prune(long_run, every=100, around=50).rows_after <= result.rows_after
    Path(long_run.path, ".publish", "private.duckdb").write_bytes(b"no database" * 999)
    Publisher(long_run.path).publish()
    assert len(RunReader.open(long_run.path).sql("SELECT * FROM steps")) > 0


PRUNE = """
import sys
from runhealth.storage.prune import prune
from runhealth.storage.store import read_run
from runhealth.storage import publish  # imported before the clock starts
run = read_run(sys.argv[1])
print("begin", flush=True)
prune(run)
"""


@pytest.mark.parametrize("sealed", [False, True])
def test_a_prune_killed_anywhere_leaves_the_whole_run_or_the_thinned_one(
    long_run: RunInfo, tmp_path: Path, sealed: bool
) -> None:
    Publisher(long_run.path).publish(seal=sealed)
    query = "SELECT * FROM steps ORDER BY attempt, step, rank"
    whole = RunReader.open(long_run.path).sql(query)

    def start(name: str) -> tuple[Path, subprocess.Popen[str]]:
        copy = tmp_path / name
        shutil.copytree(long_run.path, copy)
        process = subprocess.Popen([sys.executable, "-c", PRUNE, str(copy)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "begin\n"
        return copy, process

    copy, process = start("reference")
    started = time.monotonic()
    process.communicate(timeout=120)
    seconds = time.monotonic() - started
    thinned = RunReader.open(str(copy)).sql(query)
    assert len(thinned) < len(whole)
    rng, kills = random.Random(7), 0
    for number in range(3):
        copy, process = start(f"copy-{number}")
        time.sleep(seconds * rng.uniform(0.1, 0.9))
        kills += process.poll() is None
        process.kill()
        process.communicate()
        left = RunReader.open(str(copy)).sql(query)
        assert left.equals(whole, null_equal=True) or left.equals(thinned, null_equal=True), number
        run = read_run(str(copy))
        assert run is not None
        prune(run)
        again = RunReader.open(str(copy))
        assert again.sql(query).equals(thinned, null_equal=True)
        assert not list(copy.glob("parts/*")) + list(copy.glob("log/a*/r*/*.rlog"))
        assert again.describe().notes == ()
    assert kills >= 2


def test_a_run_that_is_written_to_is_not_pruned(log_for: LogFor, run: RunInfo) -> None:
    with log_for() as log:
        log.append([StepRecord(attempt=0, step=0, rank=0, values={"loss": 1.0})])
        with pytest.raises(StoreError, match=r"log/a000/r00000 is still written to"):
            prune(run)
    prune(run)
    assert RunReader.open(run.path).sql("SELECT loss FROM steps").item() == 1.0


@pytest.mark.parametrize("text", ["5", "x:y", "7:3", ""])
def test_spans_that_are_none_are_named(text: str, run: RunInfo) -> None:
    with pytest.raises(ConfigError, match="FIRST:LAST"):
        parse_span(text)
    with pytest.raises(ConfigError, match="--every"):
        prune(run, every=1)
    assert parse_span("3:7") == (3, 7)


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_export(long_run: RunInfo, tmp_path: Path, kind: str) -> None:
    Publisher(long_run.path).publish(seal=True)
    target = str(tmp_path / "it's")
    files = {Path(one.file).name: one.rows for one in export(long_run, target, kind)}  # type: ignore[arg-type]
    assert files[f"steps.{kind}"] == 4000
    assert files[f"layers.{kind}"] == 1200
    read = pl.read_parquet if kind == "parquet" else pl.read_csv
    frame = read(f"{target}/steps.{kind}")  # type: ignore[operator]
    assert frame["step"].to_list() == [number for number in range(2000) for _ in (0, 1)]
    assert frame["loss"].is_nan().sum() == 2
    with pytest.raises(StoreError, match="exists already"):
        export(long_run, target, kind)  # type: ignore[arg-type]


@pytest.mark.usefixtures("long_run")
def test_the_commands(store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    at = ("--store", store.root)
    assert cli("store", "list", *at) == 0
    assert cli("store", "size", *at) == 0
    assert cli("store", "size", "run-one", *at) == 0
    assert cli("compact", "run-one", *at) == 0
    assert cli("store", "export", "run-one", str(tmp_path / "out"), "--format", "csv", *at) == 0
    assert cli("store", "push", "run-one", "memory://commands", *at) == 0
    assert cli("store", "prune", "run-one", "--every", "50", "--keep", "10:20", *at) == 0
    out = capsys.readouterr().out
    for text in ("run-one ", "1 parts", "steps.csv: 4000 rows", "memory://commands/run-one", "rows before"):
        assert text in out
    assert RunReader.open("run-one", "memory://commands").sql("SELECT count(*) FROM steps").item() == 4000
    with pytest.raises(ConfigError):
        cli("store", "prune", "run-one", "--keep", "x", *at)


def test_size(long_run: RunInfo) -> None:
    Publisher(long_run.path).publish(seal=True)
    used = usage(long_run)
    files = [file for file in Path(long_run.path).rglob("*") if file.is_file()]
    assert used.total_bytes == sum(file.stat().st_size for file in files)
    assert used.log_bytes > 0
    assert used.parts_bytes == sum(file.stat().st_size for file in files if file.parent.name == "parts")


def as_format_1(run: RunInfo) -> None:
    """Turn the published and the private database into what the first format was."""
    for name in ("run.duckdb", ".publish/private.duckdb"):
        with duckdb.connect(f"{run.path}/{name}") as connection:
            connection.execute(f"DROP TABLE {PARTS.name}")
            connection.execute(f"DROP TABLE {MIGRATIONS.name}")
            connection.execute("UPDATE meta SET value = '1' WHERE key = 'format_version'")


def test_a_store_of_format_1_keeps_opening(
    log_for: LogFor, run: RunInfo, one_step: Callable[..., list[Record]]
) -> None:
    log = log_for()
    log.append(one_step(0))
    Publisher(run.path).publish()
    as_format_1(run)
    assert list(RunReader.open(run.path).records()) == one_step(0)
    log.append(one_step(1))
    wanted = one_step(0) + one_step(1)
    assert list(RunReader.open(run.path).records()) == wanted
    Publisher(run.path).publish(seal=True)
    with duckdb.connect(f"{run.path}/run.duckdb", read_only=True) as client:
        assert client.execute("SELECT number, applied_ns > 0 FROM migrations").fetchall() == [(2, True)]
        assert client.execute("SELECT value FROM meta WHERE key = 'format_version'").fetchall() == [("2",)]
    assert list(RunReader.open(run.path).records()) == wanted
    log.close()


def test_a_store_of_a_newer_format_is_refused_by_name(log_for: LogFor, run: RunInfo) -> None:
    with log_for() as log:
        log.append([StepRecord(attempt=0, step=0, rank=0)])
    Publisher(run.path).publish()
    for name in ("run.duckdb", ".publish/private.duckdb"):
        with duckdb.connect(f"{run.path}/{name}") as connection:
            connection.execute("UPDATE meta SET value = '99' WHERE key = 'format_version'")
    with pytest.raises(StoreError, match="database format 99"):
        Publisher(run.path).publish()
    reader = RunReader.open(run.path)
    assert [record.step for record in reader.records()] == [0]  # from the rank logs
    assert any("format 99" in note for note in reader.describe().notes)


def test_a_migration_that_fails_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from runhealth.storage import migrations

    def broken(connection: duckdb.DuckDBPyConnection) -> None:
        connection.execute("CREATE TABLE half (x INTEGER)")
        raise duckdb.Error("half way")

    monkeypatch.setattr(migrations, "ALL", (migrations.Migration(2, "broken", broken),))
    with duckdb.connect() as connection:
        connection.execute("CREATE TABLE meta AS SELECT 'format_version' AS key, '1' AS value")
        with pytest.raises(duckdb.Error, match="half way"):
            migrate(connection)
        assert connection.execute("SELECT value FROM meta").fetchall() == [("1",)]
        assert connection.execute("SELECT table_name FROM duckdb_tables()").fetchall() == [("meta",)]


def test_every_table_is_described(run: RunInfo) -> None:
    assert len({table.name for table in ALL_TABLES}) == len(ALL_TABLES)
    assert json.loads(Path(run.path, "run.json").read_text())["format_version"] == 1
