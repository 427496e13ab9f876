"""The interpreter collects garbage at its own times: pauses on random ranks in the forward pass, growing with age."""

import random

from runhealth.trainer.fault import Fault, FaultContext, FaultLabel, Phase


class GcPause(Fault):
    """From `step` on each rank pauses about every `every` steps, out of step with the others, for `severity` seconds
    that grow by 1 % a step."""

    name = "gc_pause"
    transient = True

    def __init__(self, context: FaultContext, *, step: int = 200, every: int = 16, severity: float = 2.0) -> None:
        super().__init__(context)
        self.step, self.every, self.severity = step, every, severity

    def label(self) -> FaultLabel:
        return FaultLabel(
            fault=self.name,
            cause="gc_pause",
            onset_step=self.step,
            last_step=None,
            ranks=tuple(range(self.context.config.world)),
        )

    def stall_s(self, step: int, phase: Phase) -> float:
        if phase != "gc" or step < self.step:
            return 0.0
        rank = self.context.rank
        age = step - self.step
        period = self.every + random.Random(rank).randrange(-1, 2)
        phase_offset = (rank * self.every) // self.context.config.world
        return self.severity * (1.0 + 0.01 * age) if age % period == phase_offset % period else 0.0


FAULT = GcPause
