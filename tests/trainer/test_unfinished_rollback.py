"""A supervisor that is killed after it accepted a rollback and before an attempt began with it."""

import dataclasses
import fcntl
import os
import shutil
import threading
import time
from pathlib import Path

import pytest

from runhealth.diagnose.plans import Cost, RollbackPlan
from runhealth.storage.errors import CheckpointError, ConfigError, PlanError, StoreError
from runhealth.storage.reader import RunReader
from runhealth.storage.records import EventKind, RunEvent, StepRecord
from runhealth.storage.store import RunInfo, Store
from runhealth.trainer import checkpoints, rollback
from runhealth.trainer.config import CheckpointConfig, TrainConfig
from runhealth.trainer.launch import RunState
from runhealth.trainer.lock import owned
from runhealth.trainer.supervisor import Supervisor, create

EVERY, TARGET = 4, 4
PLAN = RollbackPlan(
    run="run",
    incident="a0-s6",
    attempt=0,
    cause="bad_shard",
    probability=0.99,
    onset_step=6,
    checkpoint_step=TARGET,
    checkpoint_path=checkpoints.relative_path(TARGET, 0),
    cost=Cost(steps=0, tokens=0, samples_skipped=0),
)


@pytest.fixture
def killed(tiny: TrainConfig, store: Store) -> RunInfo:
    """Trained to step 8; the plan was accepted after step 4 was saved and before step 8 was."""
    config = dataclasses.replace(tiny, steps=12, checkpoint=CheckpointConfig(every=EVERY), eval_every=1000)
    run = create(store, "run", config)
    assert Supervisor(store, run, stop_step=8, say=lambda _line: None).supervise() == 0
    late = Path(run.path) / checkpoints.relative_path(8, 0)
    shutil.move(late, Path(run.path) / "late")
    checked = rollback.check(PLAN, run="run", run_path=run.path, config=config, state=RunState.read(run.path))
    checked.state.write(run.path)
    shutil.move(Path(run.path) / "late", late)
    (Path(run.path) / "plans").mkdir()
    return run


@pytest.mark.parametrize("suffix", [rollback.APPLIED, rollback.PENDING])
def test_the_next_supervisor_makes_the_rollback(suffix: str, killed: RunInfo, store: Store):
    plans = Path(killed.path) / "plans"
    (plans / f"{PLAN.incident}{suffix}").write_text(PLAN.dumps())
    said: list[str] = []
    assert Supervisor(store, killed, say=said.append).supervise() == 0
    assert any("back to step 4 for a0-s6" in line for line in said)
    with RunReader.open("run", store.root) as reader:
        records = list(reader.records())
    assert min(r.step for r in records if isinstance(r, StepRecord) and r.attempt == 1) == TARGET
    made = [r for r in records if isinstance(r, RunEvent) and r.kind == EventKind.ROLLBACK]
    assert [(r.attempt, r.data["incident"], r.data["cause"]) for r in made] == [(1, "a0-s6", "bad_shard")]
    state = RunState.read(killed.path)
    assert state.returning == ""
    assert checkpoints.relative_path(8, 0) in state.superseded
    assert [path.name for path in plans.iterdir()] == [f"{PLAN.incident}{rollback.APPLIED}"]


def test_a_target_that_was_damaged_meanwhile_is_told_and_the_run_goes_on(killed: RunInfo, store: Store):
    (Path(killed.path) / PLAN.checkpoint_path / ".metadata").write_bytes(b"rot")
    said: list[str] = []
    assert Supervisor(store, killed, say=said.append).supervise() == 0
    assert any("the rollback that was accepted cannot be made" in line for line in said)
    assert RunState.read(killed.path).returning == ""


@pytest.mark.parametrize("path", ["../../elsewhere", "/etc", "checkpoints/step-00000777", "checkpoints/.."])
def test_only_checkpoints_of_the_run_are_gone_back_to(path: str, killed: RunInfo):
    state = dataclasses.replace(RunState.read(killed.path), returning=path)
    with pytest.raises(CheckpointError, match="is no checkpoint of this run"):
        rollback.unfinished(killed.path, killed.path, state)


def test_a_state_with_numbers_that_are_none_is_refused(tmp_path: Path):
    (tmp_path / "trainer.json").write_text(
        '{"skips": {}, "repairs": [], "superseded": [], "applied": [], "world": 1e999}'
    )
    with pytest.raises(ConfigError, match="expected the trainer's state"):
        RunState.read(str(tmp_path))


def test_whoever_asks_for_the_lock_for_a_moment_does_not_keep_a_supervisor_from_starting(tmp_path: Path):
    asking = os.open(tmp_path / "supervisor.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(asking, fcntl.LOCK_SH)

    def let_go() -> None:
        time.sleep(0.03)
        os.close(asking)

    other = threading.Thread(target=let_go)
    other.start()
    with owned("run", str(tmp_path)):
        pass
    other.join()


def test_a_lock_that_is_held_or_cannot_be_made_is_an_error_with_words(tmp_path: Path):
    again = pytest.raises(ConfigError, match="already being trained")
    with owned("run", str(tmp_path)), again, owned("run", str(tmp_path)):
        pass
    (tmp_path / "supervisor.lock").unlink()
    (tmp_path / "supervisor.lock").mkdir()
    with pytest.raises(StoreError, match="cannot be trained"), owned("run", str(tmp_path)):
        pass


def test_a_plan_too_large_for_any_plan_is_refused_unread(tmp_path: Path):
    path = tmp_path / f"x{rollback.PENDING}"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(PlanError, match="of at most 8,000,000 bytes"):
        rollback.read_plan(str(path))
