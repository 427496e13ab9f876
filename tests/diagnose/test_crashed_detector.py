"""A detector that raises costs the user nothing but its own findings."""

import pickle

import pytest

from runhealth.diagnose.detectors.loss_spike import LossSpike
from runhealth.diagnose.engine import Engine
from runhealth.diagnose.service import diagnose
from runhealth.storage.importers import open_log
from runhealth.storage.records import SourceInfo, StepRecord

SOURCE = SourceInfo(name="r", source="r", format="made")


def feed(engine, first, last):
    for step in range(first, last):
        loss = float("nan") if 70 <= step < 80 else 3.0 - step * 1e-3
        engine.feed(StepRecord(attempt=0, step=step, rank=0, values={"loss": loss}))


def broken(*_):
    raise ZeroDivisionError("of ours")


@pytest.mark.crashing_detectors
@pytest.mark.parametrize("method", ["update", "finish"])
def test_it_is_left_out_and_named_and_the_others_go_on(monkeypatch, method):
    monkeypatch.setattr(LossSpike, method, broken)
    engine = Engine()
    feed(engine, 0, 50)
    again = Engine()
    again.load_state_dict(pickle.loads(pickle.dumps(engine.state_dict())))
    feed(again, 50, 120)
    again.finish()
    report = again.report(SOURCE)
    assert report.source.notes == ("detector loss_spike failed and was left out (ZeroDivisionError: of ours)",)
    assert [finding.kind for finding in report.findings] == ["non_finite"]


@pytest.mark.crashing_detectors
def test_in_blocks_as_well(monkeypatch, tmp_path):
    monkeypatch.setattr(LossSpike, "update_block", broken)
    path = tmp_path / "log.csv"
    path.write_text("step,loss\n" + "".join(f"{s},{'nan' if s == 70 else 3 - s / 100}\n" for s in range(100)))
    report = diagnose(open_log(str(path)))
    assert any("loss_spike failed" in note for note in report.source.notes)
    assert "non_finite" in [finding.kind for finding in report.findings]


@pytest.mark.parametrize("cell", ["", "null", "inf"])
def test_a_log_with_nothing_but_a_loss_may_lack_some(tmp_path, cell):
    path = tmp_path / "log.csv"
    path.write_text("step,loss\n" + "".join(f"{s},{cell if s == 70 else 3 - s / 100}\n" for s in range(100)))
    found = {finding.kind: finding.onset_step for finding in diagnose(open_log(str(path))).findings}
    assert found["non_finite"] == 70
