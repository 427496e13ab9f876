"""Attention or output logits climb: their matrix grows by a constant factor a step."""

from typing import TYPE_CHECKING

from runhealth.storage.errors import ConfigError
from runhealth.trainer.fault import Fault, FaultContext, FaultLabel

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

_MODES = {"attention": ("qkv.weight", "q.weight"), "output": ("head.weight",)}


class LogitGrowth(Fault):
    """From `step` on, for `steps` steps (0: for good), the query rows (mode attention) or the output head (mode output)
    are multiplied with 1 + `severity` in each step."""

    name = "logit_growth"

    def __init__(
        self,
        context: FaultContext,
        *,
        step: int = 200,
        steps: int = 60,
        mode: str = "attention",
        severity: float = 0.06,
    ) -> None:
        super().__init__(context)
        if mode not in _MODES:
            raise ConfigError(f"fault logit_growth: expected mode out of {', '.join(_MODES)}, met {mode!r}")
        if severity <= 0:
            raise ConfigError(f"fault logit_growth: expected severity > 0, met {severity}")
        self.step, self.steps, self.mode, self.severity = step, steps, mode, severity

    def label(self) -> FaultLabel:
        return FaultLabel(
            fault=self.name,
            cause="logit_growth",
            onset_step=self.step,
            last_step=self.step + self.steps - 1 if self.steps else None,
            ranks=tuple(range(self.context.config.world)),
        )

    def before_optimizer(self, step: int, model: "nn.Module", optimizer: "Optimizer") -> None:  # noqa: ARG002
        if step < self.step or (self.steps and step >= self.step + self.steps):
            return
        import torch

        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(_MODES[self.mode]):
                    rows = parameter.shape[0] // 3 if name.endswith("qkv.weight") else parameter.shape[0]
                    parameter[:rows] *= 1.0 + self.severity


FAULT = LogitGrowth
