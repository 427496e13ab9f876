"""The numbers that a run reports of its own work, against what is counted, measured or worked out by hand."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest

from runhealth.storage.reader import RunReader
from runhealth.storage.store import RunInfo, Store
from runhealth.trainer import flops
from runhealth.trainer.config import CheckpointConfig, ModelConfig, OptimConfig, ParallelConfig, TrainConfig
from runhealth.trainer.data import DataConfig
from runhealth.trainer.layout import describe
from runhealth.trainer.model import build
from runhealth.trainer.parallel.pipeline import bubble_fraction
from runhealth.trainer.parallel.zero1 import partition
from runhealth.trainer.planner.shape import ModelShape
from runhealth.trainer.planner.traffic import all_gather, all_reduce
from runhealth.trainer.traffic import step_bytes

BASE = TrainConfig(
    steps=6,
    seed=5,
    world=1,
    data=DataConfig(shards=8, shard_bytes=2_048, piece_bytes=256, seq_len=16, batch_size=8),
    model=ModelConfig(layers=4, width=32, heads=4, ffn_width=64, fused=False),
    optim=OptimConfig(lr=3e-3, clip_threshold=0.5),
)


def configured(world: int, **parallel: Any) -> TrainConfig:
    return dataclasses.replace(BASE, world=world, parallel=ParallelConfig(**parallel))


# ------------------------------------------------------------------------------------------------ FLOP and parameters


def test_parameters_are_counted_as_the_model_has_them():
    built = sum(p.numel() for p in build(BASE.model, 16, 1).parameters())
    assert sum(flops.stage_parameters(BASE, 0)) == built
    staged = configured(2, pp=2, microbatches=2)
    assert sum(sum(flops.stage_parameters(staged, stage)) for stage in (0, 1)) == built


def test_flops_are_palms_formula_worked_out_by_hand():
    # a block: q, k, v, out of 32x32 and three of 32x64 = 10,240; four blocks and the head of 32x256 = 49,152
    assert flops.model_flops_per_token(BASE.model, 16) == 6 * 49_152 + 12 * 4 * 32 * 16
    assert flops.step_flops(configured(4, pp=2, microbatches=2)) == 2 * 8 * 16 * (6 * 49_152 + 12 * 4 * 32 * 16)
    assert flops.mfu(BASE, step_s=0.5, peak_flops_s=1e9) == pytest.approx(flops.step_flops(BASE) / 0.5e9)


def test_the_planner_counts_the_same_flops_and_parameters():
    shape = ModelShape(
        name="ours", layers=4, width=32, heads=4, kv_heads=4, ffn_width=64, vocabulary=256, tied=False, gated=True
    )
    assert shape.params == sum(flops.stage_parameters(BASE, 0))
    norms = 9 * 32  # the planner counts them as matrices
    assert shape.flops_a_token(16) - 6 * norms == flops.model_flops_per_token(BASE.model, 16)


# ------------------------------------------------------------------------------------------------------------- traffic


@pytest.mark.parametrize(
    "config",
    [
        configured(2),
        configured(2, kind="zero1"),
        configured(2, kind="zero2", microbatches=2),
        configured(2, kind="zero3", microbatches=2),
        configured(4, kind="hsdp", replicas=2),
        configured(2, tp=2),
        configured(2, tp=2, recompute="full"),
        configured(2, pp=2, microbatches=4),
        configured(2, pp=2, microbatches=4, schedule="interleaved", stages_per_rank=2),
        configured(4, pp=2, kind="zero3", microbatches=4),
        configured(4, pp=2, kind="zero2", microbatches=2),
    ],
    ids=describe,
)
def test_bytes_by_algorithm_are_those_of_the_collectives_that_ran(
    config: TrainConfig, run: Callable[..., dict[int, Any]]
):
    for rank, found in run(config.world, "collectives", config).items():
        counted = {"gather": 0.0, "reduce": 0.0, "tensor": 0.0, "pipeline": float(found["sent"])}
        for entry in found["entries"]:
            purpose, size_bytes = _ring(entry, config)
            counted[purpose] += size_bytes
        told = step_bytes(config, rank)
        assert counted == pytest.approx(told, abs=1.0), rank
        assert sum(told.values()) > 0


def _ring(entry: dict[str, Any], config: TrainConfig) -> tuple[str, float]:
    """Purpose and bytes of one recorded collective. gloo records a reduce-scatter as an all-reduce: what is one follows
    from the group, and in tensor parallelism from whether it is of activations."""
    name, group = entry["profiling_name"].removeprefix("gloo:"), entry["process_group"][1]
    assert set(entry["input_dtypes"]) == {"Float"}
    shape = entry["input_sizes"][0]
    size_bytes = 4 * math.prod(shape)
    if group == "mesh_tp":
        ranks = config.parallel.tp
        if name == "all_gather":
            return "tensor", all_gather(size_bytes * ranks, ranks)
        return "tensor", (all_reduce if len(shape) == 1 else all_gather)(size_bytes, ranks)
    if group == "mesh_replica":
        return "reduce", all_reduce(size_bytes, config.parallel.replicas)
    ranks = config.dp // config.parallel.replicas
    if name == "all_gather":
        return "gather", all_gather(size_bytes * ranks, ranks)
    if name == "broadcast":
        return "gather", all_gather(size_bytes, ranks)
    return "reduce", (all_gather if config.parallel.shards_state else all_reduce)(size_bytes, ranks)


def test_zero1_deals_out_parameters_evenly():
    owned = partition([100, 10, 60, 50, 30, 40], 3)
    assert sorted(at for mine in owned for at in mine) == [0, 1, 2, 3, 4, 5]
    assert sorted(sum([100, 10, 60, 50, 30, 40][at] for at in mine) for mine in owned) == [90, 100, 100]


# -------------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize(
    ("kind", "shares"), [("ddp", (1, 1, 1)), ("zero1", (1, 1, 2)), ("zero2", (2, 2, 2)), ("zero3", (2, 2, 2))]
)
def test_memory_by_part_is_what_each_stage_of_zero_says(
    kind: str, shares: tuple[int, int, int], run: Callable[..., dict[int, Any]]
):
    """4 bytes of parameter, 4 of gradient, 8 of moments each, divided by the share. (FSDP keeps parameters sharded
    between steps in stage 2 as well; the gathered ones live from the forward to the backward pass.)"""
    config = configured(2, kind=kind)
    whole = 4 * sum(flops.stage_parameters(config, 0))
    found = run(2, "memory", config)
    for part, share, factor in zip(("parameters", "gradients", "optimizer"), shares, (1, 1, 2), strict=True):
        total = sum(result[f"mem_{part}_bytes"] for result in found.values())
        counters = 400 if part == "optimizer" else 0  # AdamW counts the steps of each parameter
        assert total == pytest.approx(2 * factor * whole / share, abs=counters), part
        for result in found.values():
            assert result[f"mem_{part}_bytes"] == pytest.approx(total / 2, rel=0.02), part


def test_recomputation_keeps_less_and_pipelines_keep_what_is_in_flight(run: Callable[..., dict[int, Any]]):
    def kept(config: TrainConfig) -> list[int]:
        return [result["activations"] for result in run(config.world, "memory", config).values()]

    none, full = kept(configured(1))[0], kept(configured(1, recompute="full"))[0]
    stream = 4 * 8 * 16 * 32  # one block's input
    head = 8 * 16 * 256 * 4  # logits
    assert full < none / 4
    assert full >= 4 * stream + head
    assert kept(configured(2, kind="zero3"))[0] == pytest.approx(none, rel=0.05)  # gathered parameters do not count
    gpipe = kept(configured(2, pp=2, microbatches=4, schedule="gpipe"))[0]
    one_f_one_b = kept(configured(2, pp=2, microbatches=4))[0]
    # GPipe holds all four micro-batches on the first stage, 1F1B as many as there are stages: two
    assert gpipe == pytest.approx(2 * one_f_one_b, rel=0.1)


# -------------------------------------------------------------------------------------------------- bubble and waiting


def test_bubble_formula():
    assert bubble_fraction(ParallelConfig()) == 0.0
    assert bubble_fraction(ParallelConfig(pp=4, microbatches=8)) == pytest.approx(3 / 11)
    interleaved = ParallelConfig(pp=2, microbatches=4, schedule="interleaved", stages_per_rank=2)
    assert bubble_fraction(interleaved) == pytest.approx(1 / 9)


@pytest.mark.parametrize(
    "config",
    [
        configured(2, kind="zero3"),
        configured(2, pp=2, microbatches=2),
        configured(4, kind="zero2", pp=2, microbatches=2),
    ],
    ids=describe,
)
def test_the_rank_that_is_waited_for_waits_least(config: TrainConfig, run: Callable[..., dict[int, Any]]):
    slow = config.world - 1
    found = run(config.world, "waiting", config, slow, 0.15)
    waits = {rank: phases["wait"] for rank, phases in found.items()}
    assert min(waits, key=lambda rank: waits[rank]) == slow
    assert found[slow]["forward"] == max(phases["forward"] for phases in found.values())


def test_a_hang_is_noticed_in_every_sub_group_within_the_time_out(run: Callable[..., dict[int, Any]]):
    """The group of the world has 30 s here; the time-out of the run has to reach the groups of the mesh."""
    config = dataclasses.replace(configured(4, kind="zero3", pp=2, microbatches=2), timeout_s=3.0)
    found = run(4, "hang", config, 3)
    told = [result["said"] for rank, result in found.items() if rank != 3]
    assert all(told), told
    assert any("3000ms" in said for said in told)
    assert max(result["seconds"] for rank, result in found.items() if rank != 3) < 20.0


# ------------------------------------------------------------------------------------------- through the whole trainer


def test_a_pipeline_of_two_is_on_record(train: Callable[..., RunInfo], store: Store, tiny: TrainConfig):
    config = dataclasses.replace(
        tiny,
        model=dataclasses.replace(tiny.model, layers=2, precision="fp32"),
        parallel=ParallelConfig(pp=2, microbatches=2),
    )
    info = train("pipeline", config)
    with RunReader.open(info.name, store.root) as reader:
        steps = reader.sql("SELECT * FROM steps ORDER BY step, rank")
        batches = reader.sql("SELECT DISTINCT rank, samples FROM batches")
        layout = reader.sql("SELECT message, rank FROM events WHERE kind = 'layout'")
    first, last = (steps.filter(steps["rank"] == rank) for rank in (0, 1))
    assert first["loss"].is_null().all()
    assert last["loss"].is_not_null().all()
    assert batches.rows() == [(1, 2)]  # micro-batches, on the rank that knows their loss
    assert first["grad_norm"].is_not_null().all()
    assert set(first["comm_bytes"]) == {sum(step_bytes(config, 0).values())}
    assert set(first["stage"]) == {0}
    assert set(last["stage"]) == {1}
    for signal in ("mfu", "eval_loss"):
        assert first[signal].is_not_null().any()
    assert steps["bubble_fraction"].is_between(0.0, 1.0, closed="both").all()
    assert steps["mem_activations_bytes"].drop_nulls().gt(0).all()
    assert layout.rows() == [(f"{describe(config)}; mesh (pp 2), tensor parallelism innermost", 0)]


def test_the_whole_trainer_reports_the_same_numbers_in_another_layout(
    train: Callable[..., RunInfo], store: Store, tiny: TrainConfig
):
    """One process, against a pipeline of sharded stages on the same data."""
    model = ModelConfig(layers=2, width=16, heads=2, ffn_width=32, fused=False)
    one = dataclasses.replace(tiny, steps=6, world=1, model=model, updates_every=3)
    other = dataclasses.replace(
        one, world=4, parallel=ParallelConfig(kind="zero3", pp=2, tp=2, microbatches=2, recompute="selective")
    )
    signals = ("loss", "eval_loss", "grad_norm", "clip_coef", "update_ratio", "weight_norm", "lr", "consumed_samples")
    signals += ("epoch", "logit_max", "attn_logit_max", "sum_len_sq")
    found = []
    for config in (one, other):
        info = train(f"world-{config.world}", config)
        with RunReader.open(info.name, store.root) as reader:
            columns = ", ".join(f"max({signal})" for signal in signals)
            found.append(reader.sql(f"SELECT step, {columns} FROM steps GROUP BY step ORDER BY step").rows())
            lost = reader.sql("SELECT message FROM events WHERE kind = 'telemetry_lost'")
            assert lost.rows() == []
    assert len(found[0]) == len(found[1]) == config.steps
    for expected, met in zip(*found, strict=True):
        assert [value is None for value in met] == [value is None for value in expected]
        assert [v for v in met if v is not None] == pytest.approx([v for v in expected if v is not None], rel=2e-5)
    assert [row[5] is not None for row in found[1]] == [step % 3 == 0 for step in range(config.steps)]


@pytest.mark.parametrize(
    ("world", "parallel"), [(3, {}), (3, {"kind": "zero1"}), (2, {"kind": "zero3"}), (2, {"pp": 2, "microbatches": 2})]
)
def test_a_resumed_run_repeats_to_the_last_bit(
    world: int, parallel: dict[str, Any], train: Callable[..., RunInfo], store: Store, tiny: TrainConfig
):
    """In the same layout. DDP at three ranks needs its warm-up: without it, it sums the first step in another order."""
    config = dataclasses.replace(
        tiny,
        world=world,
        model=ModelConfig(layers=2, width=16, heads=2, ffn_width=32),
        parallel=ParallelConfig(**parallel),
        checkpoint=CheckpointConfig(every=6),
    )
    info = train("whole", config)
    train("whole", config, checkpoint="checkpoints/step-00000006")
    with RunReader.open(info.name, store.root) as reader:
        rows = reader.sql("SELECT attempt, step, rank, loss, grad_norm FROM steps WHERE step >= 6 ORDER BY step, rank")
    attempts = [rows.filter(rows["attempt"] == attempt).drop("attempt").rows() for attempt in (0, 1)]
    assert len(attempts[0]) == 6 * world
    assert attempts[0] == attempts[1]
