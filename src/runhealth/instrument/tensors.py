"""Norms and finite checks over any mix of tensors: empty, sparse, complex, half, float8, on several devices."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

_WIDE_ENOUGH = (torch.float32, torch.float64)
_NEVER_SHARDED = (Tensor, torch.nn.Parameter)


def is_sharded(tensor: Tensor) -> bool:
    """A DTensor: this rank holds a part of it, so a local norm is not the tensor's norm."""
    return type(tensor) not in _NEVER_SHARDED and hasattr(tensor, "to_local")


def is_at_hand(tensor: Tensor) -> bool:
    """The host can read it without waiting for a device."""
    return tensor.device.type == "cpu"


def plain(tensor: Tensor) -> Tensor:
    """The stored numbers of a tensor as a dense real tensor: values of a sparse one, parts of a complex one."""
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce().values()
    elif tensor.layout is not torch.strided:
        tensor = tensor.values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if not tensor.is_floating_point() or tensor.element_size() == 1:
        tensor = tensor.float()
    return tensor


def l2_norms(tensors: Sequence[Tensor]) -> Tensor:
    """L2 norm of each tensor, as one vector of shape (len(tensors),) on the first tensor's device.

    Half precision is accumulated in float32, where the norm of large gradients does not overflow."""
    if not tensors:
        return torch.zeros(0)
    dense = [plain(tensor) for tensor in tensors]
    buckets: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for at, tensor in enumerate(dense):
        buckets.setdefault((tensor.device, tensor.dtype), []).append(at)
    if len(buckets) == 1:
        return torch.stack(_foreach_norm(dense))
    found: list[Tensor] = [dense[0]] * len(dense)
    for members in buckets.values():
        for at, norm in zip(members, _foreach_norm([dense[at] for at in members]), strict=True):
            found[at] = norm
    wide = torch.float64 if any(norm.dtype is torch.float64 for norm in found) else torch.float32
    return torch.stack([norm.to(dense[0].device, wide) for norm in found])


def _foreach_norm(tensors: list[Tensor]) -> list[Tensor]:
    if tensors[0].dtype in _WIDE_ENOUGH:
        return list(torch._foreach_norm(tensors, 2))
    return list(torch._foreach_norm(tensors, 2, dtype=torch.float32))


def count_nonfinite(tensors: Iterable[Tensor]) -> Tensor:
    """How many elements are NaN or infinite, as one int64 number. For complex tensors each part counts."""
    total = torch.zeros((), dtype=torch.int64)
    for tensor in tensors:
        numbers = plain(tensor)
        bad = numbers.numel() - torch.isfinite(numbers).sum()
        total = bad + total.to(bad.device, non_blocking=True)
    return total


def largest_magnitude(tensor: Tensor) -> Tensor | None:
    """Largest absolute value as one number, NaN if there is a NaN, None for an empty tensor."""
    numbers = tensor.detach()
    numbers = numbers.abs() if numbers.is_complex() else plain(numbers)
    if numbers.numel() == 0:
        return None
    low, high = torch.aminmax(numbers)
    return torch.maximum(-low, high)
