"""Pipeline, ZeRO-3 and tensor parallelism together on eight ranks, with selective recomputation."""

from runhealth.trainer.config import ParallelConfig, TrainConfig
from runhealth.trainer.recipes._small import small


def config() -> TrainConfig:
    return small(8, ParallelConfig(kind="zero3", pp=2, tp=2, microbatches=4, recompute="selective"))
