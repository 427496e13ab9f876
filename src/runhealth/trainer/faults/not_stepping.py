"""No update is applied on any rank, while gradients are there: an optimizer that holds other parameters."""

from typing import TYPE_CHECKING

from runhealth.storage.errors import ConfigError
from runhealth.trainer.fault import Fault, FaultContext, FaultLabel

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer


class NotStepping(Fault):
    """From `step` on, a share `severity` of the parameters, the last ones of the model, stays as it is."""

    name = "not_stepping"

    def __init__(self, context: FaultContext, *, step: int = 200, severity: float = 1.0) -> None:
        super().__init__(context)
        if not 0 < severity <= 1:
            raise ConfigError(f"fault not_stepping: expected 0 < severity <= 1, met {severity}")
        self.step, self.severity = step, severity
        self._kept: list[tuple[Tensor, Tensor]] = []

    def label(self) -> FaultLabel:
        return FaultLabel(
            fault=self.name,
            cause="not_stepping",
            onset_step=self.step,
            last_step=None,
            ranks=tuple(range(self.context.config.world)),
        )

    def before_optimizer(self, step: int, model: "nn.Module", optimizer: "Optimizer") -> None:  # noqa: ARG002
        if step >= self.step:
            parameters = list(model.parameters())
            held = parameters[len(parameters) - max(1, round(self.severity * len(parameters))) :]
            self._kept = [(parameter, parameter.detach().clone()) for parameter in held]

    def after_optimizer(self, step: int, model: "nn.Module", optimizer: "Optimizer") -> None:  # noqa: ARG002
        for parameter, value in self._kept:
            parameter.data.copy_(value)
        self._kept = []


FAULT = NotStepping
