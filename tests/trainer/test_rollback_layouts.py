"""`diagnose rollback plan` and `apply` on runs whose model is sharded, cut or spread over a pipeline: the samples of
the plan are skipped on every rank, all others stay, and training goes on from the checkpoint of the plan."""

import dataclasses
from pathlib import Path
from typing import Any

import fsspec
import pytest

from runhealth.diagnose import apply as applying
from runhealth.diagnose.cli import main as diagnose_main
from runhealth.diagnose.plans import Cost, RollbackPlan
from runhealth.storage.reader import RunReader
from runhealth.storage.records import BatchRecord, CheckpointRecord, CheckpointStatus, Record, RunEvent, StepRecord
from runhealth.storage.store import Store
from runhealth.trainer import checkpoints
from runhealth.trainer.config import CheckpointConfig, FaultSpec, ParallelConfig, TrainConfig
from runhealth.trainer.data import BatchPlan, shard_name
from runhealth.trainer.launch import RunState
from runhealth.trainer.supervisor import Supervisor, create

STEPS, BAD_STEP, EVERY = 70, 50, 10


def records(store: Store, run: str) -> list[Record]:
    with RunReader.open(run, store.root) as reader:
        return list(reader.records())


def batches(found: list[Record], attempt: int) -> dict[tuple[int, int], set[tuple[str, int, int]]]:
    """(step, rank) -> its parts."""
    by_place: dict[tuple[int, int], set[tuple[str, int, int]]] = {}
    for r in found:
        if isinstance(r, BatchRecord) and r.attempt == attempt:
            by_place.setdefault((r.step, r.rank), set()).add((r.shard, r.first_sample, r.last_sample))
    return by_place


@pytest.mark.parametrize(
    ("world", "parallel"),
    [
        (2, {"kind": "zero1"}),
        (2, {"kind": "zero3"}),
        (2, {"tp": 2}),
        (4, {"pp": 2, "microbatches": 2}),
    ],
    ids=["zero1", "zero3", "tensor", "pipeline"],
)
def test_a_plan_skips_its_samples_on_every_rank_in_any_layout(
    world: int,
    parallel: dict[str, Any],
    tiny: TrainConfig,
    store: Store,
    capsys: pytest.CaptureFixture[str],
):
    model = dataclasses.replace(tiny.model, layers=2, precision="fp32", fused=False)
    config = dataclasses.replace(
        tiny,
        steps=STEPS,
        world=world,
        model=model,
        parallel=ParallelConfig(**parallel),
        checkpoint=CheckpointConfig(every=EVERY),
        eval_every=1000,
    )
    config = dataclasses.replace(
        config, faults=(FaultSpec(name="bad_shard", params={"step": BAD_STEP, "rank": config.dp - 1}),)
    )
    shard = shard_name(BatchPlan(data=config.data, seed=config.seed, world=config.dp).shard_of(BAD_STEP, config.dp - 1))
    run = create(store, "run", config)
    assert Supervisor(store, run, stop_step=STEPS - 5, say=lambda _line: None).supervise() == 0

    assert diagnose_main(["rollback", "plan", "--run", "run", "--store", store.root]) == 0
    plan = applying.read_plan(applying.newest_plan(run.path))
    assert plan.cause == "bad_shard"
    assert {skip.shard for skip in plan.skip} == {shard}
    assert diagnose_main(["rollback", "apply", "--run", "run", "--store", store.root]) == 0
    assert "is not applied" not in capsys.readouterr().err

    found = records(store, "run")
    loaded = [r for r in found if isinstance(r, CheckpointRecord) and r.status is CheckpointStatus.LOADED]
    assert [(r.attempt, r.step) for r in loaded] == [(1, plan.checkpoint_step)]
    before, after = batches(found, 0), batches(found, 1)
    skips = RunState.read(run.path).skips
    assert skips.ranges.keys() == {shard}
    expected = BatchPlan(data=config.data, seed=config.seed, world=config.dp, skips=skips)
    touched = 0
    for (step, rank), parts in after.items():
        met = {(name, sample) for name, first, last in parts for sample in (first, last)}
        assert not any(skips.covers(name, sample) for name, sample in met), (step, rank)
        if (step, rank) in before and not any(name == shard for name, _, _ in before[step, rank]):
            assert parts == before[step, rank]  # nobody else's samples moved
        elif (step, rank) in before:
            touched += 1
    assert touched > 0
    for step in range(plan.checkpoint_step, STEPS):
        read = {name for (at, _), parts in after.items() if at == step for name, _, _ in parts}
        assert read == {shard_name(part.shard) for dp in range(config.dp) for part in expected.batch(step, dp)}
    steps = {(r.rank, r.step) for r in found if isinstance(r, StepRecord) and r.attempt == 1 and r.rank >= 0}
    assert steps == {(rank, step) for rank in range(world) for step in range(plan.checkpoint_step, STEPS)}
    assert checkpoints.newest_verified(run.path, RunState.read(run.path).superseded)[0] is not None
    assert not [r for r in found if isinstance(r, RunEvent) and r.kind == "exception"]


# ---------------------------------------------------------------------------------------------------- remote targets


def plan_to(path: str) -> RollbackPlan:
    return RollbackPlan(
        run="run",
        incident="a0-s50",
        attempt=0,
        cause="bad_shard",
        probability=0.99,
        onset_step=50,
        checkpoint_step=40,
        checkpoint_path=path,
        cost=Cost(steps=0, tokens=0, samples_skipped=0),
    )


def test_a_checkpoint_behind_a_url_is_looked_for_there(tiny: TrainConfig, store: Store):
    target = f"memory://{Path(store.root).parent.name}"
    run = create(store, "run", dataclasses.replace(tiny, checkpoint=CheckpointConfig(every=10, target=target)))
    path = checkpoints.relative_path(40, 0)

    def holds(checkpoint: str) -> list[bool]:
        checks = applying.check(plan_to(checkpoint), "run", run.path)
        return [check.holds for check in checks[1:3]]  # it exists, its manifest is committed

    (Path(run.path) / path).mkdir(parents=True)  # one in the run's own folder is not meant
    assert holds(path) == [False, False]
    memory = fsspec.filesystem("memory")
    memory.pipe_file(f"{target}/run/{path}/.metadata", b"meta")
    assert holds(path) == [True, False]
    memory.pipe_file(f"{target}/run/{path}/MANIFEST.json", b"{}")
    assert holds(path) == [True, True]
    memory.pipe_file(f"{target}/other/{path}/MANIFEST.json", b"{}")
    assert holds(f"../other/{path}") == [False, False]
    assert holds(f"{target}/run/{path}") == [False, False]


def test_a_target_that_cannot_be_opened_is_said(tiny: TrainConfig, store: Store):
    settings = CheckpointConfig(every=10, target="nosuch://bucket/x")
    run = create(store, "run", dataclasses.replace(tiny, checkpoint=settings))
    broken = applying.check(plan_to(checkpoints.relative_path(40, 0)), "run", run.path)[1]
    assert not broken.holds
    assert "nosuch" in broken.why
