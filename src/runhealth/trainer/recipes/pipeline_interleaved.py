"""A pipeline of two ranks with two stages each, by interleaved 1F1B."""

from runhealth.trainer.config import ParallelConfig, TrainConfig
from runhealth.trainer.recipes._small import small


def config() -> TrainConfig:
    return small(2, ParallelConfig(pp=2, schedule="interleaved", stages_per_rank=2, microbatches=8))
