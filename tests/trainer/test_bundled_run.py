"""The run that ships with the package: real, complete, small, and without its own answer."""

import json
from pathlib import Path

import pytest

from runhealth.storage.reader import RunReader
from runhealth.storage.records import EventKind

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "40k-spike"


@pytest.fixture(scope="module")
def reader():
    with RunReader.open(str(FOLDER)) as opened:
        yield opened


def value(reader: RunReader, query: str) -> object:
    return reader.sql(query).row(0)[0]


def test_it_is_long_complete_and_small(reader: RunReader):
    steps = value(reader, "SELECT max(step) + 1 FROM steps")
    assert steps >= 41_000
    for rank in (0, 1):
        assert value(reader, f"SELECT count(DISTINCT step) FROM steps WHERE rank = {rank}") == steps
        assert value(reader, f"SELECT count(DISTINCT step) FROM batches WHERE rank = {rank}") == steps
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) <= 5_000_000


def test_it_does_not_give_its_answer_away(reader: RunReader):
    assert value(reader, f"SELECT count(*) FROM events WHERE kind = '{EventKind.FAULT_INJECTED}'") == 0
    assert "stale" not in (FOLDER / "run.json").read_text()
    assert json.loads((FOLDER / "run.json").read_text())["config"]["faults"] == []


def test_the_loss_is_smooth_then_spikes_near_40k_and_never_recovers(reader: RunReader):
    truth = json.loads((FOLDER / "truth.json").read_text())
    onset = truth["onset_step"]
    assert abs(onset - 40_000) < 1_000
    last = value(reader, "SELECT max(step) FROM steps")
    assert last - onset >= 1_200
    before = value(reader, f"SELECT avg(loss) FROM steps WHERE step BETWEEN {onset - 500} AND {onset - 1}")
    after = reader.sql(
        f"SELECT avg(loss) AS loss FROM steps WHERE step >= {onset} GROUP BY step // 100 ORDER BY step // 100"
    )["loss"]
    assert min(after) > before + 0.5


def test_the_last_good_checkpoint_is_the_newest_verified_before_the_onset(reader: RunReader):
    truth = json.loads((FOLDER / "truth.json").read_text())
    newest = value(
        reader, f"SELECT max(step) FROM checkpoints WHERE status = 'verified' AND step <= {truth['onset_step']}"
    )
    assert newest == truth["last_good_step"] <= truth["onset_step"] - 5
