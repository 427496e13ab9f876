"""Publisher: complete, without duplicates, whatever happened before."""

import fcntl
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
import pytest

from runhealth.storage.errors import StoreError
from runhealth.storage.publish import Publisher
from runhealth.storage.ranklog import RankLog
from runhealth.storage.reader import RunReader
from runhealth.storage.records import StepRecord
from runhealth.storage.store import RunInfo

LogFor = Callable[..., RankLog]


def step(number: int, **values: float) -> StepRecord:
    return StepRecord(attempt=0, step=number, rank=0, values=values or {"loss": float(number)})


def published(run: RunInfo, query: str = "SELECT step FROM steps ORDER BY step") -> list[object]:
    """What any DuckDB client sees in run.duckdb."""
    with duckdb.connect(f"{run.path}/run.duckdb", read_only=True) as connection:
        return [row[0] if len(row) == 1 else row for row in connection.execute(query).fetchall()]


def test_publishing_is_incremental_and_idempotent(log_for: LogFor, run: RunInfo) -> None:
    log, publisher = log_for(), Publisher(run.path)
    assert not publisher.publish().replaced or published(run) == []
    log.append([step(0)])
    first = publisher.publish()
    assert (first.records, first.replaced) == (1, True)
    again = publisher.publish()
    assert (again.records, again.replaced) == (0, False)
    log.append([step(1)])
    assert Publisher(run.path).publish().records == 1  # another process takes over
    log.append([step(2)])
    assert publisher.publish().records == 1
    log.close()
    assert publisher.publish().records == 0
    assert published(run) == [0, 1, 2]


def test_nothing_to_publish(run: RunInfo) -> None:
    result = Publisher(run.path).publish()
    assert (result.records, result.replaced) == (0, False)
    assert not Path(result.path).exists()


def test_new_signals_become_columns_and_types_only_widen(log_for: LogFor, run: RunInfo) -> None:
    publisher = Publisher(run.path)
    with log_for() as log:
        for number, values in enumerate([
            {"loss": float("nan"), "tokens": 2**53 + 1, "hash": 2**64 - 1},
            {"loss": float("inf"), "mixed": 2**63, "a \"quoted\" name": 1.5},
            {"mixed": -1, "Loss": 4, "step": 5, "tokens": 3},
            {"tokens": 0.5},
        ]):  # fmt: skip
            log.append([step(number, **values)])
            publisher.publish()
    types = dict(published(run, "SELECT name, column_type FROM signals"))  # type: ignore[arg-type]
    assert types["loss"] == "DOUBLE"
    assert types["tokens"] == "DOUBLE"  # widened by 0.5
    assert types["hash"] == "UBIGINT"
    assert types["mixed"] == "DECIMAL(20,0)"
    columns = dict(published(run, "SELECT name, column_name FROM signals"))  # type: ignore[arg-type]
    assert columns["Loss"].lower() != "loss"
    assert columns["step"] != "step"
    assert published(run, "SELECT hash FROM steps WHERE hash IS NOT NULL") == [2**64 - 1]
    assert published(run, "SELECT count(*) FROM steps WHERE isnan(loss)") == [1]
    assert published(run, "SELECT count(*) FROM steps WHERE loss IS NULL") == [2]


def test_any_client_may_keep_the_database_open(log_for: LogFor, run: RunInfo) -> None:
    log, publisher = log_for(), Publisher(run.path)
    log.append([step(0)])
    publisher.publish()
    with duckdb.connect(f"{run.path}/run.duckdb", read_only=True) as old:
        log.append([step(1)])
        publisher.publish()
        assert old.execute("SELECT count(*) FROM steps").fetchone() == (1,)
    assert published(run) == [0, 1]
    log.close()


def test_older_clients_can_open_the_database(log_for: LogFor, run: RunInfo) -> None:
    with log_for() as log:
        log.append([step(0)])
    Publisher(run.path).publish()
    version = published(run, "SELECT tags['storage_version'] FROM duckdb_databases() WHERE database_name = 'run'")
    assert str(version[0]).startswith("v1.2")


def test_one_publisher_at_a_time(log_for: LogFor, run: RunInfo) -> None:
    with log_for() as log:
        log.append([step(0)])
    publisher = Publisher(run.path)
    publisher.publish()
    with open(f"{run.path}/.publish/lock", "r+") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        with pytest.raises(StoreError, match=rf"another publisher \(process {os.getpid()}\).*lock"):
            publisher.publish()
    publisher.publish()


