"""Two replicas that keep the input of each block only and recompute the rest."""

from runhealth.trainer.config import ParallelConfig, TrainConfig
from runhealth.trainer.recipes._small import small


def config() -> TrainConfig:
    return small(2, ParallelConfig(recompute="full"))
