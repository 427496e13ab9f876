"""Tensor parallelism (Shoeybi et al., arXiv:1909.08053) with sequence parallelism (Korthikanti et al.,
arXiv:2205.05198).

Between the matrices each rank holds its part of the sequence, within attention and feed-forward its share of the heads
and channels: an all-gather before, a reduce-scatter after. *Every* parameter becomes a DTensor, the norms as replicas,
since one norm over plain tensors and DTensors cannot be taken.
"""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from runhealth.trainer.model import Transformer

_NORMS = ("norm_attn", "norm_ffn")


def apply(model: Transformer, mesh: DeviceMesh) -> None:
    """Cut a model, or the stage of one, over a mesh of one dimension, in place."""
    plan: dict[str, ParallelStyle] = {}
    gather: dict[str, ParallelStyle] = {}
    if model.embed is not None:
        plan["embed"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    for name in model.blocks:
        for norm in _NORMS:
            plan[f"blocks.{name}.{norm}"] = SequenceParallel()
            # one all-gather for all the matrices that read it, not one each
            gather[f"blocks.{name}.{norm}"] = PrepareModuleOutput(
                output_layouts=Shard(1), desired_output_layouts=Replicate(), use_local_output=False
            )
        for matrix in ("q", "k", "v", "gate", "up"):
            plan[f"blocks.{name}.{matrix}"] = ColwiseParallel()
        for matrix in ("out", "down"):
            plan[f"blocks.{name}.{matrix}"] = RowwiseParallel(output_layouts=Shard(1))
    if model.head is not None:
        plan["norm"] = SequenceParallel()
        plan["head"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    parallelize_module(model, mesh, plan)
    parallelize_module(model, mesh, gather)


def reduce_partial(model: nn.Module) -> None:
    """Sum the gradients of the norms, to which each rank has added what its part of the sequence gives. (FSDP has done
    that already.) Left alone, every operation of the optimizer would sum them again."""
    for parameter in model.parameters():
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
            parameter.grad = gradient.redistribute(placements=parameter.placements)
