"""ZeRO stage 1 (Rajbhandari et al., arXiv:1910.02054): replicas that divide the optimizer's state among them. Each
rank steps its own parameters and broadcasts them.

torch's ZeroRedundancyOptimizer does the same; importing it compiles a dozen TorchScript functions, with a deprecation
warning each.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runhealth.storage.errors import ConfigError


class ShardedAdamW(torch.optim.Optimizer):
    """AdamW whose moments exist on one rank of the group each. Parameters go whole, the largest first, to the rank that
    has least; `inner` steps those of this rank. The learning rate is read from `param_groups` at every step."""

    def __init__(self, parameters: list[nn.Parameter], group: dist.ProcessGroup, **adamw: Any) -> None:
        super().__init__(parameters, {"lr": adamw["lr"]})
        self._group = group
        self._ranks = dist.get_process_group_ranks(group)
        if len(parameters) < len(self._ranks):
            raise ConfigError(f"zero1: expected a parameter a rank, met {len(parameters)} for {len(self._ranks)}")
        self._owned = partition([p.numel() for p in parameters], len(self._ranks))
        self._parameters = parameters
        mine = [parameters[at] for at in self._owned[dist.get_rank(group)]]
        self.inner = torch.optim.AdamW(mine, **adamw)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step this rank's parameters, then hand them round; collective."""
        assert closure is None
        for group in self.inner.param_groups:
            group["lr"] = self.param_groups[0]["lr"]
        self.inner.step()
        for rank, owned in zip(self._ranks, self._owned, strict=True):
            parts: list[Tensor] = [self._parameters[at] for at in owned]
            flat = torch.cat([part.reshape(-1) for part in parts])
            dist.broadcast(flat, src=rank, group=self._group)
            for part, new in zip(parts, torch.split(flat, [part.numel() for part in parts]), strict=True):
                part.copy_(new.view_as(part))


def partition(sizes: list[int], ranks: int) -> list[list[int]]:
    """Indices by rank so that their sizes add up about equally; the same on every rank."""
    owned: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for at in sorted(range(len(sizes)), key=lambda at: -sizes[at]):
        lightest = loads.index(min(loads))
        owned[lightest].append(at)
        loads[lightest] += sizes[at]
    return [sorted(mine) for mine in owned]


def local(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that holds this rank's moments: of ZeRO-1 the inner one, which knows this rank's parameters only;
    of every other layout the optimizer itself."""
    return optimizer.inner if isinstance(optimizer, ShardedAdamW) else optimizer
