"""The demo: two ranks, small enough for two minutes on two cores."""

from runhealth.trainer.config import CheckpointConfig, ModelConfig, OptimConfig, TrainConfig
from runhealth.trainer.data import DataConfig


def config() -> TrainConfig:
    return TrainConfig(
        steps=640,
        seed=7,
        world=2,
        data=DataConfig(shards=64, shard_bytes=24_576, seq_len=32, batch_size=16),
        model=ModelConfig(layers=2, width=64, heads=4, ffn_width=160),
        optim=OptimConfig(lr=4e-3, warmup_steps=40, min_lr_ratio=0.1),
        checkpoint=CheckpointConfig(every=20),
        eval_every=40,
    )
