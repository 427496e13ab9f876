"""An asynchronous checkpoint is saved in no time, and the steps after it are slow while a thread writes it.

The thread contends for the interpreter's lock with the one that trains: github.com/pytorch/pytorch/pull/147039, and
github.com/InternLM/InternEvo/pull/65 with dozens of steps at half their speed after each save.
"""

from runhealth.storage.errors import ConfigError
from runhealth.trainer.fault import Fault, FaultContext, FaultLabel, Phase


class SaveShadow(Fault):
    """After each checkpoint that is saved at the end of `step` or later, the forward pass of all ranks takes up to
    `severity` seconds longer for `steps` steps, less in each one than in the one before."""

    name = "save_shadow"

    def __init__(self, context: FaultContext, *, step: int = 200, steps: int = 8, severity: float = 0.5) -> None:
        super().__init__(context)
        if steps < 1 or severity <= 0:
            raise ConfigError(f"fault save_shadow: expected steps >= 1 and severity > 0, met {steps} and {severity}")
        self.step, self.steps, self.severity = step, steps, severity

    def label(self) -> FaultLabel:
        every = self.context.config.checkpoint.every
        return FaultLabel(
            fault=self.name,
            cause="checkpoint_io",
            onset_step=-(-(self.step + 1) // every) * every,  # the first step after such a checkpoint
            last_step=None,
            ranks=tuple(range(self.context.config.world)),
        )

    def stall_s(self, step: int, phase: Phase) -> float:
        every = self.context.config.checkpoint.every
        age, saved_at = step % every, step // every * every - 1
        if phase != "forward" or saved_at < self.step or age >= self.steps:
            return 0.0
        return self.severity * (1.0 - age / self.steps)


FAULT = SaveShadow
