"""Most calls of the optimizer do nothing: the loop believes that it still gathers micro-batches.

A wrapper that steps only where gradients are synchronised, given an accumulation count that the loop does not use,
drops the update and the gradient of all the other steps (`sync_gradients` decides on both:
github.com/huggingface/accelerate/pull/2790; counts that differ: github.com/huggingface/diffusers/pull/308).
"""

from typing import TYPE_CHECKING, Any

from runhealth.storage.errors import ConfigError
from runhealth.trainer.fault import Fault, FaultContext, FaultLabel

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer


class NoopSteps(Fault):
    """From `step` on, only the last of every `severity` steps updates weights and moments; the gradients of the others
    are lost."""

    name = "noop_steps"

    def __init__(self, context: FaultContext, *, step: int = 200, severity: int = 4) -> None:
        super().__init__(context)
        if severity < 2:
            raise ConfigError(f"fault noop_steps: expected severity >= 2 steps, met {severity}")
        self.step, self.severity = step, severity
        self._kept: list[tuple[Tensor, Tensor]] = []
        self._rates: list[float] = []

    def label(self) -> FaultLabel:
        return FaultLabel(
            fault=self.name,
            cause="not_stepping",
            onset_step=self.step,
            last_step=None,
            ranks=tuple(range(self.context.config.world)),
        )

    def before_optimizer(self, step: int, model: "nn.Module", optimizer: "Optimizer") -> None:
        if step < self.step or (step - self.step) % self.severity == self.severity - 1:
            return
        for parameter in model.parameters():
            state: dict[str, Any] = optimizer.state.get(parameter) or {}
            held = (state[key] for key in ("step", "exp_avg", "exp_avg_sq") if key in state)
            self._kept += [(tensor, tensor.clone()) for tensor in held]
        self._rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:  # with a rate of 0 neither the update nor the decay moves a weight
            group["lr"] = 0.0

    def after_optimizer(self, step: int, model: "nn.Module", optimizer: "Optimizer") -> None:  # noqa: ARG002
        for tensor, value in self._kept:
            tensor.copy_(value)
        for group, rate in zip(optimizer.param_groups, self._rates, strict=False):
            group["lr"] = rate
        self._kept, self._rates = [], []


FAULT = NoopSteps
