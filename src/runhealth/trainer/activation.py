"""Activation checkpointing: what the backward pass needs is made again instead of kept.

`full` keeps a block's input only; `selective` keeps the results of matrix products and attention as well, which cost
most to make and little to keep (Korthikanti et al., arXiv:2205.05198, recompute the opposite: attention without flash
kernels, whose scores are large). Gradients are bit-identical to those without.

The call is inside the block, so its name does not change, and what FSDP does around a block happens once.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from runhealth.trainer.model import Block
from runhealth.trainer.precision import fp8

_aten = torch.ops.aten
_KEPT = frozenset(
    {
        _aten.mm.default,
        _aten.bmm.default,
        _aten.addmm.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_mm.default,
    }
)


def apply(model: nn.Module, mode: str) -> None:
    """Have every block of the model recompute by `mode`: none, selective or full."""
    if mode == "none":
        return
    recomputer = _full if mode == "full" else _selective
    for module in model.modules():
        if isinstance(module, Block):
            module.recomputer = recomputer


def _full(forward: Any, *inputs: Any) -> Any:
    return checkpoint(forward, *inputs, use_reentrant=False, context_fn=_full_contexts, preserve_rng_state=False)


def _selective(forward: Any, *inputs: Any) -> Any:
    return checkpoint(forward, *inputs, use_reentrant=False, context_fn=_selective_contexts, preserve_rng_state=False)


def _full_contexts() -> tuple[Any, Any]:
    return contextlib.nullcontext(), fp8.recomputing()


def _selective_contexts() -> tuple[Any, Any]:
    kept, again = create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]
    return kept, _both(again)


@contextlib.contextmanager
def _both(inner: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
    with fp8.recomputing(), inner:
        yield


def _policy(_context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE
