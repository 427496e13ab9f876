"""The run behind `examples/40k-spike`: tens of thousands of steps of a very small fp8 model, and one fault late in it
that it never recovers from: the amax history of one kind of tensor goes stale."""

from runhealth.trainer.config import CheckpointConfig, FaultSpec, ModelConfig, OptimConfig, TrainConfig
from runhealth.trainer.data import DataConfig


def config() -> TrainConfig:
    return TrainConfig(
        steps=41_400,
        seed=40,
        world=2,
        data=DataConfig(shards=256, shard_bytes=16_384, seq_len=32, batch_size=16),
        model=ModelConfig(layers=2, width=32, heads=4, ffn_width=80, precision="fp8"),
        optim=OptimConfig(lr=3e-3, warmup_steps=200, min_lr_ratio=0.1),
        checkpoint=CheckpointConfig(every=250, keep=4),
        eval_every=500,
        layers_every=200,
        updates_every=20,
        faults=(FaultSpec(name="fp8_stale_amax", params={"step": 40_137, "tensor": "down.x", "severity": 256}),),
    )
