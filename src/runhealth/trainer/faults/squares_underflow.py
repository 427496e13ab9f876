"""Squares of gradients underflow on their way into Adam's second moment, which from there on only decays.

The square of a gradient below 2.4e-4 is zero in half precision. Ramesh et al. (arXiv:2102.12092, appendix D) keep the
running variance in a format with a longer exponent because of it. The moment then falls behind the gradient by beta2 a
step, and the updates of these elements grow.
"""

from typing import TYPE_CHECKING

from runhealth.storage.errors import ConfigError
from runhealth.trainer.fault import Fault, FaultContext, FaultLabel

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer


class SquaresUnderflow(Fault):
    """For `steps` steps from `step` on (0: for good), no square of a gradient reaches the second moments of the first
    share `severity` of the elements of each parameter whose name holds `tensor`; they decay as ever."""

    name = "squares_underflow"

    def __init__(
        self, context: FaultContext, *, step: int = 200, steps: int = 60, severity: float = 1.0, tensor: str = "embed"
    ) -> None:
        super().__init__(context)
        if not 0 < severity <= 1:
            raise ConfigError(f"fault squares_underflow: expected 0 < severity <= 1, met {severity}")
        self.step, self.steps, self.severity, self.tensor = step, steps, severity, tensor
        self._before: list[tuple[Tensor, Tensor, float]] = []

    def label(self) -> FaultLabel:
        return FaultLabel(
            fault=self.name,
            cause="adam_staleness",
            onset_step=self.step,
            last_step=self.step + self.steps - 1 if self.steps else None,
            ranks=tuple(range(self.context.config.world)),
            layers=(self.tensor,),
        )

    def attach(self, model: "nn.Module") -> None:
        if not any(self.tensor in name for name, _ in model.named_parameters()):
            raise ConfigError(f"fault squares_underflow: expected a part of a parameter's name, met {self.tensor!r}")

    def before_optimizer(self, step: int, model: "nn.Module", optimizer: "Optimizer") -> None:
        if step < self.step or (self.steps and step >= self.step + self.steps):
            return
        beta2 = float(optimizer.param_groups[0]["betas"][1])
        for name, parameter in model.named_parameters():
            state = optimizer.state.get(parameter)
            if self.tensor in name and state:
                second = state["exp_avg_sq"]
                self._before.append((second, second.clone(), beta2))

    def after_optimizer(self, step: int, model: "nn.Module", optimizer: "Optimizer") -> None:  # noqa: ARG002
        for second, old, beta2 in self._before:
            lost = max(1, round(self.severity * second.numel()))
            second.view(-1)[:lost] = old.view(-1)[:lost] * beta2
        self._before = []


FAULT = SquaresUnderflow
