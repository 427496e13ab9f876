"""Every layout trains what single-process training trains: losses and true global gradient norms of six steps agree to
five digits. Multi-process tests run one after the other; `-k 3d` selects the composition of all."""

import dataclasses
from collections.abc import Callable
from typing import Any, get_args

import pytest

from runhealth.storage.errors import ConfigError
from runhealth.trainer import recipes
from runhealth.trainer.config import (
    DataParallel,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    Precision,
    Recompute,
    Schedule,
    TrainConfig,
)
from runhealth.trainer.data import DataConfig
from runhealth.trainer.layout import layers_of, loss_ranks, place

STEPS = 6
DIGITS = 1e-5
BASE = TrainConfig(
    steps=STEPS,
    seed=5,
    world=1,
    data=DataConfig(shards=8, shard_bytes=2_048, piece_bytes=256, seq_len=16, batch_size=8),
    model=ModelConfig(layers=4, width=32, heads=4, ffn_width=64, fused=False),
    optim=OptimConfig(lr=3e-3, clip_threshold=0.5),
)

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "ddp": (2, {}),
    "ddp-accumulation": (4, {"microbatches": 2}),
    "zero1": (2, {"kind": "zero1"}),
    "zero1-4": (4, {"kind": "zero1", "microbatches": 2}),
    "zero2": (2, {"kind": "zero2", "microbatches": 2}),
    "zero3": (2, {"kind": "zero3"}),
    "zero3-accumulation": (4, {"kind": "zero3", "microbatches": 2}),
    "hsdp": (4, {"kind": "hsdp", "replicas": 2}),
    "tp": (2, {"tp": 2}),
    "zero3-tp": (4, {"kind": "zero3", "tp": 2}),
    "gpipe": (2, {"pp": 2, "schedule": "gpipe", "microbatches": 4}),
    "1f1b": (2, {"pp": 2, "microbatches": 4}),
    "1f1b-4": (4, {"pp": 4, "microbatches": 8}),
    "interleaved": (2, {"pp": 2, "schedule": "interleaved", "stages_per_rank": 2, "microbatches": 4}),
    "pp-ddp": (4, {"pp": 2, "microbatches": 2}),
    "pp-zero1": (4, {"pp": 2, "kind": "zero1", "microbatches": 2}),
    "pp-zero2": (4, {"pp": 2, "kind": "zero2", "microbatches": 2}),
    "pp-tp": (4, {"pp": 2, "tp": 2, "microbatches": 2}),
    "full-recomputation": (2, {"recompute": "full", "kind": "zero3"}),
    "selective-recomputation": (2, {"recompute": "selective"}),
    "3d": (8, {"pp": 2, "tp": 2, "kind": "zero3", "microbatches": 4}),
    "3d-interleaved-recomputed": (
        8,
        {
            "pp": 2,
            "tp": 2,
            "kind": "zero2",
            "microbatches": 2,
            "schedule": "interleaved",
            "stages_per_rank": 2,
            "recompute": "selective",
        },
    ),
}


def configured(name: str, **changes: Any) -> TrainConfig:
    world, parallel = LAYOUTS[name]
    return dataclasses.replace(BASE, world=world, parallel=ParallelConfig(**parallel), **changes)


def assert_equal_training(
    config: TrainConfig, found: dict[int, Any], expected: dict[str, list[float]], digits: float
) -> None:
    """The mean loss over the data-parallel ranks, and the norm of every rank, at each step."""
    speakers = [rank for rank in loss_ranks(config) if place(config, rank).tp == 0]
    assert len(speakers) == config.dp
    for step in range(STEPS):
        losses = [found[rank]["losses"][step] for rank in speakers]
        assert sum(losses) / len(losses) == pytest.approx(expected["losses"][step], rel=digits), f"loss, step {step}"
        for rank in found:
            norm = found[rank]["norms"][step]
            assert norm == pytest.approx(expected["norms"][step], rel=digits), f"norm of rank {rank}, step {step}"


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_trains_what_one_process_trains(
    name: str, run: Callable[..., dict[int, Any]], alone: Callable[..., dict[str, list[float]]]
):
    config = configured(name)
    expected = alone(config, STEPS)
    assert expected["losses"][0] - expected["losses"][-1] > 0.3  # it learns, so agreement means something
    assert max(expected["norms"]) > config.optim.clip_threshold  # and is clipped, so a wrong norm would show
    found = run(config.world, "layout", config, STEPS)
    assert_equal_training(config, found, expected, DIGITS)
    knows = [rank for rank in found if found[rank]["losses"][0] is not None]
    assert knows == list(loss_ranks(config))
    assert [rank for rank in found if found[rank]["eval"] is not None] == knows
    assert len({round(found[rank]["eval"], 4) for rank in knows}) == 1
    if config.parallel.tp > 1 or config.parallel.shards_state:
        # also after an evaluation: stage 2 gathers for it, and must not leave the gathered copies behind
        assert not [name for rank in found for name in found[rank]["plain"]]
    _holds_its_share(config, found)


def _holds_its_share(config: TrainConfig, found: dict[int, Any]) -> None:
    """Names and sizes of what each rank holds: stages complete each other, shards divide."""
    parallel = config.parallel
    blocks = set()
    for rank, result in found.items():
        here = {int(name.split(".")[1]) for name in result["local"] if name.startswith("blocks.")}
        wanted = {
            layer
            for stage in range(place(config, rank).pp, parallel.stages, parallel.pp)
            for layer in layers_of(config, stage)
        }
        assert here == wanted
        blocks |= here
        shards = config.dp // parallel.replicas if parallel.shards_state else 1
        size = config.model.width**2 // parallel.tp // shards
        assert {result["local"][f"blocks.{layer}.out.weight"] for layer in here} == {size}
    assert blocks == set(range(config.model.layers))


@pytest.mark.parametrize(
    ("world", "parallel", "message"),
    [
        (2, {"tp": 4}, "multiple of tp x pp"),
        (4, {"tp": 2}, "tensor parallelism needs zero2"),
        (2, {"pp": 2, "microbatches": 1}, "as many microbatches as pipeline ranks"),
        (2, {"pp": 2, "microbatches": 3}, "multiple of microbatches"),
        (2, {"pp": 2, "stages_per_rank": 2, "microbatches": 4}, "interleaved needs stages_per_rank"),
        (8, {"pp": 8, "microbatches": 8}, "a layer a pipeline stage"),
        (2, {"kind": "hsdp"}, "hsdp needs replicas"),
        (16, {}, "at least one shard a rank"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(world: int, parallel: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(BASE, world=world, parallel=ParallelConfig(**parallel))


def test_fused_matrices_and_fp8_do_not_go_with_tensor_parallelism():
    for model in ({"fused": True}, {"fused": False, "precision": "fp8"}):
        with pytest.raises(ConfigError, match="tensor parallelism"):
            dataclasses.replace(
                BASE, world=2, parallel=ParallelConfig(tp=2), model=dataclasses.replace(BASE.model, **model)
            )


def test_there_is_a_recipe_for_every_layout_and_precision():
    configs = [recipes.load(name) for name in recipes.names()]
    assert "_small" not in recipes.names()
    assert {config.parallel.kind for config in configs} == set(get_args(DataParallel))
    assert {config.parallel.schedule for config in configs if config.parallel.pp > 1} == set(get_args(Schedule))
    assert {config.parallel.recompute for config in configs} == set(get_args(Recompute))
    assert {config.model.precision for config in configs} == set(get_args(Precision))
    three = recipes.load("parallel-3d")
    assert three.world == 8
    assert min(three.parallel.pp, three.parallel.tp, three.dp) > 1


def test_configs_from_before_the_layouts_still_load():
    raw = BASE.to_json()
    del raw["parallel"], raw["model"]["fused"]
    loaded = TrainConfig.from_json(raw)
    assert (loaded.parallel, loaded.model.fused, loaded.dp) == (ParallelConfig(), True, 1)
    assert TrainConfig.from_json(configured("3d").to_json()) == configured("3d")
