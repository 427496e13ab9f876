"""A world that shrinks: the same samples a step, the same curve of the loss, and ranks that are lost for good."""

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runhealth.diagnose.findings import Severity
from runhealth.diagnose.plans import SkipRange
from runhealth.diagnose.service import diagnose
from runhealth.storage.errors import ConfigError
from runhealth.storage.reader import RunReader
from runhealth.storage.records import BatchRecord, EventKind, Record, RunEvent, StepRecord
from runhealth.storage.store import RunInfo, Store
from runhealth.trainer import checkpoints, elastic
from runhealth.trainer.config import (
    CheckpointConfig,
    FaultSpec,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    TrainConfig,
)
from runhealth.trainer.data import BatchPlan, DataConfig, shard_name
from runhealth.trainer.launch import RunState
from runhealth.trainer.layout import loss_ranks, place
from runhealth.trainer.skips import SkipSet
from runhealth.trainer.supervisor import Supervisor, create

BASE = TrainConfig(
    steps=6,
    seed=5,
    world=4,
    data=DataConfig(shards=8, shard_bytes=2_048, piece_bytes=256, seq_len=16, batch_size=6),
    model=ModelConfig(layers=2, width=32, heads=4, ffn_width=64, fused=False),
    optim=OptimConfig(lr=3e-3, clip_threshold=0.5),
)


def shrunk(config: TrainConfig, room: int, gone: tuple[int, ...] = ()) -> TrainConfig:
    found = elastic.shrink(config, room, 1, gone)
    assert found is not None
    return found.config


def rows(plan: BatchPlan, step: int) -> list[tuple[int, int]]:
    """(shard, sample) of a whole step, in the order of the ranks' rows."""
    found = []
    for rank in range(plan.world):
        mine = {
            row: (part.shard, sample)
            for part in plan.batch(step, rank)
            for row, sample in zip(part.positions, part.samples, strict=True)
        }
        found += [mine[row] for row in range(len(mine))]
    return found


# ------------------------------------------------------------------------------------------------------------ data


def test_every_step_has_the_same_samples_in_the_same_rows_whatever_the_world():
    skips = SkipSet().add([SkipRange(shard=shard_name(n), first_sample=20, last_sample=70) for n in (1, 4)])
    before = BatchPlan(data=BASE.data, seed=5, world=4, skips=skips)
    for room in (3, 2, 1):
        config = shrunk(BASE, room)
        after = BatchPlan(data=config.data, seed=5, world=config.dp, skips=skips)
        assert after.streams == 4
        for step in range(3 * BASE.data.steps_per_visit):
            assert rows(before, step) == rows(after, step)


def test_streams_that_do_not_make_up_a_step_are_refused():
    with pytest.raises(ConfigError, match="multiple of stream_size 5"):
        BatchPlan(data=dataclasses.replace(BASE.data, stream_size=5), seed=1, world=2)
    with pytest.raises(ConfigError, match="a data-parallel rank below 4, met 4"):
        BatchPlan(data=BASE.data, seed=1, world=4).shard_of(0, 4)


# ---------------------------------------------------------------------------------------------------------- config


