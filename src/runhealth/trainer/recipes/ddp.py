"""Data parallelism of replicas, four ranks, two micro-batches accumulated a step."""

from runhealth.trainer.config import ParallelConfig, TrainConfig
from runhealth.trainer.recipes._small import small


def config() -> TrainConfig:
    return small(4, ParallelConfig(kind="ddp", microbatches=2))
