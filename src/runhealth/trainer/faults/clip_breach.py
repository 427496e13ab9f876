"""A burst of gradient noise: the norm is far over the clip threshold, so the clipped update is mostly noise."""

from typing import TYPE_CHECKING

from runhealth.storage.errors import ConfigError
from runhealth.trainer.fault import Fault, FaultContext, FaultLabel

if TYPE_CHECKING:
    from torch import nn


class ClipBreach(Fault):
    """For `steps` steps from `step` on, noise of norm `severity` times the clip threshold is added to the reduced
    gradient. It is the same on all ranks, so replicas stay equal."""

    name = "clip_breach"
    repaired_by = ("lower_clip_threshold",)

    def __init__(self, context: FaultContext, *, step: int = 200, steps: int = 20, severity: float = 50.0) -> None:
        super().__init__(context)
        if steps < 1 or severity <= 0:
            raise ConfigError(f"fault clip_breach: expected steps >= 1 and severity > 0, met {steps} and {severity}")
        self.step, self.steps, self.severity = step, steps, severity

    def label(self) -> FaultLabel:
        return FaultLabel(
            fault=self.name,
            cause="clip_breach",
            onset_step=self.step,
            last_step=self.step + self.steps - 1,
            ranks=tuple(range(self.context.config.world)),
        )

    def after_backward(self, step: int, model: "nn.Module") -> None:
        if not self.step <= step < self.step + self.steps:
            return
        import torch

        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        elements = sum(gradient.numel() for gradient in gradients)
        deviation = self.severity * self.context.config.optim.clip_threshold / elements**0.5
        generator = torch.Generator().manual_seed(self.context.config.seed * 1_000_003 + step)
        for gradient in gradients:
            gradient.add_(torch.randn(gradient.shape, generator=generator), alpha=deviation)


FAULT = ClipBreach