@pytest.mark.parametrize("damage", ["garbage", "truncated", "flipped", "removed", "empty"])
def test_a_damaged_private_database_is_built_anew(log_for: LogFor, run: RunInfo, damage: str) -> None:
    publisher = Publisher(run.path)
    with log_for() as log:
        log.append([step(n, **{f"s{i}": n * 1.5 for i in range(20)}) for n in range(500)])
        publisher.publish()
        private = Path(run.path) / ".publish" / "private.duckdb"
        data = private.read_bytes()
        if damage == "removed":
            private.unlink()
        else:
            middle = len(data) // 2
            private.write_bytes({
                "garbage": b"no database" * 1000, "truncated": data[:middle], "empty": b"",
                "flipped": bytes(byte ^ 0xFF if i % 64 == 0 else byte for i, byte in enumerate(data)),
            }[damage])  # fmt: skip
        log.append([step(500)])
        Publisher(run.path).publish()
    assert published(run) == list(range(501))


def test_a_removed_or_replaced_result_is_restored(log_for: LogFor, run: RunInfo) -> None:
    with log_for() as log:
        log.append([step(0)])
    publisher = Publisher(run.path)
    target = Path(publisher.publish().path)
    target.unlink()
    assert publisher.publish().replaced
    target.write_bytes(b"")
    assert Publisher(run.path).publish().replaced
    assert published(run) == [0]


def test_a_run_without_logs_keeps_its_database(log_for: LogFor, run: RunInfo) -> None:
    with log_for() as log:
        log.append([step(0)])
    Publisher(run.path).publish()
    shutil.rmtree(f"{run.path}/log")
    shutil.rmtree(f"{run.path}/.publish")
    Publisher(run.path).publish()
    assert published(run) == [0]


def test_a_full_disk_is_reported_and_survived(log_for: LogFor, run: RunInfo) -> None:
    publisher = Publisher(run.path)
    with log_for() as log:
        log.append([step(0)])
        publisher.publish()
        log.append([step(n, **{f"s{i}": n * i * 0.37 for i in range(50)}) for n in range(1, 3000)])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, before[1]))
    stop = threading.Event()
    try:
        with pytest.raises(StoreError, match=r"cannot publish .*run\.duckdb"):
            publisher.publish()
        thread = threading.Thread(target=publisher.run_forever, args=(stop, 0.01))
        thread.start()
        deadline = time.monotonic() + 30
        while publisher.last_error is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert publisher.last_error is not None
        assert published(run) == [0]  # the old one stays
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
        stop.set()
        thread.join(60)
    assert not thread.is_alive()
    assert publisher.last_error is None
    assert published(run) == list(range(3000))


def test_a_run_folder_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no-such-run"):
        Publisher(str(tmp_path / "no-such-run")).publish()
    with pytest.raises(StoreError, match="memory://"):
        Publisher("memory://bucket/run")


def test_damaged_frames_are_reported_and_the_rest_is_published(log_for: LogFor, run: RunInfo) -> None:
    with log_for(segment_bytes=1000) as log:
        for number in range(100):
            log.append([step(number)])
    victim = Path(log.path) / "000001.rlog"
    data = bytearray(victim.read_bytes())
    data[500] ^= 1
    victim.write_bytes(data)
    result = Publisher(run.path).publish()
    assert len(result.rejected) == 1
    assert "log/a000/r00000/000001.rlog: at byte" in result.rejected[0].why
    got = published(run)
    assert 0 < len(got) < 100
    assert got[-1] == 99
    (row,) = published(run, "SELECT file, state, message FROM progress WHERE state = 'damaged'")
    assert "checksum" in str(row)
    shutil.rmtree(f"{run.path}/log")
    assert RunReader.open(run.path).describe().rows_rejected == 1  # known even where the logs are gone


PUBLISHER = """
import sys
from runhealth.storage.publish import Publisher
while True:
    Publisher(sys.argv[1]).publish()
    print("published", flush=True)
"""


def test_a_publisher_killed_anywhere_leaves_nothing_missing_or_twice(log_for: LogFor, run: RunInfo) -> None:
    log = log_for(segment_bytes=200_000)
    number = 0
    for kill in range(4):
        with subprocess.Popen(
            [sys.executable, "-c", PUBLISHER, run.path], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as publisher:
            assert publisher.stdout is not None
            publisher.stdout.readline()
            end = time.monotonic() + 0.05 + 0.043 * kill
            while time.monotonic() < end:
                log.append([step(number)])
                number += 1
            publisher.kill()
        if Path(f"{run.path}/run.duckdb").exists():
            assert published(run) == list(range(len(published(run))))
    log.close()
    Publisher(run.path).publish()
    assert published(run) == list(range(number))
