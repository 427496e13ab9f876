"""A mixture-of-experts router sends more and more tokens to one expert."""

from typing import TYPE_CHECKING

from runhealth.storage.errors import ConfigError
from runhealth.trainer.fault import Fault, FaultContext, FaultLabel

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


class RouterCollapse(Fault):
    """From `step` on, the bias of one expert grows by `severity` in each step. Routers are the linear modules named
    `router`, with a bias."""

    name = "router_collapse"

    def __init__(self, context: FaultContext, *, step: int = 200, expert: int = 0, severity: float = 0.2) -> None:
        super().__init__(context)
        if severity <= 0:
            raise ConfigError(f"fault router_collapse: expected severity > 0, met {severity}")
        self.step, self.expert, self.severity = step, expert, severity

    def label(self) -> FaultLabel:
        return FaultLabel(
            fault=self.name,
            cause="router_collapse",
            onset_step=self.step,
            last_step=None,
            ranks=tuple(range(self.context.config.world)),
        )

    def attach(self, model: "nn.Module") -> None:
        if not any(name.endswith("router.bias") for name, _ in model.named_parameters()):
            raise ConfigError("fault router_collapse: expected a model with a router, met one without")

    def before_optimizer(self, step: int, model: "nn.Module", optimizer: "Optimizer") -> None:  # noqa: ARG002
        if step < self.step:
            return
        for name, parameter in model.named_parameters():
            if name.endswith("router.bias"):
                parameter.data[self.expert] += self.severity


FAULT = RouterCollapse
