"""The supervisor with real torchrun children: crash, plan, Ctrl-C, kill -9."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from runhealth.diagnose.plans import Cost, Repair, RollbackPlan, SkipRange
from runhealth.storage.errors import ConfigError, MissingExtraError, PlanError
from runhealth.storage.reader import RunReader
from runhealth.storage.records import (
    BatchRecord,
    CheckpointRecord,
    CheckpointStatus,
    EventKind,
    Record,
    RunEvent,
    StepRecord,
)
from runhealth.storage.store import RunInfo, Store
from runhealth.trainer import checkpoints, nodes, rollback
from runhealth.trainer import supervisor as supervising
from runhealth.trainer.attempt import Progress
from runhealth.trainer.config import CheckpointConfig, FaultSpec, TrainConfig
from runhealth.trainer.launch import RunState
from runhealth.trainer.processes import descendants
from runhealth.trainer.supervisor import INTERRUPTED, Supervisor, create

SCRIPT = """
import sys
from runhealth.storage.store import Store
from runhealth.trainer.supervisor import Supervisor
store = Store(sys.argv[1])
sys.exit(Supervisor(store, store.resolve("run"), on_progress=lambda p: print(p.step, flush=True)).supervise())
"""


def records(store: Store, run: str) -> list[Record]:
    with RunReader.open(run, store.root) as reader:
        return list(reader.records())


def long_run(config: TrainConfig, **changes: object) -> TrainConfig:
    changed = {"steps": 400, "checkpoint": CheckpointConfig(every=20), "eval_every": 1000, **changes}
    return dataclasses.replace(config, **changed)  # type: ignore[arg-type]


def plan_for(step: int, **changes: object) -> RollbackPlan:
    plan = RollbackPlan(
        run="run",
        incident="a0-s50",
        attempt=0,
        cause="bad_shard",
        probability=0.99,
        onset_step=step + 10,
        checkpoint_step=step,
        checkpoint_path=checkpoints.relative_path(step, 0),
        cost=Cost(steps=0, tokens=0, samples_skipped=0),
    )
    return dataclasses.replace(plan, **changes)  # type: ignore[arg-type]


def rank_process(run: RunInfo, rank: int) -> int:
    """The pid of a rank."""
    status: dict[str, dict[str, int]] = json.loads((Path(run.path) / "supervisor.json").read_text())
    return status["ranks"][str(rank)]


def wait_until(condition: Callable[[], object], what: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="finds the rank through /proc")
def test_a_killed_rank_restarts_from_the_verified_checkpoint_and_finishes(tiny: TrainConfig, store: Store):
    run = create(store, "run", long_run(tiny, steps=120))
    said: list[str] = []

    def kill_once(progress: Progress) -> None:
        if progress.attempt == 0 and progress.step >= 20 and not said:
            said.append("killed")
            os.kill(rank_process(run, 1), signal.SIGKILL)

    assert Supervisor(store, run, on_progress=kill_once, say=said.append).supervise() == 0
    assert said[0] == "killed"
    found = records(store, "run")
    resumed = [r for r in found if isinstance(r, RunEvent) and r.kind == EventKind.RESUME]
    assert [r.attempt for r in resumed] == [1]
    start = resumed[0].step
    loaded = [r for r in found if getattr(r, "status", None) == CheckpointStatus.LOADED]
    assert [(r.step, r.path) for r in loaded] == [(start, checkpoints.relative_path(start, 0))]
    assert start >= 20
    steps = {(r.rank, r.step) for r in found if isinstance(r, StepRecord) and r.attempt == 1}
    assert {(rank, step) for rank in (0, 1) for step in range(start, 120)} <= steps
    failures = [r for r in found if isinstance(r, RunEvent) and r.kind == EventKind.EXCEPTION and r.rank == -1]
    assert [f.data["ranks"] for f in failures] == [[1]]
    assert failures[0].message == "rank 1 was killed (signal 9, SIGKILL)"
    assert any("attempt 0 ended with exit code -9: rank 1 was killed" in line for line in said)
    dead = [r for r in found if isinstance(r, RunEvent) and r.kind == "dead_rank"]
    assert [(e.attempt, e.data["ranks"]) for e in dead] == [(0, [1])]


def test_a_checkpoint_that_cannot_be_loaded_gives_way_to_the_one_before(tiny: TrainConfig, store: Store):
    run = create(store, "run", dataclasses.replace(tiny, checkpoint=CheckpointConfig(every=4)))
    assert Supervisor(store, run, stop_step=8).supervise() == 0
    bad = Path(run.path) / checkpoints.relative_path(8, 0)
    (bad / checkpoints.MANIFEST).unlink()
    (bad / ".metadata").write_bytes(bytes(200))
    checkpoints.commit(str(bad), step=8, attempt=0, world=2, finite=True)  # who tampers may write a manifest as well
    checkpoints.verify(str(bad))
    said: list[str] = []
    assert Supervisor(store, run, max_restarts=0, say=said.append).supervise() == 0
    assert any("step-00000008 passes verification but cannot be loaded" in line for line in said)
    assert any("falling back to checkpoints/step-00000004" in line for line in said)
    found = [r for r in records(store, "run") if isinstance(r, CheckpointRecord) and r.attempt == 2]
    assert (CheckpointStatus.LOADED, 4) in {(r.status, r.step) for r in found}
    assert [r.step for r in found if r.status is CheckpointStatus.FAILED] == [8]


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_a_plan_is_applied_to_a_live_run_and_ctrl_c_leaves_no_process(tiny: TrainConfig, store: Store):
    faulty = FaultSpec(name="bad_shard", params={"step": 50, "rank": 1, "mode": "noise"})
    run = create(store, "run", long_run(tiny, steps=4000, faults=(faulty,)))
    shard = next(iter(supervising_label(run)))
    samples = tiny.data.samples_per_shard
    child = subprocess.Popen([sys.executable, "-c", SCRIPT, store.root], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    try:
        wait_until(lambda: (Path(run.path) / "checkpoints/step-00000060/MANIFEST.json").exists(), "step 60")
        with pytest.raises(ConfigError, match=f"already being trained by process {child.pid}"):
            Supervisor(store, run).supervise()

        plans = Path(run.path) / "plans"
        plans.mkdir(exist_ok=True)
        wrong = plan_for(40, incident="wrong", checkpoint_path="checkpoints/step-00000999")
        (plans / f"wrong{rollback.PENDING}").write_text(wrong.dumps())
        wait_until(lambda: (plans / f"wrong{rollback.FAILED}").exists(), "the refusal of the wrong plan")
        assert "step-00000999" in (plans / "wrong.failed.txt").read_text()

        skip = (SkipRange(shard=shard, first_sample=0, last_sample=samples - 1),)
        temporary = plans / "a0-s50.tmp"
        temporary.write_text(plan_for(20, skip=skip).dumps())
        temporary.rename(plans / f"a0-s50{rollback.PENDING}")
        wait_until(lambda: (plans / f"a0-s50{rollback.APPLIED}").exists(), "the plan to be applied")
        wait_until(lambda: (Path(run.path) / "checkpoints/step-00000060-a001/MANIFEST.json").exists(), "attempt 1")

        family = descendants(child.pid)
        assert len(family) >= 3
        child.send_signal(signal.SIGINT)
        assert child.wait(30) == INTERRUPTED
        wait_until(lambda: not any(map(alive, family)), "all processes to end", 5)
    finally:
        child.kill()
        child.wait()
        child.stdout.close()

    found = records(store, "run")
    batches = [r for r in found if isinstance(r, BatchRecord)]
    assert any(r.shard == shard for r in batches if r.attempt == 0)
    assert not any(r.shard == shard for r in batches if r.attempt == 1)
    assert min(r.step for r in batches if r.attempt == 1) == 20
    rollbacks = [r for r in found if isinstance(r, RunEvent) and r.kind == EventKind.ROLLBACK]
    assert [(r.attempt, r.data["incident"]) for r in rollbacks] == [(1, "a0-s50")]
    assert not [r for r in found if isinstance(r, RunEvent) and r.kind == EventKind.EXCEPTION]

    state = RunState.read(run.path)
    assert state.skips.covers(shard, 0)
    assert checkpoints.relative_path(40, 0) in state.superseded
    newest, _ = checkpoints.newest_verified(run.path, state.superseded)
    assert newest is not None
    assert newest.attempt == 1


def supervising_label(run: RunInfo) -> tuple[str, ...]:
    from runhealth.trainer.data import BatchPlan
    from runhealth.trainer.fault import FaultContext
    from runhealth.trainer.fault import create as create_fault

    config = TrainConfig.from_json(run.config)
    plan = BatchPlan(data=config.data, seed=config.seed, world=config.world)
    return create_fault(config.faults[0], FaultContext(config=config, plan=plan, rank=0)).label().shards


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG")
def test_kill_9_of_the_supervisor_takes_all_ranks_along(tiny: TrainConfig, store: Store):
    run = create(store, "run", long_run(tiny, steps=4000))
    child = subprocess.Popen([sys.executable, "-c", SCRIPT, store.root], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    try:
        wait_until(lambda: (Path(run.path) / "checkpoints/step-00000020/MANIFEST.json").exists(), "step 20")
        family = descendants(child.pid)
        assert len(family) >= 3
        child.kill()
        child.wait(10)
        wait_until(lambda: not any(map(alive, family)), "all processes to end", 10)
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


def test_ranks_that_keep_failing_end_with_1_and_their_output_is_kept(
    tiny: TrainConfig, store: Store, monkeypatch: pytest.MonkeyPatch
):
    run = create(store, "run", tiny)
    said: list[str] = []
    failing = [sys.executable, "-c", "print('boom'); raise SystemExit(3)"]
    real = subprocess.Popen
    monkeypatch.setattr(nodes.subprocess, "Popen", lambda _command, **options: real(failing, **options))
    assert Supervisor(store, run, max_restarts=1, say=said.append).supervise() == 1
    assert sum("node" in line and "was lost with ranks 0, 1" in line for line in said) == 2
    assert (Path(run.path) / "launch" / "a001.log").read_text() == "boom\n"


def test_sigterm_while_the_nodes_load_ends_them_before_they_start_a_rank(
    tiny: TrainConfig, store: Store, monkeypatch: pytest.MonkeyPatch
):
    run = create(store, "run", tiny)
    start, close = nodes.Nodes.start, nodes.Nodes.close
    left: list[tuple[dict[int, int], list[int]]] = []

    def start_and_be_told_to_end(self: nodes.Nodes, launch: Path, world: int) -> list[str]:
        joined = start(self, launch, world)
        os.kill(os.getpid(), signal.SIGTERM)
        return joined

    def closing(self: nodes.Nodes, grace_s: float) -> None:
        left.append((self.pids, descendants(os.getpid())))
        close(self, grace_s)

    monkeypatch.setattr(nodes.Nodes, "start", start_and_be_told_to_end)
    monkeypatch.setattr(nodes.Nodes, "close", closing)
    before = set(descendants(os.getpid()))
    assert Supervisor(store, run, nodes=2, say=lambda _line: None).supervise() == INTERRUPTED
    ranks, children = left[0]
    assert ranks == {}
    assert not [pid for pid in children if pid not in before and alive(pid)]
    assert not [r for r in records(store, "run") if isinstance(r, RunEvent) and r.kind == EventKind.EXCEPTION]


def test_missing_torch_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(supervising.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'runhealth\[train\]'"):
        supervising.require_torch()


def test_the_command_and_the_supervisor_do_not_import_torch():
    code = (
        "import sys, runhealth.trainer.commands, runhealth.trainer.supervisor, runhealth.trainer.demo;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ------------------------------------------------------------------------------------------------ plans against a run


@pytest.fixture
def saved(tiny: TrainConfig, store: Store) -> RunInfo:
    """A run with committed checkpoints 20, 40 and 60 of plain bytes."""
    run = create(store, "run", tiny)
    for step in (20, 40, 60):
        folder = Path(run.path) / checkpoints.relative_path(step, 0)
        folder.mkdir(parents=True)
        (folder / ".metadata").write_bytes(b"meta")
        checkpoints.commit(str(folder), step=step, attempt=0, world=2, finite=True)
    return run


def check(run: RunInfo, plan: RollbackPlan, config: TrainConfig, state: RunState | None = None) -> rollback.Rollback:
    return rollback.check(plan, run="run", run_path=run.path, config=config, state=state or RunState())


def test_an_accepted_plan_becomes_state_that_survives(tiny: TrainConfig, saved: RunInfo):
    skip = (SkipRange(shard="0003", first_sample=1, last_sample=5),)
    made = check(saved, plan_for(20, skip=skip, repairs=(Repair(kind="fresh_amax"),)), tiny)
    made.state.write(saved.path)
    again = RunState.read(saved.path)
    assert again == made.state
    assert again.skips.covers("0003", 3)
    assert again.superseded == (checkpoints.relative_path(40, 0), checkpoints.relative_path(60, 0))
    with pytest.raises(PlanError, match="was already applied"):
        check(saved, plan_for(20), tiny, again)
    with pytest.raises(PlanError, match="left behind"):
        check(saved, plan_for(40, incident="later"), tiny, again)


def damaged(run: RunInfo) -> None:
    (Path(run.path) / checkpoints.relative_path(20, 0) / ".metadata").write_bytes(b"mete")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"run": "other"}, "expected a plan for run 'run', met 'other'"),
        ({"incident": "../x"}, "without slashes"),
        ({"checkpoint_path": "../../x"}, "expected a folder in checkpoints/"),
        ({"checkpoint_path": "/etc"}, "expected a folder in checkpoints/"),
        ({"checkpoint_path": "s3://bucket/x"}, "met the URL"),
        ({"checkpoint_path": "checkpoints/step-00000030"}, "fails verification"),
        ({"checkpoint_path": "checkpoints/step-00000040"}, "expected step 20"),
        ({"skip": (SkipRange(shard="0099", first_sample=0, last_sample=1),)}, "expected a shard 0000 to 0007"),
        ({"skip": (SkipRange(shard="0001", first_sample=0, last_sample=999),)}, "expected samples below 127"),
        ({"repairs": (Repair(kind="reset_loss_scale"),)}, "no loss scale"),
        ({"repairs": (Repair(kind="lower_clip_threshold"),)}, "expected a value > 0"),
        ({"incident": "i" * 201}, "of at most 200 bytes"),
        (
            {"skip": tuple(SkipRange(shard=f"{i:04d}", first_sample=0, last_sample=126) for i in range(8))},
            "nothing is left to train on",
        ),
    ],
)
def test_plans_that_do_not_fit_are_refused(tiny: TrainConfig, saved: RunInfo, changes: dict[str, object], message: str):
    check(saved, plan_for(20), tiny)
    with pytest.raises(PlanError, match=message):
        check(saved, plan_for(20, **changes), tiny)


def test_numbers_of_a_plan_are_finite():
    text = plan_for(20, repairs=(Repair(kind="lower_clip_threshold", value=float("inf")),)).dumps()
    with pytest.raises(PlanError, match=r"repairs\[0\]: expected value as a finite number, met inf"):
        RollbackPlan.loads(text)


@pytest.mark.timeout(20)
def test_only_plain_files_wait_to_be_applied(saved: RunInfo):
    plans = Path(saved.path) / "plans"
    plans.mkdir()
    os.mkfifo(plans / "pipe.apply.json")
    (plans / "nowhere.apply.json").symlink_to(plans / "gone")
    (plans / "real.apply.json").write_text("{}")
    assert [path.name for path in rollback.pending(saved.path)] == ["real.apply.json"]


def test_a_plan_that_the_disk_does_not_take_is_set_aside_and_changes_nothing(
    store: Store, saved: RunInfo, monkeypatch: pytest.MonkeyPatch
):
    said: list[str] = []
    supervisor = Supervisor(store, saved, say=said.append)
    path = Path(saved.path) / "plans" / "a0-s50.apply.json"
    path.parent.mkdir()
    path.write_text(plan_for(20).dumps())

    def full(*_arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("runhealth.trainer.launch.write_whole", full)
    assert supervisor._apply_pending(path) is None
    assert supervisor._apply_pending(path) is None  # it is not tried ten times a second
    assert len(said) == 1
    assert "No space left on device" in said[0]
    assert supervisor.state == RunState()
    assert path.exists()


def test_a_plan_to_a_damaged_checkpoint_is_refused_before_anything_stops(tiny: TrainConfig, saved: RunInfo):
    damaged(saved)
    with pytest.raises(PlanError, match=r"\.metadata: expected xxh3"):
        check(saved, plan_for(20), tiny)
