"""Data parallelism of replicas: every rank holds the whole model, gradients are averaged in buckets as they become
ready, while the rest of the backward pass goes on."""

import warnings

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def wrap(model: nn.Module, group: dist.ProcessGroup | None = None) -> DistributedDataParallel:
    """DDP without any exchange of buffers: amax histories belong to a rank. With the exchange rank 0 would also wait
    in the forward pass, and time would no longer tell which rank is slow. (The successor of the deprecated argument
    still overwrites the buffers once, at the start.)"""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*broadcast_buffers.*", category=FutureWarning)
        return DistributedDataParallel(model, process_group=group, broadcast_buffers=False)
