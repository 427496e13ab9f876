"""A store that cannot be written: training goes on, one line says so, what is lost is counted."""

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from runhealth.instrument import Monitor
from runhealth.instrument.sink import OpenedLog
from runhealth.storage.errors import ConfigError, StoreError
from runhealth.storage.records import RunEvent, StepRecord
from runhealth.storage.tail import RunTail

Make = Callable[..., Monitor]


def _steps(monitor: Monitor, *numbers: int) -> None:
    for number in numbers:
        with monitor.step(number) as s:
            s.loss(float(number))


def test_an_outage_drops_and_counts_and_ends(monitor_for: Make, log, time, capsys) -> None:  # type: ignore[no-untyped-def]
    monitor = monitor_for(clock=time.clock)
    log.failing = StoreError(28, "No space left on device")
    _steps(monitor, 0, 1)
    log.failing = None
    _steps(monitor, 2)  # not tried again yet
    assert monitor.dropped == 3
    time.s += 1.0
    _steps(monitor, 3)
    assert [record.step for record in log.steps] == [3]
    assert log.steps[0].values["dropped"] == 3
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert "telemetry is lost" in lines[0]
    assert "No space left on device" in lines[0]
    assert "training goes on" in lines[0]
    assert "telemetry is written again; 3 records were lost" in lines[1]


def test_a_store_that_opens_late_is_tried_at_growing_intervals(monitor_for: Make, log, time) -> None:  # type: ignore[no-untyped-def]
    tries: list[float] = []

    def opener() -> OpenedLog:
        tries.append(time.s)
        if time.s < 120:
            raise StoreError("not mounted")
        return OpenedLog(attempt=5, log=log)

    monitor = monitor_for(clock=time.clock, opener=opener)
    for number in range(40):
        _steps(monitor, number)
        time.s += 1.0
    assert tries == [100.0, 101.0, 103.0, 107.0, 115.0, 131.0]
    assert [record.step for record in log.steps] == list(range(31, 40))
    assert {record.attempt for record in log.steps} == {5}


def test_a_step_counts_all_its_records(monitor_for: Make, log, tiny, tokens) -> None:  # type: ignore[no-untyped-def]
    monitor = monitor_for(model=tiny)
    log.failing = OSError("gone")
    with monitor.step(0) as s:
        s.batch(*tokens(0))
        s.batch(*tokens(1))
        s.record_layer("head", {"logit_max": 1.0})
    assert monitor.dropped == 4  # step, two batches, one layer


def test_records_that_cannot_be_written_are_no_outage(tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    with Monitor("run", str(tmp_path)) as monitor:
        for _ in range(2):
            monitor.event("odd", data={(1, 2): "keys of JSON are texts"})  # type: ignore[dict-item]
        with monitor.step("nonsense") as s:  # type: ignore[arg-type]
            s.record_layer("head", {"logit_max": "nonsense"})  # type: ignore[dict-item]
        _steps(monitor, 1)
        assert monitor.dropped == 2
    steps = [record for record in RunTail(str(tmp_path / "run")).read() if isinstance(record, StepRecord)]
    assert [record.step for record in steps] == [0, 1]
    error = capsys.readouterr().err
    assert error.count("records cannot be written") == 1
    assert "met 'nonsense'" in error


def test_a_store_path_that_is_a_file(tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "store").write_text("a file")
    with Monitor("run", str(tmp_path / "store")) as monitor:
        _steps(monitor, 0, 1, 2)
        assert monitor.dropped == 4  # the start of the attempt, too
    error = capsys.readouterr().err
    assert error.count("telemetry is lost") == 1
    assert str(tmp_path / "store") in error


def test_a_full_disk(tmp_path: Path) -> None:
    """A file size limit makes write() fail in the middle of a run, as a full disk does."""
    script = f"""
from runhealth.instrument import Monitor
with Monitor("run", {str(tmp_path)!r}) as monitor:
    for step in range(200):
        with monitor.step(step) as s:
            s.loss(1.0)
            s.record("x" * 50 + str(step), 1.0)
print("trained to the end", monitor.dropped)
"""
    limit = 8192
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("trained to the end")
    assert int(done.stdout.split()[-1]) > 0
    assert done.stderr.count("rank 0: telemetry is lost") == 1
    kept = [record.step for record in RunTail(str(tmp_path / "run")).read() if isinstance(record, StepRecord)]
    assert 0 < len(kept) < 200
    assert kept == list(range(len(kept)))  # what was written before is whole


def test_a_run_in_a_real_store(tmp_path: Path) -> None:
    for _ in range(2):
        with Monitor("run", str(tmp_path), config={"lr": 0.1}) as monitor:
            _steps(monitor, 0, 1)
    records = RunTail(str(tmp_path / "run")).read()
    assert [(r.attempt, r.step) for r in records if isinstance(r, StepRecord)] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    kinds = [r.kind for r in records if isinstance(r, RunEvent)]
    assert kinds == ["attempt_start", "attempt_end"] * 2


def test_an_end_without_close_is_recorded(tmp_path: Path) -> None:
    script = f"""
from runhealth.instrument import Monitor
monitor = Monitor("run", {str(tmp_path)!r})
with monitor.step(0) as s:
    s.loss(1.0)
"""
    subprocess.run([sys.executable, "-c", script], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert isinstance(RunTail(str(tmp_path / "run")).read()[-1], RunEvent)


@pytest.mark.parametrize("name", ["", "a/b", "latest"])
def test_a_run_name_that_no_store_takes(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError):
        Monitor(name, str(tmp_path))


def test_the_monitor_loads_no_database(tmp_path: Path) -> None:
    script = (
        "import sys, runhealth.instrument; sys.exit(any(m in sys.modules for m in ('duckdb', 'polars', 'pyarrow')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], check=False, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0


@pytest.mark.parametrize("how", ["argument", "variable"])
def test_a_monitor_writes_through_the_agent_and_goes_on_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    path, store = str(tmp_path / "agent.sock"), str(tmp_path / "store")
    command = [sys.executable, "-m", "runhealth.cli", "agent", "noted", "--store", store, "--socket", path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as agent:
        try:
            assert agent.stdout is not None
            agent.stdout.readline()
            if how == "variable":
                monkeypatch.setenv("RUNHEALTH_AGENT", path)
            monitor = Monitor("noted", store, config={"lr": 1}, agent=path if how == "argument" else None)
            _steps(monitor, 0, 1)
            attempt = Path(store, "noted", "log", "a000")
            assert [entry.name for entry in attempt.iterdir() if entry.is_dir()] == ["n00000"]
        finally:
            agent.kill()
    _steps(monitor, 2, 3)
    monitor.close()
    assert monitor.dropped == 0
    assert sorted(entry.name for entry in attempt.iterdir() if entry.is_dir()) == ["n00000", "r00000"]
    steps = [record.step for record in RunTail(f"{store}/noted").read() if isinstance(record, StepRecord)]
    assert steps == [0, 1, 2, 3]
    assert '"lr": 1' in Path(store, "noted", "run.json").read_text()
