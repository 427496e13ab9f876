"""Parts: rows that moved into Parquet files read the same, for us and for any other client, wherever the run lies."""

import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import duckdb
import pyarrow.parquet as pq
import pytest

from runhealth.storage.archive import pack
from runhealth.storage.errors import StoreError
from runhealth.storage.parts import read_manifests
from runhealth.storage.publish import Publisher
from runhealth.storage.ranklog import RankLog
from runhealth.storage.reader import RunReader
from runhealth.storage.records import Record, StepRecord
from runhealth.storage.retention import retire_logs
from runhealth.storage.store import RunInfo, Store
from runhealth.storage.tail import RetiredLogError, RunTail, order

LogFor = Callable[..., RankLog]
OneStep = Callable[..., list[Record]]


def step(number: int, **values: float) -> StepRecord:
    return StepRecord(attempt=0, step=number, rank=0, values=values or {"loss": float(number)})


@pytest.fixture
def in_parts(log_for: LogFor, run: RunInfo, one_step: OneStep) -> list[Record]:
    """Three parts, some published rows that are in none, and a tail; returns all records."""
    log, publisher = log_for(segment_bytes=3000), Publisher(run.path, retention_s=0.0)
    for number in range(32):
        log.append(one_step(number))
        if number in (8, 16, 24):
            publisher.publish(seal=True)
        elif number == 28:
            assert publisher.publish().parts == 3
    return [record for number in range(32) for record in one_step(number)]


