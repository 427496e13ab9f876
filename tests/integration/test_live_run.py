"""A second process reads a run while it trains."""

import subprocess
import sys
import time
from pathlib import Path

import duckdb
import pytest

from runhealth.storage.errors import RunNotFoundError
from runhealth.storage.reader import RunReader
from runhealth.storage.records import StepRecord

STEPS = 60


@pytest.mark.timeout(240)
def test_a_second_process_follows_a_live_run(tmp_path: Path) -> None:
    store = tmp_path / "runs"
    command = ["train", "--recipe", "demo", "--run", "live", "--store", str(store), "--steps", str(STEPS)]
    with (tmp_path / "train.log").open("w") as output:
        train = subprocess.Popen([sys.executable, "-m", "runhealth.cli", *command], stdout=output, stderr=output)
        try:
            seen, delays_s, published_while_live = _follow(train, store)
            assert train.wait(120) == 0, (tmp_path / "train.log").read_text()
        finally:
            if train.poll() is None:
                train.terminate()
                train.wait(30)
    keys = [(record.attempt, record.step, record.rank) for record in seen]
    assert len(keys) == len(set(keys)), "a step was delivered twice"
    assert len(delays_s) > 10, "steps were seen only after training had ended"
    assert published_while_live, "run.duckdb could not be opened by a plain DuckDB client during the run"
    print(f"a step was visible {1e3 * sorted(delays_s)[len(delays_s) // 2]:.1f} ms after it was recorded (median)")
    with RunReader.open("live", str(store)) as reader:
        everything = {
            (r.attempt, r.step, r.rank) for r in reader.records() if isinstance(r, StepRecord) and r.rank >= 0
        }
        count = reader.sql("SELECT count(DISTINCT (step, rank)) AS n FROM steps WHERE rank >= 0")["n"][0]
    assert {key for key in keys if key[2] >= 0} <= everything
    assert count == len(everything) == 2 * STEPS


def _follow(train: subprocess.Popen[bytes], store: Path) -> tuple[list[StepRecord], list[float], bool]:
    """Poll until training ends. Returns the step records, how long after its step each live one became visible, and
    whether a DuckDB client could query the published file meanwhile."""
    seen: list[StepRecord] = []
    delays_s: list[float] = []
    published_while_live = False
    reader: RunReader | None = None
    while train.poll() is None:
        if reader is None:
            try:
                reader = RunReader.open("live", str(store))
            except RunNotFoundError:
                time.sleep(0.05)
                continue
        for record in reader.poll():
            if isinstance(record, StepRecord):
                seen.append(record)
                delays_s.append(time.time() - record.ts_ns / 1e9)
        if not published_while_live and (store / "live" / "run.duckdb").exists():
            with duckdb.connect(str(store / "live" / "run.duckdb"), read_only=True) as client:
                published_while_live = client.sql("SELECT count(*) FROM steps").fetchall()[0][0] > 0
        time.sleep(0.01)
    if reader is not None:
        reader.close()
    return seen, delays_s, published_while_live
