"""push: a run on another file system, read there while it grows. S3 is moto's server, a process on loopback."""

import importlib.util
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import duckdb
import fsspec
import pytest

from runhealth.storage.errors import StoreError
from runhealth.storage.publish import Publisher
from runhealth.storage.push import push
from runhealth.storage.ranklog import RankLog
from runhealth.storage.reader import RunReader
from runhealth.storage.records import Record
from runhealth.storage.store import RunInfo, Store

LogFor = Callable[..., RankLog]
OneStep = Callable[..., list[Record]]
NO_S3 = importlib.util.find_spec("moto") is None or importlib.util.find_spec("s3fs") is None


@pytest.fixture(params=["memory", pytest.param("s3", marks=pytest.mark.skipif(NO_S3, reason="needs moto and s3fs"))])
def store_url(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    bucket = f"bucket-{uuid.uuid4().hex[:12]}"
    if request.param == "memory":
        yield f"memory://{bucket}/runs"
        memory = fsspec.filesystem("memory")
        if memory.exists(f"/{bucket}"):
            memory.rm(f"/{bucket}", recursive=True)
        return
    url = request.getfixturevalue("s3_server")
    for name, value in (("KEY", "x"), ("SECRET", "x"), ("ENDPOINT_URL", url)):
        monkeypatch.setitem(fsspec.config.conf.setdefault("s3", {}), name.lower(), value)
    s3 = fsspec.filesystem("s3", skip_instance_cache=True)
    s3.mkdir(bucket)
    yield f"s3://{bucket}/runs"


def test_a_pushed_run_is_queried_there_and_seen_to_grow(
    store_url: str, run: RunInfo, log_for: LogFor, one_step: OneStep, one_step_of: OneStep
) -> None:
    log, publisher = log_for(), Publisher(run.path)
    zero, one = log, log_for(1)
    written: list[Record] = []
    seen: list[Record] = []
    reader: RunReader | None = None
    for number in range(12):
        for rank, each in ((0, zero), (1, one)):
            each.append(one_step(number, rank))
        written += one_step_of(number, 2)
        publisher.publish(seal=number in (3, 7))
        if number == 9:  # the next publication has its rows in another order
            shutil.rmtree(f"{run.path}/.publish")
            Path(f"{run.path}/run.duckdb").unlink()
            publisher = Publisher(run.path)
            publisher.publish()
        if number % 2:
            result = push(run.path, store_url)
            assert result.url == f"{store_url}/run-one"
            reader = reader or RunReader.open("run-one", store_url)
            fresh = reader.poll()
            assert fresh == written[len(seen) :], number
            seen += fresh
            assert reader.poll() == []
            assert reader.sql("SELECT count(*), max(step) FROM steps").row(0) == (2 * (number + 1), number)
    assert reader is not None
    assert list(reader.records()) == written
    files = push(run.path, store_url).files
    assert files == 2  # run.json and run.duckdb: no part goes twice
    assert [info.name for info in Store(store_url).runs() if not info.bundled] == ["run-one"]
    reader.close()


def test_a_name_is_claimed_once(store_url: str, run: RunInfo, log_for: LogFor, tmp_path: Path) -> None:
    with log_for():
        Publisher(run.path).publish()
    push(run.path, store_url)
    push(run.path, store_url)
    twin = Store(str(tmp_path / "twin")).create_run("run-one")
    shutil.copy(f"{run.path}/run.duckdb", twin.path)
    with pytest.raises(StoreError, match=r"runs/run-one belongs to another run"):
        push(twin.path, store_url)


def test_what_cannot_be_pushed_is_named(
    run: RunInfo, log_for: LogFor, one_step: OneStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StoreError, match=r"run\.duckdb is missing: publish"):
        push(run.path, "memory://nowhere")
    with log_for() as log:
        log.append(one_step(0))
    Publisher(run.path).publish(seal=True)
    with pytest.raises(StoreError, match="nosuch://"):
        push(run.path, "nosuch://bucket")
    Path(run.path, "parts", "000000-steps.parquet").write_bytes(b"")
    with pytest.raises(StoreError, match=r"000000-steps\.parquet has 0 bytes"):
        push(run.path, f"memory://{uuid.uuid4().hex}")
    monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(StoreError, match="No space left"):
        push(run.path, "memory://nowhere")


def test_pushing_while_publishing(run: RunInfo, log_for: LogFor, one_step: OneStep) -> None:
    """Each push is one whole publication."""
    url, stop = f"memory://{uuid.uuid4().hex}", threading.Event()
    log = log_for()
    log.append(one_step(0))
    publisher = Publisher(run.path, part_bytes=4000)
    publisher.publish()
    thread = threading.Thread(target=publisher.run_forever, args=(stop, 0.0))
    thread.start()
    try:
        reader, seen = RunReader.open(push(run.path, url).url), 0
        for number in range(1, 25):
            log.append(one_step(number))
            push(run.path, url)
            for record in reader.poll():
                assert record == one_step(seen // 8)[seen % 8]
                seen += 1
    finally:
        stop.set()
        thread.join(60)
        log.close()
    push(run.path, url)
    assert seen + len(reader.poll()) == 25 * 8
    assert publisher.last_error is None
    with duckdb.connect(f"{run.path}/run.duckdb", read_only=True) as client:
        assert client.execute("SELECT count(*) > 1 FROM parts").fetchall() == [(True,)]
