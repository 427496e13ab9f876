"""A pipeline of two stages by GPipe: all forward passes, then all backward passes."""

from runhealth.trainer.config import ParallelConfig, TrainConfig
from runhealth.trainer.recipes._small import small


def config() -> TrainConfig:
    return small(2, ParallelConfig(pp=2, schedule="gpipe", microbatches=8))
