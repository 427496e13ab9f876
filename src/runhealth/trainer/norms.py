"""The gradient norm of the whole model, whatever part of it a rank holds."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def global_norm(parameters: Iterable[nn.Parameter], pipeline: dist.ProcessGroup | None = None) -> Tensor:
    """L2 norm over all gradients of all ranks, as one plain number; the same on every rank. Collective.

    Shards over data and tensor parallelism are summed by DTensor, stages over the group of the `pipeline`: what
    `torch.nn.utils.clip_grad_norm_` finds there is the norm of its own stage, and stages would be clipped apart.
    """
    return total_norm([parameter.grad for parameter in parameters if parameter.grad is not None], pipeline)


def total_norm(tensors: list[Tensor], pipeline: dist.ProcessGroup | None = None) -> Tensor:
    """L2 norm over tensors of which each rank holds shards or stages; collective."""
    norm = nn.utils.get_total_norm(tensors)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if pipeline is None:
        return norm
    square = norm.square()
    dist.all_reduce(square, group=pipeline)
    return torch.sqrt(square)
