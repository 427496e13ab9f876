"""RunReader: published database and live tail as one, while others write and publish."""

import json
import math
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import duckdb
import fsspec
import pytest

from runhealth.storage.errors import StoreError
from runhealth.storage.publish import Publisher
from runhealth.storage.ranklog import RankLog
from runhealth.storage.reader import RunReader
from runhealth.storage.records import Record, RunEvent, StepRecord
from runhealth.storage.store import RunInfo, Store

LogFor = Callable[..., RankLog]
OneStep = Callable[..., list[Record]]


def step(number: int, **values: float) -> StepRecord:
    return StepRecord(attempt=0, step=number, rank=0, values=values or {"loss": float(number)})


def open_run(run: RunInfo) -> RunReader:
    return RunReader.open(run.path)


@pytest.fixture
def three_logs(log_for: LogFor, one_step: OneStep, one_step_of: OneStep) -> list[Record]:
    """Two ranks and a restart, written interleaved; returns what a reader must give out, in order."""
    logs = {(0, rank): log_for(rank, "first") for rank in (0, 1)}
    for number in range(5):
        for rank in (1, 0):
            logs[0, rank].append(one_step(number, rank))
    logs[1, 0] = log_for(0, "second")
    for number in range(3, 6):
        logs[1, 0].append(one_step(number, 0, attempt=1))
    for log in logs.values():
        log.close()
    wanted = [record for number in range(5) for record in one_step_of(number, 2)]
    return wanted + [record for number in range(3, 6) for record in one_step(number, 0, attempt=1)]


def test_rank_logs_alone_published_and_half_published_read_the_same(
    three_logs: list[Record], run: RunInfo, log_for: LogFor, one_step: OneStep
) -> None:
    reader = open_run(run)
    assert list(reader.records()) == three_logs
    Publisher(run.path).publish()
    assert list(reader.records()) == three_logs
    with log_for(0, "third") as log:
        log.append(one_step(6, attempt=2))
        wanted = three_logs + one_step(6, attempt=2)
        assert list(reader.records()) == wanted
        assert list(reader.records()) == wanted  # starts over
        Publisher(run.path).publish()
        assert list(reader.records()) == wanted
    shutil.rmtree(f"{run.path}/log")
    assert list(open_run(run).records()) == wanted


def test_nan_and_absent_stay_apart(log_for: LogFor, run: RunInfo) -> None:
    with log_for() as log:
        log.append([step(0, loss=math.nan), step(1, lr=1.0)])
        log.append([RunEvent(attempt=0, step=1, rank=0, kind="x", data={"nan": math.nan})])
    reader = open_run(run)
    for _ in ("live", "published"):
        first, event, second = reader.records()
        assert isinstance(first, StepRecord)
        assert isinstance(event, RunEvent)
        assert isinstance(second, StepRecord)
        assert math.isnan(first.values["loss"])
        assert math.isnan(float(str(event.data["nan"])))
        assert dict(second.values) == {"lr": 1.0}
        assert reader.sql("SELECT step FROM steps WHERE isnan(loss)")["step"].to_list() == [0]
        Publisher(run.path).publish()


@pytest.mark.usefixtures("three_logs")
def test_sql_sees_every_table_with_the_tail(run: RunInfo, log_for: LogFor) -> None:
    reader = open_run(run)
    queries = {
        "steps": "SELECT count(*) AS n FROM steps",
        "layers": "SELECT count(*) AS n FROM layers WHERE layer LIKE 'blocks.%'",
        "batches": "SELECT count(*) AS n FROM batches WHERE content_hash = 18446744073709551615",
        "checkpoints": "SELECT count(*) AS n FROM checkpoints WHERE status = 'verified'",
        "events": "SELECT count(*) AS n FROM events WHERE json_extract(data, '$.a[2]') = '\"x\"'",
        "attempts": "SELECT count(*) AS n FROM attempts WHERE launch_key = 'second'",
        "signals": "SELECT count(*) AS n FROM signals WHERE name = 'loss' AND unit = 'nats'",
    }
    want = {"steps": 13, "layers": 26, "batches": 13, "checkpoints": 13, "events": 13, "attempts": 1, "signals": 1}
    assert {table: reader.sql(query)["n"][0] for table, query in queries.items()} == want
    Publisher(run.path).publish()
    assert {table: reader.sql(query)["n"][0] for table, query in queries.items()} == want
    with log_for(0, "third") as log:
        log.append([StepRecord(attempt=2, step=9, rank=0, values={"brand_new": 5})])
    assert reader.sql("SELECT step, brand_new FROM steps WHERE attempt = ?", [2]).rows() == [(9, 5)]
    assert reader.sql("SELECT count(*) FROM attempts").item() == 3
    with pytest.raises(duckdb.Error):
        reader.sql("SELECT nonsense FROM steps")
    assert reader.sql("SELECT count(*) FROM steps").item() == 14


