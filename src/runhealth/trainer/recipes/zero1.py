"""ZeRO-1: four replicas that divide the optimizer's state."""

from runhealth.trainer.config import ParallelConfig, TrainConfig
from runhealth.trainer.recipes._small import small


def config() -> TrainConfig:
    return small(4, ParallelConfig(kind="zero1"))