@pytest.mark.parametrize(
    ("world", "batch", "parallel", "room", "expected"),  # expected: world, rows a rank, micro-batches
    [
        (4, 6, {}, 3, (3, 8, 2)),  # 24 samples: 3 x 8, in parts of 4
        (4, 8, {}, 3, (2, 16, 2)),  # 32 samples do not go by 3
        (4, 8, {"microbatches": 2}, 2, (2, 16, 4)),
        (8, 8, {"kind": "zero3", "tp": 2}, 7, (4, 16, 2)),
        (8, 8, {"kind": "hsdp", "replicas": 2}, 7, (4, 16, 2)),
        (8, 12, {"pp": 2, "microbatches": 4}, 6, (6, 16, 8)),  # parts of 3 do not fit 16 rows
        (8, 8, {"pp": 2, "schedule": "interleaved", "stages_per_rank": 2, "microbatches": 4}, 7, (4, 16, 8)),
    ],
)
def test_the_largest_world_that_divides_the_samples_of_a_step(
    world: int, batch: int, parallel: dict[str, Any], room: int, expected: tuple[int, int, int]
):
    config = dataclasses.replace(
        BASE,
        world=world,
        data=dataclasses.replace(BASE.data, batch_size=batch),
        model=dataclasses.replace(BASE.model, layers=4),
        parallel=ParallelConfig(**parallel),
    )
    found = shrunk(config, room)
    assert (found.world, found.data.batch_size, found.parallel.microbatches) == expected
    assert found.dp * found.data.batch_size == config.dp * config.data.batch_size
    assert found.data.batch_size // found.parallel.microbatches <= batch // config.parallel.microbatches
    assert (found.parallel.tp, found.parallel.pp) == (config.parallel.tp, config.parallel.pp)
    assert TrainConfig.from_json(found.to_json()) == found
    again = elastic.shrink(found, found.world - 1, 1, ())
    assert again is None or again.config.data.stream_size == config.data.batch_size


def test_a_world_that_would_become_too_small_does_not_shrink():
    assert elastic.shrink(BASE, 3, 3, ()) is not None
    assert elastic.shrink(BASE, 3, 4, ()) is None
    assert elastic.shrink(dataclasses.replace(BASE, world=1), 0, 1, ()) is None
    pipeline = dataclasses.replace(BASE, world=2, parallel=ParallelConfig(pp=2, microbatches=2))
    assert elastic.shrink(pipeline, 1, 1, ()) is None  # no data parallelism to give up


def test_faults_of_a_rank_go_with_it_and_those_of_others_get_its_new_number():
    faults = (
        FaultSpec(name="dead_rank", params={"step": 3, "rank": 1}),
        FaultSpec(name="hang", params={"step": 3, "rank": 2}),
        FaultSpec(name="bad_shard", params={"step": 3, "rank": 2}),  # of a shard: its rank is a place in the plan
        FaultSpec(name="lr_change", params={"step": 3}),
    )
    found = elastic.shrink(dataclasses.replace(BASE, faults=faults), 3, 1, (1,))
    assert found is not None
    assert found.dropped == ("dead_rank",)
    assert [(f.name, f.params.get("rank")) for f in found.config.faults] == [
        ("hang", 1),
        ("bad_shard", 2),
        ("lr_change", None),
    ]


# -------------------------------------------------------------------------------------------------------- training


@pytest.mark.parametrize(
    ("parallel", "room", "world"),
    [
        ({}, 3, 3),
        ({"kind": "zero1"}, 2, 2),
        ({"kind": "zero3"}, 3, 3),
        ({"kind": "zero2"}, 1, 1),
        ({"kind": "zero3", "tp": 2}, 3, 2),
        ({"pp": 2, "microbatches": 2}, 3, 2),
    ],
    ids=["ddp", "zero1", "zero3", "zero2-alone", "zero3-tensor", "pipeline-ddp"],
)
def test_a_shrunk_world_trains_on_what_one_process_trains(
    parallel: dict[str, Any],
    room: int,
    world: int,
    tmp_path: Path,
    run: Callable[..., dict[int, Any]],
    alone: Callable[..., dict[str, list[float]]],
):
    """Three steps on four ranks, a checkpoint, three more on fewer: losses and norms are those of one process."""
    config = dataclasses.replace(BASE, parallel=ParallelConfig(**parallel))
    expected = alone(config, 6)
    saved = run(4, "save_layout", config, str(tmp_path / "run"), 3, 0, False)
    assert saved[0]["outcome"].verified
    less = shrunk(config, room)
    assert less.world == world
    folder = str(tmp_path / "run" / checkpoints.relative_path(3, 0))
    found = run(world, "load_layout", less, folder, 3)
    for step in range(3):
        losses = [found[rank]["losses"][step] for rank in loss_ranks(less) if place(less, rank).tp == 0]
        assert sum(losses) / len(losses) == pytest.approx(expected["losses"][3 + step], rel=1e-5)
        for rank in found:
            assert found[rank]["norms"][step] == pytest.approx(expected["norms"][3 + step], rel=1e-5)