def test_polling_gives_each_record_once(log_for: LogFor, run: RunInfo) -> None:
    reader = open_run(run)
    assert reader.poll() == []
    log = log_for(segment_bytes=500)
    log.append([step(0)])
    assert reader.poll() == [step(0)]
    Publisher(run.path).publish()
    assert reader.poll() == []
    got: list[Record] = []
    for number in range(1, 60):
        log.append([step(number)])
        if number % 7 == 0:
            Publisher(run.path).publish()
        got += reader.poll()
    assert got == [step(number) for number in range(1, 60)]
    other = log_for(1)
    other.append([StepRecord(attempt=0, step=0, rank=1)])
    log.append([step(60)])
    assert reader.poll() == [StepRecord(attempt=0, step=0, rank=1), step(60)]
    late = open_run(run)
    assert len(late.poll()) == 62
    log.append([step(61)])
    assert late.poll() == [step(61)]
    log.close()
    other.close()


def test_a_long_run_is_read_in_chunks_and_in_order(
    log_for: LogFor, run: RunInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runhealth.storage.view._ROWS_A_CHUNK", 50)
    logs = [log_for(0), log_for(1)]
    for number in range(300):
        for rank, log in enumerate(logs):
            log.append([StepRecord(attempt=0, step=number, rank=rank)])
    for log in logs:
        log.close()
    keys = [(record.step, record.rank) for record in open_run(run).records()]
    assert keys == [(number, rank) for number in range(300) for rank in (0, 1)]


def test_describe(three_logs: list[Record], run: RunInfo) -> None:
    info = open_run(run).describe()
    assert (info.name, info.format, info.source) == ("run-one", "runhealth", run.path)
    assert info.rows_read == info.rows_kept == len(three_logs)
    assert info.rows_rejected == 0
    assert {"loss", "token_entropy", "amax", "unsigned"} <= set(info.signals)


def test_a_torn_end_is_reported_for_a_dead_attempt_only(log_for: LogFor, run: RunInfo) -> None:
    log = log_for()
    log.append([step(0), step(1)])
    file = Path(log.path) / "000000.rlog"
    with file.open("ab") as handle:
        handle.write(file.read_bytes()[-40:][:20])  # half a frame: may be a write under way
    reader = open_run(run)
    assert [record.step for record in reader.records()] == [0, 1]
    assert reader.describe().rejected == ()
    log_for(0, "second").close()
    (rejected,) = reader.describe().rejected
    assert "log/a000/r00000/000000.rlog" in rejected.why
    assert rejected.line == file.stat().st_size - 20


def test_a_run_database_that_is_damaged_gives_way_to_the_logs(log_for: LogFor, run: RunInfo) -> None:
    with log_for() as log:
        log.append([step(0)])
    database = Path(run.path) / "run.duckdb"
    database.write_bytes(b"not a database" * 300)
    reader = open_run(run)
    assert list(reader.records()) == [step(0)]
    assert any("run.duckdb" in note for note in reader.describe().notes)
    shutil.rmtree(f"{run.path}/log")
    with pytest.raises(StoreError, match=r"cannot read .*run\.duckdb"):
        list(open_run(run).records())


OTHER_CLIENT = """
import duckdb, sys
connection = duckdb.connect(sys.argv[1])
print("open", flush=True)
sys.stdin.readline()
"""


def test_a_client_that_opened_the_database_for_writing_blocks_nobody(log_for: LogFor, run: RunInfo) -> None:
    with log_for() as log:
        log.append([step(0)])
        Publisher(run.path).publish()
        with subprocess.Popen(
            [sys.executable, "-c", OTHER_CLIENT, f"{run.path}/run.duckdb"], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as client:  # fmt: skip
            assert client.stdout is not None
            client.stdout.readline()
            assert list(open_run(run).records()) == [step(0)]
            log.append([step(1)])
            assert Publisher(run.path).publish().replaced
            assert list(open_run(run).records()) == [step(0), step(1)]
            client.communicate(b"\n", timeout=30)


@pytest.mark.parametrize("tail_rows", [0, 10_000])
def test_readers_while_publishing(
    log_for: LogFor, run: RunInfo, monkeypatch: pytest.MonkeyPatch, tail_rows: int
) -> None:
    """Several readers in one process, the database replaced under them again and again."""
    monkeypatch.setattr("runhealth.storage.view._STALE_TAIL_ROWS", tail_rows)
    log, stop, publisher = log_for(), threading.Event(), Publisher(run.path)
    log.append([step(0)])
    thread = threading.Thread(target=publisher.run_forever, args=(stop, 0.0))
    thread.start()
    readers = [open_run(run) for _ in range(3)]
    try:
        for number in range(1, 60):
            log.append([step(number)])
            reader = readers[number % 3]
            assert reader.sql("SELECT count(*), count(DISTINCT step), max(step) FROM steps").row(0) == (
                number + 1, number + 1, number,
            )  # fmt: skip
            if number % 10 == 0:
                assert [record.step for record in reader.records()] == list(range(number + 1))
    finally:
        stop.set()
        thread.join(60)
        log.close()
        for reader in readers:
            reader.close()
    assert publisher.last_error is None


WRITER = """
import sys, time
from runhealth.storage.ranklog import RankLog
from runhealth.storage.records import StepRecord
log = RankLog.create(sys.argv[1], 0)
for step in range(200):
    log.append([StepRecord(attempt=0, step=step, rank=0, ts_ns=time.time_ns(), values={"loss": 1.0})])
    time.sleep(0.005)
log.close()
"""


def test_another_process_sees_steps_while_they_are_written(
    store: Store, run: RunInfo, record_property: Callable[[str, object], None]
) -> None:
    reader = open_run(run)
    claim = store.claim_attempt(run, "first")
    delays: list[float] = []
    seen: list[int] = []
    with subprocess.Popen([sys.executable, "-c", WRITER, claim.path]) as writer:
        deadline = time.monotonic() + 60
        alive_when_seen = False
        while len(seen) < 200 and time.monotonic() < deadline:
            for record in reader.poll():
                delays.append((time.time_ns() - record.ts_ns) / 1e6)
                seen.append(record.step)
            alive_when_seen = alive_when_seen or (0 < len(seen) < 200 and writer.poll() is None)
            time.sleep(0.005)
        assert writer.wait(timeout=30) == 0
    assert seen == list(range(200))
    assert alive_when_seen
    delays.sort()
    record_property("delay_ms_p50", delays[100])
    print(f"delay until visible: p50 {delays[100]:.1f} ms, p99 {delays[198]:.1f} ms")


def test_a_store_on_another_file_system_can_be_read(three_logs: list[Record], run: RunInfo) -> None:
    Publisher(run.path).publish()
    memory = fsspec.filesystem("memory")
    try:
        for name in ("run.json", "run.duckdb"):
            memory.pipe_file(f"/bucket/runs/run-one/{name}", Path(run.path, name).read_bytes())
        memory.pipe_file("/bucket/runs/other/run.json", json.dumps({"created_ns": 1}).encode())
        remote = Store("memory://bucket/runs")
        assert [info.name for info in remote.runs() if not info.bundled] == ["other", "run-one"]
        assert remote.resolve("run").config == {"lr": 0.1}
        assert remote.resolve("latest").name == "run-one"
        with RunReader.open("run-one", "memory://bucket/runs") as reader:
            assert list(reader.records()) == three_logs
            assert reader.sql("SELECT count(*) FROM steps").item() == 13
            assert reader.describe().source == "memory://bucket/runs/run-one"
        assert list(RunReader.open("memory://bucket/runs/run-one").records()) == three_logs
    finally:
        memory.rm("/bucket", recursive=True)


FORK = """
import os, signal, sys, warnings
from pathlib import Path
from runhealth.storage.ranklog import RankLog
from runhealth.storage.reader import RunReader
from runhealth.storage.records import StepRecord

warnings.simplefilter("ignore")  # a process with threads is forked here, as loader workers are
log = RankLog.create(sys.argv[1], 0)
log.append([StepRecord(attempt=0, step=0, rank=0)])
reader = RunReader.open(sys.argv[2])
count = "SELECT count(*) FROM steps"
assert reader.sql(count).item() == 1
log.append([StepRecord(attempt=0, step=1, rank=0)])
child = os.fork()
if child == 0:
    signal.alarm(60)  # ends a child that hangs
    assert reader.sql(count).item() == 2
    assert [record.step for record in reader.poll()] == [0, 1]
    reader.close()
    print("child", flush=True)
    sys.exit(0)  # with all that is done at exit
assert os.waitpid(child, 0)[1] == 0
assert reader._view._scratch.exists()
assert reader.sql(count).item() == 2
print("parent")
"""


def test_a_forked_child_opens_the_run_anew(store: Store, run: RunInfo) -> None:
    claim = store.claim_attempt(run, "first")
    done = subprocess.run(
        [sys.executable, "-c", FORK, claim.path, run.path], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["child", "parent"]


def test_a_run_that_cannot_be_written_can_be_read(three_logs: list[Record], run: RunInfo) -> None:
    Publisher(run.path).publish(seal=True)
    folders = [Path(run.path), *(path for path in Path(run.path).rglob("*") if path.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    try:
        before = sorted(Path(run.path).rglob("*"))
        reader = open_run(run)
        assert list(reader.records()) == three_logs
        assert reader.sql("SELECT count(*) FROM steps").item() == 13
        assert sorted(Path(run.path).rglob("*")) == before  # also where permissions do not bind, as for root
    finally:
        for folder in folders:
            folder.chmod(0o755)


def test_no_scratch_folder_is_left(three_logs: list[Record], run: RunInfo, tmp_path: Path, monkeypatch) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    reader = open_run(run)
    assert next(iter(reader.records())) == three_logs[0]
    reader.sql("SELECT 1")
    reader.close()
    assert list(scratch.iterdir()) == []
