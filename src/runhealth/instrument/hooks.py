"""Hooks that do not keep the monitor alive."""

import atexit
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from runhealth.instrument.monitor import Monitor


def as_list(
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
) -> list[torch.optim.Optimizer]:
    if optimizer is None:
        return []
    return list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]  # type: ignore[list-item]


def weak_hook(monitor: "Monitor", method: str) -> Callable[[torch.optim.Optimizer, Any, Any], None]:
    """A hook that does not keep the monitor alive."""
    reference = weakref.ref(monitor)

    def hook(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:  # noqa: ARG001  torch's signature
        found = reference()
        if found is not None:
            getattr(found, method)(optimizer)

    return hook


def close_at_exit(monitor: "Monitor") -> Callable[[], None]:
    reference = weakref.ref(monitor)

    def close() -> None:
        found = reference()
        if found is not None:
            found.close()

    atexit.register(close)
    return close