def records(store: Store, run: str) -> list[Record]:
    with RunReader.open(run, store.root) as reader:
        return list(reader.records())


def curve(found: list[Record]) -> dict[int, float]:
    """The mean loss over the ranks by step, of the last attempt that took it."""
    by_step: dict[int, dict[tuple[int, int], float]] = {}
    for record in found:
        if isinstance(record, StepRecord) and record.rank >= 0 and "loss" in record.values:
            by_step.setdefault(record.step, {})[record.attempt, record.rank] = float(record.values["loss"])
    means = {}
    for step, losses in by_step.items():
        last = max(attempt for attempt, _ in losses)
        values = [loss for (attempt, _), loss in losses.items() if attempt == last]
        means[step] = sum(values) / len(values)
    return means


@pytest.mark.skipif(sys.platform != "linux", reason="signals and /proc")
def test_a_rank_that_dies_again_and_again_is_left_out_and_the_curve_goes_on(
    tiny: TrainConfig, store: Store, train: Callable[..., RunInfo]
):
    config = dataclasses.replace(
        tiny,
        steps=60,
        world=3,
        model=dataclasses.replace(tiny.model, precision="fp32"),
        checkpoint=CheckpointConfig(every=10),
        eval_every=1000,
    )
    train("undisturbed", config)
    fault = FaultSpec(name="dead_rank", params={"step": 25, "rank": 1})
    run = create(store, "run", dataclasses.replace(config, faults=(fault,)))
    said: list[str] = []
    assert Supervisor(store, run, max_restarts=1, min_world=2, say=said.append).supervise() == 0
    words = "the world shrinks from 3 to 2 ranks: 2 data-parallel ranks of 6 samples for 3 of 4, the same 12 a step"
    before = "run: the ranks failed 2 times without a new checkpoint"
    assert f"{before}; {words}; gone with a rank: dead_rank; on from checkpoints/step-00000020" in said

    found = records(store, "run")
    shrunk_events = [r for r in found if isinstance(r, RunEvent) and r.kind == "world_changed"]
    assert [(e.attempt, e.step, e.data["world"], e.data["ranks"]) for e in shrunk_events] == [(2, 20, 2, [1])]
    assert [r.attempt for r in found if isinstance(r, RunEvent) and r.kind == EventKind.RESUME] == [1, 2]

    expected = curve(records(store, "undisturbed"))
    met = curve(found)
    assert met.keys() == expected.keys() == set(range(60))
    for step, loss in met.items():
        assert loss == pytest.approx(expected[step], rel=1e-5), step

    plan = BatchPlan(data=config.data, seed=config.seed, world=3)
    for step in range(20, 60):
        batches = [r for r in found if isinstance(r, BatchRecord) and (r.attempt, r.step) == (2, step)]
        assert {r.rank for r in batches} == {0, 1}
        assert sum(r.samples for r in batches) == 12
        assert {r.shard for r in batches} == {shard_name(shard) for shard, _ in rows(plan, step)}
    taken = [r for r in found if isinstance(r, StepRecord) and r.attempt == 2 and "consumed_samples" in r.values]
    assert {r.step: r.values["consumed_samples"] for r in taken} == {step: 12 * (step + 1) for step in range(20, 60)}

    with RunReader.open("run", store.root) as reader:
        report = diagnose(reader)
    loud = {(f.attempt, f.kind) for f in report.findings if f.severity is not Severity.INFO}
    assert loud == {(0, "dead_rank"), (1, "dead_rank")}  # what happened, and nothing about the smaller world


