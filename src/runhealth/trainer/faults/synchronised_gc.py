"""Benign: garbage is collected on purpose, on all ranks in the same step, and that is short.

The remedy for pauses at random times, such as `--manual-gc` of Megatron-LM and `gc_freq` of torchtitan.
"""

from runhealth.storage.errors import ConfigError
from runhealth.trainer.fault import Fault, FaultContext, FaultLabel, Phase


class SynchronisedGc(Fault):
    """From `step` on, every `every` steps all ranks collect for `severity` seconds."""

    name = "synchronised_gc"

    def __init__(self, context: FaultContext, *, step: int = 200, every: int = 20, severity: float = 0.1) -> None:
        super().__init__(context)
        if every < 1 or severity <= 0:
            raise ConfigError(
                f"fault synchronised_gc: expected every >= 1 and severity > 0, met {every} and {severity}"
            )
        self.step, self.every, self.severity = step, every, severity

    def label(self) -> FaultLabel:
        return FaultLabel(
            fault=self.name,
            cause="benign",
            onset_step=self.step,
            last_step=None,
            ranks=tuple(range(self.context.config.world)),
        )

    def stall_s(self, step: int, phase: Phase) -> float:
        due = step >= self.step and (step - self.step) % self.every == 0
        return self.severity if phase == "gc" and due else 0.0


FAULT = SynchronisedGc
