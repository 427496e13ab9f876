"""Measured utilisation held against the plan in the run's folder."""

import json
from pathlib import Path

import pytest

from runhealth.diagnose import against_plan
from runhealth.diagnose.engine import Engine
from runhealth.diagnose.findings import Severity
from runhealth.diagnose.service import diagnose
from runhealth.storage.errors import StoreError
from runhealth.storage.ranklog import RankLog
from runhealth.storage.reader import RunReader
from runhealth.storage.records import StepRecord
from runhealth.storage.store import Store

PLAN = {
    "recommended": {
        "words": "ZeRO-1 over 2 x pipeline 4",
        "mfu": 0.50,
        "bubble_fraction": 0.10,
        "memory_bytes": {"total": 50e9},
        "seconds": {"step": 2.0},
    }
}


def history(**values: float) -> Engine:
    engine = Engine()
    for step in range(64):
        engine.feed(StepRecord(attempt=0, step=step, rank=0, values={"loss": 2.0 - step * 1e-3, **values}))
    engine.finish()
    return engine


def keep(folder: Path, plan: object) -> str:
    (folder / "plan.json").write_text(plan if isinstance(plan, str) else json.dumps(plan))
    return str(folder)


def test_utilisation_far_under_the_plan_is_told_with_what_else_is_off(tmp_path: Path) -> None:
    engine = history(mfu=0.2, bubble_fraction=0.35, mem_allocated_bytes=70_000_000_000, t_step_s=5.0, t_wait_s=2.0)
    finding = against_plan.check(keep(tmp_path, PLAN), engine.history)
    assert finding is not None
    assert (finding.kind, finding.code, finding.severity) == ("low_mfu", "RH410", Severity.WARNING)
    for said in ("20.0%", "planned 50.0%", "idles 35.0%", "70 GB", "wait in collectives"):
        assert said in finding.summary


def test_only_what_is_off_is_told(tmp_path: Path) -> None:
    finding = against_plan.check(keep(tmp_path, PLAN), history(mfu=0.3, bubble_fraction=0.12).history)
    assert finding is not None
    assert "idles" not in finding.summary


@pytest.mark.parametrize("values", [{"mfu": 0.45}, {"mfu": 0.38}, {}, {"mfu": float("nan")}])
def test_quiet_when_as_planned_or_not_measured(tmp_path: Path, values: dict[str, float]) -> None:
    assert against_plan.check(keep(tmp_path, PLAN), history(**values).history) is None


def test_quiet_without_a_plan_and_where_nothing_fitted(tmp_path: Path) -> None:
    engine = history(mfu=0.01)
    assert against_plan.check(str(tmp_path), engine.history) is None
    assert against_plan.check(keep(tmp_path, {"recommended": None}), engine.history) is None


@pytest.mark.parametrize("plan", ["", "{", "[]", "{}", "3"])
def test_a_plan_that_is_none_is_named(tmp_path: Path, plan: str) -> None:
    with pytest.raises(StoreError, match=r"plan\.json: expected the answer of `runhealth plan"):
        against_plan.check(keep(tmp_path, plan), history(mfu=0.01).history)


def test_the_post_mortem_of_a_run_holds_it_against_its_plan(tmp_path: Path) -> None:
    run = Store(str(tmp_path)).create_run("planned")
    claimed = Store(str(tmp_path)).claim_attempt(run, "key")
    log = RankLog.create(claimed.path, 0)
    log.append([StepRecord(attempt=0, step=s, rank=0, values={"loss": 2.0, "mfu": 0.1}) for s in range(64)])
    log.close()
    keep(Path(run.path), PLAN)
    found = {f.kind: f for f in diagnose(RunReader.open("planned", str(tmp_path))).findings}
    assert "planned 50.0%" in found["low_mfu"].summary
    keep(Path(run.path), "{")
    report = diagnose(RunReader.open("planned", str(tmp_path)))
    assert "low_mfu" not in {f.kind for f in report.findings}
    assert any("plan.json" in note for note in report.source.notes)
