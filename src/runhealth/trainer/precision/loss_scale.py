"""Dynamic loss scaling for float16 (Micikevicius et al., arXiv:1710.03740, section 3.2): halve the scale and skip the
step at the first non-finite gradient, double it after a long time without one."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

INITIAL_SCALE = 2.0**16
GROWTH_INTERVAL = 2_000  # steps


class ScaleState(nn.Module):
    """Scale and count of good steps as buffers, so that they are kept with the model's own state in a checkpoint."""

    scale: Tensor
    good_steps: Tensor

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(scale))
        self.register_buffer("good_steps", torch.tensor(0, dtype=torch.int32))


class LossScaler(torch.amp.GradScaler):
    """A GradScaler whose ranks agree: a rank that holds a shard or a stage sees the gradients of its own only."""

    def __init__(self, *, initial_scale: float = INITIAL_SCALE, growth_interval: int = GROWTH_INTERVAL) -> None:
        super().__init__("cpu", init_scale=initial_scale, growth_interval=growth_interval)
        self.state = ScaleState(initial_scale)
        self._scale, self._growth_tracker = self.state.scale, self.state.good_steps

    def agree(self, optimizer: torch.optim.Optimizer) -> bool:
        """Unscale the gradients in place; whether any rank found one that is not finite. Collective."""
        self.unscale_(optimizer)
        found: dict[torch.device, Tensor] = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        largest = torch.zeros(())
        for flag in found.values():
            largest = torch.maximum(largest, _plain(flag).float().cpu().reshape(()))
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        for device in found:
            found[device] = largest.reshape(1).to(device)
        return bool(largest)

    def reset(self) -> None:
        """Back to where a run begins."""
        self.state.scale.fill_(self._init_scale)
        self.state.good_steps.zero_()


def _plain(flag: Tensor) -> Tensor:
    whole: Callable[[], Tensor] | None = getattr(flag, "full_tensor", None)
    return flag if whole is None else whole()
