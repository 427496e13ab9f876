"""A pipeline of four stages by 1F1B."""

from runhealth.trainer.config import ParallelConfig, TrainConfig
from runhealth.trainer.recipes._small import small


def config() -> TrainConfig:
    return small(4, ParallelConfig(pp=4, schedule="1f1b", microbatches=8))
