"""A warm-up that multiplies the learning rate a resume has restored, instead of starting from its base.

PyTorch's chainable schedulers, such as `LinearLR`, multiply the rate that they find in the optimizer. Where the
optimizer's state brings back a rate that is warm already and the scheduler is new, the warm-up goes on top of it: the
rate climbs to 1 / start_factor times the scheduled one and stays. Schedules that are rebuilt at a resume:
github.com/Nerogar/OneTrainer/issues/1604.
"""

from runhealth.storage.errors import ConfigError
from runhealth.trainer.fault import Fault, FaultContext, FaultLabel


class LrClimb(Fault):
    """Over `steps` steps from `step` on, the learning rate climbs in a line from the scheduled one to `severity` times
    that, and stays there."""

    name = "lr_climb"
    repaired_by = ("restore_lr_schedule",)

    def __init__(self, context: FaultContext, *, step: int = 200, steps: int = 20, severity: float = 3.0) -> None:
        super().__init__(context)
        if severity <= 1 or steps < 1:
            raise ConfigError(f"fault lr_climb: expected severity > 1 and steps >= 1, met {severity} and {steps}")
        self.step, self.steps, self.severity = step, steps, severity

    def label(self) -> FaultLabel:
        return FaultLabel(
            fault=self.name,
            cause="lr_change",
            onset_step=self.step,
            last_step=None,
            ranks=tuple(range(self.context.config.world)),
        )

    def learning_rate(self, step: int, lr: float) -> float:
        if step < self.step:
            return lr
        return lr * (1.0 + (self.severity - 1.0) * min(1.0, (step - self.step + 1) / self.steps))


FAULT = LrClimb