def ask(code: str, cwd: Path) -> str:
    """Output of another DuckDB client in its own process."""
    done = subprocess.run(
        [sys.executable, "-c", f"import duckdb\n{code}"], cwd=cwd, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_parts_recent_rows_and_tail_are_one(in_parts: list[Record], run: RunInfo, tmp_path: Path) -> None:
    reader = RunReader.open(run.path)
    assert list(reader.records()) == in_parts
    assert reader.poll() == in_parts
    assert reader.poll() == []
    assert reader.sql("SELECT count(*), count(DISTINCT step), max(step) FROM steps").row(0) == (32, 32, 31)
    assert reader.sql('SELECT DISTINCT typeof("unsigned"), typeof(loss) FROM steps').rows() == [("UBIGINT", "DOUBLE")]
    assert not list(Path(run.path).glob("log/a000/r00000/000000.rlog"))  # covered by parts
    packed = pack(run.path, str(tmp_path / "packed"))
    assert list(RunReader.open(packed.path).records()) == in_parts


@pytest.mark.usefixtures("in_parts")
def test_any_client_reads_parts_from_anywhere_and_after_a_move(run: RunInfo, tmp_path: Path) -> None:
    query = "SELECT count(*), sum(tokens = 9223372036854775807), max(step) FROM steps"
    want = "[(29, 29, 28)]"

    def read(database: str, cwd: Path) -> str:
        return ask(f"print(duckdb.connect({database!r}, read_only=True).execute({query!r}).fetchall())", cwd)

    path = f"{run.path}/run.duckdb"
    assert read(path, tmp_path) == want
    assert read("run.duckdb", Path(run.path)) == want
    assert read(os.path.relpath(path, tmp_path), tmp_path) == want
    attach = f"c = duckdb.connect(); c.execute(\"ATTACH '{path}' AS x (READ_ONLY)\"); "
    assert ask(attach + f"print(c.execute({query.replace('steps', 'x.steps')!r}).fetchall())", tmp_path) == want
    moved = tmp_path / "else where"
    shutil.move(run.path, moved)
    assert read(str(moved / "run.duckdb"), tmp_path) == want
    assert len(list(RunReader.open(str(moved)).records())) == 32 * 8


@pytest.mark.parametrize("lost", ["private", "private and database", "damaged private"])
def test_the_database_is_built_anew_from_parts_and_logs(in_parts: list[Record], run: RunInfo, lost: str) -> None:
    private = Path(run.path, ".publish", "private.duckdb")
    if lost == "damaged private":
        private.write_bytes(b"no database" * 1000)
    else:
        shutil.rmtree(private.parent)
    if lost == "private and database":
        Path(run.path, "run.duckdb").unlink()
        with pytest.raises(StoreError, match=r"run\.duckdb is missing.*makes it anew"):
            RunReader.open(run.path).poll()
    Publisher(run.path).publish()
    assert list(RunReader.open(run.path).records()) == in_parts


def test_a_publisher_that_died_while_sealing_repeats_it(
    log_for: LogFor, run: RunInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = log_for()
    for number in range(20):
        log.append([step(number)])
    with monkeypatch.context() as patch:
        patch.setattr("runhealth.storage.publish.build_successor", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            Publisher(run.path).publish(seal=True)
    assert len(read_manifests(Path(run.path))) == 1  # written, but its rows are still in the private database
    log.append([step(20)])
    assert Publisher(run.path).publish(seal=True).parts == 1
    assert [record.step for record in RunReader.open(run.path).records()] == list(range(21))


@pytest.mark.parametrize("damage", ["empty", "torn", "flipped", "removed"])
@pytest.mark.usefixtures("in_parts")
def test_a_damaged_part_is_named_and_costs_its_rows_only(run: RunInfo, damage: str) -> None:
    file = Path(run.path, "parts", "000001-steps.parquet")
    data = bytearray(file.read_bytes())
    if damage == "removed":
        file.unlink()
    else:
        data[len(data) // 2] ^= 4
        file.write_bytes({"empty": b"", "torn": data[: len(data) // 2], "flipped": data}[damage])
    reader = RunReader.open(run.path)
    assert reader.sql("SELECT count(*) FROM steps").item() == 32 - 8
    assert reader.sql("SELECT count(*) FROM layers").item() == 32 * 3
    (note,) = reader.describe().notes
    assert str(file) in note
    assert "8 rows of steps, steps 9 to 16" in note
    assert "restore it" in note


def test_a_missing_manifest_stops_the_publisher_with_its_name(in_parts: list[Record], run: RunInfo) -> None:
    Path(run.path, "parts", "000001.json").unlink()
    with pytest.raises(StoreError, match=r"parts/000001\.json is missing"):
        Publisher(run.path).publish()
    assert list(RunReader.open(run.path).records()) == in_parts


def test_parts_hold_values_exactly_and_narrow(log_for: LogFor, run: RunInfo) -> None:
    rows: list[dict[str, float]] = [
        {"loss": math.nan, "lr": 0.1, "hash": 2**64 - 1, "late": 1}, {"loss": math.inf, "lr": 1e-5},
        {"loss": 1.5, "tokens": 2**53 + 1}, {"hash": -1, "late": 0.5, "tokens": 3},
    ]  # fmt: skip
    publisher = Publisher(run.path)
    with log_for() as log:
        for number, values in enumerate(rows):
            log.append([step(number, **values)])
            publisher.publish(seal=True)
    reader = RunReader.open(run.path)
    got = [dict(record.values) for record in reader.records() if isinstance(record, StepRecord)]
    assert [{name: repr(float(v)) if name != "hash" else v for name, v in one.items()} for one in got] == [
        {name: repr(float(v)) if name != "hash" else v for name, v in one.items()} for one in rows
    ]
    assert reader.sql("SELECT step FROM steps WHERE isnan(loss)")["step"].to_list() == [0]
    assert reader.sql("SELECT max(tokens) FROM steps").item() == 2**53 + 1
    first = pq.ParquetFile(f"{run.path}/parts/000000-steps.parquet")
    types = {field.name: str(field.type) for field in first.schema_arrow}
    assert types["loss"] == "float"
    assert types["lr"] == "double"
    group = first.metadata.row_group(0)
    with_statistics = {group.column(i).path_in_schema for i in range(group.num_columns) if group.column(i).is_stats_set}
    assert with_statistics == {"attempt", "step", "rank"}


def test_publishing_does_not_copy_what_is_in_parts(log_for: LogFor, run: RunInfo) -> None:
    publisher = Publisher(run.path, part_bytes=200_000)
    sizes = []
    with log_for() as log:
        for number in range(6):
            log.append([step(number * 1000 + i, **{f"s{k}": k * i * 0.37 for k in range(20)}) for i in range(1000)])
            publisher.publish()
            sizes.append(Path(run.path, "run.duckdb").stat().st_size)
    assert len(read_manifests(Path(run.path))) == 3
    assert sizes[5] <= sizes[1] * 1.2  # both right after a part was made
    assert RunReader.open(run.path).sql("SELECT count(*) FROM steps").item() == 6000


def test_logs_are_removed_after_the_grace_time_only(log_for: LogFor, run: RunInfo) -> None:
    log = log_for(segment_bytes=500)
    for number in range(30):
        log.append([step(number)])
    assert Publisher(run.path).publish(seal=True).retired == 0
    manifest = read_manifests(Path(run.path))[-1]
    files = sorted(Path(log.path).iterdir())
    newest = max(file.stat().st_mtime for file in files)
    assert retire_logs(Path(run.path), manifest, 900.0, clock=lambda: newest - 1e6) == 0  # a clock that jumped back
    assert retire_logs(Path(run.path), manifest, 900.0, clock=lambda: newest + 901.0) == len(files) - 1
    assert [file for file in files if file.exists()] == files[-1:]  # the open one stays
    log.append([step(30)])
    log.close()
    assert Publisher(run.path).publish().records == 1
    assert [record.step for record in RunReader.open(run.path).records()] == list(range(31))


def test_a_follower_too_far_behind_is_told(log_for: LogFor, run: RunInfo) -> None:
    log = log_for(segment_bytes=500)
    log.append([step(0)])
    behind, ahead = RunTail(run.path), RunTail(run.path)
    for tail in (behind, ahead):
        tail.read()
    sleeper = RunReader.open(run.path)
    sleeper.sql("SELECT 1")
    for number in range(1, 30):
        log.append([step(number)])
    assert len(ahead.read()) == 29
    Publisher(run.path, retention_s=0.0).publish(seal=True)
    log.append([step(30)])
    assert len(ahead.read()) == 1
    with pytest.raises(RetiredLogError, match=r"000000\.rlog was removed.*open the run anew"):
        behind.read()
    assert sleeper.sql("SELECT count(*) FROM steps").item() == 31  # looks at the published run anew
    log.close()


def test_a_poller_too_far_behind_takes_the_rest_from_the_parts(
    log_for: LogFor, run: RunInfo, one_step: OneStep
) -> None:
    logs = [log_for(rank, segment_bytes=3000) for rank in (0, 1)]
    poller = RunReader.open(run.path)

    def write(first: int, last: int) -> list[Record]:
        for number in range(first, last):
            for rank, log in enumerate(logs):
                log.append(one_step(number, rank))
        return [one for number in range(first, last) for rank in (0, 1) for one in one_step(number, rank)]

    def seal() -> None:
        Publisher(run.path, retention_s=0.0).publish(seal=True)

    got = poller.poll()
    wanted = write(0, 5)
    got += poller.poll()
    assert sorted(got, key=order) == sorted(wanted, key=order)
    for first in (5, 15, 25):
        wanted += write(first, first + 10)
        seal()
    wanted += write(35, 37)
    assert not Path(logs[0].path, "000000.rlog").exists()
    while fresh := poller.poll():
        got += fresh
    assert sorted(got, key=order) == sorted(wanted, key=order)
    assert got[-1].step == 36
    wanted += write(37, 50)
    seal()
    wanted += write(50, 51)
    while fresh := poller.poll():
        got += fresh
    assert sorted(got, key=order) == sorted(wanted, key=order)
    for log in logs:
        log.close()


KILLED = """
import os, signal, sys
from runhealth.storage.ranklog import RankLog
from runhealth.storage.records import StepRecord
log = RankLog.create(sys.argv[1], 0)
log.append([StepRecord(attempt=0, step=step, rank=0) for step in range(3)])
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_last_segment_of_a_killed_writer_goes_once_another_attempt_is_there(
    store: Store, run: RunInfo, log_for: LogFor
) -> None:
    claim = store.claim_attempt(run, "first")
    subprocess.run([sys.executable, "-c", KILLED, claim.path], check=False)
    left = Path(claim.path, "r00000", "000000.rlog")
    seal = Publisher(run.path, retention_s=0.0).publish
    assert seal(seal=True).retired == 0  # it says that its writer did not end
    poller = RunReader.open(run.path)
    assert [record.step for record in poller.poll()] == [0, 1, 2]
    living = log_for(0, "second")
    living.append([StepRecord(attempt=1, step=2, rank=0)])
    other = log_for(1, "first")  # a writer of the first attempt that lives
    other.append([StepRecord(attempt=0, step=2, rank=1)])
    assert seal(seal=True).retired == 1
    assert not left.exists()
    assert Path(other.path, "000000.rlog").exists()
    other.append([StepRecord(attempt=0, step=3, rank=1)])
    keys = [(0, 2, 1), (0, 3, 1), (1, 2, 0)]
    assert sorted((r.attempt, r.step, r.rank) for r in [*poller.poll(), *poller.poll()]) == keys
    everything = [(record.attempt, record.step, record.rank) for record in RunReader.open(run.path).records()]
    assert everything == [(0, 0, 0), (0, 1, 0), (0, 2, 0), *keys]
    for log in (living, other):
        log.close()


def test_a_full_disk_while_sealing_is_reported_and_survived(log_for: LogFor, run: RunInfo) -> None:
    with log_for() as log:
        log.append([step(n, **{f"s{i}": n * i * 0.37 for i in range(50)}) for n in range(2000)])
    publisher = Publisher(run.path)
    publisher.publish()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(StoreError, match=r"cannot publish .*run\.duckdb"):
            publisher.publish(seal=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert not list(Path(run.path, "parts").glob("*"))
    assert RunReader.open(run.path).sql("SELECT count(*) FROM steps").item() == 2000
    assert publisher.publish(seal=True).parts == 1
    assert RunReader.open(run.path).sql("SELECT count(*), count(DISTINCT step) FROM steps").row(0) == (2000, 2000)


def published_steps(run: RunInfo) -> int:
    if not Path(run.path, "run.duckdb").exists():
        return 0
    with duckdb.connect(f"{run.path}/run.duckdb", read_only=True) as client:
        return int(client.execute("SELECT count(*) FROM steps").fetchall()[0][0])


def test_two_publishers_take_turns(log_for: LogFor, run: RunInfo) -> None:
    log, stop = log_for(segment_bytes=4000), threading.Event()
    pair = [Publisher(run.path, part_bytes=3000, retention_s=0.0) for _ in range(2)]
    threads = [threading.Thread(target=one.run_forever, args=(stop, 0.0)) for one in pair]
    for thread in threads:
        thread.start()
    for number in range(200):
        log.append([step(number)])
        if number % 50 == 49:  # so that each of them has something to do
            deadline = time.monotonic() + 30
            while published_steps(run) <= number and time.monotonic() < deadline:
                time.sleep(0.01)
    stop.set()
    for thread in threads:
        thread.join(60)
    log.close()
    result = Publisher(run.path).publish(wait_s=10.0)
    assert result.parts > 1
    assert [record.step for record in RunReader.open(run.path).records()] == list(range(200))


def test_a_publisher_that_slept_while_another_removed_logs_goes_on(log_for: LogFor, run: RunInfo) -> None:
    log = log_for(segment_bytes=500)
    log.append([step(0)])
    sleeper = Publisher(run.path)
    assert sleeper.publish().records == 1
    for number in range(1, 30):
        log.append([step(number)])
    assert Publisher(run.path, retention_s=0.0).publish(seal=True).retired > 1
    log.append([step(30)])
    log.close()
    assert sleeper.publish().records == 1
    assert [record.step for record in RunReader.open(run.path).records()] == list(range(31))


def test_a_poller_ahead_of_the_publisher_that_has_to_follow_anew_gets_nothing_twice(
    log_for: LogFor, run: RunInfo, one_step: OneStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = [log_for(rank) for rank in (0, 1)]
    poller = RunReader.open(run.path)

    def write(first: int, last: int) -> list[Record]:
        for number in range(first, last):
            for rank, log in enumerate(logs):
                log.append(one_step(number, rank))
        return [one for number in range(first, last) for rank in (0, 1) for one in one_step(number, rank)]

    wanted = write(0, 3)
    Publisher(run.path).publish()
    wanted += write(3, 8)
    got = poller.poll()
    wanted += write(8, 9)
    read = RunTail.read

    def retired(*_: object) -> list[Record]:
        monkeypatch.setattr(RunTail, "read", read)
        raise RetiredLogError("made")

    monkeypatch.setattr(RunTail, "read", retired)
    for _ in range(3):
        got += poller.poll()
    wanted += write(9, 10)
    got += poller.poll()
    assert sorted(got, key=order) == sorted(wanted, key=order)
    for log in logs:
        log.close()


def test_waiting_for_another_publisher(log_for: LogFor, run: RunInfo) -> None:
    with log_for() as log:
        log.append([step(0)])
    publisher = Publisher(run.path)
    with (
        publisher.exclusive(0.0),
        pytest.raises(StoreError, match=r"another publisher .* is at work: .*lock is held.*hangs"),
    ):
        Publisher(run.path).publish(wait_s=0.1)
    assert Publisher(run.path).publish(wait_s=0.1).records == 1


def test_an_empty_run_has_nothing_to_seal(run: RunInfo) -> None:
    assert Publisher(run.path).publish(seal=True).parts == 0


def test_a_database_without_parts_is_a_plain_file(log_for: LogFor, run: RunInfo) -> None:
    with log_for() as log:
        log.append([step(0)])
    Publisher(run.path).publish()
    with duckdb.connect(f"{run.path}/run.duckdb", read_only=True) as client:
        assert client.execute("SELECT count(*) FROM duckdb_views() WHERE NOT internal").fetchall() == [(0,)]