def test_without_leave_to_shrink_the_run_ends_as_before(tiny: TrainConfig, store: Store):
    fault = FaultSpec(name="dead_rank", params={"step": 2, "rank": 1})
    run = create(store, "run", dataclasses.replace(tiny, faults=(fault,)))
    assert Supervisor(store, run, max_restarts=0, say=lambda _line: None).supervise() == 1
    assert not [r for r in records(store, "run") if isinstance(r, RunEvent) and r.kind == "world_changed"]


def test_an_exception_is_no_reason_to_shrink(tiny: TrainConfig, store: Store, monkeypatch: pytest.MonkeyPatch):
    """It comes of code or data, which every rank has."""
    monkeypatch.setenv("RUNHEALTH_DRILL", "exception:step=2,rank=1,attempt=-1")
    run = create(store, "run", tiny)
    assert Supervisor(store, run, max_restarts=0, min_world=1, say=lambda _line: None).supervise() == 1
    assert not [r for r in records(store, "run") if isinstance(r, RunEvent) and r.kind == "world_changed"]


def test_a_node_that_fails_again_and_again_gives_way_to_a_spare_then_is_left_out(
    tiny: TrainConfig, store: Store, monkeypatch: pytest.MonkeyPatch
):
    config = dataclasses.replace(tiny, steps=16, checkpoint=CheckpointConfig(every=4))
    monkeypatch.setenv("RUNHEALTH_DRILL", "kill:step=6,rank=1,attempt=0;kill:step=10,rank=1,attempt=1")
    run = create(store, "run", config)
    said: list[str] = []
    supervisor = Supervisor(store, run, max_restarts=0, nodes=2, spares=1, min_world=1, say=said.append)
    assert supervisor.supervise() == 0
    found = records(store, "run")
    changes = [
        (e.kind, e.attempt) for e in found if isinstance(e, RunEvent) and e.kind in ("node_left", "world_changed")
    ]
    assert changes == [("node_left", 1), ("world_changed", 2)]
    assert any("node n1 gives way to a spare" in line for line in said)
    assert not any("is gone" in line for line in said)  # those that were given up are not missed
    layouts = [e for e in found if isinstance(e, RunEvent) and e.kind == "layout"]
    assert [(e.attempt, e.message.split(":")[0]) for e in layouts] == [(0, "2 ranks"), (1, "2 ranks"), (2, "1 rank")]

    # whoever starts it anew says that all ranks are there again
    monkeypatch.delenv("RUNHEALTH_DRILL")
    assert Supervisor(store, run, stop_step=20, say=said.append).supervise() == 0
    found = [e for e in records(store, "run") if isinstance(e, RunEvent) and e.attempt == 3]
    assert [e.message.split(":")[0] for e in found if e.kind == "layout"] == ["2 ranks"]
    grown = [e for e in found if e.kind == "world_changed"]
    assert [(e.step, e.message) for e in grown] == [(16, "the world grows back from 1 to 2 ranks")]
    assert RunState.read(run.path).world == 0


def test_leave_to_shrink_that_could_never_be_used_is_refused_at_the_start(store: Store):
    four = dataclasses.replace(BASE, data=dataclasses.replace(BASE.data, batch_size=8))
    elastic.check_least(four, 2)
    for least in (3, 4, 5):
        with pytest.raises(ConfigError, match=rf"expected at most 2, .* 4 ranks, met {least}"):
            elastic.check_least(four, least)
    pipeline = dataclasses.replace(BASE, world=2, parallel=ParallelConfig(pp=2, microbatches=6))
    with pytest.raises(ConfigError, match="cannot shrink: its 2 ranks are 1 data-parallel rank of 2"):
        elastic.check_least(pipeline, 1)
    with pytest.raises(ConfigError, match="--min-world"):
        Supervisor(store, create(store, "run", four), min_world=4)


def test_one_rank_is_one_rank():
    found = elastic.shrink(dataclasses.replace(BASE, world=2), 1, 1, ())
    assert found is not None
    said = elastic.describe(dataclasses.replace(BASE, world=2), found.config)
    assert said.startswith("the world shrinks from 2 to 1 rank: 1 data-parallel rank of 12 samples for 2 of 6")
