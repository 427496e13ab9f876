"""fp8 by torchao in the blocks, with dynamic scaling; needs torchao."""

from runhealth.trainer.config import ModelConfig, TrainConfig
from runhealth.trainer.recipes._small import small


def config() -> TrainConfig:
    return small(2, model=ModelConfig(layers=4, width=64, precision="fp8_torchao", fused=False))
