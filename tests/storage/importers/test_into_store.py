"""Logs become runs of the store: exactly, once, and anew when they have changed."""

from pathlib import Path

import pytest

from runhealth.storage.errors import ConfigError, NoUsableDataError, StoreError
from runhealth.storage.importers import into_store, open_log
from runhealth.storage.importers.into_store import import_log
from runhealth.storage.reader import RunReader
from runhealth.storage.records import RunEvent
from runhealth.storage.store import Store


def rows(start: int, stop: int) -> str:
    return "".join(
        f'{{"step": {n}, "loss": {3 - n / 100}, "grad_norm": 0.1, "other": 0.7}}\n' for n in range(start, stop)
    )


@pytest.fixture
def store(tmp_path):
    return Store(str(tmp_path / "runs"))


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text(rows(0, 50) + "broken\n" + rows(30, 60))
    return path


def stored(store, name="r"):
    with RunReader.open(name, store.root) as reader:
        return list(reader.records())


def test_all_records_come_back_as_doubles(store, log):
    run = import_log(str(log), "r", store)
    got = stored(store)
    told = [record for record in got if isinstance(record, RunEvent) and record.kind == "imported"]
    expected = list(open_log(str(log)).records())
    assert [record for record in got if record not in told] == expected
    assert told[0].data["rows_rejected"] == 1
    assert told[0].data["rejected"][0]["line"] == 51
    assert {record.attempt for record in got} == {0, 1}
    assert run.config["imported"]["generation"] == 0


def test_importing_twice_changes_nothing(store, log, tmp_path):
    import_log(str(log), "r", store)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*")}
    import_log(str(log), "r", store)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*")} == before


def test_a_grown_log_becomes_the_next_generation(store, log):
    import_log(str(log), "r", store)
    with log.open("a") as file:
        file.write(rows(60, 70))
    run = import_log(str(log), "r", store)
    assert run.config["imported"]["generation"] == 1
    assert max(record.step for record in stored(store)) == 69
    assert [one.name for one in store.runs() if not one.bundled] == ["r"]


def test_another_mapping_is_another_import(store, log):
    import_log(str(log), "r", store)
    run = import_log(str(log), "r", store, {"loss": "other"})
    assert run.config["imported"]["generation"] == 1
    assert next(record.values["loss"] for record in stored(store) if hasattr(record, "values")) == 0.7


def test_a_log_that_fails_leaves_the_old_run(store, log, tmp_path):
    import_log(str(log), "r", store)
    before = stored(store)
    log.write_text('{"step": 1, "reward": 2}\n' * 3)
    with pytest.raises(NoUsableDataError):
        import_log(str(log), "r", store)
    assert stored(store) == before
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["r"]


def test_runs_of_another_origin_are_not_replaced(store, log, tmp_path):
    store.create_run("measured")
    with pytest.raises(ConfigError, match="measured"):
        import_log(str(log), "measured", store)
    import_log(str(log), "r", store)
    other = tmp_path / "other.jsonl"
    other.write_text(rows(0, 5))
    with pytest.raises(ConfigError, match=r"log\.jsonl"):
        import_log(str(other), "r", store)


def test_ranks_and_sparse_attempts_are_kept(store, tmp_path):
    path = tmp_path / "log.csv"
    lines = [f"{attempt},{step},{rank},{step + rank}.5" for attempt in (0, 2) for step in range(5) for rank in range(3)]
    path.write_text("attempt,step,rank,loss\n" + "\n".join(lines) + "\n")
    import_log(str(path), "r", store)
    keys = {(record.attempt, record.step, record.rank) for record in stored(store)}
    assert {key for key in keys if key[0] == 2} == {(2, step, rank) for step in range(5) for rank in range(3)}


def test_a_folder_is_imported_as_a_whole(store, tmp_path):
    folder = tmp_path / "logs"
    folder.mkdir()
    for rank in range(2):
        (folder / f"rank_{rank}.jsonl").write_text(rows(0, 10))
    import_log(str(folder), "r", store)
    assert {record.rank for record in stored(store)} == {0, 1}
    first = import_log(str(folder), "r", store)
    (folder / "rank_1.jsonl").write_text(rows(0, 12))
    assert import_log(str(folder), "r", store).config != first.config


@pytest.mark.parametrize("exchange", [True, False])
def test_a_replaced_run_is_whole_at_any_moment(store, log, monkeypatch, exchange):
    import_log(str(log), "r", store)
    with log.open("a") as file:
        file.write(rows(60, 70))
    if not exchange:
        monkeypatch.setattr(into_store, "_exchanged", lambda *_: False)
    elif not into_store._exchanged(Path(store.root, "r"), Path(store.root, "r")):
        pytest.skip("this file system cannot exchange folders")
    assert import_log(str(log), "r", store).config["imported"]["generation"] == 1
    assert max(record.step for record in stored(store)) == 69
    assert [path.name for path in Path(store.root).iterdir()] == ["r"]


def test_a_run_that_could_not_be_replaced_comes_back(store, log, monkeypatch):
    import_log(str(log), "r", store)
    with log.open("a") as file:
        file.write(rows(60, 70))
    monkeypatch.setattr(into_store, "_exchanged", lambda *_: False)
    rename, calls = Path.rename, []

    def failing(self, target):
        calls.append(self)
        if self.name == "r" and self.parent.name.startswith(".import-"):
            raise OSError(28, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(StoreError, match="No space left"):
        import_log(str(log), "r", store)
    assert max(record.step for record in stored(store)) == 59


def test_a_run_that_a_killed_import_left_aside_is_found(store, log):
    import_log(str(log), "r", store)
    aside = Path(store.root, ".import-0", ".replaced", "r")
    aside.parent.mkdir(parents=True)
    Path(store.root, "r").rename(aside)
    run = import_log(str(log), "r", store)
    assert run.config["imported"]["generation"] == 0
    assert max(record.step for record in stored(store)) == 59
