"""Adam's second moment is behind the gradient in a few tensors, so their updates are far too large.

The RMS of g/sqrt(v) is then far over 1 in these tensors and 1 in all others, before the loss moves (Wortsman et al.,
arXiv:2304.13013, section 3.4).
"""

from typing import TYPE_CHECKING

from runhealth.storage.errors import ConfigError
from runhealth.trainer.fault import Fault, FaultContext, FaultLabel

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer


class AdamStaleness(Fault):
    """For `steps` steps from `step` on, the second moments of all parameters whose name holds `tensor` are divided by
    `severity` once and then frozen."""

    name = "adam_staleness"
    repaired_by = ("restore_optimizer_state",)

    def __init__(
        self, context: FaultContext, *, step: int = 200, steps: int = 20, severity: float = 300.0, tensor: str = "embed"
    ) -> None:
        super().__init__(context)
        if severity <= 1 or steps < 1:
            raise ConfigError(f"fault adam_staleness: expected severity > 1 and steps >= 1, met {severity} and {steps}")
        self.step, self.steps, self.severity, self.tensor = step, steps, severity, tensor
        self._frozen: dict[str, Tensor] = {}

    def label(self) -> FaultLabel:
        return FaultLabel(
            fault=self.name,
            cause="adam_staleness",
            onset_step=self.step,
            last_step=self.step + self.steps - 1,
            ranks=tuple(range(self.context.config.world)),
            layers=(self.tensor,),
        )

    def before_optimizer(self, step: int, model: "nn.Module", optimizer: "Optimizer") -> None:
        if not self.step <= step < self.step + self.steps:
            return
        for name, parameter in model.named_parameters():
            state = optimizer.state.get(parameter)
            if self.tensor not in name or not state:
                continue
            if name not in self._frozen:
                self._frozen[name] = state["exp_avg_sq"] / self.severity
            state["exp_avg_sq"].copy_(self._frozen[name])


FAULT = AdamStaleness
