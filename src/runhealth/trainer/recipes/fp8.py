"""fp8 with delayed scaling in the blocks, two replicas."""

from runhealth.trainer.config import ModelConfig, TrainConfig
from runhealth.trainer.recipes._small import small


def config() -> TrainConfig:
    return small(2, model=ModelConfig(layers=4, width=64, precision="fp8", fused=False))
