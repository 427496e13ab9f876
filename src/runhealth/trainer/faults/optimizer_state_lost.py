"""A resume brings back the weights and not, or not all of, the optimizer's moments."""

from typing import TYPE_CHECKING

from runhealth.storage.errors import ConfigError
from runhealth.trainer.fault import Fault, FaultContext, FaultLabel

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

_MODES = ("second", "both", "scaled")


class OptimizerStateLost(Fault):
    """The resume at `step` finds the second moments at zero (mode second; the step count is kept, so nothing corrects
    their bias), all moments and the step count at zero (both), or the second moments divided by `severity` (scaled)."""

    name = "optimizer_state_lost"
    repaired_by = ("restore_optimizer_state",)

    def __init__(
        self, context: FaultContext, *, step: int = 200, mode: str = "second", severity: float = 100.0
    ) -> None:
        super().__init__(context)
        if mode not in _MODES:
            raise ConfigError(f"fault optimizer_state_lost: expected mode out of {', '.join(_MODES)}, met {mode!r}")
        if severity <= 1:
            raise ConfigError(f"fault optimizer_state_lost: expected severity > 1, met {severity}")
        self.step, self.mode, self.severity = step, mode, severity

    def label(self) -> FaultLabel:
        return FaultLabel(
            fault=self.name,
            cause="optimizer_state",
            onset_step=self.step,
            last_step=None,
            ranks=tuple(range(self.context.config.world)),
        )

    def after_load(self, step: int, model: "nn.Module", optimizer: "Optimizer") -> None:  # noqa: ARG002
        if step != self.step:
            return
        for state in optimizer.state.values():
            if self.mode == "scaled":
                state["exp_avg_sq"] /= self.severity
                continue
            state["exp_avg_sq"].zero_()
            if self.mode == "both":
                state["exp_avg"].zero_()
                state["step"].zero_()


FAULT = OptimizerStateLost
