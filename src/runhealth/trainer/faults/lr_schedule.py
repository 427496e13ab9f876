"""Benign: the schedule itself changes, as announced: a re-warm-up or a faster decay."""

from runhealth.storage.errors import ConfigError
from runhealth.trainer.fault import Fault, FaultContext, FaultLabel

_MODES = ("rewarm", "decay")


class LrSchedule(Fault):
    """Over `steps` steps from `step` on, the learning rate goes smoothly to `severity` times the scheduled one and
    stays: up from a tenth (mode rewarm) or down (mode decay)."""

    name = "lr_schedule"

    def __init__(
        self, context: FaultContext, *, step: int = 200, steps: int = 30, mode: str = "decay", severity: float = 0.3
    ) -> None:
        super().__init__(context)
        if mode not in _MODES:
            raise ConfigError(f"fault lr_schedule: expected mode out of {', '.join(_MODES)}, met {mode!r}")
        self.step, self.steps, self.mode, self.severity = step, steps, mode, severity

    def label(self) -> FaultLabel:
        return FaultLabel(
            fault=self.name,
            cause="benign",
            onset_step=self.step,
            last_step=None,
            ranks=tuple(range(self.context.config.world)),
        )

    def learning_rate(self, step: int, lr: float) -> float:
        if step < self.step:
            return lr
        progress = min(1.0, (step - self.step + 1) / self.steps)
        start = 0.1 if self.mode == "rewarm" else 1.0
        return lr * (start + (self.severity - start) * progress)


FAULT = LrSchedule
