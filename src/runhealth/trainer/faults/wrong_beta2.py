"""A config error: Adam's second moment is averaged over far too few steps, so updates are mostly noise."""

from typing import TYPE_CHECKING

from runhealth.storage.errors import ConfigError
from runhealth.trainer.fault import Fault, FaultContext, FaultLabel

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


class WrongBeta2(Fault):
    """From `step` on beta2 is `severity`, below 1; 0 is the sign of the gradient."""

    name = "wrong_beta2"
    repaired_by = ("restore_optimizer_state",)

    def __init__(self, context: FaultContext, *, step: int = 200, severity: float = 0.1) -> None:
        super().__init__(context)
        if not 0 <= severity < 1:
            raise ConfigError(f"fault wrong_beta2: expected 0 <= severity < 1, met {severity}")
        self.step, self.severity = step, severity

    def label(self) -> FaultLabel:
        return FaultLabel(
            fault=self.name,
            cause="optimizer_state",
            onset_step=self.step,
            last_step=None,
            ranks=tuple(range(self.context.config.world)),
        )

    def before_optimizer(self, step: int, model: "nn.Module", optimizer: "Optimizer") -> None:  # noqa: ARG002
        if step >= self.step:
            for group in optimizer.param_groups:
                group["betas"] = (group["betas"][0], self.severity)


FAULT = WrongBeta2
