"""What the optimizer is set to at the step that it makes: decay rates, weight decay, epsilon."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from runhealth.instrument.draft import Draft, Probe


def of_group(group: Mapping[str, Any]) -> dict[str, float]:
    """beta1, beta2, weight_decay and adam_eps of a parameter group, of those that it has. An optimizer without betas
    has no Adam epsilon. What lies on an accelerator is left out: reading it would wait."""
    found: dict[str, Any] = {"weight_decay": group.get("weight_decay")}
    betas = group.get("betas")
    if isinstance(betas, Sequence) and len(betas) >= 2:
        found |= {"beta1": betas[0], "beta2": betas[1], "adam_eps": group.get("eps")}
    return {name: float(value) for name, value in found.items() if _is_known(value)}


def _is_known(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.device.type == "cpu" and value.numel() == 1
    return isinstance(value, int | float)


class HyperProbe(Probe):
    """Recorded on rank 0 at the first step of the optimizer, whenever a value changes, and every `every` steps (0: not
    on a cadence). Of several optimizers, that of the first with betas counts, else the first."""

    name = "hyper-parameters"

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], every: int, *, leader: bool) -> None:
        with_betas = [one for one in optimizers if one.param_groups and "betas" in one.param_groups[0]]
        chosen = [*with_betas, *optimizers][:1] if leader else []
        self._watched = id(chosen[0]) if chosen else None
        self._every = every
        self._last: dict[str, float] | None = None

    def before_optimizer(self, draft: Draft, optimizer: torch.optim.Optimizer) -> None:
        if id(optimizer) != self._watched:
            return
        now = of_group(optimizer.param_groups[0])
        due = self._every and draft.number % self._every == 0
        if due or now != self._last:
            draft.values.update(now)
        self._last = now
