"""ZeRO-2: gradients and optimizer state are sharded over four ranks."""

from runhealth.trainer.config import ParallelConfig, TrainConfig
from runhealth.trainer.recipes._small import small


def config() -> TrainConfig:
    return small(4, ParallelConfig(kind="zero2"))
