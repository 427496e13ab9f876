"""HSDP: two replicas, each sharded over two ranks."""

from runhealth.trainer.config import ParallelConfig, TrainConfig
from runhealth.trainer.recipes._small import small


def config() -> TrainConfig:
    return small(4, ParallelConfig(kind="hsdp", replicas=2))
