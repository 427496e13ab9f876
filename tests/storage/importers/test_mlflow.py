"""MLflow's two stores, as MLflow 2 and 3 write them."""

import math
import sqlite3
import sys
from pathlib import Path

import pytest

from runhealth.storage.errors import NoUsableDataError
from runhealth.storage.importers import open_log
from runhealth.storage.records import StepRecord


def points(start: int, stop: int, begin_ms: int):
    """(metric, value, time in ms, step) as a loop logs them, one call after the other."""
    for step in range(start, stop):
        at = begin_ms + 1000 * (step - start)
        yield "train/loss", 3 - 0.05 * step, at, step
        yield "grad_norm", 1.0, at + 1, step
        if step % 10 == 0:
            yield "val_loss", 2.5, at + 3, step


def database(path: Path, runs: dict[str, list[tuple[str, float, int, int]]], status: str = "FINISHED") -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE runs (run_uuid TEXT PRIMARY KEY, name TEXT, status TEXT)")
    connection.execute(
        "CREATE TABLE metrics (key TEXT, value REAL, timestamp INTEGER, run_uuid TEXT, step INTEGER, is_nan INTEGER)"
    )
    for name, rows in runs.items():
        connection.execute("INSERT INTO runs VALUES (?, ?, ?)", (f"{name}-id", name, status))
        for key, value, time, step in rows:
            nan = math.isnan(value)
            stored = 0.0 if nan else math.copysign(sys.float_info.max, value) if math.isinf(value) else value
            connection.execute("INSERT INTO metrics VALUES (?,?,?,?,?,?)", (key, stored, time, f"{name}-id", step, nan))
    connection.commit()
    connection.close()


def files(root: Path, run: str, rows: list[tuple[str, float, int, int]]) -> Path:
    folder = root / "0" / run
    for key, value, time, step in rows:
        path = folder / "metrics" / key
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as stream:
            stream.write(f"{time} {value} {step}\n")
    (folder / "meta.yaml").write_text(f"run_name: {run}\n")
    return folder


@pytest.fixture(params=["sqlite", "files"])
def store(request, tmp_path):
    def write(rows) -> str:
        if request.param == "sqlite":
            database(tmp_path / "mlflow.db", {"one": list(rows)})
            return str(tmp_path / "mlflow.db")
        files(tmp_path / "mlruns", "one", list(rows))
        return str(tmp_path / "mlruns")

    return write


def read_steps(path: str) -> list[StepRecord]:
    return [record for record in open_log(path).records() if isinstance(record, StepRecord)]


def test_metrics_are_joined_by_step(store):
    path = store(points(0, 25, 1_700_000_000_000))
    steps = read_steps(path)
    assert [record.step for record in steps] == list(range(25))
    assert steps[10].values == {"loss": 2.5, "grad_norm": 1.0, "eval_loss": 2.5}
    assert steps[0].ts_ns == 1_700_000_000_000_000_000
    assert open_log(path).describe().format == "mlflow"


def test_nan_and_infinities_are_what_was_logged(store):
    rows = [
        (key, {("train/loss", 2): math.nan, ("grad_norm", 3): math.inf}.get((key, step), value), time, step)
        for key, value, time, step in points(0, 5, 0)
    ]
    steps = read_steps(store(rows))
    assert math.isnan(steps[2].values["loss"])
    assert steps[3].values["grad_norm"] == math.inf


def test_a_resume_opens_an_attempt_for_all_metrics(store):
    steps = read_steps(store([*points(0, 30, 0), *points(15, 25, 100_000)]))
    assert [(record.attempt, record.step) for record in steps] == [(0, n) for n in range(30)] + [
        (1, n) for n in range(15, 25)
    ]
    assert all("grad_norm" in record.values and "loss" in record.values for record in steps)


def test_one_of_several_runs_is_chosen_by_name_or_identity(tmp_path):
    path = tmp_path / "mlflow.db"
    database(path, {"one": list(points(0, 5, 0)), "two": list(points(0, 7, 0))})
    with pytest.raises(NoUsableDataError, match=r"2 runs: one-id \(one\), two-id \(two\).*PATH#RUN"):
        list(open_log(str(path)).records())
    assert len(read_steps(f"{path}#two")) == 7
    assert len(read_steps(f"{path}#one-i")) == 5


def test_several_runs_of_a_file_store_are_named(tmp_path):
    for run in ("one", "two"):
        folder = files(tmp_path, run, list(points(0, 5, 0)))
    with pytest.raises(NoUsableDataError, match=r"2 runs: 0/one \(steps 0 to 4\), 0/two"):
        open_log(str(tmp_path))
    assert len(read_steps(str(folder))) == 5


def test_a_failed_run_ends_with_an_exception(tmp_path):
    path = tmp_path / "mlflow.db"
    database(path, {"one": list(points(0, 5, 0))}, status="FAILED")
    assert [record.kind for record in open_log(str(path)).records() if not isinstance(record, StepRecord)] == [
        "exception"
    ]


def test_a_database_without_metrics_is_refused(tmp_path):
    path = tmp_path / "x.db"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE t (x)")
    connection.close()
    with pytest.raises(NoUsableDataError, match="no such table"):
        list(open_log(str(path)).records())


def test_lines_that_are_no_points_are_rejected_with_their_file(tmp_path):
    folder = files(tmp_path, "one", list(points(0, 5, 0)))
    with (folder / "metrics" / "grad_norm").open("a") as stream:
        stream.write("12 abc\n")
    log = open_log(str(tmp_path))
    list(log.records())
    assert [(one.line, "grad_norm" in one.why) for one in log.describe().rejected] == [(6, True)]


def test_times_that_are_none_are_left_out(tmp_path):
    database(tmp_path / "mlflow.db", {"a": [("loss", 2.5, 10**17, 1), ("loss", 2.4, 1_700_000_000_000, 2)]})
    records = [record for record in open_log(str(tmp_path / "mlflow.db")).records() if isinstance(record, StepRecord)]
    assert {record.step: record.ts_ns for record in records} == {1: 0, 2: 1_700_000_000 * 10**9}


def test_a_schema_whose_damage_sqlite_cannot_even_name(tmp_path):
    path = tmp_path / "mlflow.db"
    database(path, {"a": list(points(0, 5, 1000))})
    data = path.read_bytes()
    at = data.rindex(b"CREATE TABLE metrics")
    path.write_bytes(data[:at] + b"CRE\xbdTE" + data[at + 6 :])
    with pytest.raises(NoUsableDataError, match="no readable MLflow store"):
        list(open_log(str(path)).records())
