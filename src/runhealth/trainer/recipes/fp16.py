"""float16 with a dynamic loss scale. CPUs compute it about ten times slower than float32, so the model is tiny."""

from runhealth.trainer.config import ModelConfig, TrainConfig
from runhealth.trainer.data import DataConfig
from runhealth.trainer.recipes._small import small


def config() -> TrainConfig:
    return small(
        2,
        data=DataConfig(shards=16, shard_bytes=8_192, seq_len=32, batch_size=8),
        model=ModelConfig(layers=2, width=32, heads=4, ffn_width=80, precision="fp16", fused=False),
    )
