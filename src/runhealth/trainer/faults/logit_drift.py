"""All output logits drift together: the softmax does not see it, and the loss says nothing for long.

Nothing in cross-entropy holds the sum of the exponentials, log Z, in place; without a z-loss it runs away from 0
(Chowdhery et al., arXiv:2204.02311, section 5; output logit divergence in Wortsman et al., arXiv:2309.14322).
"""

from typing import TYPE_CHECKING

from runhealth.storage.errors import ConfigError
from runhealth.trainer.fault import Fault, FaultContext, FaultLabel

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


class LogitDrift(Fault):
    """From `step` on, for `steps` steps (0: for good), the same vector of length `severity` is added to all rows of the
    output head in each step: every token's logits move by one number."""

    name = "logit_drift"

    def __init__(self, context: FaultContext, *, step: int = 200, steps: int = 60, severity: float = 0.5) -> None:
        super().__init__(context)
        if severity <= 0:
            raise ConfigError(f"fault logit_drift: expected severity > 0, met {severity}")
        self.step, self.steps, self.severity = step, steps, severity

    def label(self) -> FaultLabel:
        return FaultLabel(
            fault=self.name,
            cause="logit_growth",
            onset_step=self.step,
            last_step=self.step + self.steps - 1 if self.steps else None,
            ranks=tuple(range(self.context.config.world)),
            layers=("head",),
        )

    def before_optimizer(self, step: int, model: "nn.Module", optimizer: "Optimizer") -> None:  # noqa: ARG002
        if step < self.step or (self.steps and step >= self.step + self.steps):
            return
        import torch

        generator = torch.Generator().manual_seed(self.context.config.seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("head.weight"):
                    direction = torch.randn(parameter.shape[1], generator=generator).to(parameter)
                    parameter.add_(direction * (self.severity / torch.linalg.vector_norm(direction)))


FAULT = LogitDrift
