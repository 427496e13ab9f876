"""A mixture of experts: four feed-forward parts a block, a router sends each token to one of them. Two ranks."""

from runhealth.trainer.config import ModelConfig, TrainConfig
from runhealth.trainer.recipes._small import small


def config() -> TrainConfig:
    return small(2, model=ModelConfig(layers=2, width=64, heads=4, ffn_width=96, fused=False, experts=4))
