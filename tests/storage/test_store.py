"""Store: names, claims, resolving, remote roots, and clear messages."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from runhealth.storage.errors import AmbiguousRunError, RunNotFoundError, StoreError
from runhealth.storage.publish import Publisher
from runhealth.storage.ranklog import RankLog
from runhealth.storage.reader import RunReader
from runhealth.storage.records import Record, StepRecord
from runhealth.storage.store import RunInfo, Store
from runhealth.storage.writers import writers_of

OneStep = Callable[..., list[Record]]


def test_creating_twice_gives_the_first_run(store: Store) -> None:
    first = store.create_run("run", {"lr": 0.1})
    again = store.create_run("run", {"lr": 0.2})
    assert first == again
    assert again.config == {"lr": 0.1}
    assert json.loads((Path(first.path) / "run.json").read_text())["format_version"] == 1
    assert [file.name for file in Path(first.path).iterdir()] == ["run.json"]


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "a\\b", "x" * 129, "latest", "new\nline"])
def test_bad_names_are_refused(store: Store, name: str) -> None:
    with pytest.raises(StoreError, match="run name"):
        store.create_run(name)


def test_resolving(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("alpha", "alpha-2", "beta"):
        store.create_run(name)
    assert store.resolve("alpha").name == "alpha"  # exact beats prefix
    assert store.resolve("be").name == "beta"
    assert store.resolve(f"{store.root}/beta").name == "beta"
    monkeypatch.chdir(store.root)
    assert store.resolve("./beta/").path == f"{store.root}/beta"
    assert Store(str(tmp_path / "elsewhere")).resolve("beta").path == f"{store.root}/beta"
    with pytest.raises(AmbiguousRunError, match=r"'alp' fits 2 runs.*alpha, alpha-2"):
        store.resolve("alp")


@pytest.mark.parametrize("text", ["[" * 200_000, '{"created_ns": Infinity}', '{"created_ns": ' + "9" * 5_000 + "}"])
def test_a_hostile_run_json_is_reported_and_hides_no_other_run(store: Store, text: str) -> None:
    good = store.create_run("good")
    bad = store.create_run("bad")
    (Path(bad.path) / "run.json").write_text(text)
    found = {run.name: run.problem for run in store.runs()}
    assert found[good.name] == ""
    assert "run.json is damaged" in found["bad"]


def test_a_run_json_that_cannot_be_opened_hides_no_other_run(store: Store) -> None:
    good, bad = store.create_run("good"), store.create_run("bad")
    (Path(bad.path) / "run.json").unlink()
    (Path(bad.path) / "run.json").mkdir()
    found = {run.name: run.problem for run in store.runs()}
    assert found[good.name] == ""
    assert "run.json: Is a directory" in found["bad"]


def test_a_folder_that_is_no_attempt_is_not_read_as_one(store: Store, run: RunInfo, one_step: OneStep) -> None:
    with RankLog.create(store.claim_attempt(run, "k").path, 0) as log:
        log.append(one_step(0))
    (Path(run.path) / "log" / "a1x").mkdir()
    (Path(run.path) / "log" / "a2_").mkdir()
    (Path(run.path) / "log" / "a99999999999999999999").mkdir()
    claim = Path(run.path) / "log" / "a000" / "claim.json"
    claim.write_text(json.dumps({"created_ns": 1e300, "pid": 10**30, "host": ["x"], "launch_key": {}}))
    Publisher(run.path).publish(seal=True)
    with RunReader.open(run.path) as reader:
        assert reader.sql("SELECT count(*) AS n FROM attempts")["n"].to_list() == [1]


@pytest.mark.timeout(30)
def test_a_pipe_in_place_of_a_segment_holds_no_reader_up(store: Store, run: RunInfo, one_step: OneStep) -> None:
    attempt = Path(store.claim_attempt(run, "k").path)
    with RankLog.create(str(attempt), 0) as log:
        log.append(one_step(0))
    (attempt / "r00001").mkdir()
    os.mkfifo(attempt / "r00001" / "000000.rlog")
    assert writers_of(run.path) is not None
    with RunReader.open(run.path) as reader:
        assert {record.rank for record in reader.records()} == {0}


def test_an_unknown_run_names_the_nearest_and_the_store(store: Store) -> None:
    store.create_run("40k-spike-mine")
    with pytest.raises(RunNotFoundError) as caught:
        store.resolve("40k-spik-mine")
    assert "40k-spike-mine" in caught.value.nearest
    assert "40k-spike-mine" in str(caught.value)
    assert store.root in str(caught.value)


def test_latest_is_the_run_with_the_newest_activity(store: Store) -> None:
    old, new = store.create_run("old"), store.create_run("new")
    assert store.resolve("latest") == new
    time.sleep(0.02)  # coarse file times
    with RankLog.create(store.claim_attempt(old, "k").path, 0) as log:
        log.append([StepRecord(attempt=0, step=0, rank=0)])
    assert store.resolve("latest") == old


def test_runs_are_listed_oldest_first_and_damage_is_shown(store: Store) -> None:
    store.create_run("b")
    store.create_run("a")
    broken = Path(store.root) / "broken"
    broken.mkdir()
    (broken / "run.json").write_text("{")
    (Path(store.root) / "no-run").mkdir()
    runs = {run.name: run for run in store.runs() if not run.bundled}
    assert list(runs) == ["broken", "b", "a"]
    assert str(broken / "run.json") in runs["broken"].problem


def test_a_long_list_is_remembered_and_never_stale(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(30):
        store.create_run(f"r{number:02d}", {"n": number})
    first = store.runs()
    index = Path(store.root) / ".index.json"
    assert index.exists()
    reads: list[str] = []
    real = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda self, **kw: reads.append(str(self)) or real(self, **kw))
    assert Store(store.root).runs() == first
    assert not any(store.root in read for read in reads)
    body = json.loads((Path(store.root) / "r03" / "run.json").read_bytes())
    (Path(store.root) / "r03" / "run.json").write_text(json.dumps({**body, "config": {"n": "changed"}}))
    (Path(store.root) / "r04" / "run.json").write_text("{")
    changed = {run.name: run for run in Store(store.root).runs() if not run.bundled}
    assert changed["r03"].config == {"n": "changed"}
    assert changed["r04"].problem
    for broken in ("", "[]", '{"format_version": 1, "runs": {"r00": 5}}'):
        index.write_text(broken)
        assert len([run for run in Store(store.root).runs() if not run.bundled]) == 30


def test_bundled_runs_come_last_and_hide_nothing(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = Store(str(tmp_path / "package" / "bundled"))
    for name in ("40k-spike", "shared-name"):
        bundle.create_run(name)
    monkeypatch.setattr("runhealth.storage.store.resources.files", lambda _: tmp_path / "package")
    assert store.resolve("latest").bundled  # nothing else there
    store.create_run("shared-name")
    assert [(run.name, run.bundled) for run in store.runs()] == [("shared-name", False), ("40k-spike", True)]
    assert store.resolve("40k").bundled
    assert not store.resolve("latest").bundled
    with pytest.raises(StoreError, match="read-only"):
        store.claim_attempt(store.resolve("40k-spike"), "k")


def test_the_root_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNHEALTH_STORE", str(tmp_path / "env"))
    assert Store().root == str(tmp_path / "env")
    monkeypatch.delenv("RUNHEALTH_STORE")
    monkeypatch.chdir(tmp_path)
    assert Store().root == str(tmp_path / "runs")
    assert [run for run in Store().runs() if not run.bundled] == []


def test_a_store_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file"):
        Store(str(tmp_path / "file")).create_run("x")


def test_one_launch_shares_an_attempt(store: Store, run: RunInfo) -> None:
    assert store.claim_attempt(run, "a").attempt == 0
    assert store.claim_attempt(run, "b").attempt == 1
    assert store.claim_attempt(run, "a").attempt == 0
    names = sorted(entry.name for entry in (Path(run.path) / "log").iterdir())
    assert names == ["a000", "a001"]


RACER = """
import sys, time
from runhealth.storage.store import Store
store = Store(sys.argv[1])
run = store.create_run("raced")
time.sleep(max(0, float(sys.argv[2]) - time.time()))
print(*(store.claim_attempt(run, f"{sys.argv[3]}-{i}").attempt for i in range(20)))
"""


def test_racing_processes_agree_on_attempts(store: Store) -> None:
    start = str(time.time() + 1.5)
    keys = ["left", "left", "right", "right"]
    racers = [
        subprocess.Popen([sys.executable, "-c", RACER, store.root, start, key], stdout=subprocess.PIPE, text=True)
        for key in keys
    ]
    got = [racer.communicate(timeout=60)[0].split() for racer in racers]
    assert got[0] == got[1]
    assert got[2] == got[3]
    assert sorted(map(int, got[0] + got[2])) == list(range(40))


def test_a_remote_root_is_for_reading() -> None:
    with pytest.raises(StoreError, match=r"memory://bucket.*can only be read"):
        Store("memory://bucket").create_run("x")
    with pytest.raises(RunNotFoundError, match="memory://bucket"):
        Store("memory://bucket").resolve("x")
    with pytest.raises(StoreError, match="nosuch://"):
        Store("nosuch://bucket").runs()


def test_storing_never_imports_duckdb() -> None:
    code = (
        "import sys, runhealth.storage, runhealth.storage.store, runhealth.storage.ranklog; "
        "print(*[m for m in ('duckdb', 'polars', 'pyarrow', 'fsspec', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
