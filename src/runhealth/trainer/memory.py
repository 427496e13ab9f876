"""Memory of a rank by part: parameters, gradients, optimizer state, activations."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from runhealth.trainer.parallel import zero1


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds, on its way through a collective or not."""
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    return tensor.elem if isinstance(tensor, AsyncCollectiveTensor) else tensor


def bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(local(tensor).numel() * tensor.element_size() for tensor in tensors)


def state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """What this rank holds between backward pass and optimizer step, by signal name. Moments that are not made yet
    (before the first step) do not count."""
    parameters = list(model.parameters())
    held = zero1.local(optimizer).state.values()
    return {
        "mem_parameters_bytes": bytes_of(parameters),
        "mem_gradients_bytes": bytes_of(p.grad for p in parameters if p.grad is not None),
        "mem_optimizer_bytes": bytes_of(v for state in held for v in state.values() if isinstance(v, Tensor)),
    }


class ActivationMeter:
    """The most that autograd kept for the backward pass at any moment, in bytes; parameters do not count, and a tensor
    that is kept twice counts once. What selective recomputation keeps of its own is not seen."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._keepers: dict[int, int] = {}
        self._sizes: dict[int, int] = {}
        self._now_bytes = 0
        self.peak_bytes = 0

    @contextmanager
    def measure(self) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(self._pack, _Kept.tensor):
            yield

    def _pack(self, tensor: Tensor) -> "_Kept":
        return _Kept(self, tensor)

    def kept(self, tensor: Tensor) -> int:
        """Returns the key to hand back when it is freed; 0 for what does not count."""
        try:
            storage = local(tensor).untyped_storage()
            key = storage.data_ptr()
        except RuntimeError:  # a wrapper of another kind, without a storage of its own; a meter never fails a step
            return 0
        if not key or key in self._parameters():
            return 0
        self._keepers[key] = self._keepers.get(key, 0) + 1
        if self._keepers[key] == 1:
            self._sizes[key] = storage.nbytes()
            self._now_bytes += self._sizes[key]
            self.peak_bytes = max(self.peak_bytes, self._now_bytes)
        return key

    def _parameters(self) -> set[int]:
        """Asked anew each time: FSDP puts the gathered parameters in the place of the shards while a module runs."""
        return {local(parameter).untyped_storage().data_ptr() for parameter in self._model.parameters()}

    def freed(self, key: int) -> None:
        self._keepers[key] -= 1
        if not self._keepers[key]:
            del self._keepers[key]
            self._now_bytes -= self._sizes.pop(key)


class _Kept:
    """A saved tensor; its end tells the meter."""

    __slots__ = ("_key", "_meter", "_tensor")

    def __init__(self, meter: ActivationMeter, tensor: Tensor) -> None:
        self._meter, self._tensor, self._key = meter, tensor, meter.kept(tensor)

    def tensor(self) -> Tensor:
        return self._tensor

    def __del__(self) -> None:
        if self._key:
            self._meter.freed(self._key)
