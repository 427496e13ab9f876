"""What the recipes of the layouts have in common: a model that eight ranks can share on two cores."""

from typing import Any

from runhealth.trainer.config import CheckpointConfig, ModelConfig, OptimConfig, ParallelConfig, TrainConfig
from runhealth.trainer.data import DataConfig


def small(world: int, parallel: ParallelConfig | None = None, **changes: Any) -> TrainConfig:
    """`changes` are fields of the TrainConfig."""
    fields: dict[str, Any] = {
        "steps": 200,
        "seed": 11,
        "world": world,
        "data": DataConfig(shards=64, shard_bytes=16_384, seq_len=64, batch_size=8),
        "model": ModelConfig(layers=4, width=64, heads=4, ffn_width=160, fused=False),
        "parallel": parallel or ParallelConfig(),
        "optim": OptimConfig(lr=4e-3, warmup_steps=20),
        "checkpoint": CheckpointConfig(every=50, keep=3),
        "eval_every": 50,
        "updates_every": 10,
    }
    return TrainConfig(**{**fields, **changes})
