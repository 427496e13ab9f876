"""FSDP2: ZeRO stages 2 and 3 (Rajbhandari et al., arXiv:1910.02054), and HSDP, which shards within groups and
replicates between them.

Each block is a unit of its own, what is left (embedding, norm, head) another. Parameters, gradients and moments are
DTensors. Stage 3 frees a unit's parameters after its forward pass and gathers them again for the backward pass; stage 2
keeps them.
"""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from runhealth.trainer.model import Transformer

PhaseTimer = Callable[[str], AbstractContextManager[object]]


def apply(model: Transformer, mesh: DeviceMesh, *, keep_gathered: bool) -> None:
    """Shard a model, or the stage of one, over a mesh of one dimension, or of two (replicas, shards), in place.

    Parameters are gathered in float32 and gradients reduced in float32 whatever the precision: the casts to a lower one
    happen in the block."""
    # nothing here works in place on what a stage returns
    warnings.filterwarnings("ignore", message=".*returned a view tensor.*", category=UserWarning)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh, reshard_after_forward=not keep_gathered, mp_policy=policy)
    fully_shard(model, mesh=mesh, reshard_after_forward=not keep_gathered, mp_policy=policy)


def synchronise(model: nn.Module, reduce: bool) -> None:
    """Whether the next backward pass reduces gradients, or adds them up unsharded (accumulation)."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(reduce)
        model.set_is_last_backward(reduce)


def free(model: nn.Module) -> None:
    """Give back gathered parameters, so that the module holds its shards again: stage 2 keeps them until a backward
    pass, which an evaluation does not have."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def time_waiting(model: nn.Module, phase: PhaseTimer) -> None:
    """Count the time in the all-gathers and reduce-scatters of this model as the phase `wait`. On the CPU they block,
    so the rank that is waited for waits least."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(_TimedAllGather(phase))
            module.set_custom_reduce_scatter(_TimedReduceScatter(phase))


class _TimedAllGather(DefaultAllGather):
    def __init__(self, phase: PhaseTimer) -> None:
        super().__init__()
        self._phase = phase

    def __call__(self, *args: Any, **kwargs: Any) -> dist.Work | None:
        with self._phase("wait"):
            return super().__call__(*args, **kwargs)


class _TimedReduceScatter(DefaultReduceScatter):
    def __init__(self, phase: PhaseTimer) -> None:
        super().__init__()
        self._phase = phase

    def __call__(self, *args: Any, **kwargs: Any) -> dist.Work:
        with self._phase("wait"):
            return super().__call__(*args, **kwargs)
