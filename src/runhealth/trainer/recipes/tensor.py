"""Tensor and sequence parallelism over two ranks."""

from runhealth.trainer.config import ParallelConfig, TrainConfig
from runhealth.trainer.recipes._small import small


def config() -> TrainConfig:
    return small(2, ParallelConfig(tp=2))
