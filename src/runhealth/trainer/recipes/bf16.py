"""bfloat16 in the blocks, float32 everywhere else, ZeRO-3 over two ranks."""

from runhealth.trainer.config import ModelConfig, ParallelConfig, TrainConfig
from runhealth.trainer.recipes._small import small


def config() -> TrainConfig:
    return small(2, ParallelConfig(kind="zero3"), model=ModelConfig(layers=4, width=64, precision="bf16", fused=False))
