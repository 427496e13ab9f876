"""The learning rate leaves its schedule, as after a wrong restore or a unit mistake in a config."""

from runhealth.trainer.fault import Fault, FaultContext, FaultLabel


class LrChange(Fault):
    """From `step` on, for `steps` steps (0: for good), the learning rate is `severity` times the scheduled one."""

    name = "lr_change"
    repaired_by = ("restore_lr_schedule",)

    def __init__(self, context: FaultContext, *, step: int = 200, steps: int = 0, severity: float = 20.0) -> None:
        super().__init__(context)
        self.step, self.steps, self.severity = step, steps, severity

    def label(self) -> FaultLabel:
        return FaultLabel(
            fault=self.name,
            cause="lr_change",
            onset_step=self.step,
            last_step=self.step + self.steps - 1 if self.steps else None,
            ranks=tuple(range(self.context.config.world)),
        )

    def learning_rate(self, step: int, lr: float) -> float:
        active = step >= self.step and (not self.steps or step < self.step + self.steps)
        return lr * self.severity if active else lr


FAULT = LrChange
